"""The Shioaji adapter on a market that misbehaves as users have reported; numbers are
Sinotrade/Shioaji's."""

from __future__ import annotations

import inspect
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.berth_testing.harness import (
    API_KEY,
    CREDENTIALS,
    SECRET_KEY,
    HeardOrders,
    order,
    until,
)
from tests.support.brokers.shioaji_client import REAL
from tests.support.brokers.shioaji_market import (
    MarketBehaviour,
    Row,
    ShioajiMarketStage,
    deal_event,
    order_event,
    trade_of,
)
from worker_runtime.brokers.shioaji import broker as adapter
from worker_runtime.brokers.shioaji import sdk
from worker_runtime.brokers.shioaji.broker import ShioajiBroker
from worker_runtime.brokers.shioaji.reported_orders import ReportedOrders
from worker_runtime.protocol.errors import (
    BrokerUnreachable,
    BrokerVersionRefused,
    LoginLimited,
    LoginRejected,
    OrderRejected,
    OutcomeUnknown,
    SessionDown,
)
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState, Side
from worker_runtime.protocol.order_terms import OrderLot
from worker_runtime.protocol.requests import QuantityMeaning

CANCELLED, FILLED, SUBMITTED = OrderState.CANCELLED, OrderState.FILLED, OrderState.SUBMITTED


def stage_of(kind: str = "stock", simulation: bool = False, **behaviour: Any) -> ShioajiMarketStage:
    stage = ShioajiMarketStage(MarketBehaviour(**behaviour), kind=kind, simulation=simulation)
    stage.register("111", API_KEY, SECRET_KEY)
    return stage


def logged_in(stage: ShioajiMarketStage, heard: HeardOrders) -> ShioajiBroker:
    broker = stage.broker("111", heard)
    broker.login(CREDENTIALS, 20.0)
    return broker


# --- the stand-in is like the SDK -----------------------------------------------------------------


def test_what_the_stand_in_shows_has_only_fields_of_the_sdk() -> None:
    stage = stage_of()
    broker = logged_in(stage, HeardOrders())
    broker.place(order(symbol="2330", price=Decimal(50)), 5.0)
    [client] = stage.market.sessions
    stage.market.match(stage.market.rows[0], 1)
    [shown] = client.list_trades()
    [position] = client.list_positions(None, unit="Share", timeout=1)
    for made, kind in (
        (shown, REAL.Trade),
        (shown.order, REAL.OrderResult),
        (shown.status, REAL.OrderStatusInfo),
        (shown.status.deals[0], REAL.Deal),
        (position, REAL.StockPosition),
        (client.account_balance(None, timeout=1), REAL.AccountBalance),
        (client.margin(None, timeout=1), REAL.Margin),
        (client.usage(timeout=1), REAL.UsageOut),
        (client.trade_cache_health(None), REAL.TradeCacheHealth),
    ):
        unknown = set(vars(made)) - set(dir(kind))
        assert not unknown, f"Shioaji {REAL.__version__} has no {unknown} in {kind.__name__}"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "OrderStatus",
            "Cancelled Failed Filled Inactive PartFilled PendingSubmit PreSubmitted Submitted",
        ),
        ("OrderState", "FuturesDeal FuturesOrder StockDeal StockOrder"),
        ("OpType", "Cancel New Reject UpdatePrice UpdateQty"),
        ("TimeInForce", "FOK IOC ROD"),
        ("PriceType", "LMT MKP MKT"),
        ("FuturesOCType", "Auto Cover DayTrade New"),
        ("AccountType", "Future Intl Stock"),
        ("Action", "Buy Sell"),
        ("Unit", "Common Share"),
        ("TradeCacheHealthState", "Degraded Healthy Unknown"),
        (
            "TradeCacheHealthReasonCode",
            "NoBaseline NotSubscribed PendingReport ProjectionFailed SequenceGap "
            "UntrackableEventId",
        ),
    ],
)
def test_the_enums_of_the_installed_sdk_are_those_we_know(name: str, values: str) -> None:
    members = {member for member in dir(getattr(REAL, name)) if member[0].isupper()}
    known = set(values.split())
    assert members == known, f"{name} of Shioaji {REAL.__version__} differs in {members ^ known}"


