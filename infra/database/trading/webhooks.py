"""Webhooks, and the signals that were posted to them."""

import secrets
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from typing import Any

from sqlalchemy import case, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.locks import lease_due, seconds_from_now
from infra.database.trading.models import Webhook, WebhookDelivery
from infra.database.users import UserDisabled, is_disabled
from worker_runtime.protocol.errors import BerthError, from_code

#: Characters of a refusal.
_LONGEST = 300
_TAKE_ABANDONED = lease_due(WebhookDelivery.held_until).returning(
    WebhookDelivery, func.extract("epoch", WebhookDelivery.until - func.clock_timestamp())
)


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


async def create_webhook(
    session: AsyncSession,
    token: str,
    *,
    user_id: str,
    account_id: str,
    sources: Sequence[str],
    window_s: int,
    actor: str,
) -> tuple[Webhook, str]:
    """Creates a webhook with a token of `ApiTokens` for an account, which must exist.

    Returns it with the secret of each signal's body, which is shown once.
    """
    secret = secrets.token_urlsafe(32)
    row = Webhook(
        id=uuid.uuid4(),
        token_hash=_hash(token),
        secret_hash=_hash(secret),
        user_id=user_id,
        account_id=account_id,
        sources=list(sources),
        window_s=window_s,
    )
    session.add(row)
    about = {"user": user_id, "account": account_id, "sources": list(sources)}
    audit.append_entry(session, actor, "webhook.created", f"webhook:{row.id}", **about)
    await session.flush()
    await session.refresh(row)
    return row, secret


async def find_webhook(session: AsyncSession, token: str) -> Webhook | None:
    """Returns the webhook of this token, unless it is unknown or revoked. Raises `UserDisabled`."""
    found = await session.scalar(select(Webhook).filter_by(token_hash=_hash(token), revoked_at=None))
    if found is not None and await is_disabled(session, found.user_id):
        raise UserDisabled(f"user {found.user_id} is disabled")
    return found


def has_secret(webhook: Webhook, secret: str) -> bool:
    """Compares in constant time."""
    return compare_digest(webhook.secret_hash, _hash(secret))


async def webhooks_of_user(session: AsyncSession, user_id: str) -> list[Webhook]:
    """Returns all webhooks of a user, revoked ones too, the newest first."""
    rows = select(Webhook).filter_by(user_id=user_id).order_by(Webhook.created_at.desc(), Webhook.id)
    return list(await session.scalars(rows))


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


async def note_refusal(session: AsyncSession, webhook_id: uuid.UUID, digest: str, error: BerthError) -> None:
    """Records why a signal was refused before it became an order: a repeat gets the same answer.

    Adds an audit entry if the signal was promised, since its sender has no answer then.
    """
    signal = WebhookDelivery.webhook_id == webhook_id, WebhookDelivery.digest == digest
    promised = await session.scalar(select(WebhookDelivery.held_until).where(*signal).with_for_update())
    refused = f"{error.code}: {error.detail}"[:_LONGEST]
    await session.execute(update(WebhookDelivery).where(*signal).values(refused=refused, held_until=None))
    if promised is not None:
        about = {"id": digest, "code": error.code, "detail": error.detail}
        await audit.append_entry_once(
            session, "alerts", "webhook.alert_failed", f"webhook:{webhook_id}", **about
        )


async def promise_signal(
    session: AsyncSession, webhook_id: uuid.UUID, digest: str, *, left: float, lease: float
) -> WebhookDelivery | None:
    """Leases a signal for `lease` seconds, right before its sender is answered that it will be carried out.

    From then on it is carried out until its deadline, which is in `left` seconds unless an earlier promise
    has set one. Returns the signal as it is now, without a lease if it was refused or done meanwhile, or None
    if it was deleted.
    """
    until = case((WebhookDelivery.held_until.is_(None), seconds_from_now(left)), else_=WebhookDelivery.until)
    signal = update(WebhookDelivery).filter_by(
        webhook_id=webhook_id, digest=digest, refused=None, order_id=None
    )
    promised = signal.values(until=until, held_until=seconds_from_now(lease))
    await session.execute(promised.execution_options(synchronize_session=False))
    return await session.get(WebhookDelivery, (webhook_id, digest))


async def hold_signals(session: AsyncSession, digests: Collection[str], lease: float) -> None:
    """Renews the lease of signals that this process carries out, for `lease` seconds."""
    held = update(WebhookDelivery).where(
        WebhookDelivery.digest.in_(digests), WebhookDelivery.held_until.is_not(None)
    )
    renewed = held.values(held_until=seconds_from_now(lease))
    await session.execute(renewed.execution_options(synchronize_session=False))


@dataclass(frozen=True, slots=True)
class AbandonedSignal:
    """A promised signal whose process no longer carries it out."""

    webhook: Webhook
    digest: str
    signal: dict[str, Any] | None
    #: Seconds until its deadline, by PostgreSQL's clock.
    left: float


async def take_abandoned_signals(session: AsyncSession, *, lease: float, most: int) -> list[AbandonedSignal]:
    """Leases up to `most` signals whose lease has run out, for `lease` seconds."""
    rows = await session.execute(_TAKE_ABANDONED, {"lease": lease, "most": most})
    found: list[tuple[WebhookDelivery, Any]] = [(row[0], row[1]) for row in rows]
    ids = {signal.webhook_id for signal, _ in found}
    webhooks = {row.id: row for row in await session.scalars(select(Webhook).where(Webhook.id.in_(ids)))}
    return [
        AbandonedSignal(webhooks[signal.webhook_id], signal.digest, signal.alert, float(left))
        for signal, left in found
        if signal.webhook_id in webhooks
    ]


def refusal_of(row: WebhookDelivery) -> BerthError:
    """Returns the error that `note_refusal` recorded."""
    code, _, detail = (row.refused or "").partition(": ")
    return from_code(code, detail)


async def note_signal(
    session: AsyncSession, webhook_id: uuid.UUID, digest: str, signal: dict[str, Any]
) -> bool:
    """Records a signal before anything is done for it; False for a repeat."""
    row = insert(WebhookDelivery).values(webhook_id=webhook_id, digest=digest, alert=signal)
    new = await session.scalar(row.on_conflict_do_nothing().returning(WebhookDelivery.digest))
    return new is not None


async def note_order_of_signal(
    session: AsyncSession, webhook_id: uuid.UUID, digest: str, order_id: uuid.UUID
) -> None:
    signal = update(WebhookDelivery).filter_by(webhook_id=webhook_id, digest=digest)
    await session.execute(signal.values(order_id=order_id, held_until=None))
