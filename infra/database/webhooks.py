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
from infra.database.trading_models import Webhook, WebhookDelivery
from worker_runtime.protocol.errors import BerthError, from_code

#: How long deliveries are kept. The order's own client order id, made of the digest, is kept for ever.
KEPT = timedelta(days=30)
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


async def create(
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
    audit.append(
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


async def find(session: AsyncSession, token: str) -> Webhook | None:
    """The webhook of this token, unless it is unknown or revoked."""
    return await session.scalar(
        select(Webhook).where(Webhook.token_hash == _hash(token), Webhook.revoked_at.is_(None))
    )


def has_secret(webhook: Webhook, secret: str) -> bool:
    """In a time that does not depend on how much of it is right."""
    return compare_digest(webhook.secret_hash, _hash(secret))


async def of_user(session: AsyncSession, user_id: str) -> list[Webhook]:
    """All of a user's webhooks, also the revoked ones, the newest first."""
    rows = select(Webhook).where(Webhook.user_id == user_id).order_by(Webhook.created_at.desc(), Webhook.id)
    return list(await session.scalars(rows))


async def revoke(session: AsyncSession, user_id: str, webhook_id: uuid.UUID, *, actor: str) -> Webhook | None:
    """The webhook, revoked now or before; None if the user has none like that."""
    done: Webhook | None = await session.scalar(
        update(Webhook)
        .where(Webhook.id == webhook_id, Webhook.user_id == user_id, Webhook.revoked_at.is_(None))
        .values(revoked_at=func.clock_timestamp())
        .returning(Webhook)
    )
    if done is not None:
        audit.append(session, actor=actor, action="webhook.revoked", subject=f"webhook:{webhook_id}")
        return done
    return await session.scalar(select(Webhook).where(Webhook.id == webhook_id, Webhook.user_id == user_id))


async def delivery(session: AsyncSession, webhook_id: uuid.UUID, digest: str) -> WebhookDelivery | None:
    """The alert, if it was taken before."""
    return await session.get(WebhookDelivery, (webhook_id, digest))


async def refuse(session: AsyncSession, webhook_id: uuid.UUID, digest: str, error: BerthError) -> None:
    """Writes down with what an alert was refused before it became an order: a repeat meets the same.

    The audit trail tells it, too, if the sender was told that the alert goes on. One transaction.
    """
    alert = WebhookDelivery.webhook_id == webhook_id, WebhookDelivery.digest == digest
    promised = await session.scalar(select(WebhookDelivery.held_until).where(*alert).with_for_update())
    refused = f"{error.code}: {error.detail}"[:_LONGEST]
    await session.execute(update(WebhookDelivery).where(*alert).values(refused=refused, held_until=None))
    if promised is not None:
        await audit.append_once(
            session,
            actor="alerts",
            action="webhook.alert_failed",
            subject=f"webhook:{webhook_id}",
            id=digest,
            code=error.code,
            detail=error.detail,
        )


async def promise(
    session: AsyncSession, webhook_id: uuid.UUID, digest: str, *, left: float, lease: float
) -> WebhookDelivery | None:
    """Holds an alert for `lease` seconds, right before its sender is told that it goes on: from then on it is
    carried on until its deadline, in `left` seconds, unless an earlier promise has set one.

    The alert as it is now; nothing is held if it was refused or done meanwhile. None: it is forgotten.
    """
    now = func.clock_timestamp()
    until = case(
        (WebhookDelivery.held_until.is_(None), now + timedelta(seconds=left)), else_=WebhookDelivery.until
    )
    await session.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.webhook_id == webhook_id, WebhookDelivery.digest == digest)
        .where(WebhookDelivery.refused.is_(None), WebhookDelivery.order_id.is_(None))
        .values(until=until, held_until=now + timedelta(seconds=lease))
        .execution_options(synchronize_session=False)
    )
    return await delivery(session, webhook_id, digest)


async def keep(session: AsyncSession, digests: Collection[str], lease: float) -> None:
    """Holds alerts that this process carries out for another `lease` seconds."""
    await session.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.digest.in_(digests), WebhookDelivery.held_until.is_not(None))
        .values(held_until=func.clock_timestamp() + timedelta(seconds=lease))
        .execution_options(synchronize_session=False)
    )


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """An alert that somebody promised and does not carry out any more."""

    webhook: Webhook
    digest: str
    alert: dict[str, Any] | None
    #: Seconds that are left for it, by PostgreSQL's clock.
    left: float


async def left_behind(session: AsyncSession, *, lease: float, most: int) -> list[LeftBehind]:
    """Alerts that nobody holds; from now on the caller does, for `lease` seconds."""
    rows = await session.execute(_LEFT_BEHIND, {"lease": lease, "most": most})
    found = {(row.webhook_id, row.digest): row for row in rows}
    webhooks = await session.scalars(select(Webhook).where(Webhook.id.in_({one for one, _ in found})))
    by_id = {webhook.id: webhook for webhook in webhooks}
    return [
        LeftBehind(by_id[webhook_id], digest, row.alert, float(row.remaining))
        for (webhook_id, digest), row in found.items()
        if webhook_id in by_id
    ]


_LEFT_BEHIND = text("""
with due as (
  select webhook_id, digest from webhook_deliveries where held_until <= now()
   order by held_until limit :most for update skip locked
)
update webhook_deliveries as taken set held_until = clock_timestamp() + make_interval(secs => :lease)
  from due where taken.webhook_id = due.webhook_id and taken.digest = due.digest
returning taken.webhook_id, taken.digest, taken.alert,
          extract(epoch from taken.until - clock_timestamp()) as remaining
""").bindparams(bindparam("lease", type_=Float))


def refusal_of(row: WebhookDelivery) -> BerthError:
    """What `refuse` wrote down."""
    code, _, detail = (row.refused or "").partition(": ")
    return from_code(code, detail)


async def take(
    session: AsyncSession,
    webhook_id: uuid.UUID,
    digest: str,
    alert: dict[str, Any],
) -> bool:
    """Writes down that an alert was taken, before anything is done for it; false: somebody else was quicker.

    Nobody carries it on before it is promised. Old ones are forgotten.
    """
    row = insert(WebhookDelivery).values(webhook_id=webhook_id, digest=digest, alert=alert)
    new = await session.scalar(row.on_conflict_do_nothing().returning(WebhookDelivery.digest))
    await session.execute(delete(WebhookDelivery).where(WebhookDelivery.at < func.clock_timestamp() - KEPT))
    return new is not None


async def placed(session: AsyncSession, webhook_id: uuid.UUID, digest: str, order_id: uuid.UUID) -> None:
    """Writes down which order an alert became."""
    await session.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.webhook_id == webhook_id, WebhookDelivery.digest == digest)
        .values(order_id=order_id, held_until=None)
    )
