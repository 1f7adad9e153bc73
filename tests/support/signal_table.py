"""Reads the table of signals and orders in `docs/how-to/receive-signals.md`."""

from __future__ import annotations

import re
from pathlib import Path

from api.webhooks.planning import (
    SignalAction,
    Wish,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "receive-signals.md"


def rows(first_column: str = "position before") -> list[tuple[str, ...]]:
    """Returns the cells of each row: position before, signal, mode, orders, position after.

    The table with `first_column` "shares before" is of webhooks that round down; it has no mode.
    """
    part = PAGE.read_text(encoding="utf-8").partition(f"| {first_column} |")[2].partition("\n\n")[0]
    lines = part.strip().splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def wish_of(text: str) -> Wish:
    """Returns what a signal of the table asks for, such as "`buy` 3 reduce_only"."""
    match = re.fullmatch(r"`(\w+)`(?: (-?\d+))?( reduce_only)?", text)
    assert match is not None, text
    action, number = SignalAction(match[1]), int(match[2]) if match[2] else None
    target = number if action is SignalAction.POSITION else None
    quantity = None if action is SignalAction.POSITION else number
    return Wish(action=action, quantity=quantity, target=target, reduce_only=bool(match[3]))
