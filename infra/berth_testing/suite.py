"""What every broker keeps: the contract of `worker_runtime/brokers/port.py`. Submit-once comes
first."""

from __future__ import annotations

import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from worker_runtime.brokers.port import (
    Broker,
    Credentials,
    KeepsToken,
    OrderChanged,
    OrderState,
    Side,
    TimeInForce,
)
from worker_runtime.protocol.errors import (
    BrokerUnreachable,
    LoginLimited,
    LoginRejected,
    OrderRejected,
    OutcomeUnknown,
    SessionDown,
)

from .harness import (
    API_KEY,
    CREDENTIALS,
    MAX_STANDSTILL_S,
    SECRET_KEY,
    BrokerStage,
    HeardOrders,
    order,
    until,
)
from .sources import find_faults


def booked(stage: BrokerStage, account: str) -> list[tuple[str, OrderState]]:
    return [(taken.tag, taken.state) for taken in stage.taken(account)]


def stage_method(stage: BrokerStage, name: str) -> Callable[..., Any]:
    """Return a method of the stage; stages for an earlier suite may lack it."""
    method: Callable[..., Any] | None = getattr(stage, name, None)
    if method is None:
        pytest.fail(
            f"{type(stage).__name__} has no `{name}`, which this test needs: "
            "`BrokerStage` in berth_testing/harness.py says what it does"
        )
    return method


def place_resting(stage: BrokerStage, broker: Broker, quantity: int = 2) -> str:
    """Place an order at 80 steps, below the market; return the broker's id of it."""
    symbol = stage.facts.symbols[4]
    stage.set_price(symbol, stage.facts.price(100))
    resting = order(symbol=symbol, price=stage.facts.price(80), quantity=quantity)
    return broker.place(resting, 5.0).broker_order_id


def require_one_unknown_change(
    stage: BrokerStage, broker: Broker, account: str, fault: str, change: Callable[[float], object]
) -> None:
    """Lose the answer of a change, and require that it left once and that its outcome is
    unknown."""
    count_changes = stage_method(stage, "count_changes")
    before = count_changes(account)
    stage_method(stage, fault)(account)
    began = time.monotonic()
    with pytest.raises(OutcomeUnknown):
        change(1.0)
    assert time.monotonic() - began < 1.0 + MAX_STANDSTILL_S
    broker.close()
    assert count_changes(account) == before + 1


def test_an_order_is_submitted_once(
    stage: BrokerStage, broker: Broker, account: str, heard: HeardOrders
) -> None:
    """The connection is lost after the order may have left: its outcome is unknown, and nothing
    repeats it, neither the adapter nor its client library nor a new session."""
    sent = stage.facts.market_order(0)
    stage.drop_next(account)
    with pytest.raises(OutcomeUnknown):
        broker.place(sent, 5.0)
    again = stage.broker(account, heard)
    again.login(CREDENTIALS, 5.0)
    listed = [known.tag for known in again.orders(5.0).orders]
    again.close()
    assert [taken.tag for taken in stage.taken(account)] == [sent.tag]
    assert listed in ([sent.tag], [])  # a broker may show each session its own orders only


def test_a_call_ends_with_its_timeout_and_leaves_the_outcome_unknown(
    stage: BrokerStage, broker: Broker, account: str
) -> None:
    sent = stage.facts.market_order(0)
    stage.silence_next(account)
    began = time.monotonic()
    with pytest.raises(OutcomeUnknown):
        broker.place(sent, 0.5)
    assert time.monotonic() - began < 0.5 + MAX_STANDSTILL_S
    assert [taken.tag for taken in stage.taken(account)] == [sent.tag]


#: How the answer of a cancel or replacement is lost.
LOST_CHANGES = ("drop_next_change", "silence_next_change")


@pytest.mark.parametrize("fault", LOST_CHANGES)
def test_a_lost_change_is_unknown_and_sent_once(
    stage: BrokerStage, broker: Broker, account: str, fault: str
) -> None:
    resting, price = place_resting(stage, broker), stage.facts.price(82)

    def change(timeout: float) -> None:
        broker.replace(resting, None, price, timeout)

    require_one_unknown_change(stage, broker, account, fault, change)


@pytest.mark.parametrize("fault", LOST_CHANGES)
def test_a_lost_cancel_is_unknown_and_sent_once(
    stage: BrokerStage, broker: Broker, account: str, fault: str
) -> None:
    resting = place_resting(stage, broker)

    def cancel(timeout: float) -> None:
        broker.cancel(resting, timeout)

    require_one_unknown_change(stage, broker, account, fault, cancel)
    until(lambda: [state for _, state in booked(stage, account)] == [OrderState.CANCELLED])