def test_every_method_of_the_sdk_that_the_adapter_calls_is_there() -> None:
    source = inspect.getsource(adapter) + inspect.getsource(sdk)
    called = {word.split("(")[0] for word in source.split("api.")[1:] if "(" in word.split("\n")[0]}
    called = {name for name in called if name.isidentifier()}
    assert {"login", "place_order", "update_order", "cancel_order", "list_trades"} <= called
    missing = {name for name in called if not hasattr(REAL.Shioaji, name)}
    assert not missing, f"Shioaji {REAL.__version__} has no {missing}"


# --- changes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("means", QuantityMeaning)
@pytest.mark.parametrize(
    ("kind", "lot", "name"),
    [
        ("stock", OrderLot.COMMON, "Common"),
        ("stock", OrderLot.ODD, "Odd"),
        ("futures", OrderLot.COMMON, "futures"),
    ],
)
def test_a_what_is_confirmed_leaves_the_quantity_that_was_wanted(
    heard: HeardOrders, means: QuantityMeaning, kind: str, lot: OrderLot, name: str
) -> None:
    stage = stage_of(kind, quantity_means={name: means})
    broker = logged_in(stage, heard)
    symbol = "TXFA6" if kind == "futures" else "2330"
    placed = broker.place(order(symbol=symbol, price=Decimal(50), quantity=10, lot=lot), 5.0)
    broker.replace(placed.broker_order_id, 8, None, 5.0, stage.confirmed)
    until(lambda: [order.quantity for order in broker.orders(5.0).orders] == [8])
    assert stage.market.rows[0].working == 8


def test_p118_a_wrong_guess_would_have_left_another_quantity(heard: HeardOrders) -> None:
    """Why quantity changes are refused: 10 to 8 leaves 2 where the number is taken off."""
    stage = stage_of(quantity_means={"Common": QuantityMeaning.NEW_TOTAL})
    guess = stage.confirmed
    stage.market.behaviour.quantity_means = {"Common": QuantityMeaning.REDUCE_BY}
    broker = logged_in(stage, heard)
    placed = broker.place(order(symbol="2330", price=Decimal(50), quantity=10), 5.0)
    broker.replace(placed.broker_order_id, 8, None, 5.0, guess)
    until(lambda: [order.quantity for order in broker.orders(5.0).orders] == [2])


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.4])
def test_a_cancel_is_confirmed_when_the_exchange_says_so(
    heard: HeardOrders, seconds: float
) -> None:
    stage = stage_of(confirms_after=seconds)
    broker = logged_in(stage, heard)
    placed = broker.place(order(symbol="2330", price=Decimal(50)), 5.0)
    answered = broker.cancel(placed.broker_order_id, 5.0)
    assert answered.state in (SUBMITTED, OrderState.SUBMITTING, CANCELLED)
    assert heard.outcome(answered, CANCELLED).quantity == 2
    assert [order.state for order in broker.orders(5.0).orders] == [CANCELLED]


def test_a_partly_filled_order_is_cancelled_with_what_it_has(heard: HeardOrders) -> None:
    stage = stage_of()
    broker = logged_in(stage, heard)
    placed = broker.place(order(symbol="2330", price=Decimal(50), quantity=3), 5.0)
    stage.market.match(stage.market.rows[0], 2)
    ended = heard.outcome(broker.cancel(placed.broker_order_id, 5.0), CANCELLED)
    until(lambda: sum(fill.quantity for fill in broker.orders(5.0).orders[0].fills) == 2)
    [listed] = broker.orders(5.0).orders
    assert (ended.quantity, listed.quantity, listed.state) == (3, 3, CANCELLED)


