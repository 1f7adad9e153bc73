"""An exchange without sockets, on a clock that the test turns."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import count
from pathlib import Path

import pytest

from infra.exchange.exchange import PaperExchange
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.records import AccountRegistration
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

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self._ms + int(seconds * 1000), next(self._numbers), what))

    def pass_by(self, seconds: float) -> None:
        end = self._ms + int(seconds * 1000)
        while self._due and self._due[0][0] <= end:
            self._ms, _, what = heapq.heappop(self._due)
            what()
        self._ms = end


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[ExchangeLedger]:
    opened = ExchangeLedger(tmp_path / "ledger.db")
    yield opened
    opened.close()


@pytest.fixture
def clock() -> ExchangeClock:
    return ExchangeClock()


@pytest.fixture
def exchange(ledger: ExchangeLedger, clock: ExchangeClock) -> PaperExchange:
    """With two accounts of one person."""
    made = PaperExchange(ledger, clock.later, now=clock.now)
    for name in ("a", "b"):
        made.accounts.register(
            AccountRegistration(account=name, api_key="k", secret_key="s", person_id="person")
        )
    return made
