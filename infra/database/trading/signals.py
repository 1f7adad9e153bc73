"""The queue of signals: written before they are answered, carried out one at a time for each lane.

`WebhookCall` describes states and order. A process that carries a signal out holds it by a
lease; each of its orders is written only while it does (`require_lease`), so two processes
never place by two plans.
"""

import functools
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, and_, delete, func, not_, or_, select, update
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from infra.database import audit
from infra.database.locks import seconds_from_now, wait_for_turn
from infra.database.trading.models import Webhook, WebhookCall, WebhookDelivery
from worker_runtime.protocol.errors import BerthError, from_code

#: Characters of a call's text, and of a reason.
MAX_TEXT_LENGTH, MAX_REASON_LENGTH = 2000, 500
#: Calls of a webhook that were refused before they became signals, and that are kept: so many of
#: strangers, and as many others.
MAX_KEPT_REFUSALS = 200
#: Outcomes of strangers' calls, which had no secret of the webhook or came from elsewhere. An owner
#: cannot do anything about them, and anyone who has found the address can make any number of them.
STRANGERS_OUTCOMES = ("WEBHOOK_SECRET_WRONG", "SOURCE_NOT_ALLOWED")
#: What the release before answers to a repeat
#: of a signal that this one carries out: try again later.
BARRED = "WEBHOOK_BUSY: a newer release carries this signal out"

QUEUED, RUNNING, DONE, REFUSED = "queued", "running", "done", "refused"
#: The outcome of a signal of which the broker rejected an order (`planning.Outcome`).
REJECTED = "rejected"
_WAITS = WebhookCall.completed_at.is_(None)


class SignalLeaseLost(BerthError, code="SIGNAL_LEASE_LOST", retryable=True):
    """Another API process is carrying out this signal."""


@dataclass(frozen=True)
class Lane:
    """Signals of one lane are carried out one at a time."""

    user_id: str
    account_id: str
    name: str

    @property
    def columns(self) -> dict[str, str]:
        return {"user_id": self.user_id, "account_id": self.account_id, "lane": self.name}


def lane_of(call: WebhookCall) -> Lane:
    return Lane(call.user_id, call.account_id, call.lane or "")


async def find_signal(
    session: AsyncSession, webhook_id: uuid.UUID, digest: str
) -> WebhookCall | None:
    return await session.scalar(
        select(WebhookCall).filter_by(webhook_id=webhook_id, digest=digest, test=False)
    )


async def get_call(session: AsyncSession, call_id: int) -> WebhookCall | None:
    return await session.get(WebhookCall, call_id, populate_existing=True)


async def add_signal(
    session: AsyncSession,
    webhook: Webhook,
    lane: Lane,
    digest: str,
    *,
    lasts: float,
    **columns: Any,
) -> WebhookCall | None:
    """Puts a signal into its lane, to be begun within `lasts` seconds; None if it was there before.

    The lane's lock is held from before the id is drawn until the commit, so ids are in the order of
    commits. Raises what the release before answered to the same signal.
    """
    await wait_for_turn(session, f"signals {lane.user_id} {lane.account_id} {lane.name}")
    row = insert(WebhookCall).values(
        **lane.columns,
        **columns,
        webhook_id=webhook.id,
        digest=digest,
        state=QUEUED,
        deadline_at=seconds_from_now(lasts),
    )
    call: WebhookCall | None = await session.scalar(
        row.on_conflict_do_nothing()
        .returning(WebhookCall)
        .execution_options(populate_existing=True)
    )
    if call is not None:
        await _bar_release_before(session, webhook.id, digest)
    return call


async def _bar_release_before(session: AsyncSession, webhook_id: uuid.UUID, digest: str) -> None:
    """Keeps processes of the release before from carrying the signal out. A refusal of theirs
    stays."""
    barred = insert(WebhookDelivery).values(webhook_id=webhook_id, digest=digest, refused=BARRED)
    nothing_done = and_(
        WebhookDelivery.refused.is_(None),
        WebhookDelivery.held_until.is_(None),
        WebhookDelivery.order_id.is_(None),
    )
    done = await session.scalar(
        barred.on_conflict_do_update(
            index_elements=["webhook_id", "digest"], set_={"refused": BARRED}, where=nothing_done
        ).returning(WebhookDelivery.digest)
    )
    if done is None:
        before = await session.get(WebhookDelivery, (webhook_id, digest))
        if before is not None and before.refused == BARRED:
            return
        if before is not None and before.refused is not None:
            raise refusal_of(before.refused)
        raise from_code("WEBHOOK_BUSY", "a process of the release before carries this signal out")


