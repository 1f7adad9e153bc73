"""Assignments of workers to users: the source of every epoch, and who has which worker."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Interval,
    ScalarSelect,
    Select,
    and_,
    bindparam,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import aliased

from infra.database.engine import Database
from infra.database.locks import next_number
from infra.database.models import BrokerAccount, User, WorkerSession
from infra.database.users import UserNotFound

#: In SQL: an assignment whose worker may still run.
HAS_WORKER = (WorkerSession.ended_at.is_(None), WorkerSession.worker_id.is_not(None))

#: In SQL: the user was taken from the assignment's worker (`WorkerTerminator.fence`, which begins
#: with the user's epoch).
_IS_FENCED = or_(
    WorkerSession.fenced_at.is_not(None),
    exists().where(User.id == WorkerSession.user_id, User.epoch > WorkerSession.epoch),
)

#: Beginning of the reason of an end that the worker itself announced.
CLOSED_BY_WORKER = "worker closed: "


def at_unix(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@dataclass(frozen=True, kw_only=True)
class AssignmentResult:
    #: 0: nothing was assigned. Either there is no such user, or this claim has no assignment yet
    #: and the user's workers crashed too often (`crashes`), another assignment may still have its
    #: worker (`unended`), or the request may only adopt.
    epoch: int
    #: Unix seconds of the recent crashes.
    crashes: tuple[float, ...] = ()
    #: The worker that an earlier call of this claim got.
    worker_id: str = ""
    task_id: str = ""
    #: The assignment of this claim has ended: nothing may be claimed for it.
    ended: bool = False
    #: Another assignment of the user whose worker may still run; nothing was assigned (one-owner).
    unended: WorkerSession | None = None
    #: That assignment is the user's latest, was never fenced, and the user may have a worker: a run
    #: that was started anew continues with its worker.
    adoptable: bool = False


async def next_control_number(session: AsyncSession) -> int:
    """Returns the number of the next reload of any worker; it grows, whoever asks."""
    return int(await session.scalar(select(next_number("control_number"))) or 0)


#: Lowest epoch that may answer a request made now for `:user_id`: the current one, or the next if
#: that assignment has ended.
FIRST_EPOCH = """(select u.epoch + (select count(*) from worker_sessions s where s.user_id = u.id
  and s.epoch = u.epoch and s.ended_at is not null) from users u where u.id = :user_id)"""


async def first_epoch(database: Database, user_id: str) -> int:
    """Returns `FIRST_EPOCH`. Answers of earlier workers, which may still have their keys, are
    refused by it."""
    async with database.session(autocommit=True) as session:
        return int(await session.scalar(text(f"select {FIRST_EPOCH}"), {"user_id": user_id}) or 0)


async def assign_epoch(
    session: AsyncSession,
    *,
    user_id: str,
    claim_id: str,
    pool: str,
    crash_limit: int = 0,
    crash_window: float = 0.0,
    adopt_only: bool = False,
) -> AssignmentResult:
    """Assigns the next epoch of the user to this claim; a repeat gets the same epoch.

    Assigns nothing with `adopt_only`, after `crash_limit` crashes within `crash_window` seconds
    (see `_recent_crashes`), or while the worker of another claim was not confirmed to have ended.
    Raises `UserNotFound`.
    """
    # The row lock serialises the claims of one user.
    locked = _WITH_CRASHES if crash_limit else _WITHOUT_CRASHES
    given = {"user": user_id, "window": timedelta(seconds=crash_window)}
    row = (await session.execute(locked, given)).one_or_none()
    if row is None:
        raise UserNotFound(f"there is no user {user_id}")
    user, times = row[0], tuple(float(at) for at in row[1] or ())
    # A separate statement: only one that begins after
    # the lock was taken sees its last holder's writes.
    running = and_(WorkerSession.user_id == user_id, *HAS_WORKER)
    own_and_running = select(WorkerSession).where(or_(WorkerSession.claim_id == claim_id, running))
    rows = (await session.scalars(own_and_running.order_by(WorkerSession.epoch.desc()))).all()
    before = next((row for row in rows if row.claim_id == claim_id), None)
    unended = next((row for row in rows if row.claim_id != claim_id), None)
    over = before is None or before.ended_at is not None
    if before is None and unended is None and crash_limit and len(times) >= crash_limit:
        return AssignmentResult(epoch=0, crashes=times)
    adoptable = (
        over
        and unended is not None
        and unended.epoch == user.epoch
        and unended.fenced_at is None
        and user.disabled_at is None
        and user.removed_at is None
    )
    if before is not None:
        return AssignmentResult(
            epoch=before.epoch,
            crashes=times,
            worker_id=before.worker_id or "",
            task_id=before.task_id or "",
            ended=over,
            unended=unended,
            adoptable=adoptable,
        )
    if unended is not None or adopt_only:
        return AssignmentResult(epoch=0, crashes=times, unended=unended, adoptable=adoptable)
    user.epoch += 1
    session.add(WorkerSession(claim_id=claim_id, user_id=user_id, epoch=user.epoch, pool=pool))
    await session.flush()
    return AssignmentResult(epoch=user.epoch, crashes=times)


def _recent_crashes() -> ScalarSelect[list[float]]:
    """Selects the Unix seconds of the user's recent crashes since a worker last ended in order.

    An orderly end shows that the cause is gone. A crash counts whether or not the connect was
    recorded: its event may be lost with a flushed Valkey.
    """
    earlier = aliased(WorkerSession)
    served = (
        select(func.coalesce(func.max(earlier.epoch), 0))
        .where(earlier.user_id == bindparam("user"), earlier.crashed.is_(False))
        .where(earlier.connected_at.is_not(None), earlier.ended_at.is_not(None))
        .scalar_subquery()
    )
    at = func.extract("epoch", WorkerSession.ended_at)
    return (
        select(func.array_agg(aggregate_order_by(at, WorkerSession.ended_at)))
        .where(WorkerSession.user_id == bindparam("user"), WorkerSession.epoch > served)
        .where(WorkerSession.crashed)
        .where(
            WorkerSession.ended_at > func.clock_timestamp() - bindparam("window", type_=Interval)
        )
        .scalar_subquery()
    )


def _locked(crashes: ColumnElement[Any]) -> Select[tuple[User, Any]]:
    return (
        select(User, crashes)
        .where(User.id == bindparam("user"))
        .with_for_update(of=User, key_share=True)
    )


# Built once: building the larger one took 1 ms of each claim.
_WITHOUT_CRASHES = _locked(null())
_WITH_CRASHES = _locked(_recent_crashes())


class NotAssignable(Exception):
    """The worker was not launched for this pool, or has or had another assignment."""


class LaunchedWorker(NamedTuple):
    #: Empty until the launcher has answered.
    task_id: str
    version: str
    #: Seconds from the epoch to the worker.
    waited: float = 0.0


_ASSIGN = text(
    "update worker_sessions s set worker_id = l.worker_id, task_id = coalesce(l.task_id, ''), "
    "warm = :warm, "
    "claimed_at = coalesce(s.claimed_at, clock_timestamp()) from worker_launches l "
    "where s.claim_id = :claim_id and (s.worker_id is null or s.worker_id = l.worker_id) "
    "and l.worker_id = :worker_id and l.pool = s.pool returning s.task_id, l.version, "
    "extract(epoch from s.claimed_at - s.assigned_at)::float8"
)


async def assign_worker(
    session: AsyncSession, *, claim_id: str, worker_id: str, warm: bool
) -> LaunchedWorker:
    """Records the worker of a claim; the first call's worker and time stay.

    Raises `NotAssignable`; then the transaction has to be given up.
    """
    values = {"claim_id": claim_id, "worker_id": worker_id, "warm": warm}
    try:
        row = (await session.execute(_ASSIGN, values)).one_or_none()
    except IntegrityError:
        raise NotAssignable("it has or had another assignment") from None
    if row is None:
        raise NotAssignable("no such worker was launched for this pool and claim")
    return LaunchedWorker(*row)


async def set_connected(session: AsyncSession, *, claim_id: str, at: float) -> None:
    """Records when a claim was connected. `at` is in Unix seconds; the first call counts."""
    mine = update(WorkerSession).filter_by(claim_id=claim_id, connected_at=None)
    await session.execute(mine.values(connected_at=at_unix(at)))


async def end_session(
    session: AsyncSession, *, claim_id: str, reason: str, crashed: bool = False
) -> str:
    """Ends an assignment; the first reason and time count.

    A crash is recorded even after an orderly end, since a worker may announce its end and then
    crash. Returns the worker if this call changed the assignment, or ''.
    """
    changed: ColumnElement[bool] = WorkerSession.ended_at.is_(None)
    if crashed:
        changed = changed | WorkerSession.crashed.is_(False)
    worker_id = await session.scalar(
        update(WorkerSession)
        .where(WorkerSession.claim_id == claim_id, changed)
        .values(
            ended_at=func.coalesce(WorkerSession.ended_at, func.clock_timestamp()),
            end_reason=func.coalesce(WorkerSession.end_reason, reason),
            crashed=or_(WorkerSession.crashed, literal(crashed)),
        )
        .returning(WorkerSession.worker_id)
    )
    return worker_id or ""


async def latest_session(session: AsyncSession, /, **of: Any) -> WorkerSession | None:
    """Returns the last assignment of a user, worker or claim: `of` are columns and their values."""
    latest = select(WorkerSession).filter_by(**of).order_by(WorkerSession.epoch.desc()).limit(1)
    return await session.scalar(latest)


async def count_claims(session: AsyncSession, pool: str, seconds: float) -> int:
    """Counts the workers of a pool, warm or cold, that were claimed within the last `seconds`."""
    since = func.now() - timedelta(seconds=seconds)  # clock_timestamp() would read the whole index
    claims = select(func.count()).where(
        WorkerSession.pool == pool, WorkerSession.claimed_at > since
    )
    return await session.scalar(claims) or 0


async def ended_before(session: AsyncSession, user_id: str, epoch: int, at: datetime) -> bool:
    """Returns True if this assignment of the user ended before this moment. What is purged is the
    oldest."""
    first = (
        select(func.min(WorkerSession.epoch))
        .where(WorkerSession.user_id == user_id)
        .scalar_subquery()
    )
    ended = select(WorkerSession.claim_id).where(
        WorkerSession.user_id == user_id, WorkerSession.epoch == epoch, WorkerSession.ended_at < at
    )
    return bool(await session.scalar(select(or_(literal(epoch) < first, ended.exists()))))


async def session_at(session: AsyncSession, user_id: str, at: datetime) -> WorkerSession | None:
    """Returns the user's assignment at a time, for an order's timeline."""
    runs = or_(WorkerSession.ended_at.is_(None), WorkerSession.ended_at > at)
    query = (
        select(WorkerSession)
        .filter_by(user_id=user_id)
        .where(WorkerSession.worker_id.is_not(None), runs)
    )
    return await session.scalar(query.order_by(WorkerSession.epoch).limit(1))


class WorkerInService(NamedTuple):
    """A user's present assignment whose worker should have its mark."""

    claim_id: str
    user_id: str
    worker_id: str
    epoch: int

    @property
    def mark(self) -> bytes:
        """The value of the mark while this worker lives."""
        return f"{self.epoch}:{self.worker_id}".encode()


