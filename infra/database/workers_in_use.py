"""Which users have which workers, and what they trade: for those who plan a move."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import BrokerAccount, WorkerSession


class InUse(NamedTuple):
    user_id: str
    worker_id: str
    #: Of the user's accounts: `stock`, `futures`.
    markets: list[str]


async def of_workers(session: AsyncSession, worker_ids: Collection[str]) -> list[InUse]:
    """The users of these workers, as far as their assignments are open, in order of their ids."""
    if not worker_ids:
        return []
    kind = BrokerAccount.broker_type
    rows = await session.execute(
        select(
            WorkerSession.user_id,
            WorkerSession.worker_id,
            func.array_agg(aggregate_order_by(kind.distinct(), kind)),
        )
        .join(BrokerAccount, BrokerAccount.user_id == WorkerSession.user_id)
        .where(WorkerSession.ended_at.is_(None), WorkerSession.worker_id.in_(worker_ids))
        .group_by(WorkerSession.user_id, WorkerSession.worker_id)
        .order_by(WorkerSession.user_id)
    )
    return [InUse(user_id, worker_id or "", list(markets)) for user_id, worker_id, markets in rows]
