"""API keys: made, found by their token, listed, rotated and revoked. Only the hash of a token is
stored.

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
from infra.database.locks import wait_for_turn
from infra.database.models import SCOPED, ApiKey
from infra.database.trading.models import Webhook
from worker_runtime.protocol.errors import BerthError

#: PostgreSQL notifies this channel with the id of a key when a revocation or new expiry is
#: committed: all API processes listen, so that none trusts what it remembers of the key any longer.
REVOKED_CHANNEL = "berth_api_keys"
#: A use is written down this long after the last one at the earliest:
#: one small write a key and minute.
USE_NOTE_INTERVAL = timedelta(minutes=1)

#: For which a key is valid if its maker says nothing else.
KEY_LIFETIME = timedelta(days=90)
#: Label and life of the key with which the first administrator's is made
#: (`infra/vault/keyring.py`).
BOOTSTRAP_LABEL = "bootstrap"
BOOTSTRAP_LIFETIME = timedelta(hours=24)

Role = Literal["user", "operator", "admin"]


#: Valid keys of one user, and of operators and administrators together.
MAX_USER_KEYS, MAX_STAFF_KEYS = 50, 500


#: Sessions on the pages that one key may have at a time.
MAX_SESSIONS = 20


class ApiKeyLimitReached(BerthError, code="API_KEY_LIMIT", status=409):
    """The maximum number of API keys exists. Revoke one that is no longer needed."""


class ApiKeyNotFound(BerthError, code="API_KEY_NOT_FOUND", status=404):
    """There is no such API key."""


def hash_token(token: str) -> str:
    return sha256(token.encode()).hexdigest()


#: In SQL: neither revoked nor expired.
_VALID = and_(
    ApiKey.revoked_at.is_(None),
    or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.clock_timestamp()),
)
#: In SQL: made by `berth prepare` for the first administrator.
_IS_BOOTSTRAP = and_(
    ApiKey.role_word.in_(("admin", f"{SCOPED}admin")),
    ApiKey.label == BOOTSTRAP_LABEL,
    ApiKey.session_of.is_(None),
)
#: In SQL: an administrator's that may make other keys.
_MAKES_KEYS = or_(
    ApiKey.role_word == "admin",
    and_(ApiKey.role_word == f"{SCOPED}admin", ApiKey.scope_words.contains(["keys"])),
)


async def create_api_key(
    session: AsyncSession,
    token: str,
    role: Role,
    user_id: str | None = None,
    label: str = "",
    expires_at: datetime | None = None,
    session_of: uuid.UUID | None = None,
    *,
    scopes: Collection[str] | None = None,
    sources: Sequence[str] = (),
    made_by: uuid.UUID | None = None,
) -> ApiKey:
    """Creates a key for a token of `ApiTokens`; the role `user` needs a `user_id`.

    Without `scopes` it may do all that its role may do. An administrator's that may make keys ends
    the bootstrap key, which exists only while there is no other.
    """
    makes_keys = role == "admin" and (scopes is None or "keys" in scopes)
    if makes_keys and session_of is None and label != BOOTSTRAP_LABEL:
        await _end_bootstrap_keys(session)
    now = datetime.now(UTC)
    key = ApiKey(
        id=uuid.uuid4(),
        key_hash=hash_token(token),
        prefix=token[:12],
        role_word=role if scopes is None else f"{SCOPED}{role}",
        user_id=user_id,
        label=label,
        created_at=now,
        expires_at=expires_at,
        session_of=session_of,
        scope_words=sorted(scopes or ()),
        sources=list(sources),
        life_s=expires_at and max(1, round((expires_at - now).total_seconds())),
        made_by=made_by,
    )
    session.add(key)
    await session.flush()
    return key


async def _end_bootstrap_keys(session: AsyncSession) -> None:
    keys = await session.scalars(select(ApiKey.id).where(_IS_BOOTSTRAP, _VALID))
    for key_id in keys.all():
        await revoke_api_key(session, key_id)
        audit.append_entry(
            session,
            "berth",
            "api_key.revoked",
            f"key:{key_id}",
            reason="an administrator has a key",
        )


async def has_administrator(session: AsyncSession, *, made_after: datetime) -> bool:
    """Returns whether a valid key of an administrator is there that may make keys, and is no
    bootstrap key and no session."""
    query = select(ApiKey.id).where(_VALID, ~_IS_BOOTSTRAP, _MAKES_KEYS)
    query = query.where(ApiKey.session_of.is_(None), ApiKey.created_at >= made_after)
    return await session.scalar(query.limit(1)) is not None


async def begin_session(
    session: AsyncSession, token: str, key_id: uuid.UUID, until: datetime
) -> ApiKey:
    """Creates a session's key, with the rights of the key that logs in;
    removes sessions that have ended.

    A key has at most `MAX_SESSIONS`: the oldest one ends for a new one.
    """
    ended = or_(ApiKey.expires_at < func.now(), ApiKey.revoked_at.is_not(None))
    await session.execute(delete(ApiKey).where(ApiKey.session_of.is_not(None), ended))
    owner = await session.get_one(ApiKey, key_id, with_for_update=True)
    newest = select(ApiKey.id).where(ApiKey.session_of == key_id).order_by(ApiKey.created_at.desc())
    surplus = (
        delete(ApiKey).where(ApiKey.id.in_(newest.offset(MAX_SESSIONS - 1))).returning(ApiKey.id)
    )
    if (await session.scalars(surplus.execution_options(synchronize_session=False))).all():
        await session.execute(select(func.pg_notify(REVOKED_CHANNEL, str(key_id))))
    role: Role = owner.role  # type: ignore[assignment]  # the table holds these only
    ends = min(until, owner.expires_at or until)
    scopes = None if owner.scopes is None else ()  # what it may do the owner's row says
    return await create_api_key(
        session, token, role, owner.user_id, owner.label, ends, owner.id, scopes=scopes
    )


async def require_room(session: AsyncSession, user_id: str | None) -> None:
    """Raises `ApiKeyLimitReached` if the user,
    or the staff (None), has as many valid keys as they may.

    Two that are made at the same time wait for each other.
    """
    await wait_for_turn(session, f"api keys {user_id or ''}")
    limit = MAX_STAFF_KEYS if user_id is None else MAX_USER_KEYS
    whose = ApiKey.user_id.is_(None) if user_id is None else ApiKey.user_id == user_id
    held = (
        select(func.count()).select_from(ApiKey).where(whose, ApiKey.session_of.is_(None), _VALID)
    )
    if (await session.scalar(held) or 0) >= limit:
        raise ApiKeyLimitReached(
            f"{user_id or 'the staff'} has {limit} API keys. Revoke one that is no longer "
            "needed, or wait until a rotated one has expired."
        )


async def find_api_key(session: AsyncSession, token: str) -> ApiKey | None:
    """Returns the key of this token, if it is valid; notes that it was used."""
    key = await session.scalar(select(ApiKey).where(ApiKey.key_hash == hash_token(token), _VALID))
    if key is None:
        return None
    if key.last_used_at is None or datetime.now(UTC) - key.last_used_at > USE_NOTE_INTERVAL:
        used = update(ApiKey).where(ApiKey.id == key.id).values(last_used_at=func.clock_timestamp())
        await session.execute(used.execution_options(synchronize_session=False))
    return key


async def find_owner(session: AsyncSession, key: ApiKey) -> ApiKey | None:
    """Returns the key itself, or for a session the key that logged in, if that is still valid."""
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
    """Returns at most `limit` keys behind this one, the latest first: of one user, or of all; with
    `revoked` the ended ones, too. Without sessions of the fleet page."""
    query = select(ApiKey).where(ApiKey.session_of.is_(None))
    query = query.order_by(ApiKey.created_at.desc(), ApiKey.id.desc()).limit(limit)
    if behind is not None:
        last = select(ApiKey.created_at, ApiKey.id).where(ApiKey.id == behind).scalar_subquery()
        query = query.where(tuple_(ApiKey.created_at, ApiKey.id) < last)
    if user_id is not None:
        query = query.where(ApiKey.user_id == user_id)
    if not revoked:
        query = query.where(_VALID)
    return (await session.scalars(query)).all()


async def revoke_api_key(session: AsyncSession, key_id: uuid.UUID) -> ApiKey:
    """Ends a key or session in all API processes; one that is revoked keeps its time, and the key
    that began a session continues. Raises `ApiKeyNotFound`."""
    revoked_at = func.coalesce(ApiKey.revoked_at, func.clock_timestamp())
    revoked = update(ApiKey).where(ApiKey.id == key_id).values(revoked_at=revoked_at)
    key: ApiKey | None = await session.scalar(
        revoked.returning(ApiKey).execution_options(populate_existing=True)
    )
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


async def get_api_key(
    session: AsyncSession,
    key_id: uuid.UUID,
    *,
    user_id: str | None = None,
    valid: bool = False,
    lock: bool = False,
) -> ApiKey:
    """Returns a key; with `user_id` only one of this user. Raises `ApiKeyNotFound`.

    `valid`: only one that has not ended; `lock`: until the transaction ends, nobody else changes
    it. A session of the fleet page is none.
    """
    query = select(ApiKey).where(ApiKey.id == key_id, ApiKey.session_of.is_(None))
    if user_id is not None:
        query = query.where(ApiKey.user_id == user_id)
    if valid:
        query = query.where(_VALID)
    key = await session.scalar(query.with_for_update() if lock else query)
    if key is None:
        raise ApiKeyNotFound(f"there is no {'valid ' if valid else ''}API key {key_id}")
    return key


async def rotate_api_key(
    session: AsyncSession,
    old: ApiKey,
    token: str,
    overlap: timedelta,
    *,
    scopes: Collection[str],
    made_by: uuid.UUID | None = None,
) -> ApiKey:
    """Makes a key like this one, which ends after `overlap`; returns the new one.

    The new key is valid for as long as the old one was made for. One of before has no scopes, and
    perhaps no end: the new one has `scopes` and `KEY_LIFETIME`.
    """
    now = datetime.now(UTC)
    if old.life_s is not None:
        life: timedelta | None = timedelta(seconds=old.life_s)
    elif old.expires_at is not None and old.scopes is None:
        life = old.expires_at - old.created_at
    else:
        life = KEY_LIFETIME if old.scopes is None else None
    role: Role = old.role  # type: ignore[assignment]  # the table holds these only
    new = await create_api_key(
        session,
        token,
        role,
        old.user_id,
        old.label,
        now + life if life else None,
        scopes=scopes,
        sources=old.sources,
        made_by=made_by,
    )
    old.expires_at = min(now + overlap, old.expires_at or now + overlap)
    await session.execute(select(func.pg_notify(REVOKED_CHANNEL, str(old.id))))
    return new


async def keys_made_by(session: AsyncSession, key_id: uuid.UUID) -> list[ApiKey]:
    """Returns the valid keys that a key has made,
    and those that these have made, the oldest first."""
    made = select(ApiKey.id).where(ApiKey.made_by == key_id).cte("made", recursive=True)
    made = made.union(select(ApiKey.id).join(made, ApiKey.made_by == made.c.id))
    query = select(ApiKey).where(ApiKey.id.in_(select(made.c.id)), ApiKey.id != key_id, _VALID)
    return list(await session.scalars(query.order_by(ApiKey.created_at)))


async def revoked_among(session: AsyncSession, key_ids: Collection[str]) -> set[str]:
    """Returns those of these keys that have ended or are unknown."""
    query = select(ApiKey.id).where(ApiKey.id.in_([uuid.UUID(key_id) for key_id in key_ids]))
    valid = await session.scalars(query.where(_VALID))
    return set(key_ids) - {str(key_id) for key_id in valid}


async def count_made_before(session: AsyncSession, at: float) -> int:
    """Counts valid API keys and webhooks that were made before this Unix time."""
    before = func.to_timestamp(at)
    kept = select(func.count()).select_from(ApiKey).where(_VALID, ApiKey.created_at < before)
    hooks = select(func.count()).select_from(Webhook)
    hooks = hooks.where(Webhook.revoked_at.is_(None), Webhook.created_at < before)
    return int(await session.scalar(kept) or 0) + int(await session.scalar(hooks) or 0)