#: A claimed worker counts as connected after this time, since the event of its connect can be lost.
#: Three logins of 20 s with their pauses take less.
COUNTED_CONNECTED_AFTER = timedelta(minutes=2)

_IN_SERVICE = (
    select(
        WorkerSession.claim_id,
        WorkerSession.user_id,
        func.coalesce(WorkerSession.worker_id, "").label("worker_id"),
        WorkerSession.epoch,
    )
    # An older assignment does not count, even if it was never closed.
    .join(User, (User.id == WorkerSession.user_id) & (User.epoch == WorkerSession.epoch))
    .where(*HAS_WORKER)
    .where(
        or_(
            WorkerSession.connected_at.is_not(None),
            WorkerSession.claimed_at < func.clock_timestamp() - COUNTED_CONNECTED_AFTER,
        )
    )
)


async def workers_in_service(connection: AsyncConnection) -> list[WorkerInService]:
    """Returns all workers whose mark should exist, for the mark watcher."""
    return [WorkerInService(*row) for row in await connection.execute(_IN_SERVICE)]


class LiveAssignment(NamedTuple):
    """A user's present assignment, whose worker may run."""

    user_id: str
    worker_id: str
    epoch: int


async def live_assignments(session: AsyncSession, pool: str) -> list[LiveAssignment]:
    """Returns the present assignments of a pool's
    users that have a worker: each needs a workflow."""
    worker_id = func.coalesce(WorkerSession.worker_id, "")
    rows = await session.execute(
        select(WorkerSession.user_id, worker_id, WorkerSession.epoch)
        .join(User, (User.id == WorkerSession.user_id) & (User.epoch == WorkerSession.epoch))
        .where(*HAS_WORKER, WorkerSession.pool == pool)
    )
    return [LiveAssignment(*row) for row in rows]


