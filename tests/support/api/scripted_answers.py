"""Contains the answers of scripted workers to orders, changes and questions about an account."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from tests.support.workers.api_worker import Question, Script
from worker_runtime.protocol.broker_reports import Balance, Position
from worker_runtime.protocol.messages import Answer, OrderOutcome, OrderState, PlaceOrder
from worker_runtime.protocol.requests import (
    AccountReport,
    CancelOrder,
    ListInstruments,
    Query,
    QueryAccount,
    encode_report,
)


def make_position(symbol: str, quantity: int) -> Position:
    return Position(symbol=symbol, quantity=quantity, average_price=Decimal("1001.50"))


def answer_positions(
    *positions: Position,
    balance: Balance | None = None,
    absence_certain: bool = True,
    behind_ms: int = 0,
    positions_agree: bool = True,
) -> Any:
    """Returns a reply to questions about the account: these positions, this balance."""

    def reply(question: Question) -> Answer:
        assert isinstance(question, QueryAccount)
        report = AccountReport(
            account_id=question.account_id,
            taken_at_ms=1_800_000_000_500,
            complete=True,
            absence_certain=absence_certain,
            behind_ms=behind_ms,
            positions_agree=positions_agree,
            positions=list(positions) if question.positions else [],
            balance=balance if question.balance else None,
        )
        return Answer(request_id=question.request_id, report=encode_report(report))

    return reply


def answer_submitted(order: PlaceOrder) -> Answer:
    """Answers that the order works at the broker."""
    outcome = OrderOutcome(
        order_id=order.order_id, state=OrderState.SUBMITTED, broker_order_id=f"P-{order.tag}"
    )
    return Answer(request_id=order.request_id, outcome=outcome)


def answer_change_done(question: Question) -> Answer:
    """Answers as a broker that does what is asked."""
    assert not isinstance(question, Query)
    state = OrderState.CANCELLED if isinstance(question, CancelOrder) else OrderState.SUBMITTED
    return Answer(
        request_id=question.request_id,
        outcome=OrderOutcome(order_id=question.order_id, state=state),
    )


def answer_state(state: OrderState, filled_quantity: int = 0) -> Script:
    """Returns a script that answers each order with this state."""

    def script(order: PlaceOrder) -> Answer:
        outcome = OrderOutcome(
            order_id=order.order_id, state=state, filled_quantity=filled_quantity
        )
        return Answer(request_id=order.request_id, outcome=outcome)

    return script


def answer_anything(question: Question) -> Answer:
    """Answers every question but the one for instruments."""
    if isinstance(question, QueryAccount):
        report = AccountReport(
            account_id=question.account_id,
            taken_at_ms=1_800_000_000_500,
            complete=True,
            absence_certain=True,
            positions=[Position(symbol="2330", quantity=2, average_price=Decimal("1001.5"))],
            balance=Balance(currency="TWD", cash=Decimal(10), available=Decimal(7)),
        )
        return Answer(request_id=question.request_id, report=encode_report(report))
    assert not isinstance(question, ListInstruments)
    state = OrderState.CANCELLED if isinstance(question, CancelOrder) else OrderState.SUBMITTED
    outcome = OrderOutcome(order_id=question.order_id, state=state, broker_order_id="P-1")
    return Answer(request_id=question.request_id, outcome=outcome)
