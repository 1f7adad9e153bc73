"""Makes an exchange without sockets, on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.exchange.exchange import PaperExchange
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.records import AccountRegistration
from tests.support.brokers.exchange_clock import ExchangeClock


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
    """Makes an exchange with two accounts of one person."""
    made = PaperExchange(ledger, clock.later, now=clock.now)
    for name in ("a", "b"):
        made.accounts.register(
            AccountRegistration(account=name, api_key="k", secret_key="s", person_id="person")
        )
    return made
