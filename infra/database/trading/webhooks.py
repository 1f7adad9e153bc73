"""Webhooks: made, found by their token, changed, listed and revoked."""

import secrets
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from hmac import compare_digest
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import BrokerAccount
from infra.database.trading.models import Webhook
from infra.database.users import UserDisabled, is_disabled

#: Marks the token hash of a webhook that this release made or changed. The release before looks for the plain
#: hash, does not find it, and answers WEBHOOK_UNKNOWN: it would take 100 shares for 100 lots. Contract: the
#: release after this one may look for marked hashes only, once no plain one is left.
MARK = "10:"


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

    `settings` are other columns. Returns it with the secret of each signal's body, which is shown once.
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
    about |= {name: value for name, value in settings.items() if isinstance(value, str | int)}
    audit.append_entry(session, actor, "webhook.created", f"webhook:{row.id}", **about)
    await session.flush()
    await session.refresh(row)
    return row, secret


async def find_webhook(session: AsyncSession, token: str) -> Webhook | None:
    """Returns the webhook of this token, unless it is unknown or revoked. Raises `UserDisabled`."""
    plain = _hash(token)
    hashes = plain, mark_hash(plain)
    found = await session.scalar(
        select(Webhook).where(Webhook.token_hash.in_(hashes), Webhook.revoked_at.is_(None))
    )
    if found is not None and await is_disabled(session, found.user_id):
        raise UserDisabled(f"user {found.user_id} is disabled")
    return found


def has_secret(webhook: Webhook, secret: str) -> bool:
    """Compares in constant time, with the secret before as long as that counts."""
    given = _hash(secret)
    until = webhook.previous_secret_until
    previous = webhook.previous_secret_hash if until is not None and until > datetime.now(UTC) else None
    return compare_digest(webhook.secret_hash, given) | compare_digest(previous or "", given)


async def webhooks_of_user(session: AsyncSession, user_id: str) -> list[Webhook]:
    """Returns all webhooks of a user, revoked ones too, the newest first."""
    rows = select(Webhook).filter_by(user_id=user_id).order_by(Webhook.created_at.desc(), Webhook.id)
    return list(await session.scalars(rows))


async def get_webhook(session: AsyncSession, user_id: str, webhook_id: uuid.UUID) -> Webhook | None:
    return await session.scalar(select(Webhook).filter_by(id=webhook_id, user_id=user_id))


async def change_webhook(
    session: AsyncSession, user_id: str, webhook_id: uuid.UUID, *, actor: str, action: str, **columns: Any
) -> Webhook | None:
    """Sets columns of a webhook that is not revoked; returns it, or None if the user has no such webhook.

    From then on the release before does not find it (`MARK`). No secret may be among the columns but by hash.
    """
    own = {"id": webhook_id, "user_id": user_id}
    row: Webhook | None = await session.scalar(select(Webhook).filter_by(**own).with_for_update())
    if row is None or row.revoked_at is not None:
        return row
    for name, value in columns.items():
        setattr(row, name, value)
    row.token_hash = mark_hash(row.token_hash)
    shown = {name: value for name, value in columns.items() if isinstance(value, str | int | None)}
    shown = {name: value for name, value in shown.items() if "hash" not in name}
    audit.append_entry(session, actor, action, f"webhook:{webhook_id}", **shown)
    await session.flush()
    await session.refresh(row)
    return row


async def revoke_webhook(
    session: AsyncSession, user_id: str, webhook_id: uuid.UUID, *, actor: str
) -> Webhook | None:
    """Revokes a webhook and returns it; None if the user has no such webhook."""
    own = {"id": webhook_id, "user_id": user_id}
    revoked = update(Webhook).filter_by(**own, revoked_at=None).values(revoked_at=func.clock_timestamp())
    done: Webhook | None = await session.scalar(revoked.returning(Webhook))
    if done is not None:
        audit.append_entry(session, actor, "webhook.revoked", f"webhook:{webhook_id}")
        return done
    return await session.scalar(select(Webhook).filter_by(**own))


async def count_unconfirmed(session: AsyncSession) -> int:
    """Counts webhooks in use for stocks whose unit nobody has confirmed."""
    rows = (
        select(func.count())
        .select_from(Webhook)
        .join(
            BrokerAccount,
            (BrokerAccount.user_id == Webhook.user_id) & (BrokerAccount.account_id == Webhook.account_id),
        )
        .where(
            Webhook.revoked_at.is_(None),
            Webhook.quantity_unit.is_(None),
            BrokerAccount.broker_type != "futures",
        )
    )
    return int(await session.scalar(rows) or 0)
