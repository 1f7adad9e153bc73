"""The suite's fixtures. Your own tests add `stage`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from worker_runtime.brokers.port import Broker

from .harness import API_KEY, CREDENTIALS, SECRET_KEY, BrokerStage, HeardOrders

_numbers = itertools.count(1)


@pytest.fixture
def account() -> str:
    """Returns an account that no other test uses."""
    return f"account-{next(_numbers)}"


@pytest.fixture
def heard() -> HeardOrders:
    return HeardOrders()


@pytest.fixture
def broker(stage: BrokerStage, account: str, heard: HeardOrders) -> Iterator[Broker]:
    """Yields a broker that is logged in."""
    stage.register(account, API_KEY, SECRET_KEY)
    made = stage.broker(account, heard)
    made.login(CREDENTIALS, 20.0)
    yield made
    made.close()