# --- reports of users -----------------------------------------------------------------------------


@pytest.mark.parametrize("deals_after", [None, 0.0, 0.02])
@pytest.mark.parametrize("repeats", [False, True])
def test_deals_count_once_before_with_and_after_their_order(
    heard: HeardOrders, deals_after: float | None, repeats: bool
) -> None:
    stage = stage_of(deals_after=deals_after, repeats_events=repeats)
    broker = logged_in(stage, heard)
    filled = heard.outcome(broker.place(order(symbol="2330", quantity=2), 5.0), FILLED)
    [listed] = broker.orders(5.0).orders
    assert filled.fills == listed.fills
    assert [fill.quantity for fill in listed.fills] == [2]
    told = [change.fill.fill_id for change in heard.changes if change.fill]
    assert len(told) == len(set(told)) <= 1


def test_130_deals_that_no_event_reports_are_found_in_the_list(heard: HeardOrders) -> None:
    stage = stage_of("futures", loses_deals=True)
    broker = logged_in(stage, heard)
    broker.place(order(symbol="TXFA6", price=Decimal(200), quantity=2), 5.0)
    [listed] = broker.orders(5.0).orders
    assert (listed.state, [fill.quantity for fill in listed.fills]) == (FILLED, [2])


def test_215_a_session_that_looks_alive_and_is_dead_is_found_by_a_ping(heard: HeardOrders) -> None:
    stage = stage_of()
    broker = logged_in(stage, heard)
    stage.market.behaviour.is_dead = True
    assert broker.alive()
    with pytest.raises(BrokerUnreachable):
        broker.ping(5.0)
    with pytest.raises(OutcomeUnknown):
        broker.place(order(symbol="2330"), 5.0)
    assert stage.taken("111") == []


def test_176_another_contract_than_the_one_asked_for_is_not_traded(heard: HeardOrders) -> None:
    stage = stage_of(other_contract={"2330": "4903"})
    with pytest.raises(OrderRejected, match="4903"):
        logged_in(stage, heard).place(order(symbol="2330"), 5.0)
    assert stage.taken("111") == []


def test_140_what_was_cancelled_elsewhere_is_not_working(heard: HeardOrders) -> None:
    stage = stage_of()
    broker = logged_in(stage, heard)
    broker.place(order(symbol="2330", price=Decimal(50)), 5.0)
    row = stage.market.rows[0]
    row.cancelled = row.native.quantity  # by the vendor's app, and the status still says Submitted
    assert [order.state for order in broker.orders(5.0).orders] == [CANCELLED]


def test_218_a_simulation_that_lists_its_own_orders_only_proves_no_absence(
    heard: HeardOrders,
) -> None:
    stage = stage_of(simulation=True, own_orders_only=True)
    first = logged_in(stage, heard)
    first.place(order(symbol="2330", price=Decimal(50)), 5.0)
    listing = logged_in(stage, heard).orders(5.0)
    assert (listing.orders, listing.behind) == ([], None)


def test_220_orders_of_a_simulation_that_are_shown_late_settle_nothing_before(
    heard: HeardOrders,
) -> None:
    """In one week a session saw the fills of an earlier one the next day only, in another week at
    once. Neither is relied on."""
    stage = stage_of(simulation=True, own_orders_only=True)
    logged_in(stage, heard).place(order(symbol="2330", price=Decimal(50)), 5.0)
    stage.market.match(stage.market.rows[0], 2)
    later = logged_in(stage, heard)
    hidden = later.orders(5.0)
    assert (hidden.orders, hidden.behind) == ([], None)
    stage.market.behaviour.own_orders_only = False
    shown = later.orders(5.0)
    assert [(listed.state, len(listed.fills)) for listed in shown.orders] == [(FILLED, 1)]
    assert shown.behind is None


