"""Merges an outcome into what PostgreSQL and callers know of an order.

Answers of workers, their events and PostgreSQL's row say what became of an order, in any order,
late and repeated. `states.py` has the rules of states. `recording.py` has the same merge in SQL,
because others write the row at the same time; a test compares the two. A worker merges the broker's
reports into its own books by another rule (`OrderTracker`).
"""

from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

from infra.database.orders.states import FINAL_RANK, IN_QUEUE, rank
from worker_runtime.protocol.errors import (
    BerthError,
    MalformedMessage,
    OutcomeUnknown,
    UnsupportedSchema,
)
from worker_runtime.protocol.messages import Answer, OrderOutcome, OrderState

_TAKEN_BEFORE = (
    f"{OutcomeUnknown.code}: it was found in its queue after a worker had begun to submit it"
)
#: Codes of answers to requests that could not be decoded.
_UNDECODED_CODES = frozenset({MalformedMessage.code, UnsupportedSchema.code})


class StandingRow(Protocol):
    """The columns of an order's row that an outcome may change."""

    @property
    def state(self) -> str: ...
    @property
    def reason_code(self) -> str | None: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def broker_order_id(self) -> str | None: ...
    @property
    def filled_quantity(self) -> int: ...
    @property
    def average_price(self) -> Decimal | None: ...
    @property
    def attention(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderStanding:
    """Holds what is known of an order. The fields are columns of its row."""

    state: OrderState
    reason_code: str | None
    reason: str | None
    broker_order_id: str | None
    filled_quantity: int
    average_price: Decimal | None
    attention: str | None

    @classmethod
    def of(cls, row: StandingRow) -> "OrderStanding":
        """Return what PostgreSQL knows."""
        return cls(
            state=OrderState(row.state),
            reason_code=row.reason_code,
            reason=row.reason,
            broker_order_id=row.broker_order_id,
            filled_quantity=row.filled_quantity,
            average_price=row.average_price,
            attention=row.attention,
        )

    def after(self, outcome: OrderOutcome, code: str | None) -> "OrderStanding":
        """Return the standing after an outcome; `self` if that says nothing new.

        An order only moves forward. An equal state brings at most the reason code that the event of
        that state did not have. `code`: of the failure in the answer.
        """
        if outcome.withdrawn and self.state not in IN_QUEUE:
            if self.state is not OrderState.SUBMITTING:
                return self
            outcome, code = taken_before(outcome.order_id), None
        is_ahead = rank(outcome.state) > rank(self.state)
        lacks_code = outcome.state == self.state and self.reason_code is None
        is_fuller = outcome.filled_quantity > self.filled_quantity
        ends = rank(outcome.state) >= FINAL_RANK
        after = OrderStanding(
            state=outcome.state if is_ahead else self.state,
            reason_code=code if is_ahead or lacks_code else self.reason_code,
            reason=outcome.reason if is_ahead else self.reason,
            broker_order_id=self.broker_order_id or outcome.broker_order_id,
            filled_quantity=outcome.filled_quantity if is_fuller else self.filled_quantity,
            average_price=outcome.average_price if is_fuller else self.average_price,
            attention=None if ends else self.attention,
        )
        return self if after == self else after


def taken_before(order_id: str) -> OrderOutcome:
    """Return the outcome of an order that was withdrawn after a worker had begun to submit it.

    After a failover, a copy of Valkey that lagged behind may hold an order in its queue again that
    a worker has already taken.
    """
    return OrderOutcome(order_id=order_id, state=OrderState.UNKNOWN, reason=_TAKEN_BEFORE)


def outcome_of(answer: Answer, order_id: str) -> tuple[OrderOutcome, str | None]:
    """Return the order's outcome in an answer, and the code of a failure."""
    code = answer.failure.code if answer.failure else None
    if answer.outcome is not None:
        return answer.outcome, code
    # A worker that could not decode the request has sent nothing; any other failure may have come
    # after.
    state = OrderState.REJECTED if code in _UNDECODED_CODES else OrderState.UNKNOWN
    detail = answer.failure.detail if answer.failure else "the worker gave no outcome"
    return OrderOutcome(order_id=order_id, state=state, reason=detail), code or BerthError.code
