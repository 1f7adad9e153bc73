"""Users, their API keys and the addresses of their daily statements."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from sqlalchemy import ColumnElement, false, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import ApiKey, StatementAddress, User, upsert
from worker_runtime.protocol.errors import BerthError


class UserExists(BerthError):
    """A user with this id exists already."""

    code = "USER_EXISTS"


class UserNotFound(BerthError):
    """There is no such user."""

    code = "USER_NOT_FOUND"


async def create_user(session: AsyncSession, user_id: str) -> User:
    """Raises `UserExists`."""
    made: User | None = await session.scalar(
        insert(User).values(id=user_id).on_conflict_do_nothing().returning(User)
    )
    if made is None:
        raise UserExists(f"user {user_id} exists already")
    return made


async def get_user(session: AsyncSession, user_id: str) -> User:
    """Raises `UserNotFound`."""
    user = await session.scalar(select(User).where(User.id == user_id))
    if user is None:
        raise UserNotFound(f"there is no user {user_id}")
    return user


Role = Literal["user", "operator", "admin"]


@dataclass(frozen=True)
class NewApiKey:
    id: uuid.UUID
    #: The key in clear. It is shown once; only its hash is stored.
    token: str

    def __repr__(self) -> str:
        return f"NewApiKey(id={self.id})"


def hash_token(token: str) -> str:
    return sha256(token.encode()).hexdigest()


async def create_api_key(session: AsyncSession, role: Role, user_id: str | None = None) -> NewApiKey:
    """Creates a key; the role `user` needs a `user_id`."""
    new = NewApiKey(uuid.uuid4(), f"berth_{secrets.token_urlsafe(32)}")
    session.add(
        ApiKey(id=new.id, key_hash=hash_token(new.token), prefix=new.token[:12], role=role, user_id=user_id)
    )
    await session.flush()
    return new


async def find_api_key(session: AsyncSession, token: str) -> ApiKey | None:
    """Returns the key of this token, unless it is unknown or revoked."""
    return await session.scalar(
        select(ApiKey).where(ApiKey.key_hash == hash_token(token), ApiKey.revoked_at.is_(None))
    )


async def revoke_api_key(session: AsyncSession, key_id: uuid.UUID) -> None:
    await session.execute(
        update(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None)).values(revoked_at=func.now())
    )


async def get_addresses(session: AsyncSession, user_id: str) -> StatementAddress:
    """Returns where the user's statements go; both addresses are None if none was set."""
    return await session.get(StatementAddress, user_id) or StatementAddress()


async def put_addresses(
    session: AsyncSession, user_id: str, addresses: StatementAddress, *, actor: str
) -> None:
    """Sets both addresses of a user, who must exist."""
    values = {"email": addresses.email, "webhook_url": addresses.webhook_url}
    row = upsert(StatementAddress, {"user_id": user_id}, values, updated_at=func.clock_timestamp())
    await session.execute(row)
    audit.append_entry(session, actor=actor, action="statements.set", subject=f"user:{user_id}", **values)


def _has_address(*, email: bool, webhook: bool) -> ColumnElement[bool]:
    """True in SQL for a user with an address of one of these kinds."""
    columns = ((StatementAddress.email, email), (StatementAddress.webhook_url, webhook))
    return or_(false(), *(column.is_not(None) for column, wanted in columns if wanted))


async def count_addresses(session: AsyncSession, *, email: bool, webhook: bool) -> int:
    wanted = _has_address(email=email, webhook=webhook)
    return await session.scalar(select(func.count(StatementAddress.user_id)).where(wanted)) or 0


async def addresses_after(
    session: AsyncSession, *, email: bool, webhook: bool, after: str, limit: int
) -> Sequence[StatementAddress]:
    """Returns the next `limit` such users after the id `after`, by id."""
    rows = (
        select(StatementAddress)
        .where(_has_address(email=email, webhook=webhook), StatementAddress.user_id > after)
        .order_by(StatementAddress.user_id)
        .limit(limit)
    )
    return (await session.scalars(rows)).all()