def test_22_rows_without_an_account_are_listed_and_cancelled(heard: HeardOrders) -> None:
    stage = stage_of(names_no_account=True)
    broker = logged_in(stage, heard)
    placed = broker.place(order(symbol="2330", price=Decimal(50)), 5.0)
    later = logged_in(stage, heard)
    assert [listed.state for listed in later.orders(5.0).orders] == [SUBMITTED]
    later.cancel(placed.broker_order_id, 5.0)
    until(lambda: [listed.state for listed in later.orders(5.0).orders] == [CANCELLED])


def test_216_an_order_that_was_filled_the_day_before_is_not_working_today(
    heard: HeardOrders,
) -> None:
    stage = stage_of("futures")
    broker = logged_in(stage, heard)
    broker.place(order(symbol="TXFA6", price=Decimal(200), quantity=1), 5.0)
    assert [listed.state for listed in broker.orders(5.0).orders] == [FILLED]
    stage.market.behaviour.restores_as_pending = True
    shown = {
        session: [(listed.state, len(listed.fills)) for listed in session.orders(5.0).orders]
        for session in (broker, logged_in(stage, heard))
    }
    # The session that saw the fill keeps it. Another one takes the order for one on its way.
    assert list(shown.values()) == [[(FILLED, 1)], [(OrderState.SUBMITTING, 0)]]


def test_19_contracts_that_are_not_there_yet_refuse_an_order_and_not_the_next_one(
    heard: HeardOrders,
) -> None:
    stage = stage_of(missing={"2330"})
    broker = logged_in(stage, heard)
    with pytest.raises(OrderRejected, match="no stock contract"):
        broker.place(order(symbol="2330", price=Decimal(50)), 5.0)
    assert stage.taken("111") == []
    stage.market.behaviour.missing.clear()
    broker.place(order(symbol="2330", price=Decimal(50)), 5.0)
    assert len(stage.taken("111")) == 1


def test_81_a_token_that_is_renewed_again_and_again_takes_one_connection(
    heard: HeardOrders,
) -> None:
    """Logins without a logout before them ran into the limit of connections."""
    stage = stage_of()
    for number in range(7):  # two more than a person may have connections
        broker = logged_in(stage, heard)
        [client] = stage.market.sessions
        assert client.forces_refresh is (number > 0)
        client.has_old_token = True
        with pytest.raises(SessionDown):
            broker.ping(5.0)
        broker.close()
    logged_in(stage, heard).ping(5.0)  # and the next test's first login is a usual one
    assert len(stage.market.sessions) == 1


@pytest.mark.parametrize("quantity", [2, 3])
def test_234_an_order_that_was_reduced_and_then_cancelled_is_not_working(
    heard: HeardOrders, quantity: int
) -> None:
    """Its row is still `Submitted`, with all of it cancelled. The session that heard of the cancel
    knows it by the event, another one by the quantities alone."""
    stage = stage_of("futures", forgets_final_status=True)
    broker = logged_in(stage, heard)
    new_order = order(symbol="TXFA6", price=Decimal(50), quantity=quantity)
    placed = broker.place(new_order, 5.0)
    broker.replace(placed.broker_order_id, quantity - 1, None, 5.0, stage.confirmed)
    until(lambda: [listed.quantity for listed in broker.orders(5.0).orders] == [quantity - 1])
    broker.cancel(placed.broker_order_id, 5.0)
    until(lambda: stage.market.rows[0].cancelled == quantity)
    [row] = stage.market.rows
    assert row.status == "Submitted"
    for session in (broker, logged_in(stage, heard)):
        assert [listed.state for listed in session.orders(5.0).orders] == [CANCELLED]


