"""Lists the calls that came to a webhook,
and takes the failures that are due to be reported to its owner."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, not_, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from infra.database.locks import seconds_from_now, take_turn
from infra.database.trading.models import WebhookCall
from infra.database.trading.signals import REFUSED, REJECTED, STRANGERS_OUTCOMES

#: Calls of a webhook that are shown and exported; older ones are kept until their retention ends.
MAX_SHOWN_CALLS = 200
#: Strangers' calls (`STRANGERS_OUTCOMES`) that are shown besides, so that they hide no others.
MAX_SHOWN_STRANGERS = 20
#: Seconds between two messages to a webhook's owner: what fails meanwhile goes into the next one.
NOTICE_INTERVAL_S = 600
#: Seconds after which a failure is too old to be reported.
NOTICE_MAX_AGE_S = 3600
#: Failures that one message names; further ones are counted.
MAX_FAILURES_NAMED = 10


async def list_calls(
    session: AsyncSession,
    webhook_id: uuid.UUID,
    *,
    before: int | None = None,
    limit: int = MAX_SHOWN_CALLS,
) -> Sequence[WebhookCall]:
    """Returns a webhook's calls, the newest first: of its last `MAX_SHOWN_CALLS`, and of the last
    `MAX_SHOWN_STRANGERS` of strangers.

    `before` is the id of the last call of the page before.
    """
    of_strangers = func.coalesce(WebhookCall.outcome, "").in_(STRANGERS_OUTCOMES)
    calls = (
        select(WebhookCall.id)
        .where(WebhookCall.webhook_id == webhook_id)
        .order_by(WebhookCall.id.desc())
    )
    own = calls.where(not_(of_strangers)).limit(MAX_SHOWN_CALLS)
    strangers = calls.where(of_strangers).limit(MAX_SHOWN_STRANGERS)
    rows = (
        select(WebhookCall)
        .where(or_(WebhookCall.id.in_(own), WebhookCall.id.in_(strangers)))
        .order_by(WebhookCall.id.desc())
        .limit(limit)
    )
    if before is not None:
        rows = rows.where(WebhookCall.id < before)
    return list(await session.scalars(rows))


async def add_test(session: AsyncSession, call: WebhookCall) -> WebhookCall:
    """Records a test's signal, and forgets the webhook's oldest tests beyond `MAX_SHOWN_CALLS`."""
    session.add(call)
    await session.flush()
    await session.refresh(call)
    of_tests = WebhookCall.webhook_id == call.webhook_id, WebhookCall.test
    kept = (
        select(WebhookCall.id)
        .where(*of_tests)
        .order_by(WebhookCall.id.desc())
        .limit(MAX_SHOWN_CALLS)
    )
    await session.execute(delete(WebhookCall).where(*of_tests, WebhookCall.id.not_in(kept)))
    return call


@dataclass(frozen=True)
class WebhookFailures:
    """Holds failed signals of one webhook that were not reported to its owner yet."""

    webhook_id: uuid.UUID
    user_id: str
    #: The first `MAX_FAILURES_NAMED`, the oldest first.
    calls: Sequence[WebhookCall]
    #: The number of all of them.
    count: int


async def take_failures(session: AsyncSession) -> WebhookFailures | None:
    """Returns the failures of one webhook that are due to be reported,
    and marks them as reported; else None.

    At most one message an interval is due for each webhook. One process at a time takes failures.
    """
    if not await take_turn(session, "webhook failures"):
        return None
    reported = aliased(WebhookCall)
    reported_lately = (
        select(reported.id)
        .where(
            reported.webhook_id == WebhookCall.webhook_id,
            reported.notified_at > seconds_from_now(-NOTICE_INTERVAL_S),
        )
        .exists()
    )
    unheard = (
        or_(WebhookCall.state == REFUSED, WebhookCall.outcome == REJECTED),
        WebhookCall.notified_at.is_(None),
        not_(WebhookCall.test),
        WebhookCall.outcome.not_in(STRANGERS_OUTCOMES),
        WebhookCall.received_at > seconds_from_now(-NOTICE_MAX_AGE_S),
    )
    first = (
        select(WebhookCall).where(*unheard, not_(reported_lately)).order_by(WebhookCall.id).limit(1)
    )
    call = await session.scalar(first)
    if call is None:
        return None
    noted = (
        update(WebhookCall)
        .where(*unheard, WebhookCall.webhook_id == call.webhook_id)
        .values(notified_at=func.clock_timestamp())
        .returning(WebhookCall)
        .execution_options(synchronize_session=False)
    )
    calls = sorted(await session.scalars(noted), key=lambda failed: failed.id)
    return WebhookFailures(call.webhook_id, call.user_id, calls[:MAX_FAILURES_NAMED], len(calls))