def test_a_session_is_at_the_system_that_its_key_names(
    stage: BrokerStage, account: str, heard: HeardOrders
) -> None:
    """An adapter that ignores `key.simulation` places real orders for simulated accounts."""
    stage.register(account, API_KEY, SECRET_KEY)
    other: Broker | None = stage_method(stage, "other_system")(account, heard)
    if other is None:
        return
    with pytest.raises((LoginRejected, BrokerUnreachable)):
        other.login(CREDENTIALS, 5.0)
    with pytest.raises(SessionDown):
        other.place(stage.facts.market_order(0), 5.0)
    other.close()
    assert stage.taken(account) == []


def test_an_order_without_time_is_not_sent(
    stage: BrokerStage, broker: Broker, account: str
) -> None:
    with pytest.raises(OrderRejected):
        broker.place(stage.facts.market_order(0), 0.0)
    assert stage.taken(account) == []


def test_the_source_has_no_client_that_repeats_and_no_call_without_a_timeout(
    stage: BrokerStage,
) -> None:
    assert find_faults(stage.facts.sources) == []


def test_a_good_login_gives_a_session_that_answers_pings(broker: Broker) -> None:
    broker.ping(5.0)
    assert broker.orders(5.0).orders == []
    assert broker.positions(5.0) == []


def test_a_session_is_alive_until_it_is_closed(broker: Broker) -> None:
    assert broker.alive()
    broker.close()
    assert not broker.alive()


def test_a_wrong_key_is_rejected(stage: BrokerStage, account: str, heard: HeardOrders) -> None:
    stage.register(account, API_KEY, SECRET_KEY)
    stranger = stage.broker(account, heard)
    with pytest.raises(LoginRejected):
        stranger.login(Credentials(api_key=API_KEY, secret_key="another"), 5.0)
    stranger.close()


def test_an_unknown_account_is_rejected(
    stage: BrokerStage, account: str, heard: HeardOrders
) -> None:
    stranger = stage.broker(account, heard)
    with pytest.raises(LoginRejected):
        stranger.login(CREDENTIALS, 5.0)
    stranger.close()


def test_nothing_works_before_the_login(
    stage: BrokerStage, account: str, heard: HeardOrders
) -> None:
    stage.register(account, API_KEY, SECRET_KEY)
    early = stage.broker(account, heard)
    with pytest.raises(SessionDown):
        early.place(stage.facts.market_order(0), 5.0)
    with pytest.raises(SessionDown):
        early.ping(5.0)
    early.close()
    assert stage.taken(account) == []


def test_a_market_order_is_filled_in_the_answer_or_soon_after(
    stage: BrokerStage, broker: Broker, account: str, heard: HeardOrders
) -> None:
    stage.set_price(stage.facts.symbols[0], stage.facts.price(83))
    sent = stage.facts.market_order(0, quantity=3)
    placed = heard.outcome(broker.place(sent, 5.0), OrderState.FILLED)
    assert [(fill.quantity, fill.price) for fill in placed.fills] == [(3, stage.facts.price(83))]
    assert placed.tag == sent.tag
    assert booked(stage, account) == [(sent.tag, OrderState.FILLED)]
    [position] = broker.positions(5.0)
    assert (position.symbol, position.quantity, position.average_price) == (
        stage.facts.symbols[0],
        3,
        stage.facts.price(83),
    )


def test_a_sale_makes_the_position_smaller(stage: BrokerStage, broker: Broker) -> None:
    broker.place(stage.facts.market_order(1, quantity=3), 5.0)
    broker.place(stage.facts.market_order(1, quantity=1, side=Side.SELL), 5.0)
    assert [(p.symbol, p.quantity) for p in broker.positions(5.0)] == [(stage.facts.symbols[1], 2)]


def test_a_limit_order_rests_and_is_filled_when_the_price_comes(
    stage: BrokerStage, broker: Broker, heard: HeardOrders
) -> None:
    stage.set_price(stage.facts.symbols[2], stage.facts.price(200))
    placed = broker.place(order(symbol=stage.facts.symbols[2], price=stage.facts.price(180)), 5.0)
    assert heard.outcome(placed, OrderState.SUBMITTED).fills == []
    stage.set_price(stage.facts.symbols[2], stage.facts.price(179))
    changes = heard.wait(lambda changes: any(change.fill for change in changes))
    [change] = [change for change in changes if change.fill]
    assert change.order.broker_order_id == placed.broker_order_id
    assert change.order.state is OrderState.FILLED
    assert change.fill is not None
    assert change.fill.price == stage.facts.price(179)
    assert [known.state for known in broker.orders(5.0).orders] == [OrderState.FILLED]