@pytest.mark.parametrize("is_told", [True, False])
def test_p13_a_sale_that_is_answered_and_refused_seconds_later_ends_with_the_reason(
    heard: HeardOrders, is_told: bool
) -> None:
    """Shares of the same day were sold: answered as submitted, then refused. A simulation may not
    send the event, so the list has to do."""
    stage = stage_of(simulation=True)
    broker = logged_in(stage, heard)
    placed = broker.place(order(symbol="2330", price=Decimal(150), side=Side.SELL), 5.0)
    until(lambda: [listed.state for listed in broker.orders(5.0).orders] == [SUBMITTED])
    [row] = stage.market.rows
    row.status, row.message = "Failed", "集保不足"
    if is_told:
        stage.market.report(row, "New", "88")
        assert heard.outcome(placed, OrderState.REJECTED).reason == row.message
    [listed] = broker.orders(5.0).orders
    assert (listed.state, listed.reason) == (OrderState.REJECTED, row.message)


def test_p57_a_token_that_died_beside_the_vendors_app_is_replaced_by_a_new_one(
    heard: HeardOrders,
) -> None:
    stage = stage_of()
    broker = logged_in(stage, heard)
    stage.market.sessions.clear()
    with pytest.raises(SessionDown):
        broker.ping(5.0)
    logged_in(stage, heard)
    assert [client.forces_refresh for client in stage.market.sessions] == [True]


def test_an_account_that_is_not_signed_is_refused_before_the_first_order(
    heard: HeardOrders,
) -> None:
    with pytest.raises(LoginRejected, match="not signed"):
        logged_in(stage_of(unsigned=True), heard)


@pytest.mark.parametrize(
    ("error", "error_type"),
    [
        (REAL.SystemMaintenance("503 Service Unavailable"), LoginLimited),
        (REAL.SystemMaintenance("503 please update the version"), BrokerVersionRefused),
        (REAL.ServerError("StatusCode: 451, Detail: x"), LoginLimited),
        (REAL.ShioajiConnectionError("login"), BrokerUnreachable),
    ],
)
def test_logins_fail_as_the_broker_says(
    heard: HeardOrders, error: Exception, error_type: type[Exception]
) -> None:
    with pytest.raises(error_type) as caught:
        logged_in(stage_of(login_error=error), heard)
    assert caught.type is error_type


# --- deals that differ in nothing but their ids -------------------------------------------------


def equal_deals(row: Row, *numbers: int) -> None:
    """Deals of one lot each, at one price within one second, as an order that is filled lot by lot
    has."""
    row.deals = [(f"{number}", 1, 50.0, 1_700_000_000.0 + number / 10) for number in numbers]


def new_row(quantity: int) -> Row:
    native = REAL.StockOrder(
        action="Buy",
        price=50.0,
        quantity=quantity,
        price_type="LMT",
        time_in_force="ROD",
        order_lot="Common",
    )
    unused: Any = None
    return Row(1, "111", unused, REAL.BaseContract("STK", "TSE", "2330"), native, 50.0)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_deal_whose_event_was_lost_is_not_taken_for_an_equal_one_of_the_same_second(
    lost: int,
) -> None:
    """Found by a chaos run: of three lots filled within a second, two were in the books."""
    row, book = new_row(3), ReportedOrders()
    equal_deals(row, 0, 1, 2)
    book.merge_event("SORDER", order_event(row, "New", "00"))
    for deal in row.deals:
        if deal[0] != str(lost):
            book.merge_event("SDEAL", deal_event(row, deal))
    row.status = "Filled"
    listed = book.merge_trade(trade_of(row, MarketBehaviour(), None))
    assert (listed.state, sum(fill.quantity for fill in listed.fills)) == (FILLED, 3)


@pytest.mark.parametrize("reported", [(0, 1, 2), (2,), (1, 2), ()])
def test_an_event_that_comes_after_a_list_with_an_equal_deal_counts(
    reported: tuple[int, ...],
) -> None:
    """Found by a chaos run: the session was replaced, so it knew the first deals by a list
    alone."""
    row, book = new_row(3), ReportedOrders()
    equal_deals(row, 0, 1)
    row.status = "PartFilled"
    book.merge_trade(trade_of(row, MarketBehaviour(), None))
    equal_deals(row, 0, 1, 2)
    for number in reported:
        book.merge_event("SDEAL", deal_event(row, row.deals[number]))
    row.status = "Filled"
    listed = book.merge_trade(trade_of(row, MarketBehaviour(), None))
    assert (listed.state, sum(fill.quantity for fill in listed.fills)) == (FILLED, 3)
    assert {fill.fill_id for fill in listed.fills} == {f"{row.id}-{number}" for number in range(3)}


