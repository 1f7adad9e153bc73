"""The judge of the chaos tests finds each kind of harm."""

from __future__ import annotations

from decimal import Decimal

import pytest

from infra.exchange.connection import HUNG_UP
from infra.exchange.records import LedgerOrder, LedgerSession
from tests.support.chaos.ledger_judge import AnsweredOrder, violations
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce


def session(
    name: str, client: str, opened: int, closed: int | None, reason: str | None = None
) -> LedgerSession:
    return LedgerSession(
        session_id=name,
        account="a",
        person_id="p",
        client=client,
        opened_ms=opened,
        closed_ms=closed,
        close_reason=reason,
    )


def order(note: str, client: str, at: int, state: OrderState = OrderState.FILLED) -> LedgerOrder:
    return LedgerOrder(
        broker_order_id=f"P{at}",
        account="a",
        session_id="s",
        client=client,
        tag="",
        client_note=note,
        symbol="2330",
        side=Side.BUY,
        quantity=1,
        price_type=PriceType.MARKET,
        price=Decimal(1),
        time_in_force=TimeInForce.IOC,
        state=state,
        reason=None,
        received_ms=at,
        updated_ms=at,
    )


GOOD = [session("s1", "w-1/1", 0, 100), session("s2", "w-2/2", 100, None)]
FILLED = {"o1": AnsweredOrder("o1", "filled")}


def test_a_worker_that_follows_another_is_no_violation() -> None:
    assert violations(GOOD, [order("o1", "w-1/1", 100)], FILLED) == []


def test_a_worker_that_logs_in_anew_before_the_exchange_saw_it_hang_up_is_no_violation() -> None:
    again = [session("s1", "w-1/1", 0, 123, HUNG_UP), session("s2", "w-1/1", 100, None)]
    assert violations(again, [order("o1", "w-1/1", 150)], FILLED) == []


@pytest.mark.parametrize(
    ("sessions", "orders", "answers", "expected"),
    [
        ([session("s1", "w-1/1", 0, 101), GOOD[1]], [], {}, "two sessions at once"),
        ([session("s1", "w-1/1", 0, 101, HUNG_UP), GOOD[1]], [], {}, "two sessions at once"),
        (
            [session("s1", "w-1/1", 0, 1200, HUNG_UP), session("s2", "w-1/1", 100, None)],
            [],
            {},
            "two sessions at once",
        ),
        (
            [session("s1", "w-1/1", 0, 101), session("s2", "w-1/1", 100, None)],
            [],
            {},
            "two sessions at once",
        ),
        (
            [session("s1", "w-1/1", 0, None), session("s2", "w-1/1", 50, None)],
            [],
            {},
            "two sessions at once",
        ),
        (GOOD, [order("o1", "w-1/1", 101)], FILLED, "after the login of w-2/2"),
        (GOOD, [order("o1", "w-1/1", 1), order("o1", "w-2/2", 200)], FILLED, "arrived 2 times"),
        (GOOD, [], {"o1": AnsweredOrder("o1", "queued")}, "rests in queued"),
        (GOOD, [], FILLED, "the broker says None"),
        (
            GOOD,
            [order("o1", "w-1/1", 1)],
            {"o1": AnsweredOrder("o1", "expired")},
            "but the broker has it",
        ),
        (GOOD, [order("o1", "w-1/1", 1)], {}, "never accepted from anybody"),
    ],
)
def test_each_harm_is_named(
    sessions: list[LedgerSession],
    orders: list[LedgerOrder],
    answers: dict[str, AnsweredOrder],
    expected: str,
) -> None:
    [violation] = violations(sessions, orders, answers)
    assert expected in violation
