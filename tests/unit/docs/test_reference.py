"""The generated pages of docs/reference say what the code says, and the documents name what there
is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = ROOT / "docs" / "reference"
#: Folders and top-level files whose paths documents name.
ROOMS = "worker_runtime|workflows|activities|api|infra|tests|docs"


@pytest.mark.timeout(120)
def test_the_reference_is_what_its_script_writes(tmp_path: Path) -> None:
    """If not: `.venv/bin/python docs/reference/generate.py`."""
    subprocess.run(
        [sys.executable, str(REFERENCE / "generate.py"), str(tmp_path)], check=True, cwd=ROOT
    )
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert written
    kept = {name: (REFERENCE / name).read_text(encoding="utf-8") for name in written}
    assert kept == written


def test_every_path_that_a_document_names_exists() -> None:
    missing = []
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        if document.name == "CHANGELOG.md":
            continue
        for path in re.findall(rf"`((?:{ROOMS})/[\w./-]*)`", document.read_text(encoding="utf-8")):
            if not (ROOT / path).exists():
                missing.append(f"{document.relative_to(ROOT)}: {path}")
    assert missing == []


def test_every_requirement_is_listed_once() -> None:
    text = (REFERENCE / "requirements.md").read_text(encoding="utf-8")
    ids = re.findall(r"^\| ([A-Z]\d+) \|", text, re.M)
    assert ids
    assert sorted(set(ids)) == sorted(ids)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize(
    "name",
    [
        "how-it-works/security",
        "how-to/come-from-rq",
        "how-to/come-from-celery",
        "how-to/come-from-dramatiq",
    ],
)
def test_every_test_that_a_page_promises_exists(name: str) -> None:
    """A line of such a page without its test would be a promise."""
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 18
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not re.search(
            rf"^(async )?def {test}\(", (ROOT / path).read_text(encoding="utf-8"), re.M
        )
    ]
    assert missing == []
