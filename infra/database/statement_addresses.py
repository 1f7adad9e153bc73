"""Where users' daily statements go: an e-mail address, a URL, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, false, func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.trading_models import StatementAddress


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Of one user; None: not there."""

    email: str | None = None
    webhook_url: str | None = None


async def get(session: AsyncSession, user_id: str) -> Addresses:
    row = await session.get(StatementAddress, user_id)
    return Addresses() if row is None else Addresses(email=row.email, webhook_url=row.webhook_url)


async def put(session: AsyncSession, user_id: str, addresses: Addresses, *, actor: str) -> None:
    """Sets both addresses of a user, who exists."""
    values = {"email": addresses.email, "webhook_url": addresses.webhook_url}
    row = insert(StatementAddress).values(user_id=user_id, **values)
    changed = {**values, "updated_at": func.clock_timestamp()}
    await session.execute(row.on_conflict_do_update(index_elements=["user_id"], set_=changed))
    audit.append(session, actor=actor, action="statements.set", subject=f"user:{user_id}", **values)


def _there(*, email: bool, webhook: bool) -> ColumnElement[bool]:
    """Has an address of one of these kinds."""
    columns = ((StatementAddress.email, email), (StatementAddress.webhook_url, webhook))
    return or_(false(), *(column.is_not(None) for column, wanted in columns if wanted))


async def count(session: AsyncSession, *, email: bool, webhook: bool) -> int:
    """Users with an address of one of these kinds."""
    there = _there(email=email, webhook=webhook)
    return int(await session.scalar(select(func.count()).select_from(StatementAddress).where(there)) or 0)


async def page(
    session: AsyncSession, *, email: bool, webhook: bool, after: str, limit: int
) -> Sequence[StatementAddress]:
    """The next `limit` of them behind the user `after`, in order of their ids."""
    rows = (
        select(StatementAddress)
        .where(_there(email=email, webhook=webhook), StatementAddress.user_id > after)
        .order_by(StatementAddress.user_id)
        .limit(limit)
    )
    return (await session.scalars(rows)).all()
