"""The states of an order. Its events may come late, repeated and in any order.

Several sources report the same event: a worker, its successor, an answer. So there are no
transitions from state to state but ranks: an order only moves to a state of a higher rank, and a
final state never changes. `recording.py` has these rules in SQL; tests compare it with
`tests/support/orders/model.py`.

Submitted ranks above unknown: knowing that the broker has the order is more than having lost its
answer.
"""

from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState

#: The rank of each state: how far it is along. A late or repeated event never moves an order back.
RANK = {
    OrderState.ACCEPTED: 0,  # written here, perhaps queued
    OrderState.QUEUED: 1,
    OrderState.SUBMITTING: 2,  # a worker is about to call the broker
    OrderState.UNKNOWN: 3,  # the call may have reached the broker
    OrderState.NEEDS_ATTENTION: 4,  # only an event; an order has `attention` next to its state
    OrderState.SUBMITTED: 5,  # the broker has it
    OrderState.PART_FILLED: 6,
    **dict.fromkeys(FINAL_ORDER_STATES, 7),
}
#: The rank of the final states.
FINAL_RANK = 7
#: States in which an order may still stand in its queue.
IN_QUEUE = frozenset({OrderState.ACCEPTED, OrderState.QUEUED})
#: States that may still change.
OPEN_STATES = tuple(state.value for state in OrderState if state not in FINAL_ORDER_STATES)


class OrderNotFound(BerthError, code="ORDER_NOT_FOUND", status=404):
    """There is no such order."""


def rank(state: str) -> int:
    return RANK[OrderState(state)]
