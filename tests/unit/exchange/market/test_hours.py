"""The day ends, tokens expire, and sometimes the exchange is closed."""

from __future__ import annotations

from datetime import time
from decimal import Decimal
from pathlib import Path

import pytest

from infra.exchange.behaviour import Behaviour
from infra.exchange.exchange import PaperExchange
from infra.exchange.hours import (
    ExchangeMaintenance,
    day_begins_ms,
    last_close_ms,
    next_close_ms,
    time_half_a_day_away,
)
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.limits import ExchangeCallKind, ExchangeLimits
from infra.exchange.records import AccountRegistration
from tests.support.brokers.exchange_clock import ExchangeClock
from tests.support.brokers.exchange_traders import TraderClient, limit, login, market
from worker_runtime.protocol.errors import BrokerMaintenance, BrokerUnreachable
from worker_runtime.protocol.messages import OrderState

HOUR = 3600.0


def test_the_day_and_its_close_are_those_of_taipei(clock: ExchangeClock) -> None:
    hour = 3600 * 1000
    assert clock.now() - day_begins_ms(clock.now()) == 10 * hour
    assert next_close_ms(clock.now(), time(13, 30)) - clock.now() == 3.5 * hour
    assert clock.now() - last_close_ms(clock.now(), time(13, 30)) == 20.5 * hour
    assert last_close_ms(clock.now(), time(10)) == clock.now()


def test_a_list_of_orders_begins_anew_at_midnight_or_at_the_time_that_was_set(
    ledger: ExchangeLedger, clock: ExchangeClock
) -> None:
    at_midnight = PaperExchange(ledger, clock.later, now=clock.now)
    at_midnight.accounts.register(_registration())
    session = login(at_midnight)
    clock.pass_by(13.9 * HOUR)
    placed = at_midnight.place(session, market()).order  # is filled: one that rests stays listed
    assert at_midnight.listing(session)[0] == [placed]
    other = PaperExchange(
        ledger, clock.later, now=clock.now, day_begins=time_half_a_day_away(clock.now())
    )
    clock.pass_by(0.2 * HOUR)
    assert at_midnight.listing(session)[0] == []
    shown, coverage = other.listing(session)
    assert shown == [placed]
    assert coverage is not None
    assert coverage.reaches_ms / 1000 == pytest.approx(12.2 * HOUR, abs=60)


@pytest.mark.parametrize("hours", [0, 3, 13.9, 14, 23.99])
def test_half_a_day_off_is_far_from_now_at_any_time(clock: ExchangeClock, hours: float) -> None:
    clock.pass_by(hours * HOUR)
    since = clock.now() - day_begins_ms(clock.now(), time_half_a_day_away(clock.now()))
    assert since / 1000 == pytest.approx(12 * HOUR, abs=60)


def test_resting_orders_expire_at_the_end_of_the_day_with_an_event(exchange: PaperExchange) -> None:
    exchange.market.set_price("2330", Decimal(100))
    client = TraderClient()
    session = login(exchange, client=client)
    exchange.place(session, limit("100"))
    exchange.place(session, limit("90"))
    assert exchange.close_day() == 1
    assert [order.state for order in exchange.orders("a")] == [
        OrderState.FILLED,
        OrderState.EXPIRED,
    ]
    assert client.events[-1].order.state is OrderState.EXPIRED
    assert exchange.close_day() == 0


def test_the_day_closes_by_itself_at_the_time_that_was_set(
    ledger: ExchangeLedger, clock: ExchangeClock
) -> None:
    exchange = PaperExchange(ledger, clock.later, now=clock.now, day_closes=time(13, 30))
    exchange.accounts.register(_registration())
    exchange.market.set_price("2330", Decimal(100))
    for _ in range(2):
        placed = exchange.place(login(exchange), limit("90")).order
        clock.pass_by(24 * HOUR)
        stored = exchange.ledger.order(placed.broker_order_id)
        assert stored is not None
        assert stored.state is OrderState.EXPIRED


def test_a_close_that_the_exchange_slept_through_is_made_up_for(
    exchange: PaperExchange, ledger: ExchangeLedger, tmp_path: Path, clock: ExchangeClock
) -> None:
    exchange.market.set_price("2330", Decimal(100))
    early = exchange.place(login(exchange), limit("90")).order
    clock.pass_by(4 * HOUR)
    late = exchange.place(login(exchange), limit("90")).order
    ledger.close()
    reopened = ExchangeLedger(tmp_path / "ledger.db")
    PaperExchange(reopened, clock.later, now=clock.now, day_closes=time(13, 30))
    states = {order.broker_order_id: order.state for order in reopened.orders()}
    assert states == {
        early.broker_order_id: OrderState.EXPIRED,
        late.broker_order_id: OrderState.SUBMITTED,
    }
    reopened.close()