def refusal_of(refused: str) -> BerthError:
    """Returns the error that was recorded as `CODE: sentence`."""
    code, _, detail = refused.partition(": ")
    return from_code(code, detail)


async def refused_before(
    session: AsyncSession, webhook_id: uuid.UUID, digest: str
) -> BerthError | None:
    """Returns what the release before refused this signal with, if it did."""
    before = await session.get(WebhookDelivery, (webhook_id, digest))
    if before is None or before.refused in (None, BARRED):
        return None
    return refusal_of(before.refused or "")


async def count_repeat(session: AsyncSession, call_id: int) -> None:
    await session.execute(
        update(WebhookCall).filter_by(id=call_id).values(repeats=WebhookCall.repeats + 1)
    )


async def note_answer(session: AsyncSession, call_id: int) -> WebhookCall | None:
    """Records that the sender gets its answer now;
    returns the call as it is, which the answer has to show.

    From then on a refusal goes into the audit trail, since the sender does not see it.
    """
    since = func.extract("epoch", func.clock_timestamp() - WebhookCall.received_at) * 1000
    answered = (
        update(WebhookCall)
        .filter_by(id=call_id)
        .values(
            answered_ms=func.coalesce(
                WebhookCall.answered_ms, func.least(func.round(since), 2**31 - 1)
            )
        )
        .returning(WebhookCall)
        .execution_options(populate_existing=True, synchronize_session=False)
    )
    call: WebhookCall | None = await session.scalar(answered)
    return call


async def add_refusal(
    session: AsyncSession,
    webhook: Webhook,
    error: BerthError,
    *,
    source: str,
    body: str | None,
    answered_ms: int | None,
) -> None:
    """Records a call that became no signal,
    and forgets the oldest of its kind beyond `MAX_KEPT_REFUSALS`."""
    now = func.clock_timestamp()
    session.add(
        WebhookCall(
            webhook_id=webhook.id,
            user_id=webhook.user_id,
            account_id=webhook.account_id,
            source=source[:64],
            body=None if body is None else body[:MAX_TEXT_LENGTH],
            state=REFUSED,
            outcome=error.code[:64],
            reason=error.detail[:MAX_REASON_LENGTH],
            answered_ms=answered_ms,
            completed_at=now,
        )
    )
    await session.flush()
    of_strangers = WebhookCall.outcome.in_(STRANGERS_OUTCOMES)
    refusals = (
        WebhookCall.webhook_id == webhook.id,
        WebhookCall.digest.is_(None),
        WebhookCall.test.is_(False),
        of_strangers if error.code in STRANGERS_OUTCOMES else not_(of_strangers),
    )
    kept = (
        select(WebhookCall.id)
        .where(*refusals)
        .order_by(WebhookCall.id.desc())
        .offset(MAX_KEPT_REFUSALS)
        .limit(1)
    )
    last = await session.scalar(kept)
    if last is not None:
        await session.execute(delete(WebhookCall).where(*refusals, WebhookCall.id <= last))


@dataclass(frozen=True)
class HeldSignal:
    """A signal that this process carries out."""

    call: WebhookCall
    webhook: Webhook
    #: Seconds until its deadline, by PostgreSQL's clock.
    remaining_s: float
    #: Another process had begun it.
    taken_over: bool


async def take_head(
    session: AsyncSession, lane: Lane, holder: uuid.UUID, lease: float
) -> HeldSignal | None:
    """Leases the first signal of a lane for `lease` seconds,
    unless somebody holds it or there is none."""
    first = aliased(WebhookCall)
    in_lane = (
        first.user_id == lane.user_id,
        first.account_id == lane.account_id,
        first.lane == lane.name,
        first.completed_at.is_(None),
    )
    head = select(func.min(first.id)).where(*in_lane).scalar_subquery()
    free = or_(
        WebhookCall.state == QUEUED,
        WebhookCall.held_until.is_(None),
        WebhookCall.held_until <= func.clock_timestamp(),
    )
    before = aliased(WebhookCall)
    taken = (
        update(WebhookCall)
        .where(WebhookCall.id == head, WebhookCall.id == before.id, _WAITS, free)
        .values(state=RUNNING, held_by=holder, held_until=seconds_from_now(lease))
        .returning(
            WebhookCall,
            func.extract("epoch", WebhookCall.deadline_at - func.clock_timestamp()),
            before.state,
        )
        .execution_options(populate_existing=True, synchronize_session=False)
    )
    row = (await session.execute(taken)).one_or_none()
    if row is None:
        return None
    call, seconds_left, state = row
    webhook = await session.get(Webhook, call.webhook_id)
    if webhook is None:  # it went with its user
        await session.execute(delete(WebhookCall).filter_by(id=call.id))
        return None
    return HeldSignal(call, webhook, float(seconds_left), taken_over=state == RUNNING)


