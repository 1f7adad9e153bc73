"""Webhooks: made, found by their token, changed, listed and revoked."""

import secrets
import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from hmac import compare_digest
from typing import Any

from sqlalchemy import func, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.locks import wait_for_turn
from infra.database.models import BrokerAccount
from infra.database.trading.models import Webhook
from infra.database.users import UserDisabled, is_disabled
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.installed_brokers import installed_brokers

#: Marks the token hash of a webhook that this release made or changed. The release before
#: looks for the plain hash, does not find it, and answers WEBHOOK_UNKNOWN: it would take 100
#: shares for 100 lots. Contract: the release after this one may look for marked hashes only,
#: once no plain one is left.
MARK = "10:"


#: Webhooks in use that a user may have. Each is an address that places orders.
MAX_WEBHOOKS = 20
_IN_USE = Webhook.revoked_at.is_(None) & or_(
    Webhook.expires_at.is_(None), Webhook.expires_at > func.clock_timestamp()
)


class WebhookLimitReached(BerthError, code="WEBHOOK_LIMIT", status=409):
    """The user has the maximum number of webhooks. Revoke one that is no longer needed."""


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def mark_hash(token_hash: str) -> str:
    """Return the hash with the mark, in as many characters; the rest still has 244 bits."""
    return token_hash if token_hash.startswith(MARK) else (MARK + token_hash)[:64]


async def create_webhook(
    session: AsyncSession,
    token: str,
    *,
    user_id: str,
    account_id: str,
    sources: Sequence[str],
    window_s: int,
    actor: str,
    **settings: Any,
) -> tuple[Webhook, str]:
    """Creates a webhook with a token of `ApiTokens` for an account, which must exist.

    `settings` are other columns.
    Returns it with the secret of each signal's body, which is shown once.
    """
    secret = secrets.token_urlsafe(32)
    row = Webhook(
        id=uuid.uuid4(),
        token_hash=mark_hash(_hash(token)),
        secret_hash=_hash(secret),
        user_id=user_id,
        account_id=account_id,
        sources=list(sources),
        window_s=window_s,
        **settings,
    )
    session.add(row)
    about: dict[str, Any] = {"user": user_id, "account": account_id, "sources": list(sources)}
    about |= {name: value for name, value in _told(settings).items() if value is not None}
    audit.append_entry(session, actor, "webhook.created", f"webhook:{row.id}", **about)
    await session.flush()
    await session.refresh(row)
    return row, secret


async def find_webhook(session: AsyncSession, token: str) -> Webhook | None:
    """Returns the webhook of this token, unless it is unknown or revoked. Raises `UserDisabled`."""
    plain = _hash(token)
    hashes = plain, mark_hash(plain)
    webhook = await session.scalar(
        select(Webhook).where(Webhook.token_hash.in_(hashes), Webhook.revoked_at.is_(None))
    )
    if webhook is not None and await is_disabled(session, webhook.user_id):
        raise UserDisabled(f"user {webhook.user_id} is disabled")
    return webhook


def has_secret(webhook: Webhook, secret: str) -> bool:
    """Compares in constant time. Also accepts the previous secret until it expires."""
    given = _hash(secret)
    until = webhook.previous_secret_until
    previous = (
        webhook.previous_secret_hash if until is not None and until > datetime.now(UTC) else None
    )
    return compare_digest(webhook.secret_hash, given) | compare_digest(previous or "", given)


async def webhooks_of_user(
    session: AsyncSession, user_id: str, *, after: uuid.UUID | None = None, limit: int | None = None
) -> list[Webhook]:
    """Returns webhooks of a user, revoked ones too, the newest first.

    `after` is the id of the last webhook of the page before.
    """
    place = tuple_(Webhook.created_at, Webhook.id)
    rows = select(Webhook).filter_by(user_id=user_id)
    if after is not None:
        last = (
            select(Webhook.created_at, Webhook.id)
            .filter_by(id=after, user_id=user_id)
            .scalar_subquery()
        )
        rows = rows.where(place < last)
    return list(
        await session.scalars(
            rows.order_by(Webhook.created_at.desc(), Webhook.id.desc()).limit(limit)
        )
    )


async def require_room(session: AsyncSession, user_id: str) -> None:
    """Raises `WebhookLimitReached` if the user has `MAX_WEBHOOKS` that are in use.

    Two that are made at the same time wait for each other.
    """
    await wait_for_turn(session, f"webhooks {user_id}")
    in_use = select(func.count()).select_from(Webhook).where(Webhook.user_id == user_id, _IN_USE)
    if (await session.scalar(in_use) or 0) >= MAX_WEBHOOKS:
        raise WebhookLimitReached(
            f"{user_id} has {MAX_WEBHOOKS} webhooks. Revoke one that is no longer needed."
        )


async def has_expired(session: AsyncSession, user_id: str, webhook_id: uuid.UUID) -> bool:
    ended = Webhook.revoked_at.is_(None) & (Webhook.expires_at <= func.clock_timestamp())
    query = select(Webhook.id).where(Webhook.id == webhook_id, Webhook.user_id == user_id, ended)
    return await session.scalar(query) is not None


