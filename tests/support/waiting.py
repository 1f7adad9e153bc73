"""Waits for conditions that nothing announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

#: Seconds a condition may take on a busy machine. A login of credentials of which no count is known
#: waits for 10 s.
EVENTUALLY_S = 40.0

T = TypeVar("T")


def eventually(
    probe: Callable[[], T | None], description: str, patience: float = EVENTUALLY_S
) -> T:
    """Repeats `probe` until its result is true, and returns it. Fails with `description` after
    `patience` s."""
    until = time.monotonic() + patience
    while True:
        late = time.monotonic() > until  # before the call: this process may stand still after it
        seen = probe()
        if seen:
            return seen
        if late:
            raise AssertionError(f"not within {patience} s: {description}")
        time.sleep(0.005)


async def until(
    condition: Callable[[], bool], description: str = "the condition", seconds: float = 30.0
) -> None:
    """Waits until the condition is true. Fails with `description` after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {description}"
        await asyncio.sleep(0.01)
