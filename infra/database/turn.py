"""Work that one process does at a time: whoever has the turn does it, the others come again later."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession


async def take(session: AsyncSession, name: str) -> bool:
    """Whether the turn of this name is ours, until the session's transaction ends.

    PostgreSQL gives it back when the connection breaks, so nobody keeps it beyond his death.
    """
    got = await session.scalar(select(func.pg_try_advisory_xact_lock(func.hashtextextended(name, 0))))
    return bool(got)