def test_an_order_that_may_not_rest_is_cancelled(
    stage: BrokerStage, broker: Broker, heard: HeardOrders
) -> None:
    symbol, below = stage.facts.symbols[3], stage.facts.price(180)
    stage.set_price(symbol, stage.facts.price(200))
    for kind in stage.facts.times_in_force:
        if kind is not TimeInForce.ROD:
            placed = broker.place(order(symbol=symbol, price=below, time_in_force=kind), 5.0)
            assert heard.outcome(placed, OrderState.CANCELLED).fills == [], kind


def test_a_rejection_comes_with_its_reason(
    stage: BrokerStage, broker: Broker, account: str, heard: HeardOrders
) -> None:
    stage.reject_next(account, "no margin left")
    with pytest.raises(OrderRejected, match="no margin left"):
        broker.place(stage.facts.market_order(0), 5.0)
    assert heard.outcome(broker.place(stage.facts.market_order(0), 5.0), OrderState.FILLED).fills


def test_a_fill_is_told_once_with_the_id_of_the_answer_and_the_list(
    stage: BrokerStage, broker: Broker, heard: HeardOrders
) -> None:
    placed = broker.place(stage.facts.market_order(0), 5.0)
    changes = heard.wait(lambda changes: any(change.fill for change in changes))
    [change] = [change for change in changes if change.fill]
    assert change.fill is not None
    assert placed.fills in ([], [change.fill])
    assert [known.fills for known in broker.orders(5.0).orders] == [[change.fill]]


def test_a_connection_lost_in_the_middle_leaves_the_outcome_unknown(
    stage: BrokerStage, broker: Broker, account: str
) -> None:
    stage.drop_next(account)
    sent = stage.facts.market_order(0)
    with pytest.raises(OutcomeUnknown):
        broker.place(sent, 5.0)
    assert booked(stage, account) == [(sent.tag, OrderState.FILLED)]
    with pytest.raises(SessionDown):  # nothing is sent on a dead session
        broker.place(stage.facts.market_order(0), 5.0)
    with pytest.raises(SessionDown):
        broker.ping(5.0)
    assert len(stage.taken(account)) == 1


def test_a_new_session_sees_the_orders_of_the_lost_one(
    stage: BrokerStage, broker: Broker, account: str, heard: HeardOrders
) -> None:
    stage.drop_next(account)
    sent = stage.facts.market_order(0)
    with pytest.raises(OutcomeUnknown):
        broker.place(sent, 5.0)
    again = stage.broker(account, heard)
    again.login(CREDENTIALS, 5.0)
    listed = [known.tag for known in again.orders(5.0).orders]
    again.close()
    assert listed in ([[sent.tag]] if stage.facts.all_sessions else [[sent.tag], []])


def test_closing_is_quick_and_may_be_repeated(stage: BrokerStage, broker: Broker) -> None:
    started = time.monotonic()
    broker.close()
    broker.close()
    assert time.monotonic() - started < 1.0 + MAX_STANDSTILL_S
    with pytest.raises(SessionDown):
        broker.place(stage.facts.market_order(0), 5.0)
    with pytest.raises(SessionDown):
        broker.login(CREDENTIALS, 5.0)


def test_closing_without_a_login_is_no_error(
    stage: BrokerStage, account: str, heard: HeardOrders
) -> None:
    unused = stage.broker(account, heard)
    unused.close()
    with pytest.raises(SessionDown):
        unused.ping(5.0)


def test_one_connection_too_many_is_refused_until_one_is_closed(
    stage: BrokerStage, broker: Broker, account: str, heard: HeardOrders
) -> None:
    others = [stage.broker(account, heard) for _ in range(stage.facts.connections - 1)]
    for other in others:
        other.login(CREDENTIALS, 5.0)
    further = stage.broker(account, heard)
    with pytest.raises(LoginLimited):
        further.login(CREDENTIALS, 5.0)
    others.pop().close()

    def admitted() -> bool:
        try:
            further.login(CREDENTIALS, 5.0)
        except LoginLimited:
            return False
        return True

    until(admitted)
    for other in [*others, further]:
        other.close()


