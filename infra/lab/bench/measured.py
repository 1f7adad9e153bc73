"""`docs/measured.md`: what the benches measured, each figure with its commit and date.

`berth bench NAME --update-docs` writes the record of its run to `docs/measured.json` and renders
the page anew. What is between `<!-- berth bench NAME -->` and `<!-- end -->` comes from the record;
people write the rest. Figures in it name their commit and date in their section (`PROVENANCE`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import infra
from infra.lab import figures
from worker_runtime.protocol.errors import BerthError

#: The checkout that this code is of.
ROOT = Path(infra.__file__).resolve().parents[1]
RECORDS, PAGE = Path("docs/measured.json"), Path("docs/measured.md")
#: Where a figure comes from.
PROVENANCE = re.compile(r"[Cc]ommit `(?P<commit>[0-9a-f]{7,40})`,\s+(?P<date>\d{4}-\d{2}-\d{2})")
#: The section whose numbers are not measured: they say what each bench does.
SIZES = "What each bench measures"
_BLOCK = re.compile(
    r"<!-- berth bench (?P<name>[a-z-]+) -->\n(?P<text>.*?)<!-- end -->\n", re.DOTALL
)

Record = dict[str, Any]


class DocsNotUpdated(BerthError, code="DOCS_NOT_UPDATED"):
    """The figures cannot be written to the documents."""


def present_commit(root: Path = ROOT) -> str:
    """Return the commit of the checkout.
    Raises `DocsNotUpdated` unless all of its code is committed."""
    if not (root / PAGE).exists():
        raise DocsNotUpdated(f"{root} has no {PAGE}. Run --update-docs in a checkout of Berth.")
    code = [".", f":!{RECORDS}", f":!{PAGE}"]
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *code)
    if changed:
        raise DocsNotUpdated(
            "Commit your changes first: a figure names the commit that it was measured at."
        )
    return _git(root, "rev-parse", "--short=9", "HEAD")


def _git(root: Path, *words: str) -> str:
    git = shutil.which("git")
    if git is None:
        raise DocsNotUpdated("Install git: a figure names the commit that it was measured at.")
    done = subprocess.run([git, *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DocsNotUpdated(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def make_record(
    command: str, commit: str, tables: Sequence[figures.Table], judged: Sequence[Mapping[str, Any]]
) -> Record:
    """Return the record of a run that has just ended."""
    machine = figures.machine()
    return {
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "machine": {name: machine[name] for name in ("cores", "memory_gib", "kernel", "python")},
        "load": round(os.getloadavg()[2], 1),
        "rows": [list(row) for table in tables for row in table.rows],
        "aims": [dict(aim) for aim in judged],
    }


def write_record(name: str, record: Record, root: Path = ROOT) -> None:
    """Write the record of a bench in the place of its last one, and the page from all records."""
    records = read_records(root) | {name: record}
    (root / RECORDS).write_text(
        json.dumps(records, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    )
    page = root / PAGE
    page.write_text(render(page.read_text(), records))


def read_records(root: Path = ROOT) -> dict[str, Record]:
    path = root / RECORDS
    return dict(json.loads(path.read_text())) if path.exists() else {}


def render(page: str, records: Mapping[str, Record]) -> str:
    """Return the page with the records between its markers.
    Raises `DocsNotUpdated` if one has no place."""
    missing = records.keys() - {block["name"] for block in _BLOCK.finditer(page)}
    if missing:
        raise DocsNotUpdated(f"{PAGE} has no place for {', '.join(sorted(missing))}")
    return _BLOCK.sub(lambda block: _rendered(block["name"], records.get(block["name"])), page)


def _rendered(name: str, record: Record | None) -> str:
    lines = [f"<!-- berth bench {name} -->"]
    if record is not None:
        machine = record["machine"]
        lines += [
            f"`{record['command']}`, commit `{record['commit']}`, {record['date']}: "
            f"{machine['cores']} cores, {machine['memory_gib']:g} GiB, "
            f"Linux {machine['kernel']}, Python {machine['python']}, "
            f"load average of 15 minutes {record['load']:g}.",
            "",
            "| | measured |",
            "|---|---|",
            *(f"| {label} | {figure} |" for label, figure in record["rows"]),
            "",
            "| aim | | measured | |",
            "|---|---|---|---|",
            *(_aim_row(aim) for aim in record["aims"]),
            "",
        ]
    return "\n".join([*lines, "<!-- end -->", ""])


def _aim_row(aim: Mapping[str, Any]) -> str:
    limit = f"{'at least' if aim['least'] else 'at most'} {aim['limit']:g}"
    figure = "no figure" if aim["figure"] is None else f"{aim['figure']:g}"
    return f"| {aim['what']} | {limit} | {figure} | {'met' if aim['met'] else '**missed**'} |"


def unproven_sections(page: str) -> list[str]:
    """Return the titles of sections with figures that name no commit and date of their own."""
    written = _BLOCK.sub("", page)
    unproven = []
    for section in re.split(r"(?m)^(?=## )", written)[1:]:
        title, _, text = section.partition("\n")
        title = title.removeprefix("## ")
        if title != SIZES and re.search(r"\d", text) and not PROVENANCE.search(text):
            unproven.append(title)
    return unproven
