"""A cancel or a change spends what the broker counts of the person's limits."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from tests.support.brokers.fake import FakeBroker
from tests.support.brokers.market_connections import MarketConnections
from tests.support.brokers.rate_limiters import UnlimitedRateLimiter
from tests.support.orders import limit_order
from worker_runtime.brokers.port import Broker, ConnectionKey, OnOrderChanged
from worker_runtime.process.clock import NS_PER_S
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import Lease
from worker_runtime.protocol.broker_record import QuantityChange
from worker_runtime.protocol.errors import OrderTermsRule
from worker_runtime.protocol.installed_brokers import built_in_brokers
from worker_runtime.protocol.messages import OrderState, PlaceOrder
from worker_runtime.protocol.requests import CancelOrder, ReplaceOrder
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.broker_calls import BrokerCalls
from worker_runtime.trading.order_changer import OrderChanger, check_quantity_change
from worker_runtime.trading.order_tracker import OrderTracker
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.rate_limiter import CallKind, WaitLimit


class LookFirstBroker(FakeBroker):
    """Looks at the order before it changes it, as Shioaji's futures do."""

    def queries_before_change(self, broker_order_id: str, *, quantity: bool = False) -> bool:
        return True


class LookFirstConnections(MarketConnections):
    def _broker(self, key: ConnectionKey, client: str, on_order: OnOrderChanged) -> Broker:
        return LookFirstBroker(self.market, key.account_id, client, on_order)


class RecordingRateLimiter(UnlimitedRateLimiter):
    def __init__(self) -> None:
        super().__init__()
        self.spent: list[CallKind] = []

    def spend(
        self, account: OpenedAccount, kind: CallKind, patience: WaitLimit, *, cost: int = 1
    ) -> None:
        self.spent.append(kind)


def resting() -> PlaceOrder:
    return msgspec.structs.replace(
        limit_order.ORDER, symbol="MXFA6", quantity=2, price=Decimal("0.01")
    )


@pytest.mark.parametrize(
    ("kind", "call_kind"),
    [(MarketConnections, CallKind.ORDER), (LookFirstConnections, CallKind.QUERY_AND_CHANGE)],
)
def test_a_change_costs_what_the_broker_counts_for_it(
    kind: type[MarketConnections], call_kind: CallKind
) -> None:
    connections, spent, log = kind("a1").connected(), RecordingRateLimiter(), Log("ERROR")
    shared_state = connections.shared_state
    calls = BrokerCalls(
        connections.broker_sessions,
        spent,
        lease=Lease(shared_state),
        shared_state=shared_state,
        broker_timeout=5.0,
        log=log,
    )
    unused: Any = None  # a smaller quantity asks no switch
    changer = OrderChanger(calls, OrderTracker(1, lambda event: None, log), unused)
    taken = connections.market.take("a1", resting())
    item = QueueItem("request", b"", time.monotonic_ns() + 30 * NS_PER_S, "g")
    words: dict[str, Any] = {
        "request_id": "r",
        "order_id": "o",
        "user_id": "u",
        "account_id": "a1",
        "symbol": "MXFA6",
        "tag": "tag",
        "broker_order_id": taken.broker_order_id,
        "reply_to": "",
        "generation": "g",
    }
    changes: list[CancelOrder | ReplaceOrder] = [
        ReplaceOrder(**words, quantity=1, price=None),
        CancelOrder(**words),
    ]
    outcomes = [changer.change_order(change, item) for change in changes]
    assert [failure for _, failure in outcomes] == [None, None]
    assert [outcome and outcome.state for outcome, _ in outcomes] == [
        OrderState.SUBMITTED,
        OrderState.CANCELLED,
    ]
    assert spent.spent == [call_kind] * 2


def test_a_broker_that_does_not_change_quantities_is_not_asked_to() -> None:
    record = built_in_brokers()["paper"].record
    check_quantity_change(record)
    unable = msgspec.structs.replace(record, quantity_change=QuantityChange.UNSUPPORTED)
    with pytest.raises(OrderTermsRule, match="Paper exchange does not change quantities"):
        check_quantity_change(unable)