async def require_lease(session: AsyncSession, call_id: int, holder: uuid.UUID) -> None:
    """Keeps the lease from being taken until the transaction ends. Raises `SignalLeaseLost`."""
    held = select(WebhookCall.id).filter_by(id=call_id, held_by=holder, state=RUNNING)
    if await session.scalar(held.with_for_update(read=True)) is None:
        raise SignalLeaseLost


async def list_waiting(session: AsyncSession, lane: Lane, limit: int) -> Sequence[WebhookCall]:
    """Returns the signals of a lane that are not carried out yet, the first one first."""
    waiting = select(WebhookCall).filter_by(**lane.columns).where(_WAITS)
    return list(await session.scalars(waiting.order_by(WebhookCall.id).limit(limit)))


async def find_predecessor(session: AsyncSession, call: WebhookCall) -> WebhookCall | None:
    """Returns the last signal of the lane that had its turn while this one waited."""
    before = (
        select(WebhookCall)
        .filter_by(**lane_of(call).columns)
        .where(WebhookCall.id < call.id, WebhookCall.completed_at > call.received_at)
        .order_by(WebhookCall.id.desc())
        .limit(1)
    )
    return await session.scalar(before)


async def is_revoked(session: AsyncSession, webhook_id: uuid.UUID) -> bool:
    """Returns True if the webhook was revoked; a revocation waits until the transaction ends."""
    row = select(Webhook.revoked_at).filter_by(id=webhook_id).with_for_update(read=True)
    revoked = (await session.execute(row)).one_or_none()
    return revoked is None or revoked[0] is not None


async def renew_leases(session: AsyncSession, holders: Collection[uuid.UUID], lease: float) -> None:
    renewed = update(WebhookCall).where(WebhookCall.held_by.in_(holders), _WAITS)
    await session.execute(
        renewed.values(held_until=seconds_from_now(lease)).execution_options(
            synchronize_session=False
        )
    )


async def release_leases(session: AsyncSession, holders: Collection[uuid.UUID]) -> None:
    """Lets another process take these signals over at once: this one is stopping."""
    released = update(WebhookCall).where(WebhookCall.held_by.in_(holders), _WAITS)
    await session.execute(
        released.values(held_until=func.clock_timestamp()).execution_options(
            synchronize_session=False
        )
    )


async def note_plan(
    session: AsyncSession, call_id: int, holder: uuid.UUID, plan: Mapping[str, Any]
) -> None:
    """Stores a signal's plan, before anything of it is placed. Raises `SignalLeaseLost`."""
    noted = (
        update(WebhookCall).filter_by(id=call_id, held_by=holder, state=RUNNING).values(plan=plan)
    )
    if await session.scalar(noted.returning(WebhookCall.id)) is None:
        raise SignalLeaseLost


async def note_obstacle(
    session: AsyncSession, call_id: int, holder: uuid.UUID, reason: str
) -> None:
    """Records what a signal waits for."""
    noted = update(WebhookCall).filter_by(id=call_id, held_by=holder, state=RUNNING)
    await session.execute(
        noted.values(reason=reason[:MAX_REASON_LENGTH]).execution_options(synchronize_session=False)
    )


