"""Webhooks: where alerts may be posted, and which alerts were taken."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from hmac import compare_digest
from typing import Any

from sqlalchemy import Float, bindparam, case, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.trading.models import Webhook, WebhookAlert
from worker_runtime.protocol.errors import BerthError, from_code

#: How long deliveries are kept. The order's own client order id, made of the digest, is kept for ever.
ALERTS_KEPT = timedelta(days=30)
#: Characters of a refusal.
_LONGEST = 300


@dataclass(frozen=True)
class NewWebhook:
    row: Webhook
    #: In the path of the address, and in the body of each alert; nobody can read them again.
    token: str
    secret: str

    def __repr__(self) -> str:
        return f"NewWebhook(id={self.row.id})"


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


async def create_webhook(
    session: AsyncSession,
    *,
    user_id: str,
    account_id: str,
    sources: Sequence[str],
    window_s: int,
    actor: str,
) -> NewWebhook:
    """A new webhook for an account that exists."""
    token, secret = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
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
    audit.append_entry(
        session,
        actor=actor,
        action="webhook.created",
        subject=f"webhook:{row.id}",
        user=user_id,
        account=account_id,
        sources=list(sources),
    )
    await session.flush()
    await session.refresh(row)
    return NewWebhook(row, token, secret)


async def find_webhook(session: AsyncSession, token: str) -> Webhook | None:
    """The webhook of this token, unless it is unknown or revoked."""
    return await session.scalar(
        select(Webhook).where(Webhook.token_hash == _hash(token), Webhook.revoked_at.is_(None))
    )


def has_secret(webhook: Webhook, secret: str) -> bool:
    """In a time that does not depend on how much of it is right."""
    return compare_digest(webhook.secret_hash, _hash(secret))


async def webhooks_of_user(session: AsyncSession, user_id: str) -> list[Webhook]:
    """All of a user's webhooks, also the revoked ones, the newest first."""
    rows = select(Webhook).where(Webhook.user_id == user_id).order_by(Webhook.created_at.desc(), Webhook.id)
    return list(await session.scalars(rows))


async def revoke_webhook(
    session: AsyncSession, user_id: str, webhook_id: uuid.UUID, *, actor: str
) -> Webhook | None:
    """The webhook, revoked now or before; None if the user has none like that."""
    done: Webhook | None = await session.scalar(
        update(Webhook)
        .where(Webhook.id == webhook_id, Webhook.user_id == user_id, Webhook.revoked_at.is_(None))
        .values(revoked_at=func.clock_timestamp())
        .returning(Webhook)
    )
    if done is not None:
        audit.append_entry(session, actor=actor, action="webhook.revoked", subject=f"webhook:{webhook_id}")
        return done
    return await session.scalar(select(Webhook).where(Webhook.id == webhook_id, Webhook.user_id == user_id))


async def find_alert(session: AsyncSession, webhook_id: uuid.UUID, digest: str) -> WebhookAlert | None:
    """The alert, if it was taken before."""
    return await session.get(WebhookAlert, (webhook_id, digest))


async def note_refusal(session: AsyncSession, webhook_id: uuid.UUID, digest: str, error: BerthError) -> None:
    """Writes down with what an alert was refused before it became an order: a repeat meets the same.

    The audit trail tells it, too, if the sender was told that the alert goes on. One transaction.
    """
    alert = WebhookAlert.webhook_id == webhook_id, WebhookAlert.digest == digest
    promised = await session.scalar(select(WebhookAlert.held_until).where(*alert).with_for_update())
    refused = f"{error.code}: {error.detail}"[:_LONGEST]
    await session.execute(update(WebhookAlert).where(*alert).values(refused=refused, held_until=None))
    if promised is not None:
        await audit.append_entry_once(
            session,
            actor="alerts",
            action="webhook.alert_failed",
            subject=f"webhook:{webhook_id}",
            id=digest,
            code=error.code,
            detail=error.detail,
        )


