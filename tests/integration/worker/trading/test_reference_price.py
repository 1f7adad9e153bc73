"""Prices and values against the broker's reference price of the day, which only the session
knows."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest

from tests.support.workers.harness import WorkerHarness
from tests.support.workers.process import SpawnedWorker
from tests.support.workers.trading import (
    ask_worker,
    make_price_change,
    outcome_code,
    place_unknown_order,
)
from worker_runtime.protocol.messages import PriceType, TimeInForce

#: Of the scripted broker: 100.5.
BAND = Decimal("0.1")
MARKET: dict[str, Any] = {
    "price_type": PriceType.MARKET,
    "price": None,
    "time_in_force": TimeInForce.IOC,
}


@pytest.fixture
def worker(harness: WorkerHarness) -> SpawnedWorker:
    return harness.active()


def sent(harness: WorkerHarness, **changes: Any) -> str:
    order = harness.order(**changes)
    harness.enqueue(order)
    return outcome_code(harness, order.request_id)


@pytest.mark.parametrize(
    ("price", "expected"),
    [("110.55", "filled"), ("110.56", "PRICE_BAND"), ("90.45", "filled"), ("90.44", "PRICE_BAND")],
)
def test_a_price_outside_the_band_is_refused_before_the_broker(
    harness: WorkerHarness, worker: SpawnedWorker, price: str, expected: str
) -> None:
    worker.tell_broker("reference")
    assert sent(harness, price=Decimal(price), price_band=BAND) == expected
    assert len(worker.placed()) == (expected == "filled")
    assert sent(harness, price=Decimal(price)) == "filled"  # as an API of 0.1.0 asks


def test_without_a_reference_price_the_exchanges_own_limit_remains(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    assert sent(harness, price=Decimal(1), price_band=BAND) == "filled"
    assert sent(harness, **MARKET, most_price=Decimal(1)) == "filled"


def test_a_market_order_counts_at_the_reference_price(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    worker.tell_broker("reference")
    assert sent(harness, **MARKET, most_price=Decimal("100.4")) == "NOTIONAL_LIMIT"
    assert worker.placed() == []
    assert sent(harness, **MARKET, most_price=Decimal("100.5"), price_band=BAND) == "filled"


def test_another_price_of_an_order_keeps_within_the_band(
    harness: WorkerHarness, worker: SpawnedWorker
) -> None:
    order = place_unknown_order(harness, worker)
    worker.tell_broker("reference")
    far = msgspec.structs.replace(
        make_price_change(order, "p1"), price=Decimal(111), price_band=BAND
    )
    failure = ask_worker(harness, far).failure
    assert failure is not None
    assert failure.code == "PRICE_BAND"
    assert worker.ledger("replace") == []
    near = msgspec.structs.replace(far, request_id="p2", price=Decimal(110))
    assert ask_worker(harness, near).failure is None
