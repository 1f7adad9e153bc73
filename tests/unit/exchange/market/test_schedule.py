"""Random faults that can be repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from infra.exchange.behaviour import ALL_ACCOUNTS, Behaviour, FaultPlan, FaultPoint, FaultSchedule
from infra.exchange.exchange import PaperExchange
from infra.exchange.ledger import ExchangeLedger
from tests.support.brokers.exchange_traders import limit, login
from worker_runtime.protocol.errors import UnknownAccount
from worker_runtime.protocol.messages import OrderState

PLAN = FaultPlan(seed=7, rates={FaultPoint.LOST_ACK: 0.2, FaultPoint.LOST_EVENT: 0.5})


def course(
    schedule: FaultSchedule, account: str, point: FaultPoint, visits: int = 200
) -> list[bool]:
    return [schedule.fault_hits(account, point) for _ in range(visits)]


def test_the_same_seed_gives_the_same_faults_whatever_other_accounts_do(
    ledger: ExchangeLedger,
) -> None:
    schedule = FaultSchedule(ledger)
    schedule.set(ALL_ACCOUNTS, PLAN)
    alone = course(schedule, "a", FaultPoint.LOST_ACK)
    schedule.set(ALL_ACCOUNTS, PLAN)
    crowded = []
    for _ in range(200):
        schedule.fault_hits("b", FaultPoint.LOST_ACK)
        crowded.append(schedule.fault_hits("a", FaultPoint.LOST_ACK))
        schedule.fault_hits("a", FaultPoint.LOST_EVENT)
    assert alone == crowded
    assert 20 < sum(alone) < 60


def test_accounts_points_and_seeds_have_courses_of_their_own(ledger: ExchangeLedger) -> None:
    schedule = FaultSchedule(ledger)
    both = {FaultPoint.LOST_ACK: 0.5, FaultPoint.LOST_EVENT: 0.5}
    schedule.set(ALL_ACCOUNTS, FaultPlan(seed=1, rates=both))
    courses = [course(schedule, name, point) for name in ("a", "b") for point in both]
    schedule.set(ALL_ACCOUNTS, FaultPlan(seed=2, rates=both))
    courses.append(course(schedule, "a", FaultPoint.LOST_ACK))
    assert len({tuple(hits) for hits in courses}) == 5


def test_a_fault_without_a_rate_never_hits_and_a_rate_of_one_always(ledger: ExchangeLedger) -> None:
    schedule = FaultSchedule(ledger)
    schedule.set(ALL_ACCOUNTS, FaultPlan(rates={FaultPoint.LOST_PONG: 1.0}))
    assert all(course(schedule, "a", FaultPoint.LOST_PONG))
    assert not any(course(schedule, "a", FaultPoint.LOST_ACK))


def test_the_plan_of_an_account_precedes_that_of_all(exchange: PaperExchange) -> None:
    exchange.accounts.set_fault_plan(ALL_ACCOUNTS, FaultPlan(rates={FaultPoint.LOST_PONG: 1.0}))
    exchange.accounts.set_fault_plan("a", FaultPlan())
    assert not exchange.accounts.fault_hits("a", FaultPoint.LOST_PONG)
    assert exchange.accounts.fault_hits("b", FaultPoint.LOST_PONG)
    with pytest.raises(UnknownAccount):
        exchange.accounts.set_fault_plan("nobody", FaultPlan())


def test_ordered_faults_come_before_random_ones(exchange: PaperExchange) -> None:
    exchange.set_behaviour("a", Behaviour(faults={FaultPoint.LOST_ACK: 1}))
    exchange.accounts.set_fault_plan("a", FaultPlan(rates={FaultPoint.LOST_ACK: 0.0}))
    assert [exchange.accounts.fault_hits("a", FaultPoint.LOST_ACK) for _ in range(2)] == [
        True,
        False,
    ]


def test_a_plan_outlives_the_process_and_continues_differently_but_repeatably(
    tmp_path: Path,
) -> None:
    def lives(folder: Path) -> list[list[bool]]:
        courses = []
        for start in range(3):
            ledger = ExchangeLedger(folder / "ledger.db")
            schedule = FaultSchedule(ledger)
            if start == 0:
                schedule.set("a", PLAN)
            assert schedule.get("a") == PLAN
            courses.append(course(schedule, "a", FaultPoint.LOST_ACK))
            ledger.close()
        return courses

    first, second = lives(tmp_path / "one"), lives(tmp_path / "two")
    assert first == second
    assert len({tuple(stretch) for stretch in first}) == 3


def test_a_share_of_rejected_orders_is_repeatable_too(
    tmp_path: Path, exchange: PaperExchange
) -> None:
    def states(account: str) -> list[OrderState]:
        session = login(exchange, account)
        exchange.set_behaviour(account, Behaviour(reject_rate=0.5))
        return [exchange.place(session, limit("1")).order.state for _ in range(50)]

    outcomes = states("a")
    assert outcomes.count(OrderState.REJECTED) in range(10, 40)
    assert outcomes != states("b")


@pytest.mark.parametrize(
    "wrong", [{"rates": {"x": 0.5}}, {"rates": {"lost_ack": 1.5}}, {"rate": {}}]
)
def test_a_mistyped_plan_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        FaultPlan.model_validate(wrong)
