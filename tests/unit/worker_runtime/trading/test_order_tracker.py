"""Each change is reported once and none is lost, whatever the broker repeats or reorders."""

from __future__ import annotations

from decimal import Decimal

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.support.orders import limit_order
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.protocol.broker_reports import BrokerOrder, OrderChanged
from worker_runtime.protocol.messages import (
    Failure,
    Fill,
    OrderEvent,
    OrderOutcome,
    OrderState,
    Side,
)
from worker_runtime.trading.order_tracker import OrderTracker, average_fill_price

KEY = ConnectionKey("paper", "stock", True, "a1")
ORDER = msgspec.structs.replace(limit_order.ORDER, quantity=3, price=Decimal(10))
FILLS = [Fill(fill_id=f"f{n}", quantity=1, price=Decimal(10 + n), at_ms=n) for n in range(3)]


def reported(state: OrderState, fills: list[Fill], broker_order_id: str = "b1") -> BrokerOrder:
    return BrokerOrder(
        broker_order_id=broker_order_id,
        tag=ORDER.tag,
        symbol=ORDER.symbol,
        side=ORDER.side,
        quantity=ORDER.quantity,
        price_type=ORDER.price_type,
        price=ORDER.price,
        time_in_force=ORDER.time_in_force,
        state=state,
        fills=fills,
    )


def change(filled: int) -> OrderChanged:
    state = OrderState.FILLED if filled == 3 else OrderState.PART_FILLED
    return OrderChanged(
        event_id=f"e{filled}", order=reported(state, FILLS[:filled]), fill=FILLS[filled - 1]
    )


def new_tracker() -> tuple[OrderTracker, list[OrderEvent]]:
    events: list[OrderEvent] = []
    return OrderTracker(1, events.append, Log("ERROR")), events


def outcome(tracker: OrderTracker) -> OrderOutcome:
    known = tracker.known_outcome("o1")
    assert known is not None
    return known[0]


@given(st.lists(st.integers(1, 3), max_size=8), st.lists(st.integers(1, 3), max_size=8))
def test_each_fill_is_reported_once_in_whatever_order_it_comes(
    before: list[int], after: list[int]
) -> None:
    tracker, events = new_tracker()
    tracker.mark_submitting(ORDER)
    for filled in before:  # a callback may overtake the answer to `place`
        tracker.apply_change(KEY, change(filled))
    tracker.record_placement(ORDER, reported(OrderState.SUBMITTED, []))
    for filled in [*after, 3]:
        tracker.apply_change(KEY, change(filled))
    assert sorted(event.fill.fill_id for event in events if event.fill) == ["f0", "f1", "f2"]
    assert len({event.event_id for event in events}) == len(events)
    assert [event.state for event in events].count(OrderState.FILLED) == 1
    assert outcome(tracker).state is OrderState.FILLED
    assert outcome(tracker).filled_quantity == 3


def test_fills_in_the_answer_are_reported_after_the_submission() -> None:
    tracker, events = new_tracker()
    tracker.mark_submitting(ORDER)
    answer = tracker.record_placement(ORDER, reported(OrderState.FILLED, FILLS))
    assert [event.event_id for event in events] == [
        "o1:submitted",
        "o1:fill:f0",
        "o1:fill:f1",
        "o1:fill:f2",
    ]
    assert [event.filled_quantity for event in events] == [0, 1, 2, 3]
    assert (answer.filled_quantity, answer.average_price) == (3, Decimal(11))


def test_an_order_of_unknown_outcome_is_found_again_by_its_tag() -> None:
    tracker, events = new_tracker()
    tracker.mark_submitting(ORDER)
    unknown = OrderOutcome(order_id="o1", state=OrderState.UNKNOWN)
    tracker.record_outcome(ORDER, unknown, Failure(code="OUTCOME_UNKNOWN", detail=""))
    tracker.apply_change(KEY, change(3))
    assert outcome(tracker).state is OrderState.FILLED
    assert events[-1].broker_order_id == "b1"


def test_a_change_of_an_order_that_is_not_ours_is_not_reported() -> None:
    tracker, events = new_tracker()
    tracker.apply_change(KEY, change(1))
    assert events == []
    assert tracker.known_outcome("o1") is None


def test_a_late_change_does_not_take_back_what_is_known() -> None:
    tracker, _ = new_tracker()
    tracker.mark_submitting(ORDER)
    tracker.record_placement(ORDER, reported(OrderState.FILLED, FILLS))
    tracker.apply_change(KEY, change(1))
    assert outcome(tracker).state is OrderState.FILLED
    assert outcome(tracker).filled_quantity == 3


def test_a_cancelled_order_keeps_what_was_filled() -> None:
    tracker, events = new_tracker()
    tracker.mark_submitting(ORDER)
    tracker.record_placement(ORDER, reported(OrderState.PART_FILLED, FILLS[:1]))
    cancelled = OrderChanged(event_id="e9", order=reported(OrderState.CANCELLED, FILLS[:1]))
    tracker.apply_change(KEY, cancelled)
    tracker.apply_change(KEY, cancelled)
    assert [event.state.value for event in events] == ["submitted", "part_filled", "cancelled"]
    assert events[-1].filled_quantity == 1


@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.decimals(1, 5000, places=2)), min_size=1, max_size=9
    )
)
def test_the_average_lies_between_the_lowest_and_the_highest_price(
    deals: list[tuple[int, Decimal]],
) -> None:
    fills = [
        Fill(fill_id=str(n), quantity=quantity, price=price, at_ms=0)
        for n, (quantity, price) in enumerate(deals)
    ]
    price = average_fill_price(fills)
    assert price is not None
    assert min(fill.price for fill in fills) <= price <= max(fill.price for fill in fills)


