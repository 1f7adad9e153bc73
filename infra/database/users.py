"""Users, who may be disabled and removed, and the addresses of their daily statements."""

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, delete, false, func, or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import accounts, api_keys, audit, budgets
from infra.database.accounts import StillInUse
from infra.database.models import StatementAddress, User, upsert
from worker_runtime.protocol.errors import BerthError


class UserExists(BerthError, code="USER_EXISTS", status=409):
    """A user with this id exists already."""


class UserNotFound(BerthError, code="USER_NOT_FOUND", status=404):
    """There is no such user."""


class UserDisabled(BerthError, code="USER_DISABLED", status=403):
    """The user is disabled: their API keys, signals and new orders are refused."""


async def create_user(session: AsyncSession, user_id: str) -> User:
    """Raises `UserExists`, also for a user that was removed: its orders are kept under this id."""
    floor = text("(select last_value from epoch_floor)")  # of `berth restore`
    row = insert(User).values(id=user_id, epoch=floor).on_conflict_do_nothing()
    made: User | None = await session.scalar(row.returning(User))
    if made is None:
        raise UserExists(f"user {user_id} exists already, or was removed")
    return made


async def get_user(session: AsyncSession, user_id: str, *, lock: bool = False) -> User:
    """Returns a user. With `lock`, nobody else changes the user until the transaction ends; rows
    that refer to it may be written, or the recorder, which holds an account's, would wait for its
    user. Raises `UserNotFound`."""
    query = select(User).where(User.id == user_id, User.removed_at.is_(None))
    user = await session.scalar(query.with_for_update(key_share=True) if lock else query)
    if user is None:
        raise UserNotFound(f"there is no user {user_id}")
    return user


async def is_disabled(session: AsyncSession, user_id: str | None) -> bool:
    disabled = select(User.id).where(User.id == user_id, User.disabled_at.is_not(None))
    return user_id is not None and await session.scalar(disabled) is not None


async def list_users(
    session: AsyncSession,
    *,
    prefix: str | None,
    disabled: bool | None,
    after: str | None,
    limit: int,
) -> Sequence[User]:
    """Lists the next `limit` users behind the id `after`, by id; with `disabled`, only those, or
    only the others."""
    query = select(User).where(User.removed_at.is_(None)).order_by(User.id).limit(limit)
    if prefix is not None:
        query = query.where(User.id.startswith(prefix, autoescape=True))
    if disabled is not None:
        query = query.where(
            User.disabled_at.is_not(None) if disabled else User.disabled_at.is_(None)
        )
    if after is not None:
        query = query.where(User.id > after)
    return (await session.scalars(query)).all()


async def put_disabled(
    session: AsyncSession, user_id: str, disabled: bool, *, actor: str, reason: str
) -> User:
    """Disables or enables a user, for all API processes; a repeat keeps the time. Raises
    `UserNotFound`."""
    user = await get_user(session, user_id, lock=True)
    user.disabled_at = (user.disabled_at or datetime.now(UTC)) if disabled else None
    action = "user.disabled" if disabled else "user.enabled"
    audit.append_entry(session, actor, action, f"user:{user_id}", reason=reason)
    await api_keys.forget_keys(session, user_id)
    return user


async def remove_user(session: AsyncSession, user_id: str, *, actor: str, reason: str) -> None:
    """Removes a user for good, with accounts,
    credentials and webhooks; keys are revoked, orders are kept.

    Raises `UserNotFound`, and `StillInUse` for one that is not disabled,
    since orders could come meanwhile.
    """
    user = await get_user(session, user_id, lock=True)
    if user.disabled_at is None:
        raise StillInUse(f"user {user_id} is not disabled: disable it first")
    await accounts.delete_accounts(session, user_id)
    await budgets.forget_matches(session, user_id)
    await session.execute(delete(StatementAddress).where(StatementAddress.user_id == user_id))
    for kept in ("kept_jobs", "job_settings"):
        await session.execute(text(f"delete from {kept} where user_id = :id"), {"id": user_id})  # noqa: S608
    await api_keys.forget_keys(session, user_id, revoke=True)
    user.removed_at = datetime.now(UTC)
    audit.append_entry(session, actor, "user.removed", f"user:{user_id}", reason=reason)


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
    audit.append_entry(session, actor, "statements.set", f"user:{user_id}", **values)


def _has_address(*, email: bool, webhook: bool) -> ColumnElement[bool]:
    """Returns the SQL that is true for a user with an address of one of these kinds."""
    columns = ((StatementAddress.email, email), (StatementAddress.webhook_url, webhook))
    return or_(false(), *(column.is_not(None) for column, is_asked in columns if is_asked))


async def count_addresses(session: AsyncSession, *, email: bool, webhook: bool) -> int:
    has_address = _has_address(email=email, webhook=webhook)
    return (
        await session.scalar(select(func.count(StatementAddress.user_id)).where(has_address)) or 0
    )


async def addresses_after(
    session: AsyncSession, *, email: bool, webhook: bool, after: str, limit: int
) -> Sequence[StatementAddress]:
    """Returns the next `limit` such users after the id `after`, by id."""
    has_address, user_id = _has_address(email=email, webhook=webhook), StatementAddress.user_id
    rows = (
        select(StatementAddress).where(has_address, user_id > after).order_by(user_id).limit(limit)
    )
    return (await session.scalars(rows)).all()
