"""Keeps what operators have set for each pool, so that it outlives the pool's workflow."""

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import PoolRow


async def keep_pool(
    session: AsyncSession, name: str, number: int, settings: dict[str, Any]
) -> PoolRow:
    """Writes the pool's settings unless PostgreSQL has newer ones;
    returns those that it has then."""
    row = insert(PoolRow).values(name=name, number=number, settings=settings)
    newer = row.on_conflict_do_update(
        index_elements=["name"],
        set_={
            "number": row.excluded.number,
            "settings": row.excluded.settings,
            "changed_at": func.clock_timestamp(),
        },
        where=PoolRow.number < row.excluded.number,
    )
    await session.execute(newer)
    kept = await session.scalar(
        select(PoolRow).filter_by(name=name).execution_options(populate_existing=True)
    )
    assert kept is not None  # noqa: S101 - written above, and no row is ever deleted
    return kept


async def read_pool(session: AsyncSession, name: str) -> PoolRow | None:
    """Returns what is kept of this pool; None if it never ran."""
    return await session.get(PoolRow, name)
