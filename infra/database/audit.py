"""The audit trail: who did what to whom, for ever."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import AuditEntry


def append(session: AsyncSession, *, actor: str, action: str, subject: str, **data: Any) -> None:
    """Adds an entry to the running transaction. `data` is shown to people: no secret in it."""
    session.add(AuditEntry(actor=actor, action=action, subject=subject, data=data))
