"""Users."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import User
from worker_runtime.protocol.errors import BerthError


class UserExists(BerthError):
    """There is a user with this id already."""

    code = "USER_EXISTS"


class UserNotFound(BerthError):
    """There is no such user."""

    code = "USER_NOT_FOUND"


async def create(session: AsyncSession, user_id: str) -> User:
    """Raises `UserExists`."""
    made: User | None = await session.scalar(
        insert(User).values(id=user_id).on_conflict_do_nothing().returning(User)
    )
    if made is None:
        raise UserExists(f"user {user_id} exists already")
    return made


async def get(session: AsyncSession, user_id: str) -> User:
    """Raises `UserNotFound`."""
    user = await session.scalar(select(User).where(User.id == user_id))
    if user is None:
        raise UserNotFound(f"there is no user {user_id}")
    return user