async def rotate_secret(
    session: AsyncSession, user_id: str, webhook_id: uuid.UUID, *, overlap_s: float, actor: str
) -> tuple[Webhook | None, str]:
    """Gives a webhook a new secret, which is returned;
    the one before counts for `overlap_s` seconds more.

    Returns no webhook if the user has none of this id. A revoked one stays as it is.
    """
    secret = secrets.token_urlsafe(32)
    # Two rotations at the same time wait for each other:
    # the second one keeps the first one's secret.
    own = select(Webhook).filter_by(id=webhook_id, user_id=user_id)
    row = await session.scalar(own.with_for_update())
    if row is None or row.revoked_at is not None:
        return row, ""
    now = await database_time(session)
    row = await change_webhook(
        session,
        user_id,
        webhook_id,
        actor=actor,
        action="webhook.rotated",
        secret_hash=_hash(secret),
        previous_secret_hash=row.secret_hash,
        previous_secret_until=now + timedelta(seconds=overlap_s),
    )
    return row, secret


async def webhooks_made_by(session: AsyncSession, key_ids: Collection[uuid.UUID]) -> list[Webhook]:
    """Returns the webhooks in use that these API keys have made, the oldest first."""
    made = select(Webhook).where(Webhook.made_by.in_(key_ids), _IN_USE)
    return list(await session.scalars(made.order_by(Webhook.created_at, Webhook.id)))


async def database_time(session: AsyncSession) -> datetime:
    """Returns the time by PostgreSQL's clock."""
    now: datetime | None = await session.scalar(select(func.clock_timestamp()))
    assert now is not None  # noqa: S101 - it always answers
    return now


async def get_webhook(session: AsyncSession, user_id: str, webhook_id: uuid.UUID) -> Webhook | None:
    return await session.scalar(select(Webhook).filter_by(id=webhook_id, user_id=user_id))


async def change_webhook(
    session: AsyncSession,
    user_id: str,
    webhook_id: uuid.UUID,
    *,
    actor: str,
    action: str,
    **columns: Any,
) -> Webhook | None:
    """Sets columns of a webhook that is not revoked;
    returns it, or None if the user has no such webhook.

    From then on the release before does not find it (`MARK`). No secret may be among the columns
    but by hash.
    """
    own = {"id": webhook_id, "user_id": user_id}
    locked = select(Webhook).filter_by(**own).with_for_update()
    row: Webhook | None = await session.scalar(locked.execution_options(populate_existing=True))
    if row is None or row.revoked_at is not None:
        return row
    for name, value in columns.items():
        setattr(row, name, value)
    row.token_hash = mark_hash(row.token_hash)
    audit.append_entry(session, actor, action, f"webhook:{webhook_id}", **_told(columns))
    await session.flush()
    await session.refresh(row)
    return row


def _told(columns: Mapping[str, Any]) -> dict[str, str | int | None]:
    """Returns what the audit trail tells of columns: no hashes, and times as text."""
    told = {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in columns.items()
    }
    return {
        name: value
        for name, value in told.items()
        if isinstance(value, str | int | None) and "hash" not in name
    }


async def revoke_webhook(
    session: AsyncSession, user_id: str, webhook_id: uuid.UUID, *, actor: str
) -> Webhook | None:
    """Revokes a webhook and returns it; None if the user has no such webhook."""
    own = {"id": webhook_id, "user_id": user_id}
    revoked = (
        update(Webhook).filter_by(**own, revoked_at=None).values(revoked_at=func.clock_timestamp())
    )
    done: Webhook | None = await session.scalar(revoked.returning(Webhook))
    if done is not None:
        audit.append_entry(session, actor, "webhook.revoked", f"webhook:{webhook_id}")
        return done
    return await session.scalar(select(Webhook).filter_by(**own))


async def accounts_of_contracts(session: AsyncSession, user_id: str) -> set[str]:
    """Returns the user's accounts whose market has lots of one unit, as of futures: there a
    quantity counts contracts, and no unit is asked for."""
    accounts = await session.scalars(select(BrokerAccount).filter_by(user_id=user_id))
    brokers = installed_brokers()
    return {
        account.account_id
        for account in accounts
        if account.broker in brokers
        and brokers[account.broker].record.market(account.broker_type).lot_units == 1
    }


async def count_unconfirmed(session: AsyncSession) -> int:
    """Counts webhooks in use whose unit nobody has confirmed, of accounts whose market has lots of
    several units."""
    rows = await session.execute(
        select(BrokerAccount.broker, BrokerAccount.broker_type, func.count())
        .select_from(Webhook)
        .join(
            BrokerAccount,
            (BrokerAccount.user_id == Webhook.user_id)
            & (BrokerAccount.account_id == Webhook.account_id),
        )
        .where(
            Webhook.revoked_at.is_(None),
            Webhook.quantity_unit.is_(None),
        )
        .group_by(BrokerAccount.broker, BrokerAccount.broker_type)
    )
    brokers = installed_brokers()
    return sum(
        count
        for broker, broker_type, count in rows
        if broker in brokers and brokers[broker].record.market(broker_type).lot_units > 1
    )