def test_an_order_without_fills_has_no_average_price() -> None:
    assert average_fill_price([]) is None


def test_a_listed_order_of_a_former_session_reports_what_was_missed() -> None:
    tracker, events = new_tracker()
    tracker.load_open_orders([ORDER])
    assert tracker.known_outcome("o1") is None  # nothing says that it was ever submitted
    stranger = msgspec.structs.replace(reported(OrderState.FILLED, FILLS, "b2"), tag="other")
    assert tracker.reconcile_list(KEY, [reported(OrderState.PART_FILLED, FILLS[:2]), stranger]) == [
        stranger
    ]
    assert [event.event_id for event in events] == ["o1:fill:f0", "o1:fill:f1"]
    assert outcome(tracker).state is OrderState.PART_FILLED
    tracker.apply_change(KEY, change(3))
    assert events[-1].state is OrderState.FILLED


def test_an_order_whose_submission_our_books_know_of_is_taken_and_unknown_until_it_is_listed() -> (
    None
):
    tracker, _ = new_tracker()
    tracker.load_open_orders([ORDER])  # with the claim; a reload brings more
    tracker.load_open_orders([msgspec.structs.replace(ORDER, begun=True)])
    known = tracker.known_outcome("o1")
    assert known is not None
    assert known[1] is not None
    assert (known[0].state, known[1].code) == (OrderState.UNKNOWN, "OUTCOME_UNKNOWN")
    assert tracker.reconcile_list(KEY, [reported(OrderState.PART_FILLED, FILLS[:2])]) == []
    assert outcome(tracker).state is OrderState.PART_FILLED


def test_a_tag_of_another_day_is_not_taken_for_ours() -> None:
    tracker, events = new_tracker()
    tracker.load_open_orders([ORDER])
    sold = msgspec.structs.replace(reported(OrderState.FILLED, FILLS), side=Side.SELL)
    larger = msgspec.structs.replace(
        reported(OrderState.FILLED, FILLS), quantity=ORDER.quantity + 1
    )
    assert tracker.reconcile_list(KEY, [sold, larger]) == [sold, larger]
    assert events == []


def test_a_primed_order_that_is_submitted_now_is_an_order_like_any_other() -> None:
    tracker, events = new_tracker()
    tracker.load_open_orders([ORDER])
    tracker.mark_submitting(ORDER)
    tracker.load_open_orders([ORDER])
    assert (
        tracker.record_placement(ORDER, reported(OrderState.SUBMITTED, [])).state
        is OrderState.SUBMITTED
    )
    assert tracker.broker_id_of("o1") == "b1"
    assert [event.event_id for event in events] == ["o1:submitted"]


def test_an_order_that_was_reduced_to_its_fills_is_reported_as_filled() -> None:
    tracker, events = new_tracker()
    tracker.mark_submitting(ORDER)
    tracker.record_placement(ORDER, reported(OrderState.PART_FILLED, FILLS[:1]))
    reduced = msgspec.structs.replace(reported(OrderState.FILLED, FILLS[:1]), quantity=1)
    for _ in range(2):
        tracker.apply_change(KEY, OrderChanged(event_id="e9", order=reduced))
    states = [event.state.value for event in events if event.quantity is None]
    assert states == ["submitted", "part_filled", "filled"]
    assert [event.quantity for event in events if event.quantity is not None] == [1]


def test_a_fill_that_overtakes_the_answer_is_part_of_the_outcome() -> None:
    tracker, _ = new_tracker()
    tracker.mark_submitting(ORDER)
    tracker.apply_change(KEY, change(3))
    assert (
        tracker.record_placement(ORDER, reported(OrderState.SUBMITTED, [])).state
        is OrderState.FILLED
    )


def test_a_changed_order_is_reported_once_with_its_new_quantity_and_price() -> None:
    known, events = new_tracker()
    known.load_open_orders([msgspec.structs.replace(ORDER, broker_order_id="b1")])
    smaller = msgspec.structs.replace(
        reported(OrderState.SUBMITTED, []), quantity=2, price=Decimal(11)
    )
    for _ in range(2):
        known.reconcile_list(KEY, [smaller])
        known.apply_change(KEY, OrderChanged(event_id="e", order=smaller))
    terms = [
        (event.state, event.quantity, event.price) for event in events if event.quantity is not None
    ]
    assert terms == [(OrderState.SUBMITTED, 2, Decimal(11))]
    known.reconcile_list(KEY, [msgspec.structs.replace(smaller, price=Decimal(12))])
    assert (events[-1].quantity, events[-1].price) == (2, Decimal(12))


def test_an_order_that_the_broker_lists_as_ordered_reports_no_change() -> None:
    known, events = new_tracker()
    known.load_open_orders([msgspec.structs.replace(ORDER, broker_order_id="b1")])
    known.reconcile_list(KEY, [reported(OrderState.SUBMITTED, [])])
    assert [event.quantity for event in events] == [None]


def test_a_missed_fill_is_reported_with_those_that_were_not_missed() -> None:
    tracker, events = new_tracker()
    tracker.mark_submitting(ORDER)
    later = reported(OrderState.PART_FILLED, [FILLS[1]])
    tracker.apply_change(KEY, OrderChanged(event_id="e1", order=later, fill=FILLS[1]))
    tracker.reconcile_list(KEY, [reported(OrderState.PART_FILLED, FILLS[:2])])  # of a new login
    assert [event.filled_quantity for event in events if event.fill] == [1, 2]
    assert events[-1].average_price == Decimal("10.5")
