"""Orders that were taken back from their queue: final only if no worker is known to have taken them.

After a failover to a copy of Valkey that lagged behind, the queue holds orders again that a worker had taken.
Whoever takes one of these back would call an order final that may be alive at the broker.
"""

from __future__ import annotations

import uuid

from sqlalchemy import case, func, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import Order
from infra.database.order_states import IN_QUEUE
from worker_runtime.protocol.errors import OutcomeUnknown
from worker_runtime.protocol.messages import OrderOutcome, OrderState

_TAKEN = f"{OutcomeUnknown.code}: it was found in its queue after a worker had begun to submit it"


async def apply(session: AsyncSession, outcome: OrderOutcome, reason_code: str | None) -> None:
    """An order that may be in its queue gets the outcome; one that was being submitted becomes unknown.

    The latter is looked at as before. All others have come further and stay. Safe to repeat.
    """
    queued = Order.state.in_([state.value for state in IN_QUEUE])
    await session.execute(
        update(Order)
        .where(Order.id == uuid.UUID(outcome.order_id))
        .where(queued | (Order.state == OrderState.SUBMITTING.value))
        .values(
            state=case((queued, outcome.state.value), else_=OrderState.UNKNOWN.value),
            reason_code=case((queued, reason_code), else_=None),
            reason=case((queued, outcome.reason), else_=_TAKEN),
            verify_at=case((queued, None), else_=Order.verify_at),
            attention=case((queued, None), else_=Order.attention),
            attention_at=case((queued, None), else_=Order.attention_at),
            updated_at=func.clock_timestamp(),
        )
        .execution_options(synchronize_session=False)
    )
