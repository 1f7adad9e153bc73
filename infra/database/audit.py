"""The audit trail: who did what to whom. Entries are never changed or deleted."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import AuditEntry


def append_entry(session: AsyncSession, *, actor: str, action: str, subject: str, **data: Any) -> None:
    """Adds an entry to the running transaction. `data` is shown to people and must hold no secret."""
    session.add(AuditEntry(actor=actor, action=action, subject=subject, data=data))


async def append_entry_once(
    session: AsyncSession, *, actor: str, action: str, subject: str, id: str, **data: Any
) -> None:
    """Like `append_entry`, but adds nothing if there is an entry with the same `id`."""
    known = select(AuditEntry.id).where(
        AuditEntry.subject == subject, AuditEntry.action == action, AuditEntry.data["id"].astext == id
    )
    if await session.scalar(known.limit(1)) is None:
        append_entry(session, actor=actor, action=action, subject=subject, id=id, **data)
