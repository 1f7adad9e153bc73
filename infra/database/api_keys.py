"""API keys: shown once, stored as a hash."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import ApiKey

Role = Literal["user", "operator", "admin"]


@dataclass(frozen=True)
class NewKey:
    id: uuid.UUID
    #: The key itself, in clear; nobody can read it again.
    token: str

    def __repr__(self) -> str:
        return f"NewKey(id={self.id})"


def hash_token(token: str) -> str:
    return sha256(token.encode()).hexdigest()


async def create(session: AsyncSession, role: Role, user_id: str | None = None) -> NewKey:
    """A new key; `user_id` is needed for the role `user`."""
    new = NewKey(uuid.uuid4(), f"berth_{secrets.token_urlsafe(32)}")
    session.add(
        ApiKey(id=new.id, key_hash=hash_token(new.token), prefix=new.token[:12], role=role, user_id=user_id)
    )
    await session.flush()
    return new


async def find(session: AsyncSession, token: str) -> ApiKey | None:
    """The key that this token is, unless it is unknown or revoked."""
    return await session.scalar(
        select(ApiKey).where(ApiKey.key_hash == hash_token(token), ApiKey.revoked_at.is_(None))
    )


async def revoke(session: AsyncSession, key_id: uuid.UUID) -> None:
    await session.execute(
        update(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None)).values(revoked_at=func.now())
    )
