"""The exchange refuses and bans those who exceed its limits, and writes that into the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.exchange.exchange import PaperExchange
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.limits import ExchangeCallKind, ExchangeLimits, LimitOwner
from infra.exchange.records import AccountRegistration, IncidentKind, LimitOwnerKind
from tests.support.brokers.exchange_clock import ExchangeClock
from tests.support.brokers.exchange_traders import TraderClient, login
from worker_runtime.protocol.errors import LoginLimited, LoginRejected, RateLimited

PERSON = LimitOwner(LimitOwnerKind.PERSON, "person")
DAY = 24 * 3600.0


def kinds(exchange: PaperExchange, owner: str | None = None) -> list[IncidentKind]:
    return [incident.kind for incident in exchange.ledger.incidents(owner=owner)]


def exceed(
    exchange: PaperExchange, call: ExchangeCallKind = ExchangeCallKind.ORDER, account: str = "a"
) -> None:
    """Calls until a call is refused."""
    session = login(exchange, account)

    def spend() -> None:
        for _ in range(10_000):
            exchange.sessions.admit(session, call)

    with pytest.raises(RateLimited):
        spend()
    exchange.sessions.logout(session.session_id, "done")


@pytest.mark.parametrize(
    ("call", "number", "seconds"),
    [(ExchangeCallKind.ORDER, 250, 10), (ExchangeCallKind.QUERY, 25, 5)],
)
def test_the_real_numbers_hold_and_the_next_call_is_a_ban(
    exchange: PaperExchange,
    clock: ExchangeClock,
    call: ExchangeCallKind,
    number: int,
    seconds: float,
) -> None:
    session = login(exchange)
    for _ in range(3):
        for _ in range(number):
            exchange.sessions.admit(session, call)
        clock.pass_by(seconds)
    assert kinds(exchange) == []
    for _ in range(number):
        exchange.sessions.admit(session, call)
    clock.pass_by(seconds - 0.001)
    with pytest.raises(RateLimited, match="banned for 60 s"):
        exchange.sessions.admit(session, call)
    [ban] = exchange.ledger.incidents()
    assert (ban.kind, ban.owner, ban.cause, ban.account) == (
        IncidentKind.BANNED,
        "person",
        call,
        "a",
    )


def test_orders_and_queries_are_counted_apart(exchange: PaperExchange) -> None:
    session = login(exchange)
    for _ in range(250):
        exchange.sessions.admit(session, ExchangeCallKind.ORDER)
    exchange.sessions.admit(session, ExchangeCallKind.QUERY)
    assert kinds(exchange) == []


def test_all_accounts_of_a_person_are_counted_together(exchange: PaperExchange) -> None:
    sessions = [login(exchange, "a"), login(exchange, "b")]
    for number in range(250):
        exchange.sessions.admit(sessions[number % 2], ExchangeCallKind.ORDER)
    with pytest.raises(RateLimited):
        exchange.sessions.admit(sessions[0], ExchangeCallKind.ORDER)


def test_a_ban_refuses_logins_and_calls_for_a_minute(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    other = login(exchange, "b")
    exceed(exchange)
    clock.pass_by(59)
    with pytest.raises(LoginLimited, match="banned for 1 s more"):
        login(exchange)
    with pytest.raises(RateLimited):
        exchange.sessions.admit(other, ExchangeCallKind.QUERY)
    clock.pass_by(1)
    exchange.sessions.admit(login(exchange), ExchangeCallKind.ORDER)
    refused = exchange.ledger.incidents(kind=IncidentKind.REFUSED)
    assert [incident.cause for incident in refused] == ["logins", "queries"]


def test_bans_again_and_again_suspend_the_person_and_the_address(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    exchange.accounts.register(AccountRegistration(account="other", api_key="k", secret_key="s"))
    bystander, elsewhere = TraderClient(), TraderClient()
    login(exchange, "other", bystander)
    login(exchange, "other", elsewhere, address="10.0.0.2")
    for _ in range(3):
        exceed(exchange)
        clock.pass_by(60)
    assert kinds(exchange).count(IncidentKind.SUSPENDED) == 2
    assert bystander.ended == ["the address is suspended"]
    assert elsewhere.ended == []
    clock.pass_by(30 * DAY)
    with pytest.raises(LoginRejected, match="the person is suspended"):
        login(exchange, address="10.0.0.9")
    with pytest.raises(LoginRejected, match="the address is suspended"):
        login(exchange, "other")


def test_bans_of_different_days_do_not_add_up(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    for _ in range(5):
        exceed(exchange)
        clock.pass_by(DAY)
    assert IncidentKind.SUSPENDED not in kinds(exchange)


def test_only_the_exchange_lifts_a_suspension_and_earlier_bans_count_no_more(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    for _ in range(3):
        exceed(exchange)
        clock.pass_by(60)
    for owner in (PERSON, LimitOwner(LimitOwnerKind.ADDRESS, "10.0.0.1")):
        exchange.sessions.limiter.lift(owner)
    exceed(exchange)
    clock.pass_by(60)
    exchange.sessions.admit(login(exchange), ExchangeCallKind.ORDER)


def test_the_login_after_the_last_of_the_day_is_a_ban(
    exchange: PaperExchange, clock: ExchangeClock
) -> None:
    exchange.sessions.set_limits(ExchangeLimits(logins_per_day=3))
    for _ in range(3):
        exchange.sessions.logout(login(exchange).session_id, "done")
    with pytest.raises(LoginLimited, match="3 logins a day"):
        login(exchange, "b")
    assert kinds(exchange) == [IncidentKind.BANNED]
    clock.pass_by(DAY)
    login(exchange)


def test_a_sixth_connection_is_refused_without_a_ban(exchange: PaperExchange) -> None:
    for _ in range(5):
        login(exchange)
    with pytest.raises(LoginLimited):
        login(exchange)
    assert [(i.kind, i.cause) for i in exchange.ledger.incidents()] == [
        (IncidentKind.REFUSED, "connections")
    ]


def test_an_address_can_be_limited_for_all_persons_behind_it(exchange: PaperExchange) -> None:
    exchange.accounts.register(AccountRegistration(account="other", api_key="k", secret_key="s"))
    exchange.sessions.set_limits(ExchangeLimits(address_orders=3))
    first, second, far = (
        login(exchange),
        login(exchange, "other"),
        login(exchange, "other", address="10.0.0.2"),
    )
    for session in (first, second, first):
        exchange.sessions.admit(session, ExchangeCallKind.ORDER)
    with pytest.raises(RateLimited, match="3 orders in 10 s"):
        exchange.sessions.admit(second, ExchangeCallKind.ORDER)
    exchange.sessions.admit(far, ExchangeCallKind.ORDER)
    assert kinds(exchange, "10.0.0.1") == [IncidentKind.BANNED]
    assert kinds(exchange, "other") == []


def test_a_login_with_a_wrong_key_is_not_counted(exchange: PaperExchange) -> None:
    exchange.sessions.set_limits(ExchangeLimits(logins_per_day=1))
    exchange.accounts.register(
        AccountRegistration(account="a", api_key="other", secret_key="s", person_id="person")
    )
    for _ in range(5):
        with pytest.raises(LoginRejected):
            login(exchange)
    assert login(exchange, "b").person_id == "person"


def test_bans_suspensions_and_limits_outlive_the_process(
    exchange: PaperExchange, ledger: ExchangeLedger, tmp_path: Path, clock: ExchangeClock
) -> None:
    exchange.sessions.set_limits(ExchangeLimits(suspend_after=2, queries=1))
    exceed(exchange)
    ledger.close()
    reopened = ExchangeLedger(tmp_path / "ledger.db")
    second = PaperExchange(reopened, clock.later, now=clock.now)
    assert second.sessions.limits.queries == 1
    with pytest.raises(LoginLimited):
        login(second)
    clock.pass_by(60)
    exceed(second, ExchangeCallKind.QUERY)
    reopened.close()
    again = ExchangeLedger(tmp_path / "ledger.db")
    third = PaperExchange(again, clock.later, now=clock.now)
    with pytest.raises(LoginRejected):
        login(third, address="10.0.0.7")
    again.close()
