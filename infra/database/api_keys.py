"""API keys: made, found by their token, listed, rotated and revoked. Only the hash of a token is stored.

A session of the fleet page is a key, too: it ends by itself, and with the key that logged in.
"""

import uuid
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Literal

from sqlalchemy import Text, and_, cast, delete, func, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import ApiKey
from infra.database.trading.models import Webhook
from worker_runtime.protocol.errors import BerthError

#: PostgreSQL notifies this channel with the id of a key when a revocation or new expiry is committed: all API
#: processes listen, so that none trusts what it remembers of the key any longer.
REVOKED_CHANNEL = "berth_api_keys"
#: A use is written down this long after the last one at the earliest: one small write a key and minute.
USE_NOTED_EVERY = timedelta(minutes=1)

#: Label and life of the key with which the first administrator's is made (`infra/vault/keyring.py`).
BOOTSTRAP_LABEL = "bootstrap"
BOOTSTRAP_LIFETIME = timedelta(hours=24)

Role = Literal["user", "operator", "admin"]


class ApiKeyNotFound(BerthError, code="API_KEY_NOT_FOUND", status=404):
    """There is no such API key."""


def hash_token(token: str) -> str:
    return sha256(token.encode()).hexdigest()


#: In SQL: neither revoked nor expired.
_VALID = and_(
    ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.clock_timestamp())
)
#: In SQL: made by `berth prepare` for the first administrator.
_IS_BOOTSTRAP = and_(ApiKey.role == "admin", ApiKey.label == BOOTSTRAP_LABEL, ApiKey.session_of.is_(None))


async def create_api_key(
    session: AsyncSession,
    token: str,
    role: Role,
    user_id: str | None = None,
    label: str = "",
    expires_at: datetime | None = None,
    session_of: uuid.UUID | None = None,
) -> ApiKey:
    """Creates a key for a token of `ApiTokens`; the role `user` needs a `user_id`.

    An administrator's ends the bootstrap key, which exists only while there is no other.
    """
    if role == "admin" and session_of is None and label != BOOTSTRAP_LABEL:
        await _end_bootstrap_keys(session)
    key = ApiKey(
        id=uuid.uuid4(),
        key_hash=hash_token(token),
        prefix=token[:12],
        role=role,
        user_id=user_id,
        label=label,
        created_at=datetime.now(UTC),
        expires_at=expires_at,
        session_of=session_of,
    )
    session.add(key)
    await session.flush()
    return key


async def _end_bootstrap_keys(session: AsyncSession) -> None:
    keys = await session.scalars(select(ApiKey.id).where(_IS_BOOTSTRAP, _VALID))
    for key_id in keys.all():
        await revoke_api_key(session, key_id)
        audit.append_entry(
            session, "berth", "api_key.revoked", f"key:{key_id}", reason="an administrator has a key"
        )


async def has_administrator(session: AsyncSession, *, made_after: datetime) -> bool:
    """Returns whether a valid key of an administrator is there that is no bootstrap key and no session."""
    found = select(ApiKey.id).where(_VALID, ~_IS_BOOTSTRAP, ApiKey.role == "admin")
    found = found.where(ApiKey.session_of.is_(None), ApiKey.created_at >= made_after)
    return await session.scalar(found.limit(1)) is not None


async def begin_session(session: AsyncSession, token: str, key_id: uuid.UUID, until: datetime) -> ApiKey:
    """Creates a session's key, with the rights of the key that logs in; removes sessions that have ended."""
    ended = or_(ApiKey.expires_at < func.now(), ApiKey.revoked_at.is_not(None))
    await session.execute(delete(ApiKey).where(ApiKey.session_of.is_not(None), ended))
    owner = await session.get_one(ApiKey, key_id)
    role: Role = owner.role  # type: ignore[assignment]  # the table holds these only
    return await create_api_key(
        session, token, role, owner.user_id, owner.label, min(until, owner.expires_at or until), owner.id
    )


async def find_api_key(session: AsyncSession, token: str) -> ApiKey | None:
    """Returns the key of this token, if it is valid; notes that it was used."""
    key = await session.scalar(select(ApiKey).where(ApiKey.key_hash == hash_token(token), _VALID))
    if key is None:
        return None
    if key.last_used_at is None or datetime.now(UTC) - key.last_used_at > USE_NOTED_EVERY:
        used = update(ApiKey).where(ApiKey.id == key.id).values(last_used_at=func.clock_timestamp())
        await session.execute(used.execution_options(synchronize_session=False))
    return key