def test_a_session_that_takes_the_place_of_another_outlives_it_and_reaches_its_orders(
    stage: BrokerStage, broker: Broker, account: str, heard: HeardOrders
) -> None:
    """A worker renews a session so: next to the old one, where the broker takes two."""
    resting = place_resting(stage, broker)
    if isinstance(broker, KeepsToken):
        broker.forget_token()
    renewed = stage.broker(account, heard)
    if stage.facts.connections == 1:
        broker.close()
    renewed.login(CREDENTIALS, 5.0)
    broker.close()
    renewed.ping(5.0)
    assert renewed.alive()
    if stage.facts.all_sessions:
        cancelled = heard.outcome(renewed.cancel(resting, 5.0), OrderState.CANCELLED)
        assert cancelled.broker_order_id == resting
    renewed.close()


def test_a_resting_order_is_cancelled_once(
    stage: BrokerStage, broker: Broker, heard: HeardOrders
) -> None:
    resting = place_resting(stage, broker)
    cancelled = heard.outcome(broker.cancel(resting, 5.0), OrderState.CANCELLED)
    assert cancelled.broker_order_id == resting

    def ended(changes: list[OrderChanged]) -> list[OrderChanged]:
        return [change for change in changes if change.order.state is OrderState.CANCELLED]

    [change] = ended(heard.wait(lambda changes: bool(ended(changes))))
    assert change.fill is None
    with pytest.raises(OrderRejected):
        broker.cancel(resting, 5.0)


def test_a_resting_order_gets_smaller_and_another_price(stage: BrokerStage, broker: Broker) -> None:
    resting, quantity = place_resting(stage, broker, quantity=5), 5

    def shown() -> list[tuple[int, Decimal | None, OrderState]]:
        return [(known.quantity, known.price, known.state) for known in broker.orders(5.0).orders]

    if stage.facts.changes_quantities:
        quantity = 3
        broker.replace(resting, quantity, None, 5.0, stage.confirmed)
        until(lambda: shown() == [(quantity, stage.facts.price(80), OrderState.SUBMITTED)])
    broker.replace(resting, None, stage.facts.price(82), 5.0)
    until(lambda: shown() == [(quantity, stage.facts.price(82), OrderState.SUBMITTED)])
    if stage.facts.changes_quantities:
        with pytest.raises(OrderRejected):
            broker.replace(resting, 4, None, 5.0, stage.confirmed)


def test_a_change_that_crosses_the_market_is_filled(
    stage: BrokerStage, broker: Broker, heard: HeardOrders
) -> None:
    resting = place_resting(stage, broker)
    changed = broker.replace(resting, None, stage.facts.price(100), 5.0)
    filled = heard.outcome(changed, OrderState.FILLED)
    assert sum(done.quantity for done in filled.fills) == 2


def test_an_unknown_order_is_neither_cancelled_nor_changed(
    stage: BrokerStage, broker: Broker
) -> None:
    with pytest.raises(OrderRejected):
        broker.cancel("nobody's", 5.0)
    quantity = 1 if stage.facts.changes_quantities else None
    price = stage.facts.price(80) if quantity is None else None
    with pytest.raises(OrderRejected):
        broker.replace("nobody's", quantity, price, 5.0)


def test_money_is_spent_by_fills(stage: BrokerStage, broker: Broker, heard: HeardOrders) -> None:
    stage.set_price(stage.facts.symbols[1], stage.facts.price(20))
    before = broker.balance(5.0)
    heard.outcome(broker.place(stage.facts.market_order(1, quantity=3), 5.0), OrderState.FILLED)
    after = broker.balance(5.0)
    spent = 3 * stage.facts.price(20) * stage.facts.lot_value
    assert (before.currency, before.cash - after.cash) == (stage.facts.currency, spent)


def test_what_it_reports_fits_into_berths_messages(
    stage: BrokerStage, broker: Broker, heard: HeardOrders
) -> None:
    """Ids that are too long, prices that are no numbers, times in seconds: none of them arrives."""
    placed = broker.place(stage.facts.market_order(0), 5.0)
    changes = heard.wait(lambda changes: any(change.fill for change in changes))
    listed = broker.orders(5.0).orders
    for reported in (placed, *changes, *listed, *broker.positions(5.0), broker.balance(5.0)):
        encoded = msgspec.json.encode(reported)
        assert msgspec.json.decode(encoded, type=type(reported)) == reported


def test_a_list_says_how_complete_it_is(broker: Broker) -> None:
    listing = broker.orders(5.0)
    assert listing.behind is None or (listing.behind >= 0 and listing.reaches > 0)