async def complete_signal(
    session: AsyncSession,
    call: WebhookCall,
    holder: uuid.UUID | None,
    *,
    state: str,
    outcome: str,
    reason: str = "",
    order_ids: Sequence[uuid.UUID] = (),
) -> bool:
    """Takes a signal out of the queue;
    False if another process holds it (`holder` None: if one does).

    A refusal whose sender was answered before goes into the audit trail.
    """
    held = WebhookCall.state == QUEUED if holder is None else WebhookCall.held_by == holder
    completed = (
        update(WebhookCall)
        .where(WebhookCall.id == call.id, _WAITS, held)
        .values(
            state=state,
            outcome=outcome[:64],
            reason=reason[:MAX_REASON_LENGTH] or None,
            order_ids=list(order_ids),
            held_by=None,
            held_until=None,
            completed_at=func.clock_timestamp(),
        )
        .returning(WebhookCall.answered_ms)
        .execution_options(synchronize_session=False)
    )
    row = (await session.execute(completed)).one_or_none()
    if row is None:
        return False
    if state == REFUSED and row[0] is not None:
        about = {"id": call.digest or "", "code": outcome, "detail": reason[:MAX_REASON_LENGTH]}
        await audit.append_entry_once(
            session, "alerts", "webhook.alert_failed", f"webhook:{call.webhook_id}", **about
        )
    return True


@functools.cache
def _late_behind_heads() -> Select[WebhookCall, WebhookCall]:
    """Selects late signals in the queue, each with the head of its lane.

    Built once: the keeper of every API process asks every other second, mostly for nothing.
    """
    head = aliased(WebhookCall)
    any_call = aliased(WebhookCall)
    first = (
        select(func.min(any_call.id))
        .where(
            any_call.user_id == head.user_id,
            any_call.account_id == head.account_id,
            any_call.lane == head.lane,
            any_call.completed_at.is_(None),
        )
        .correlate(head)
        .scalar_subquery()
    )
    late = aliased(WebhookCall)
    return (
        select(late, head)
        .join(
            head,
            and_(
                head.user_id == late.user_id,
                head.account_id == late.account_id,
                head.lane == late.lane,
                head.completed_at.is_(None),
            ),
        )
        .where(
            late.state == QUEUED,
            late.completed_at.is_(None),
            late.deadline_at <= func.clock_timestamp(),
            head.id == first,
            head.id < late.id,
        )
        .order_by(late.id)
    )


async def expire_queued(session: AsyncSession, limit: int) -> list[tuple[WebhookCall, WebhookCall]]:
    """Returns signals whose deadline passed in the queue,
    each with the one at the head of its lane.

    The head itself is not among them: the process that takes it ends it.
    """
    rows = await session.execute(_late_behind_heads().limit(limit))
    return [(row[0], row[1]) for row in rows]


@functools.cache
def _lanes_with_free_heads() -> Select[Any, Any, Any]:
    """Selects lanes whose first signal nobody holds; built once, as the query of late signals."""
    keys = WebhookCall.user_id, WebhookCall.account_id, WebhookCall.lane
    heads = (
        select(*keys, WebhookCall.state, WebhookCall.held_until)
        .where(_WAITS)
        .ext(distinct_on(*keys))
        .order_by(*keys, WebhookCall.id)
        .subquery()
    )
    free = or_(
        heads.c.state == QUEUED,
        heads.c.held_until.is_(None),
        heads.c.held_until <= func.clock_timestamp(),
    )
    return select(heads.c.user_id, heads.c.account_id, heads.c.lane).where(free)


async def lanes_to_work(session: AsyncSession, limit: int) -> list[Lane]:
    """Returns lanes whose first signal nobody holds."""
    rows = await session.execute(_lanes_with_free_heads().limit(limit))
    return [Lane(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class PromisedDelivery:
    """A signal that the release before has promised and no longer carries out."""

    webhook: Webhook
    digest: str
    signal: dict[str, Any] | None
    #: Seconds until its deadline.
    remaining_s: float


async def take_promised_delivery(session: AsyncSession) -> PromisedDelivery | None:
    """Takes over a signal of the release before whose
    lease has run out, in the caller's transaction.

    That release sees it as barred from the commit on.
    """
    abandoned = (
        select(
            WebhookDelivery, func.extract("epoch", WebhookDelivery.until - func.clock_timestamp())
        )
        .where(WebhookDelivery.held_until <= func.now())
        .order_by(WebhookDelivery.held_until)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    while (row := (await session.execute(abandoned)).one_or_none()) is not None:
        delivery, seconds_left = row
        delivery.held_until, delivery.refused = None, BARRED
        await session.flush()
        webhook = await session.get(Webhook, delivery.webhook_id)
        if webhook is not None:
            return PromisedDelivery(
                webhook,
                delivery.digest,
                delivery.alert,
                0.0 if seconds_left is None else float(seconds_left),
            )
    return None
