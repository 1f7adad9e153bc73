"""Counts the product's lines of Python and Lua by room; fails above the budget.

The lab and the paper exchange are no part of the product; `infra/aws`, `infra/client` and files of SQL are
counted apart.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

#: Lines of the product. The aim, for everything together, is 56,000: the limit goes down with the lines, and
#: a feature has to find its place below it.
LIMIT = 57_605

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("worker_runtime", "workflows", "activities", "api", "infra")
#: Rooms whose folders are counted one by one.
SPLIT = ("worker_runtime", "infra")
LEFT_OUT = ("infra/lab", "infra/exchange")
APART = ("infra/aws", "infra/client", "SQL")


def count_lines(root: Path = ROOT) -> Counter[str]:
    """Lines by room; a room is a top-level folder, or a folder of one in `SPLIT`."""
    lines: Counter[str] = Counter()
    for top in PRODUCT:
        for path in (root / top).rglob("*"):
            if path.suffix not in {".py", ".lua", ".sql"}:
                continue
            parts = path.relative_to(root).parts
            room = "/".join(parts[:2]) if top in SPLIT and len(parts) > 2 else top
            if path.suffix == ".sql":
                room = "SQL"
            if room not in LEFT_OUT:
                lines[room] += path.read_bytes().count(b"\n")
    return lines


def main() -> int:
    lines = count_lines()
    product = sum(count for room, count in lines.items() if room not in APART)
    for room, count in sorted(lines.items()):
        print(f"{count:7,}  {room}{'  (counted apart)' if room in APART else ''}")
    print(f"{product:7,}  in all; at most {LIMIT:,}")
    if product > LIMIT:
        print(f"error: the product has {product - LIMIT:,} lines more than allowed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