def test_a_token_expires_after_its_life(exchange: PaperExchange, clock: ExchangeClock) -> None:
    client, other = TraderClient(), TraderClient()
    login(exchange, client=client)
    exchange.sessions.set_limits(ExchangeLimits(session_life_s=60))
    exchange.set_behaviour("b", Behaviour(session_life_ms=5_000))
    login(exchange, "b", other)
    clock.pass_by(5)
    assert (client.ended, other.ended) == ([], ["the token expired"])
    clock.pass_by(24 * HOUR)
    assert client.ended == ["the token expired"]
    assert [session.close_reason for session in exchange.ledger.sessions()] == [
        "the token expired"
    ] * 2


def test_in_a_year_each_token_lives_for_its_day_and_no_longer(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    exchange.sessions.set_limits(ExchangeLimits(session_life_s=24 * HOUR))
    for _ in range(365):
        client = TraderClient()
        login(exchange, client=client)
        clock.pass_by(24 * HOUR - 1)
        assert client.ended == []
        clock.pass_by(1)
        assert client.ended == ["the token expired"]


def test_the_token_of_a_session_that_is_over_expires_silently(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    client = TraderClient()
    session = login(exchange, client=client)
    exchange.sessions.logout(session.session_id, "logged out")
    clock.pass_by(48 * HOUR)
    assert client.ended == []


def test_maintenance_ends_all_sessions_and_refuses_everything_for_its_time(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    client = TraderClient()
    session = login(exchange, client=client)
    begin = clock.now() + 60_000
    exchange.sessions.maintenance.announce(
        ExchangeMaintenance(begin_ms=begin, end_ms=begin + 30_000)
    )
    clock.pass_by(59)
    exchange.sessions.admit(session, ExchangeCallKind.ORDER)
    clock.pass_by(1)
    assert client.ended == ["maintenance begins"]
    with pytest.raises(BrokerMaintenance, match="30 s more") as refused:
        login(exchange)
    # Whoever waits for a broker that is away waits for this one, too.
    assert isinstance(refused.value, BrokerUnreachable)
    assert refused.value.retryable
    clock.pass_by(30)
    login(exchange)
    assert exchange.ledger.incidents() == []


def test_maintenance_may_leave_the_sessions_open(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    session = login(exchange)
    window = ExchangeMaintenance(
        begin_ms=clock.now(), end_ms=clock.now() + 1000, ends_sessions=False
    )
    exchange.sessions.maintenance.announce(window)
    for call in (ExchangeCallKind.ORDER, ExchangeCallKind.QUERY):
        with pytest.raises(BrokerMaintenance):
            exchange.sessions.admit(session, call)
    clock.pass_by(1)
    exchange.sessions.admit(session, ExchangeCallKind.ORDER)


def test_maintenance_that_is_called_off_never_begins(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    client = TraderClient()
    login(exchange, client=client)
    window = ExchangeMaintenance(begin_ms=clock.now() + 1000, end_ms=clock.now() + 9000)
    exchange.sessions.maintenance.announce(window)
    exchange.sessions.maintenance.cancel_all()
    clock.pass_by(2)
    assert client.ended == []
    login(exchange)


def test_announced_maintenance_outlives_the_process(
    exchange: PaperExchange, ledger: ExchangeLedger, tmp_path: Path, clock: ExchangeClock
) -> None:
    exchange.sessions.maintenance.announce(
        ExchangeMaintenance(begin_ms=clock.now() + 5000, end_ms=clock.now() + 9000)
    )
    ledger.close()
    reopened = ExchangeLedger(tmp_path / "ledger.db")
    second = PaperExchange(reopened, clock.later, now=clock.now)
    client = TraderClient()
    login(second, client=client)
    clock.pass_by(6)
    assert client.ended == ["maintenance begins"]
    with pytest.raises(BrokerMaintenance):
        login(second)
    reopened.close()


def _registration() -> AccountRegistration:
    return AccountRegistration(account="a", api_key="k", secret_key="s")
