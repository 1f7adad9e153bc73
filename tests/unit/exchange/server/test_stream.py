"""Events and listings that clients get when the exchange misbehaves."""

from __future__ import annotations

from decimal import Decimal

import pytest

from infra.exchange.behaviour import Behaviour, FaultPoint, FillMode
from infra.exchange.exchange import PaperExchange
from infra.exchange.records import order_as_of
from tests.support.brokers.exchange_clock import ExchangeClock
from tests.support.brokers.exchange_traders import TraderClient, limit, login, market
from worker_runtime.brokers.paper.wire import Coverage, Place
from worker_runtime.protocol.messages import OrderState, TimeInForce


@pytest.fixture
def client(exchange: PaperExchange) -> TraderClient:
    exchange.market.set_price("2330", Decimal(100))
    return TraderClient()


def fills(client: TraderClient) -> list[int]:
    return [event.fill.quantity for event in client.events if event.fill]


@pytest.mark.parametrize(
    "order",
    [
        limit("100", 5),
        market(quantity=5),
        market(quantity=5, time_in_force=TimeInForce.FOK),
    ],
)
def test_an_order_is_filled_part_by_part_over_time(
    exchange: PaperExchange, clock: ExchangeClock, client: TraderClient, order: Place
) -> None:
    exchange.set_behaviour(
        "a", Behaviour(fill=FillMode.GRADUAL, fill_delay_ms=1000, lots_per_fill=2)
    )
    taken = exchange.place(login(exchange, client=client), order)
    assert taken.order.state is OrderState.SUBMITTED
    seen = []
    for _ in range(4):
        clock.pass_by(1)
        seen.append(sum(fills(client)))
    assert seen == [2, 4, 5, 5]
    assert [event.order.state for event in client.events] == [
        OrderState.PART_FILLED,
        OrderState.PART_FILLED,
        OrderState.FILLED,
    ]


def test_gradual_fills_stop_while_the_price_is_away(
    exchange: PaperExchange, clock: ExchangeClock, client: TraderClient
) -> None:
    exchange.set_behaviour("a", Behaviour(fill=FillMode.GRADUAL, fill_delay_ms=1000))
    exchange.place(login(exchange, client=client), limit("100", 3))
    clock.pass_by(1)
    exchange.market.set_price("2330", Decimal(101))
    clock.pass_by(10)
    assert fills(client) == [1]
    exchange.market.set_price("2330", Decimal(99))
    clock.pass_by(2)
    assert fills(client) == [1, 1, 1]


def test_a_late_event_is_overtaken_by_the_next(
    exchange: PaperExchange, clock: ExchangeClock, client: TraderClient
) -> None:
    faults = {FaultPoint.LATE_EVENT: 1}
    exchange.set_behaviour("a", Behaviour(fill=FillMode.MANUAL, faults=faults, late_event_ms=500))
    order = exchange.place(login(exchange, client=client), limit("100", 5)).order
    exchange.fill_by_hand(order.broker_order_id, 2, None)
    exchange.fill_by_hand(order.broker_order_id, 3, None)
    assert fills(client) == [3]
    clock.pass_by(0.5)
    assert fills(client) == [3, 2]
    assert [event.order.state for event in client.events] == [
        OrderState.FILLED,
        OrderState.PART_FILLED,
    ]


def test_a_gap_swallows_all_events_for_its_time_and_then_they_continue(
    exchange: PaperExchange, clock: ExchangeClock, client: TraderClient
) -> None:
    exchange.set_behaviour("a", Behaviour(faults={FaultPoint.EVENT_GAP: 1}, event_gap_ms=2000))
    session = login(exchange, client=client)
    counts = []
    for _ in range(5):
        exchange.event_feed.publish("a", exchange.place(session, market()).events)
        counts.append(len(client.events))
        clock.pass_by(1)
    assert counts == [0, 0, 1, 2, 3]
    assert len(exchange.orders("a")) == 5


def test_events_may_lack_the_tag_that_lists_have(
    exchange: PaperExchange, client: TraderClient
) -> None:
    exchange.set_behaviour("a", Behaviour(events_without_tag=True))
    session = login(exchange, client=client)
    exchange.event_feed.publish("a", exchange.place(session, market()).events)
    assert [event.order.tag for event in client.events] == [""]
    assert [order.tag for order in exchange.listing(session)[0]] == ["tag"]


def test_a_listing_that_lags_shows_what_was_there(
    exchange: PaperExchange, clock: ExchangeClock, client: TraderClient
) -> None:
    exchange.set_behaviour("a", Behaviour(fill=FillMode.MANUAL, listing_lag_ms=5000))
    session = login(exchange)
    order = exchange.place(session, limit("100", 5)).order
    clock.pass_by(2)
    exchange.fill_by_hand(order.broker_order_id, 2, None)
    clock.pass_by(2)
    exchange.fill_by_hand(order.broker_order_id, 3, None)
    shown = []
    for _ in range(4):
        shown.append([(listed.state, listed.filled) for listed in exchange.listing(session)[0]])
        clock.pass_by(2)
    assert shown == [
        [],
        [(OrderState.SUBMITTED, 0)],
        [(OrderState.PART_FILLED, 2)],
        [(OrderState.FILLED, 5)],
    ]
    assert [position.quantity for position in exchange.positions("a")] == [5]
    assert exchange.orders("a")[0].state is OrderState.FILLED


def test_a_cancelled_order_is_shown_as_it_was(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    exchange.market.set_price("2330", Decimal(100))
    order = exchange.place(login(exchange), limit("90")).order
    clock.pass_by(3)
    cancelled = exchange.cancel(order.broker_order_id, "cancelled")
    before = order_as_of(cancelled, clock.now() - 1)
    assert before is not None
    assert before.as_sent() == order.as_sent()
    assert order_as_of(cancelled, clock.now()) == cancelled
    assert order_as_of(cancelled, order.received_ms - 1) is None


def test_money_and_positions_lag_with_the_orders(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    exchange.market.set_price("2330", Decimal(100))
    exchange.set_behaviour("a", Behaviour(listing_lag_ms=5000))
    untouched = exchange.balance("a")
    exchange.place(login(exchange), market(quantity=3))
    assert (exchange.positions("a"), exchange.balance("a")) == ([], untouched)
    clock.pass_by(5)
    assert [position.quantity for position in exchange.positions("a")] == [3]
    assert exchange.balance("a") != untouched


def test_a_listing_may_leave_out_the_orders_of_earlier_sessions(exchange: PaperExchange) -> None:
    earlier, later = login(exchange), login(exchange)
    exchange.place(earlier, market())
    own = exchange.place(later, market()).order
    assert len(exchange.listing(later)[0]) == 2
    exchange.set_behaviour("a", Behaviour(lists_own_session_only=True))
    assert exchange.listing(later)[0] == [own]


def test_a_list_says_what_it_leaves_out(exchange: PaperExchange) -> None:
    session = login(exchange)
    hours = 10 * 3600 * 1000  # it is ten in the morning
    assert exchange.listing(session)[1] == Coverage(
        all_sessions=True, behind_ms=0, reaches_ms=hours
    )
    exchange.set_behaviour("a", Behaviour(listing_lag_ms=90_000, lists_own_session_only=True))
    assert exchange.listing(session)[1] == Coverage(
        all_sessions=False, behind_ms=90_000, reaches_ms=hours
    )
    exchange.set_behaviour("a", Behaviour(listing_untold=True))
    assert exchange.listing(session)[1] is None
