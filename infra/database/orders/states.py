"""The states of an order as a pure state machine, in which events may come late, repeated and in any order.

Several sources report the same event: a worker, its successor, an answer. So there are no transitions from
state to state but ranks: an order only moves to a state of a higher rank, and a final state never changes.
`recording.py` applies the same rules in SQL to a whole batch.

| rank | state |
|---|---|
| 0 | accepted: written here, perhaps queued |
| 1 | queued |
| 2 | submitting: a worker is about to call the broker |
| 3 | unknown: the call may have reached the broker |
| 4 | needs_attention: only an event; an order has `attention` beside its state |
| 5 | submitted: the broker has it |
| 6 | part_filled |
| 7 | filled, cancelled, rejected, expired: final |

Submitted ranks above unknown: knowing that the broker has the order is more than having lost its answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal

from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState

#: How far each state is along. A late or repeated event never moves an order back.
RANK = {
    OrderState.ACCEPTED: 0,
    OrderState.QUEUED: 1,
    OrderState.SUBMITTING: 2,
    OrderState.UNKNOWN: 3,
    OrderState.NEEDS_ATTENTION: 4,
    OrderState.SUBMITTED: 5,
    OrderState.PART_FILLED: 6,
    **dict.fromkeys(FINAL_ORDER_STATES, 7),
}
#: The rank of the final states.
FINAL_RANK = 7
#: States in which an order may still stand in its queue.
IN_QUEUE = frozenset({OrderState.ACCEPTED, OrderState.QUEUED})
#: States that may still change.
OPEN_STATES = tuple(state.value for state in OrderState if state not in FINAL_ORDER_STATES)


class OrderNotFound(BerthError):
    """There is no such order."""

    code = "ORDER_NOT_FOUND"


def rank(state: str) -> int:
    return RANK[OrderState(state)]


def further_states(state: str) -> frozenset[OrderState]:
    """Returns the states to which an order in `state` may move."""
    return frozenset(known for known, its_rank in RANK.items() if its_rank > rank(state))


@dataclass(frozen=True, kw_only=True)
class OrderProgress:
    """What is known of one order. A cancelled order may have fills, so they stand beside the state."""

    state: OrderState = OrderState.ACCEPTED
    filled_quantity: int = 0
    average_price: Decimal | None = None
    #: Why a person has to look at it.
    attention: str | None = None
    #: The sweeper or the order's workflow still has to check it.
    watched: bool = True

    @property
    def final(self) -> bool:
        return self.state in FINAL_ORDER_STATES

    def after_event(
        self, state: OrderState, filled_quantity: int = 0, average_price: Decimal | None = None
    ) -> OrderProgress:
        """Returns the progress after an event or an answer. A repeat or a late one changes nothing."""
        after = self
        if state in further_states(self.state):
            after = replace(after, state=state)
        if filled_quantity > self.filled_quantity:
            after = replace(after, filled_quantity=filled_quantity, average_price=average_price)
        if after.final:
            after = replace(after, attention=None, watched=False)
        return after

    def after_dead_end(self, reason: str) -> OrderProgress:
        """Returns the progress once a person has to look at the order, unless it is final."""
        return self if self.final else replace(self, attention=reason, watched=False)

    def rechecked(self) -> OrderProgress:
        """Returns the progress once a person has the order checked again."""
        return self if self.final else replace(self, watched=True)
