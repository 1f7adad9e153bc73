"""The variants of the fake do what their names say."""

from __future__ import annotations

import pytest

from tests.contract.brokers.conftest import API_KEY, CREDENTIALS, SECRET_KEY, HeardOrders, order
from worker_runtime.brokers.fake import (
    FakeBroker,
    FakeMarket,
    RejectingBroker,
    SlowBroker,
    UnknownOutcomeBroker,
)
from worker_runtime.protocol.errors import OrderRejected, OutcomeUnknown
from worker_runtime.protocol.messages import OrderState


def _logged_in(kind: type[FakeBroker], market: FakeMarket, heard: HeardOrders) -> FakeBroker:
    market.register("a", API_KEY, SECRET_KEY)
    broker = kind(market, "a", "suite", heard)
    broker.login(CREDENTIALS, 1.0)
    return broker


def test_the_slow_broker_leaves_the_impatient_without_an_answer(heard: HeardOrders) -> None:
    market = FakeMarket()
    broker = _logged_in(SlowBroker, market, heard)
    with pytest.raises(OutcomeUnknown):
        broker.place(order(), 0.01)
    assert broker.place(order(), 5.0).state is OrderState.FILLED
    assert len(market.taken) == 2


def test_the_rejecting_broker_takes_nothing(heard: HeardOrders) -> None:
    market = FakeMarket()
    with pytest.raises(OrderRejected):
        _logged_in(RejectingBroker, market, heard).place(order(), 1.0)
    assert market.taken == []


def test_the_unknown_outcome_broker_takes_the_order_and_says_nothing(heard: HeardOrders) -> None:
    market = FakeMarket()
    with pytest.raises(OutcomeUnknown):
        _logged_in(UnknownOutcomeBroker, market, heard).place(order(), 1.0)
    assert len(market.taken) == 1
