"""Every figure of docs/measured.md names the commit and the date that it was measured at."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import UTC, date, datetime

import pytest

from infra.lab.bench import measured
from infra.lab.bench.suite import BENCHMARKS

PAGE = (measured.ROOT / measured.PAGE).read_text()
RECORDS = measured.read_records()


def test_every_section_with_figures_names_commit_and_date() -> None:
    assert measured.unproven_sections(PAGE) == []


@pytest.mark.parametrize(
    "text",
    [
        "An order takes 3.1 ms.\n",
        "| order | 3.1 ms |\n|---|---|\n",
        "An order takes 3.1 ms at commit `abc1234`.\n",
        "An order took 3.1 ms on 2026-11-20.\n",
    ],
)
def test_a_figure_without_commit_or_date_is_found(text: str) -> None:
    page = f"# Measured\n\n## Proven\n\nCommit `abc1234`, 2026-11-20: 5 ms.\n\n## Orders\n\n{text}"
    assert measured.unproven_sections(page) == ["Orders"]


def test_what_the_command_writes_is_not_changed_by_hand() -> None:
    assert measured.render(PAGE, RECORDS) == PAGE


def test_every_benchmark_has_one_place_on_the_page() -> None:
    assert sorted(re.findall(r"<!-- berth bench ([a-z-]+) -->", PAGE)) == sorted(BENCHMARKS)


def test_every_record_says_how_where_and_when_it_was_measured() -> None:
    for name, record in RECORDS.items():
        assert record["command"].startswith("berth bench "), name
        assert date.fromisoformat(record["date"]) <= datetime.now(UTC).date(), name
        assert re.fullmatch("[0-9a-f]{7,40}", record["commit"]), name
        assert record["machine"]["cores"] >= 1, name
        assert record["rows"], name
        assert record["aims"], name


def test_every_aim_of_a_record_is_the_aim_of_today() -> None:
    """A record whose aim has changed since says met or missed of another aim: measure again."""
    for name, record in RECORDS.items():
        today = {aim.what: (aim.limit, aim.least) for aim in BENCHMARKS[name].aims}
        for aim in record["aims"]:
            assert today[aim["what"]] == (aim["limit"], aim["least"]), name


def test_every_named_commit_is_one_of_this_repository() -> None:
    git = shutil.which("git")
    if git is None or not (measured.ROOT / ".git").exists():
        return  # a copy of the files has no history to look into
    shallow = [git, "-C", str(measured.ROOT), "rev-parse", "--is-shallow-repository"]
    if subprocess.run(shallow, capture_output=True, text=True, check=True).stdout.strip() == "true":
        return
    for provenance in measured.PROVENANCE.finditer(PAGE):
        # An ancestor of this commit, not just an object: a clone does not bring what no branch
        # leads to.
        known = [
            git,
            "-C",
            str(measured.ROOT),
            "merge-base",
            "--is-ancestor",
            provenance["commit"],
            "HEAD",
        ]
        assert subprocess.run(known, check=False).returncode == 0, provenance.group()
