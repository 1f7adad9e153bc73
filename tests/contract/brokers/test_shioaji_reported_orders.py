"""Events and lists of Shioaji, in the orders in which they have been seen to come."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from tests.support import needs
from tests.support.brokers.shioaji_reports import (
    REPORTED_AT,
    TRADE_ID,
    make_deal_event,
    make_order_event,
    make_trade,
)
from worker_runtime.brokers.shioaji.broker import load_sdk
from worker_runtime.brokers.shioaji.reported_orders import ReportedOrders
from worker_runtime.protocol.messages import OrderState, PriceType


@pytest.fixture
def sdk() -> Any:
    needs.require("shioaji")
    return load_sdk()


@pytest.fixture
def book() -> ReportedOrders:
    return ReportedOrders()


def test_a_deal_that_comes_before_its_order_is_kept_for_it(sdk: Any, book: ReportedOrders) -> None:
    assert book.merge_event("SDEAL", make_deal_event("1")) is None
    placed = book.merge_trade(make_trade(sdk, status="PendingSubmit"))
    assert placed.state is OrderState.PART_FILLED
    assert [fill.quantity for fill in placed.fills] == [1]


def test_a_deal_before_the_order_event_is_reported_with_it(book: ReportedOrders) -> None:
    assert book.merge_event("SDEAL", make_deal_event("1", quantity=3)) is None
    change = book.merge_event("SORDER", make_order_event())
    assert change is not None
    assert change.order.state is OrderState.FILLED
    assert change.order.tag == "abc123"


def test_an_event_that_comes_twice_is_reported_once(sdk: Any, book: ReportedOrders) -> None:
    book.merge_trade(make_trade(sdk))
    assert book.merge_event("SDEAL", make_deal_event("1")) is not None
    assert book.merge_event("SDEAL", make_deal_event("1")) is None
    assert (
        book.merge_event("SDEAL", make_deal_event("1", event_id="another")) is None
    )  # the same deal


def test_deals_add_up(sdk: Any, book: ReportedOrders) -> None:
    book.merge_trade(make_trade(sdk))
    states = [book.merge_event("SDEAL", make_deal_event(str(number))) for number in range(3)]
    assert [change.order.state for change in states if change] == [
        OrderState.PART_FILLED,
        OrderState.PART_FILLED,
        OrderState.FILLED,
    ]


def test_a_deal_known_by_event_is_not_counted_again_in_a_list(
    sdk: Any, book: ReportedOrders
) -> None:
    other_book = ReportedOrders()
    for each in (book, other_book):
        each.merge_trade(make_trade(sdk))
        each.merge_event("SDEAL", make_deal_event("669915"))
    same_id = book.merge_trade(make_trade(sdk, deals=[("669915", 1, 17.0, REPORTED_AT)]))
    other_id = other_book.merge_trade(
        make_trade(sdk, deals=[("000001", 1, 17.0, REPORTED_AT + 0.2)])
    )
    assert [fill.fill_id for fill in same_id.fills] == [f"{TRADE_ID}-669915"]
    assert other_id.fills == same_id.fills


def test_a_deal_known_from_a_list_is_not_counted_again_by_event(
    sdk: Any, book: ReportedOrders
) -> None:
    book.merge_trade(make_trade(sdk, deals=[("000001", 1, 17.0, REPORTED_AT)]))
    assert book.merge_event("SDEAL", make_deal_event("669915")) is None
    assert [fill.quantity for fill in book.merge_trade(make_trade(sdk)).fills] == [1]


def test_two_equal_deals_in_one_second_are_two(sdk: Any, book: ReportedOrders) -> None:
    listed = book.merge_trade(
        make_trade(sdk, deals=[("1", 1, 17.0, REPORTED_AT), ("2", 1, 17.0, REPORTED_AT)])
    )
    assert len(listed.fills) == 2
    again = ReportedOrders()
    again.merge_trade(make_trade(sdk))
    for number in ("1", "2"):
        assert again.merge_event("SDEAL", make_deal_event(number)) is not None
    assert (
        len(
            again.merge_trade(
                make_trade(sdk, deals=[("1", 1, 17.0, REPORTED_AT), ("2", 1, 17.0, REPORTED_AT)])
            ).fills
        )
        == 2
    )


@pytest.mark.parametrize(
    ("kind", "code", "state"),
    [
        ("New", "00", OrderState.SUBMITTED),
        ("New", "88", OrderState.REJECTED),
        ("Reject", "00", OrderState.REJECTED),
        ("Cancel", "00", OrderState.CANCELLED),
        ("UpdatePrice", "00", OrderState.SUBMITTED),
    ],
)
def test_order_events_change_the_state(
    sdk: Any, book: ReportedOrders, kind: str, code: str, state: OrderState
) -> None:
    book.merge_trade(make_trade(sdk))
    change = book.merge_event("SORDER", make_order_event(kind, code))
    assert change is not None
    assert change.order.state is state


def test_a_refused_cancel_changes_nothing(sdk: Any, book: ReportedOrders) -> None:
    book.merge_trade(make_trade(sdk))
    assert book.merge_event("SORDER", make_order_event("Cancel", "88")) is None
    assert book.merge_trade(make_trade(sdk)).state is OrderState.SUBMITTED


def test_a_futures_event_without_a_tag_keeps_the_one_of_the_order(
    sdk: Any, book: ReportedOrders
) -> None:
    book.merge_trade(make_trade(sdk))
    event = make_order_event()
    del event["order"]["custom_field"]
    change = book.merge_event("FORDER", event)
    assert change is not None
    assert change.order.tag == "abc123"


@pytest.mark.parametrize(
    ("kind", "word"), [("UpdatePrice", "UPL"), ("UpdateQty", "UPD"), ("Cancel", "CXL")]
)
def test_a_futures_event_that_names_the_change_keeps_the_price_of_a_limit_order(
    sdk: Any, book: ReportedOrders, kind: str, word: str
) -> None:
    book.merge_trade(make_trade(sdk))
    event = make_order_event(kind)
    event["order"] |= {"price_type": word, "price": 17.2}
    change = book.merge_event("FORDER", event)
    assert change is not None
    assert (change.order.price_type, change.order.price) == (PriceType.LIMIT, Decimal("17.2"))


def test_a_cancelled_order_that_a_list_still_calls_submitted_stays_cancelled(
    sdk: Any, book: ReportedOrders
) -> None:
    book.merge_trade(make_trade(sdk))
    book.merge_event("SORDER", make_order_event("Cancel", order_quantity=0))
    assert book.merge_trade(make_trade(sdk)).state is OrderState.CANCELLED


def test_a_filled_order_that_comes_back_as_pending_stays_filled(
    sdk: Any, book: ReportedOrders
) -> None:
    filled = book.merge_trade(make_trade(sdk, status="Filled", deals=[("1", 3, 17.0, REPORTED_AT)]))
    assert filled.state is OrderState.FILLED
    assert book.merge_trade(make_trade(sdk, status="PendingSubmit")).state is OrderState.FILLED


def test_every_event_of_an_order_has_an_id_of_its_own(sdk: Any, book: ReportedOrders) -> None:
    book.merge_trade(make_trade(sdk))
    changes = [
        book.merge_event("SORDER", make_order_event()),
        book.merge_event("SDEAL", make_deal_event("1")),
        book.merge_event("SDEAL", make_deal_event("2")),
        book.merge_event("SORDER", make_order_event("Cancel", event_id="")),
    ]
    assert len({change.event_id for change in changes if change}) == 4
