"""Refuses phrases that are calques, in the product's
texts and in the documents. `make check` runs it.

Each pattern has the words to write instead. Words that are right in some places are not listed.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("api", "activities", "workflows", "worker_runtime", "infra")
SUFFIXES = {".py", ".lua", ".html", ".md", ".example"}
#: History stays as it was written.
EXCEPT = ("CHANGELOG.md", "docs/adr/")
PHRASES = {
    r"\b(he|his|him|himself)\b": "they, their, them",
    # But for the command `berth bench beside`, a name in code, and the end of a patch's id.
    r"(?<!bench )(?<![`\w])\bbeside (?=[a-z*\[`])(?!if )": "next to, compared with, in addition to",
    r"\b(go|goes|went) on\b(?! in the next run\")": "continue, continues, continued",
    r"\bplace in the line\b": "place in the queue",
    r"\bwas no mistake\b": "even if an identical one was placed",
    r"\bcounts? for (him|her|nothing)\b": "applies to the user; is ignored",
    r"\bis no (address|use|part|trading day)\b": "is not a …",
    r"\bnothing to do again\b": "cannot be retried",
    r"\b(idle|its) time goes on\b": "this does not reset the idle timer",
    r"\bat the most\b": "at most",
    r"\bis told (of|that|together)\b": "is reported; is sent",
    r"\btold to (the|an|one) (operator|person)": "reported; alerts the operator",
    r"\bstands in (the|a|an)\b": "is in",
    r"\bleast \d+, most\b": "min, max",
    r"\ball is well\b": "no problem; healthy",
    r"\bhas one that runs killed\b": "kills it if it runs",
    r"\bwhat was begun has\b": "an interrupted … has",
}


def find_faults(text: str) -> list[tuple[int, str, str]]:
    """Returns line, phrase and what to write instead."""
    return [
        (number, match[0], instead)
        for number, line in enumerate(text.splitlines(), 1)
        for phrase, instead in PHRASES.items()
        if (match := re.search(phrase, line, re.IGNORECASE))
    ]


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    failed = False
    for name in listed.stdout.split():
        is_checked = (
            name.startswith((*(f"{folder}/" for folder in PRODUCT), "docs/")) or "/" not in name
        )
        if not is_checked or Path(name).suffix not in SUFFIXES or name.startswith(EXCEPT):
            continue
        for number, phrase, instead in find_faults((ROOT / name).read_text(encoding="utf-8")):
            print(f"{name}:{number}: {phrase!r}: write {instead!r} instead (.ci/check_phrases.py)")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