async def promise_alert(
    session: AsyncSession, webhook_id: uuid.UUID, digest: str, *, left: float, lease: float
) -> WebhookAlert | None:
    """Holds an alert for `lease` seconds, right before its sender is told that it goes on: from then on it is
    carried on until its deadline, in `left` seconds, unless an earlier promise has set one.

    The alert as it is now; nothing is held if it was refused or done meanwhile. None: it is forgotten.
    """
    now = func.clock_timestamp()
    until = case((WebhookAlert.held_until.is_(None), now + timedelta(seconds=left)), else_=WebhookAlert.until)
    await session.execute(
        update(WebhookAlert)
        .where(WebhookAlert.webhook_id == webhook_id, WebhookAlert.digest == digest)
        .where(WebhookAlert.refused.is_(None), WebhookAlert.order_id.is_(None))
        .values(until=until, held_until=now + timedelta(seconds=lease))
        .execution_options(synchronize_session=False)
    )
    return await find_alert(session, webhook_id, digest)


async def hold_alerts(session: AsyncSession, digests: Collection[str], lease: float) -> None:
    """Holds alerts that this process carries out for another `lease` seconds."""
    await session.execute(
        update(WebhookAlert)
        .where(WebhookAlert.digest.in_(digests), WebhookAlert.held_until.is_not(None))
        .values(held_until=func.clock_timestamp() + timedelta(seconds=lease))
        .execution_options(synchronize_session=False)
    )


@dataclass(frozen=True, slots=True)
class AbandonedAlert:
    """An alert that somebody promised and does not carry out any more."""

    webhook: Webhook
    digest: str
    alert: dict[str, Any] | None
    #: Seconds that are left for it, by PostgreSQL's clock.
    left: float


async def take_abandoned_alerts(session: AsyncSession, *, lease: float, most: int) -> list[AbandonedAlert]:
    """Alerts that nobody holds; from now on the caller does, for `lease` seconds."""
    rows = await session.execute(_ABANDONED, {"lease": lease, "most": most})
    found = {(row.webhook_id, row.digest): row for row in rows}
    webhooks = await session.scalars(select(Webhook).where(Webhook.id.in_({one for one, _ in found})))
    by_id = {webhook.id: webhook for webhook in webhooks}
    return [
        AbandonedAlert(by_id[webhook_id], digest, row.alert, float(row.remaining))
        for (webhook_id, digest), row in found.items()
        if webhook_id in by_id
    ]


_ABANDONED = text("""
with due as (
  select webhook_id, digest from webhook_deliveries where held_until <= now()
   order by held_until limit :most for update skip locked
)
update webhook_deliveries as taken set held_until = clock_timestamp() + make_interval(secs => :lease)
  from due where taken.webhook_id = due.webhook_id and taken.digest = due.digest
returning taken.webhook_id, taken.digest, taken.alert,
          extract(epoch from taken.until - clock_timestamp()) as remaining
""").bindparams(bindparam("lease", type_=Float))


def refusal_of(row: WebhookAlert) -> BerthError:
    """What `note_refusal` wrote down."""
    code, _, detail = (row.refused or "").partition(": ")
    return from_code(code, detail)


async def note_alert(
    session: AsyncSession,
    webhook_id: uuid.UUID,
    digest: str,
    alert: dict[str, Any],
) -> bool:
    """Writes down that an alert was taken, before anything is done for it; false: somebody else was quicker.

    Nobody carries it on before it is promised. Old ones are forgotten.
    """
    row = insert(WebhookAlert).values(webhook_id=webhook_id, digest=digest, alert=alert)
    new = await session.scalar(row.on_conflict_do_nothing().returning(WebhookAlert.digest))
    await session.execute(delete(WebhookAlert).where(WebhookAlert.at < func.clock_timestamp() - ALERTS_KEPT))
    return new is not None


async def note_order_of_alert(
    session: AsyncSession, webhook_id: uuid.UUID, digest: str, order_id: uuid.UUID
) -> None:
    """Writes down which order an alert became."""
    await session.execute(
        update(WebhookAlert)
        .where(WebhookAlert.webhook_id == webhook_id, WebhookAlert.digest == digest)
        .values(order_id=order_id, held_until=None)
    )
