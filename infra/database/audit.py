"""The audit trail: who did what to whom. Entries are never changed or deleted."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import AuditEntry


def append_entry(session: AsyncSession, actor: str, action: str, subject: str, **data: Any) -> None:
    """Adds an entry to the running transaction.
    `data` is shown to people and must hold no secret."""
    session.add(AuditEntry(actor=actor, action=action, subject=subject, data=data))


async def append_entry_once(
    session: AsyncSession, actor: str, action: str, subject: str, *, id: str, **data: Any
) -> None:
    """Appends an entry like `append_entry`, but adds nothing if there is an entry with the same
    `id`."""
    known = select(AuditEntry.id).where(
        AuditEntry.subject == subject,
        AuditEntry.action == action,
        AuditEntry.data["id"].astext == id,
    )
    if await session.scalar(known.limit(1)) is None:
        append_entry(session, actor, action, subject, id=id, **data)


async def append_entry_up_to(
    session: AsyncSession, limit: int, actor: str, action: str, subject: str, **data: Any
) -> None:
    """Appends an entry like `append_entry`, but adds nothing once there are `limit` entries of this
    action for the subject."""
    same = select(AuditEntry.id).where(AuditEntry.subject == subject, AuditEntry.action == action)
    known = await session.scalar(select(func.count()).select_from(same.limit(limit).subquery()))
    if (known or 0) < limit:
        append_entry(session, actor, action, subject, **data)


async def list_entries(
    session: AsyncSession,
    *,
    actor: str | None = None,
    action: str | None = None,
    subject: str | None = None,
    since: datetime | None = None,
    before: int | None = None,
    limit: int,
) -> Sequence[AuditEntry]:
    """Returns the latest entries, the newest first.

    `actor`: a part of who it was; `action`: its beginning, such as `api_key.`; `before`: only
    entries older than the one with this id.
    """
    query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit)
    if actor is not None:
        query = query.where(AuditEntry.actor.contains(actor, autoescape=True))
    if action is not None:
        query = query.where(AuditEntry.action.startswith(action, autoescape=True))
        if not "order.accepted".startswith(action):  # almost all; there is an index without them
            query = query.where(text("action <> 'order.accepted'"))
    if subject is not None:
        query = query.where(AuditEntry.subject == subject)
    if since is not None:
        query = query.where(AuditEntry.at >= since)
    if before is not None:
        query = query.where(AuditEntry.id < before)
    return (await session.scalars(query)).all()


def person_of(actor: str) -> str:
    """Returns an entry's actor for people: the label of the API key without its id, or the part of
    Berth."""
    return actor.partition(" (key:")[0]
