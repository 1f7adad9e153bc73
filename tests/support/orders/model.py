"""An order as a pure state machine: what the database's statements are compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal

from infra.database.orders.states import RANK, rank
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState


def further_states(state: str) -> frozenset[OrderState]:
    """The states to which an order in `state` may move."""
    return frozenset(known for known, its_rank in RANK.items() if its_rank > rank(state))


@dataclass(frozen=True, kw_only=True)
class OrderModel:
    """What is known of one order. A cancelled order may have fills, so they are next to the
    state."""

    state: OrderState = OrderState.ACCEPTED
    filled_quantity: int = 0
    average_price: Decimal | None = None
    #: Why it needs an operator's attention.
    attention: str | None = None
    #: The sweeper or the order's workflow still has to check it.
    watched: bool = True

    @property
    def final(self) -> bool:
        return self.state in FINAL_ORDER_STATES

    def after_event(
        self, state: OrderState, filled_quantity: int = 0, average_price: Decimal | None = None
    ) -> OrderModel:
        """The order after an event or an answer. A repeat or a late one changes nothing."""
        after = self
        if state in further_states(self.state):
            after = replace(after, state=state)
        if filled_quantity > self.filled_quantity:
            after = replace(after, filled_quantity=filled_quantity, average_price=average_price)
        if after.final:
            after = replace(after, attention=None, watched=False)
        return after

    def after_dead_end(self, reason: str) -> OrderModel:
        """Returns the order once it needs attention, unless it is final."""
        return self if self.final else replace(self, attention=reason, watched=False)

    def rechecked(self) -> OrderModel:
        """Returns the order once an operator has it checked again."""
        return self if self.final else replace(self, watched=True)
