"""Contains a clock for an exchange without sockets; the test turns it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from datetime import datetime
from itertools import count

from infra.market.calendar import HOME_ZONE


class ExchangeClock:
    """Ten in the morning of a Monday in Taipei; runs what was put off when the test lets time
    pass."""

    def __init__(self) -> None:
        self._ms = int(datetime(2026, 3, 2, 10, tzinfo=HOME_ZONE).timestamp() * 1000)
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count()

    def now(self) -> int:
        return self._ms

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self._ms + int(seconds * 1000), next(self._numbers), callback))

    def pass_by(self, seconds: float) -> None:
        end = self._ms + int(seconds * 1000)
        while self._due and self._due[0][0] <= end:
            self._ms, _, callback = heapq.heappop(self._due)
            callback()
        self._ms = end