# --- all orders of events -------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_the_order_of_events_a_list_then_shows_the_truth(data: st.DataObject) -> None:
    """Events are lost, doubled and swapped; each fill counts once, and no final state is left
    again. Deals may be equal but for their ids, which may be others in lists than in events."""
    behaviour = MarketBehaviour(hides_reduced_quantity=data.draw(st.booleans()))
    quantity = data.draw(st.integers(1, 5))
    native = REAL.StockOrder(
        action="Buy",
        price=50.0,
        quantity=quantity,
        price_type="LMT",
        time_in_force="ROD",
        order_lot="Common",
    )
    unused: Any = None
    row = Row(1, "111", unused, REAL.BaseContract("STK", "TSE", "2330"), native, 50.0)
    seconds, same_ids = data.draw(st.sampled_from((0.0, 0.1, 1.0))), data.draw(st.booleans())
    events: list[tuple[str, Any]] = [("SORDER", order_event(row, "New", "00"))]
    for number in range(data.draw(st.integers(0, quantity))):
        deal = (f"{number}", 1, 50.0, 1_700_000_000.0 + number * seconds)
        row.deals.append((deal[0] if same_ids else f"L{number}", *deal[1:]))
        events.append(("SDEAL", deal_event(row, deal)))
    row.status = "Filled" if not row.working else "PartFilled" if row.filled else "Submitted"
    if row.working > 1 and data.draw(st.booleans()):
        row.cancelled = 1
        events.append(("SORDER", order_event(row, "UpdateQty", "00")))
    if row.working and data.draw(st.booleans()):
        row.cancelled, row.status = quantity - row.filled, "Cancelled"
        events.append(("SORDER", order_event(row, "Cancel", "00")))
    for number, (_, event) in enumerate(events):
        event["event_id"] = f"e{number}"
    first = trade_of(row, behaviour, None)
    first.status = SimpleNamespace(
        **{
            **vars(first.status),
            "status": REAL.OrderStatus("PendingSubmit"),
            "deals": [],
            "cancel_quantity": 0,
        }
    )
    first.status.order_quantity = quantity
    kept = [event for event in events if data.draw(st.integers(0, 5))]  # one of six is lost
    steps: list[tuple[str, Any]] = data.draw(st.permutations([*kept, *kept, ("trade", first)]))
    book, told, ended = ReportedOrders(), list[str](), False
    for kind, step in steps:
        if kind == "trade":
            known = book.merge_trade(step)
        else:
            change = book.merge_event(kind, step)
            if change is None:
                continue
            told += [change.fill.fill_id] if change.fill else []
            known = change.order
        assert not ended or known.state in FINAL_ORDER_STATES
        ended = known.state in FINAL_ORDER_STATES
    assert len(told) == len(set(told))
    listed = book.merge_trade(trade_of(row, behaviour, None))
    assert sum(fill.quantity for fill in listed.fills) == row.filled
    ids = {fill.fill_id for fill in listed.fills}
    assert len(ids) == row.filled
    assert set(told) <= ids
    assert not same_ids or ids == {f"{row.id}-{number}" for number in range(row.filled)}
    if not ended:
        assert listed.quantity == (
            quantity if row.status == "Cancelled" else quantity - row.cancelled
        )
    expected = FILLED if not row.working and row.status != "Cancelled" else None
    assert listed.state in FINAL_ORDER_STATES or row.status in ("Submitted", "PartFilled")
    assert expected is None or listed.state is expected