async def find_owner(session: AsyncSession, key: ApiKey) -> ApiKey | None:
    """The key itself, or of a session the key that logged in, if that is still valid."""
    if key.session_of is None:
        return key
    return await session.scalar(select(ApiKey).where(ApiKey.id == key.session_of, _VALID))


async def list_api_keys(
    session: AsyncSession,
    *,
    user_id: str | None = None,
    revoked: bool = False,
    behind: uuid.UUID | None = None,
    limit: int = 100,
) -> Sequence[ApiKey]:
    """Returns at most `limit` keys behind this one, the latest first: of one user, or of all; with `revoked`
    the ended ones, too. Without sessions of the fleet page."""
    wanted = select(ApiKey).where(ApiKey.session_of.is_(None))
    wanted = wanted.order_by(ApiKey.created_at.desc(), ApiKey.id.desc()).limit(limit)
    if behind is not None:
        last = select(ApiKey.created_at, ApiKey.id).where(ApiKey.id == behind).scalar_subquery()
        wanted = wanted.where(tuple_(ApiKey.created_at, ApiKey.id) < last)
    if user_id is not None:
        wanted = wanted.where(ApiKey.user_id == user_id)
    if not revoked:
        wanted = wanted.where(_VALID)
    return (await session.scalars(wanted)).all()


async def revoke_api_key(session: AsyncSession, key_id: uuid.UUID) -> ApiKey:
    """Ends a key or session in all API processes; one that is revoked keeps its time, and the key that began
    a session goes on. Raises `ApiKeyNotFound`."""
    revoked_at = func.coalesce(ApiKey.revoked_at, func.clock_timestamp())
    revoked = update(ApiKey).where(ApiKey.id == key_id).values(revoked_at=revoked_at)
    key: ApiKey | None = await session.scalar(revoked.returning(ApiKey))
    if key is None:
        raise ApiKeyNotFound(f"there is no API key {key_id}")
    # Processes remember a session under the key that logged in.
    await session.execute(select(func.pg_notify(REVOKED_CHANNEL, str(key.session_of or key_id))))
    return key


async def forget_keys(session: AsyncSession, user_id: str, *, revoke: bool = False) -> None:
    """Has all API processes look up the user's keys anew; `revoke`: they are valid no more."""
    if revoke:
        ended = update(ApiKey).where(ApiKey.user_id == user_id, ApiKey.revoked_at.is_(None))
        await session.execute(ended.values(revoked_at=func.clock_timestamp()))
    notice = func.pg_notify(REVOKED_CHANNEL, cast(ApiKey.id, Text))
    await session.execute(select(notice).where(ApiKey.user_id == user_id))


async def rotate_api_key(
    session: AsyncSession, key_id: uuid.UUID, token: str, overlap: timedelta
) -> tuple[ApiKey, ApiKey]:
    """Makes a key like this one, which ends after `overlap`; returns both, the new one first.

    The new key is valid for as long as the old one was made for. Raises `ApiKeyNotFound`, also for a key
    that has ended, and for a session of the fleet page.
    """
    wanted = select(ApiKey).where(ApiKey.id == key_id, ApiKey.session_of.is_(None), _VALID)
    old = await session.scalar(wanted.with_for_update())
    if old is None:
        raise ApiKeyNotFound(f"there is no valid API key {key_id}")
    now = datetime.now(UTC)
    life = old.expires_at and old.expires_at - old.created_at
    role: Role = old.role  # type: ignore[assignment]  # the table holds these only
    new = await create_api_key(session, token, role, old.user_id, old.label, now + life if life else None)
    old.expires_at = min(now + overlap, old.expires_at or now + overlap)
    await session.execute(select(func.pg_notify(REVOKED_CHANNEL, str(key_id))))
    return new, old


async def revoked_among(session: AsyncSession, key_ids: Collection[str]) -> set[str]:
    """Those of these keys that have ended or are unknown."""
    wanted = select(ApiKey.id).where(ApiKey.id.in_([uuid.UUID(one) for one in key_ids]))
    valid = await session.scalars(wanted.where(_VALID))
    return set(key_ids) - {str(one) for one in valid}


async def count_made_before(session: AsyncSession, at: float) -> int:
    """Valid API keys and webhooks that were made before this Unix time."""
    before = func.to_timestamp(at)
    kept = select(func.count()).select_from(ApiKey).where(_VALID, ApiKey.created_at < before)
    hooks = select(func.count()).select_from(Webhook)
    hooks = hooks.where(Webhook.revoked_at.is_(None), Webhook.created_at < before)
    return int(await session.scalar(kept) or 0) + int(await session.scalar(hooks) or 0)