class AssignedWorker(NamedTuple):
    """A worker with a user, and what it may reach."""

    worker_id: str
    pool: str
    user_id: str
    #: Names of budgets; None: as 0.1.0 gave them.
    budgets: list[str] | None


async def assigned_now(connection: AsyncConnection) -> list[AssignedWorker]:
    """Returns the workers of all open assignments that are not fenced, connected or not."""
    whose = func.coalesce(WorkerSession.worker_id, ""), WorkerSession.pool, WorkerSession.user_id
    assigned = select(*whose, WorkerSession.budgets).where(*HAS_WORKER)
    rows = await connection.execute(assigned.where(~_IS_FENCED))
    return [AssignedWorker(*row) for row in rows]


async def is_fenced(session: AsyncSession, claim_id: str) -> bool:
    """Returns True if the assignment of this claim is fenced: its worker gets neither its user nor
    its login to Valkey back, whatever Valkey says."""
    fenced = select(WorkerSession.epoch).where(WorkerSession.claim_id == claim_id, _IS_FENCED)
    return await session.scalar(fenced) is not None


async def workers_that_ended(session: AsyncSession, worker_ids: Collection[str]) -> set[str]:
    """Returns those of these workers that had a user and have none any more, because their
    assignment has ended or is fenced: they get no other one."""
    if not worker_ids:
        return set()
    theirs = select(WorkerSession.worker_id).where(WorkerSession.worker_id.in_(worker_ids))
    ended = theirs.where(or_(WorkerSession.ended_at.is_not(None), _IS_FENCED))
    return {worker_id for worker_id in await session.scalars(ended) if worker_id}


class WorkerInUse(NamedTuple):
    """A worker with an open assignment."""

    user_id: str
    worker_id: str
    #: Broker and market (`broker_type`) of each of the user's accounts, each pair once.
    markets: list[tuple[str, str]]


async def workers_in_use(session: AsyncSession, worker_ids: Collection[str]) -> list[WorkerInUse]:
    """Returns those of these workers that have an open assignment, by user id."""
    if not worker_ids:
        return []
    market = BrokerAccount.broker, BrokerAccount.broker_type
    rows = await session.execute(
        select(WorkerSession.user_id, WorkerSession.worker_id, *market)
        .join(BrokerAccount, BrokerAccount.user_id == WorkerSession.user_id)
        .where(WorkerSession.ended_at.is_(None), WorkerSession.worker_id.in_(worker_ids))
        .distinct()
        .order_by(WorkerSession.user_id, WorkerSession.worker_id, *market)
    )
    workers: dict[tuple[str, str], WorkerInUse] = {}
    for user_id, worker_id, broker, broker_type in rows:
        key = user_id, worker_id or ""
        worker = workers.setdefault(key, WorkerInUse(*key, markets=[]))
        worker.markets.append((broker, broker_type))
    return list(workers.values())
