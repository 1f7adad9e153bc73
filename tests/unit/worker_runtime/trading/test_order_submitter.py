"""Orders that a worker does not submit: its record lacks their terms, or their time is up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.orders.limit_order import ORDER
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.errors import DeadlineExceeded
from worker_runtime.protocol.messages import OrderEvent, OrderState, PlaceOrder, PriceType
from worker_runtime.protocol.order_terms import OpenClose, OrderLot
from worker_runtime.protocol.requests import OPEN_SWITCH
from worker_runtime.trading.order_submitter import OrderSubmitter, UnknownOutcomes
from worker_runtime.trading.order_tracker import OrderResult, OrderTracker
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.rate_limiter import CallKind


class LateGrants:
    """Replaces `BrokerCalls`: each grant is void when the order could be sent, until its time is
    up."""

    grant_is_fresh = False

    def __init__(self) -> None:
        self.grants = 0

    def ensure_session(self, account_id: str, item: QueueItem) -> object:
        return object()

    def session(self, account_id: str) -> object:
        key = ConnectionKey("paper", "stock", True, account_id)
        account = SimpleNamespace(key=key)
        return SimpleNamespace(account=account, books_awaited=False, differs_since=0)

    def spend_budget(self, account_id: str, kind: CallKind, item: QueueItem) -> None:
        self.grants += 1

    def call_timeout(self, item: QueueItem) -> float:
        if self.grants >= 3:
            raise DeadlineExceeded
        return 1.0


class UnlimitedCalls:
    """Replaces `BrokerCalls` of one account, whose broker keeps what was placed."""

    grant_is_fresh = True

    def __init__(self, broker: str, broker_type: str) -> None:
        self.key = ConnectionKey(broker, broker_type, True, ORDER.account_id)
        self.placed: list[str] = []

    def ensure_session(self, account_id: str, item: QueueItem) -> object:
        return self

    def session(self, account_id: str) -> object:
        account = SimpleNamespace(key=self.key)
        return SimpleNamespace(account=account, books_awaited=False, differs_since=0)

    def reference_price(self, symbol: str) -> None: ...

    def spend_budget(self, account_id: str, kind: CallKind, item: QueueItem) -> None: ...

    def call_once(
        self, account_id: str, item: QueueItem, call: Callable[[float], BrokerOrder]
    ) -> BrokerOrder:
        return call(1.0)

    def place(self, order: PlaceOrder, timeout: float) -> BrokerOrder:
        self.placed.append(order.order_id)
        return BrokerOrder(
            broker_order_id="1",
            symbol=order.symbol,
            side=order.side,
            quantity=order.quantity,
            price_type=order.price_type,
            price=order.price,
            time_in_force=order.time_in_force,
            state=OrderState.SUBMITTED,
            tag=order.tag,
        )


class AcceptingSendBuffer:
    """Replaces the send buffer, of which Valkey takes everything."""

    journaled = True
    switch_is_stale = False
    switch = OPEN_SWITCH

    def add_journal_entry(self, order_id: str) -> None: ...

    def read_switch(self) -> None: ...

    def add_event(self, event: OrderEvent) -> None: ...

    def flush(self) -> bool:
        return True


def submitted(calls: Any, order: PlaceOrder = ORDER) -> OrderResult:
    send_buffer: Any = AcceptingSendBuffer()
    log = Log("CRITICAL")
    tracker = OrderTracker(1, send_buffer.add_event, log)
    submitter = OrderSubmitter(
        calls,
        tracker,
        UnknownOutcomes(tracker),
        send_buffer=send_buffer,
        shared_state=SharedState(),
        log=log,
    )
    return submitter.submit_order(
        order, QueueItem("request", b"", 0, ORDER.generation, OPEN_SWITCH)
    )


@pytest.mark.parametrize(
    ("market", "terms", "code"),
    [
        # The first market's terms, in a market that only a newer record has.
        (("shioaji", "options"), {}, "BROKER_NOT_INSTALLED"),
        (("shioaji", "futures"), {"lot": OrderLot.INTRADAY_ODD}, "ORDER_TERMS_RULE"),
        (("shioaji", "stock"), {"open_close": OpenClose.COVER}, "ORDER_TERMS_RULE"),
        (("shioaji", "stock"), {"price_type": PriceType.RANGE_MARKET}, "PRICE_TYPE_RULE"),
    ],
)
def test_an_order_with_terms_or_a_market_that_the_workers_record_lacks_is_not_submitted(
    market: tuple[str, str], terms: dict[str, Any], code: str
) -> None:
    calls = UnlimitedCalls(*market)
    done = submitted(calls, msgspec.structs.replace(ORDER, **terms))
    assert done.outcome.state is OrderState.REJECTED
    assert done.failure is not None
    assert done.failure.code == code
    assert calls.placed == []


@pytest.mark.parametrize(
    "market",
    [
        ("shioaji", "stock"),
        # As release 0.1.0 stored them.
        ("paper", "margin"),
    ],
)
def test_an_order_with_terms_that_the_workers_record_has_is_submitted(
    market: tuple[str, str],
) -> None:
    calls = UnlimitedCalls(*market)
    assert submitted(calls).outcome.state is OrderState.SUBMITTED
    assert calls.placed == [ORDER.order_id]


def test_an_order_whose_grant_is_always_too_old_expires() -> None:
    calls = LateGrants()
    done = submitted(calls)
    assert done.outcome.state is OrderState.EXPIRED
    assert calls.grants == 3
