"""The exchange without sockets: what it does with orders, and which session gets which event."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from infra.exchange.behaviour import Behaviour, FaultPoint, FillMode
from infra.exchange.exchange import PaperExchange
from infra.exchange.ledger import ExchangeLedger, LedgerInUse
from infra.exchange.records import INITIAL_CASH, AccountRegistration
from tests.support.brokers.exchange_clock import ExchangeClock
from tests.support.brokers.exchange_traders import TraderClient, limit, login
from worker_runtime.brokers.paper.wire import Login, Replace
from worker_runtime.protocol.errors import (
    LoginLimited,
    LoginRejected,
    OrderRejected,
    UnknownAccount,
)
from worker_runtime.protocol.messages import OrderState


def test_only_the_answer_reports_a_plain_acceptance(exchange: PaperExchange) -> None:
    exchange.market.set_price("2330", Decimal(100))
    taken = exchange.place(login(exchange), limit("90"))
    assert taken.order.state is OrderState.SUBMITTED
    assert taken.events == ()


def test_a_price_move_fills_what_it_crosses_and_notifies_every_session_of_that_account(
    exchange: PaperExchange,
) -> None:
    exchange.market.set_price("2330", Decimal(100))
    first, second, other = TraderClient(), TraderClient(), TraderClient()
    session = login(exchange, client=first)
    login(exchange, client=second)
    login(exchange, "b", other)
    exchange.place(session, limit("90"))
    exchange.place(session, limit("80"))
    exchange.market.set_price("2330", Decimal(85))
    assert [event.order.price for event in first.events] == [Decimal(90)]
    assert first.events == second.events
    assert other.events == []


def test_limited_liquidity_fills_a_part_at_each_price_move(exchange: PaperExchange) -> None:
    client = TraderClient()
    session = login(exchange, client=client)
    exchange.set_behaviour("a", Behaviour(liquidity=2))
    exchange.market.set_price("2330", Decimal(90))
    taken = exchange.place(session, limit("90", quantity=5))
    assert (taken.order.state, taken.order.filled) == (OrderState.PART_FILLED, 2)
    exchange.market.set_price("2330", Decimal(89))
    exchange.market.set_price("2330", Decimal(88))
    [order] = exchange.orders("a")
    assert order.state is OrderState.FILLED
    assert [(fill.quantity, fill.price) for fill in order.fills] == [
        (2, Decimal(90)),
        (2, Decimal(89)),
        (1, Decimal(88)),
    ]


def test_a_delayed_fill_comes_when_its_time_is_up_and_once(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    client = TraderClient()
    exchange.set_behaviour("a", Behaviour(fill=FillMode.DELAYED))
    exchange.market.set_price("2330", Decimal(90))
    exchange.place(login(exchange, client=client), limit("90"))
    assert client.events == []
    clock.pass_by(1)
    clock.pass_by(1)
    assert [event.order.state for event in client.events] == [OrderState.FILLED]


def test_an_unfilled_order_rests_until_the_behaviour_changes(exchange: PaperExchange) -> None:
    exchange.set_behaviour("a", Behaviour(fill=FillMode.NEVER))
    exchange.market.set_price("2330", Decimal(90))
    taken = exchange.place(login(exchange), limit("90"))
    exchange.market.set_price("2330", Decimal(80))
    assert exchange.orders("a")[0].state is OrderState.SUBMITTED
    exchange.set_behaviour("a", Behaviour())
    assert exchange.orders("a")[0].state is OrderState.FILLED
    with pytest.raises(OrderRejected):
        exchange.cancel(taken.order.broker_order_id, "too late")


def test_a_client_cancels_its_own_orders_only(exchange: PaperExchange) -> None:
    exchange.market.set_price("2330", Decimal(100))
    taken = exchange.place(login(exchange), limit("90"))
    with pytest.raises(OrderRejected):
        exchange.cancel(taken.order.broker_order_id, "not mine", "b")
    assert exchange.cancel(taken.order.broker_order_id, "mine", "a").state is OrderState.CANCELLED


def test_a_resting_order_is_made_smaller_and_fills_at_its_new_price(
    exchange: PaperExchange,
) -> None:
    exchange.market.set_price("2330", Decimal(100))
    order = exchange.place(login(exchange), limit("90", quantity=5)).order
    smaller = exchange.replace(
        "a", Replace(id=1, broker_order_id=order.broker_order_id, quantity=3)
    )
    assert (smaller.quantity, smaller.price, smaller.state) == (
        3,
        Decimal(90),
        OrderState.SUBMITTED,
    )
    dearer = exchange.replace(
        "a", Replace(id=2, broker_order_id=order.broker_order_id, price=Decimal(101))
    )
    assert (dearer.state, dearer.filled) == (OrderState.FILLED, 3)
    assert exchange.ledger.order(order.broker_order_id) == dearer


@pytest.mark.parametrize(
    ("quantity", "price"), [(6, None), (0, None), (None, Decimal(-1)), (None, Decimal("NaN"))]
)
def test_what_cannot_be_changed_stays_as_it_is(
    exchange: PaperExchange, quantity: int | None, price: Decimal | None
) -> None:
    exchange.market.set_price("2330", Decimal(100))
    order = exchange.place(login(exchange), limit("90", quantity=5)).order
    replacement = Replace(
        id=1, broker_order_id=order.broker_order_id, quantity=quantity, price=price
    )
    for account, change in (
        ("a", replacement),
        ("b", Replace(id=1, broker_order_id=order.broker_order_id)),
    ):
        with pytest.raises(OrderRejected):
            exchange.replace(account, change)
    assert exchange.ledger.order(order.broker_order_id) == order


def test_an_order_reduced_to_its_fills_is_cancelled(exchange: PaperExchange) -> None:
    exchange.market.set_price("2330", Decimal(100))
    order = exchange.place(login(exchange), limit("90", quantity=5)).order
    exchange.fill_by_hand(order.broker_order_id, 2, None)
    changed = exchange.replace(
        "a", Replace(id=1, broker_order_id=order.broker_order_id, quantity=2)
    )
    assert (changed.state, changed.filled) == (OrderState.CANCELLED, 2)


def test_money_follows_the_fills_and_resting_purchases_bind_some(exchange: PaperExchange) -> None:
    exchange.market.set_price("2330", Decimal(100))
    session = login(exchange)
    exchange.place(session, limit("101", quantity=5))
    exchange.place(session, limit("90", quantity=2))
    balance = exchange.balance("a")
    assert (INITIAL_CASH - balance.cash, balance.cash - balance.available) == (
        Decimal(500),
        Decimal(180),
    )


def test_the_next_orders_are_rejected_as_often_as_was_set(exchange: PaperExchange) -> None:
    session = login(exchange)
    exchange.set_behaviour("a", Behaviour(reject_next=2, reject_reason="no margin"))
    exchange.market.set_price("2330", Decimal(90))
    states = [exchange.place(session, limit("90")).order for _ in range(3)]
    assert [order.state for order in states] == [
        OrderState.REJECTED,
        OrderState.REJECTED,
        OrderState.FILLED,
    ]
    assert states[0].reason == "no margin"


def test_a_share_of_orders_is_rejected(exchange: PaperExchange) -> None:
    session = login(exchange)
    exchange.set_behaviour("a", Behaviour(reject_rate=0.5))
    states = [exchange.place(session, limit("90")).order.state for _ in range(100)]
    assert 25 < states.count(OrderState.REJECTED) < 75


def test_a_malformed_order_leaves_no_trace(exchange: PaperExchange) -> None:
    with pytest.raises(OrderRejected):
        exchange.place(login(exchange), limit("NaN"))
    assert exchange.orders("a") == []


def test_connections_are_counted_per_person_over_its_accounts(exchange: PaperExchange) -> None:
    sessions = [login(exchange, account) for account in ("a", "b", "a", "b", "a")]
    with pytest.raises(LoginLimited):
        login(exchange, "b")
    exchange.sessions.logout(sessions[0].session_id, "done")
    assert login(exchange, "b").person_id == "person"


def test_logins_need_the_right_keys_and_the_right_person(exchange: PaperExchange) -> None:
    for wrong in (
        Login(id=1, account="a", api_key="ks", secret_key=""),
        Login(id=1, account="x", api_key="k", secret_key="s"),
        Login(id=1, account="a", api_key="k", secret_key="s", person_id="another"),
    ):
        with pytest.raises(LoginRejected):
            exchange.sessions.login(wrong, TraderClient())


def test_registering_again_replaces_the_keys_and_keeps_the_behaviour(
    exchange: PaperExchange,
) -> None:
    exchange.set_behaviour("a", Behaviour(latency_ms=7))
    exchange.accounts.register(AccountRegistration(account="a", api_key="new", secret_key="s"))
    with pytest.raises(LoginRejected):
        login(exchange)
    assert exchange.accounts.behaviour("a").latency_ms == 7


def test_the_behaviour_of_an_unknown_account_cannot_be_set(exchange: PaperExchange) -> None:
    with pytest.raises(UnknownAccount):
        exchange.set_behaviour("nobody", Behaviour())


def test_lost_events_are_not_sent_and_duplicates_are_sent_twice(exchange: PaperExchange) -> None:
    client = TraderClient()
    session = login(exchange, client=client)
    exchange.market.set_price("2330", Decimal(100))
    exchange.set_behaviour(
        "a", Behaviour(faults={FaultPoint.LOST_EVENT: 1, FaultPoint.DUPLICATE_FILL: 1})
    )
    for price in ("99", "98"):
        exchange.place(session, limit(price))
        exchange.market.set_price("2330", Decimal(price))
    first, second = client.events
    assert first.fill == second.fill
    assert first.event_id != second.event_id


def test_sessions_are_ended_with_their_reason(
    exchange: PaperExchange, ledger: ExchangeLedger
) -> None:
    client = TraderClient()
    login(exchange, client=client)
    assert exchange.sessions.end("a", "maintenance", abrupt=False) == 1
    assert client.ended == ["maintenance"]
    assert [session.close_reason for session in ledger.sessions("a")] == ["maintenance"]
    assert ledger.sessions("a", only_open=True) == []


def test_another_exchange_continues_where_the_last_one_ended(
    exchange: PaperExchange, ledger: ExchangeLedger, tmp_path: Path, clock: ExchangeClock
) -> None:
    exchange.market.set_price("2330", Decimal(100))
    exchange.set_behaviour("b", Behaviour(fill=FillMode.NEVER))
    taken = exchange.place(login(exchange), limit("90"))
    ledger.close()

    reopened = ExchangeLedger(tmp_path / "ledger.db")
    second = PaperExchange(reopened, clock.later, now=clock.now)
    assert second.market.price("2330") == Decimal(100)
    assert second.accounts.behaviour("b").fill is FillMode.NEVER
    assert [s.close_reason for s in reopened.sessions()] == ["the exchange restarted"]
    again = second.place(login(second), limit("91"))
    assert again.order.broker_order_id > taken.order.broker_order_id
    second.market.set_price("2330", Decimal(85))
    assert {order.state for order in second.orders("a")} == {OrderState.FILLED}
    fills = [fill.fill_id for order in second.orders("a") for fill in order.fills]
    assert len(set(fills)) == 2
    reopened.close()


def test_a_ledger_belongs_to_one_exchange(ledger: ExchangeLedger, tmp_path: Path) -> None:
    with pytest.raises(LedgerInUse):
        ExchangeLedger(tmp_path / "ledger.db")
