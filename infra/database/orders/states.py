"""The life of an order as a pure state machine: which state may follow which, whatever order events come in.

Events are told at least once, late, and by several who saw the same (a worker, its successor, an answer). So
there is no arrow from state to state, but a distance: an order only moves to a state that is further along
than its own, and a final state never changes. `orders.py` applies the same rules in SQL, a batch at a time.

| distance | state |
|---|---|
| 0 | accepted: written here, perhaps queued |
| 1 | queued |
| 2 | submitting: a worker is about to call the broker |
| 3 | unknown: the call may have reached the broker |
| 4 | needs_attention: written by releases before 0.3; today `attention` stands beside the state |
| 5 | submitted: the broker has it |
| 6 | part_filled |
| 7 | filled, cancelled, rejected, expired: final |

Unknown lies behind submitted: who knows that the broker has the order knows more than who lost its answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal

from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState

#: How far an order has come. A late or repeated event never moves it back.
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
#: The distance of the final states.
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
    """The states that an order in this one may move to."""
    return frozenset(known for known, place in RANK.items() if place > rank(state))


@dataclass(frozen=True, kw_only=True)
class OrderProgress:
    """What is known of one order. Fills are counted apart from the state: a cancelled order may have some."""

    state: OrderState = OrderState.ACCEPTED
    filled_quantity: int = 0
    average_price: Decimal | None = None
    #: Why a person has to look at it.
    attention: str | None = None
    #: The sweeper, or the workflow that follows it, still has to look at it.
    watched: bool = True

    @property
    def final(self) -> bool:
        return self.state in FINAL_ORDER_STATES

    def told(
        self, state: OrderState, filled_quantity: int = 0, average_price: Decimal | None = None
    ) -> OrderProgress:
        """After an event or an answer. Repeats, and what came late, change nothing."""
        after = self
        if state in further_states(self.state):
            after = replace(after, state=state)
        if filled_quantity > self.filled_quantity:
            after = replace(after, filled_quantity=filled_quantity, average_price=average_price)
        if after.final:
            after = replace(after, attention=None, watched=False)
        return after

    def needs(self, reason: str) -> OrderProgress:
        """After a dead end. Nobody has to look at an order that is final."""
        return self if self.final else replace(self, attention=reason, watched=False)

    def rechecked(self) -> OrderProgress:
        """A person wants it driven again: it stays on the list until it is settled."""
        return self if self.final else replace(self, watched=True)
