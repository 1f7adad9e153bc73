"""How a benchmark says what it is doing; shown on a terminal, not in a pipe."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], object]


def silent(text: str) -> None:
    """Shows nothing."""
