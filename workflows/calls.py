"""Makes each activity call of the workflows: queue, time limits, retries, and why these numbers.

A call that failed raises a `FailureError`: `ActivityError` around the cause for a regular activity,
the cause itself for a local one. Activities are called by name, because this layer must not import
them. All of them are safe to run twice. Durations are seconds. No call is retried for ever: when
its time is over, the workflow's state shows why.
"""

from datetime import timedelta
from typing import NamedTuple, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from workflows.instruments.messages import (
        InstrumentsPlan,
        LoadInstruments,
        LoadOutcome,
        PlanInstruments,
    )
    from workflows.maintenance.messages import Batch, Cleaned, FinishPass, MaintenanceInput, Scanned
    from workflows.morning.messages import (
        Connected,
        ConnectUser,
        MorningPlan,
        PlanMorning,
        RecentUsers,
    )
    from workflows.names import BULK_QUEUE, LAUNCH_QUEUE, LIFECYCLE_QUEUE, ORDERS_QUEUE
    from workflows.order.messages import UnresolvedOrder, Verified, VerifyOrder
    from workflows.reports.messages import (
        EnqueueStatements,
        MakeReport,
        PlanStatements,
        ReportResult,
        StatementsPage,
        StatementsPlan,
    )
    from workflows.rollout.messages import (
        AskToMove,
        CheckRelease,
        ReleaseSnapshot,
        RetireWorkers,
        TellRollout,
    )
    from workflows.user_worker.messages import (
        STOP_TIMEOUT_S,
        CheckWorker,
        ClaimRequest,
        ClaimResult,
        ConnectRequest,
        Launched,
        LaunchForClaim,
        RecordTimeline,
        ReloadRequest,
        ReloadResult,
        Stopped,
        StopWorker,
        WorkerHealth,
    )
    from workflows.worker_pool.messages import (
        CountPool,
        KeepPool,
        KeptPool,
        LaunchPoolWorker,
        PoolCount,
        StopPoolWorkers,
    )

T = TypeVar("T")

#: An activity whose heartbeats stopped is started again elsewhere after this long. Ours beat once a
#: second, and the SDK passes on every second beat: a host may stand still for three seconds.
_HEARTBEAT_TIMEOUT_S = 5.0
#: The same for bulk work, for which nobody waits.
_BULK_HEARTBEAT_TIMEOUT_S = 10.0
#: The same for long bulk work. A second attempt next to a first one that is only slow cannot tell
#: what it did: on a busy machine 200 of 2,000 anomalies counted as healed.
_SLOW_HEARTBEAT_TIMEOUT_S = 30.0
#: The time that a lookup or a script may take before it counts as lost: Valkey's socket timeout is
#: 5 s.
_LOOKUP_TIMEOUT_S = 8.0
#: The time that one statement in PostgreSQL may take.
_STATEMENT_TIMEOUT_S = 15.0
#: The time that PostgreSQL may be away before a write is given up.
_OUTAGE_TIMEOUT_S = 3600.0
#: Seconds that a closing run waits for its timeline to be written.
TIMELINE_TIMEOUT_S = _OUTAGE_TIMEOUT_S

#: A person waits: the first repeat comes quickly. Measured: a local retry costs no server timer.
_QUICK_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=2)
)
#: Nobody waits, or the other side is down and must not be hammered.
_PATIENT_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=10)
)
#: Nobody waits, and what is to be written is safe in the history.
_SLOW_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=60)
)
#: The workflow repeats it by itself anyway.
_TWO_ATTEMPTS = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_attempts=2)
#: The workflow itself decides about the next try (it takes a new claim id or token for it).
_ONE_ATTEMPT = RetryPolicy(maximum_attempts=1)
#: A local activity that waits for its next try keeps the workflow task open: signals,
#: queries and the shutdown of the orchestrator would wait with it. Longer pauses are
#: timers of the server instead.
_MAX_LOCAL_RETRY_INTERVAL = timedelta(milliseconds=500)


class _Limits(NamedTuple):
    """Seconds for all attempts together, for each attempt,
    and between two heartbeats; None: no limit."""

    whole: float | None
    each: float | None = None
    beat: float | None = None
    retry: RetryPolicy = _QUICK_RETRY


async def _call(
    queue: str, name: str, request: object, result_type: type[T], limits: _Limits, summary: str
) -> T:
    result: T = await workflow.execute_activity(
        name,
        request,
        task_queue=queue,
        result_type=result_type,
        schedule_to_close_timeout=_delta(limits.whole),
        start_to_close_timeout=_delta(limits.each),
        heartbeat_timeout=_delta(limits.beat),
        retry_policy=limits.retry,
        summary=summary,
    )
    return result


def _delta(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


# --- a user's worker ------------------------------------------------------------------------------


async def claim_worker(request: ClaimRequest, claim_timeout: float) -> ClaimResult:
    """Claims a worker in a local activity: with a warm worker that takes about 10 ms, and a regular
    one would add two hops.

    It waits `reply_wait` for the worker's answer,
    which must stay far below the workflow task's 10 s.
    """
    result: ClaimResult = await workflow.execute_local_activity(
        "claim_worker",
        request,
        result_type=ClaimResult,
        start_to_close_timeout=timedelta(seconds=request.reply_wait + 6.0),
        schedule_to_close_timeout=timedelta(seconds=claim_timeout),
        retry_policy=_QUICK_RETRY,
        local_retry_threshold=_MAX_LOCAL_RETRY_INTERVAL,
        summary="claim a worker from the pool",
    )
    return result


async def launch_for_claim(request: LaunchForClaim) -> Launched:
    """Launches a worker for a claim, on the launch queue, whose rate is limited. The limit is 10 s
    above the launch's own time, so that a late launch is stopped."""
    limits = _Limits(request.timeout + 10.0, beat=_HEARTBEAT_TIMEOUT_S)
    why = "pool is empty: launch a worker for this claim"
    return await _call(LAUNCH_QUEUE, "launch_for_claim", request, Launched, limits, why)


async def await_connected(request: ConnectRequest) -> ClaimResult:
    """Waits for the login that the claim began. A repeat waits again, within the whole time."""
    limits = _Limits(request.timeout + 10.0, each=request.timeout + 3.0, beat=_HEARTBEAT_TIMEOUT_S)
    why = "wait for the broker login"
    return await _call(LIFECYCLE_QUEUE, "await_connected", request, ClaimResult, limits, why)


async def connect_again(request: ConnectRequest) -> ClaimResult:
    """Asks the worker for a further login. It counts attempts, so that a repeated message is one
    login."""
    limits = _Limits(request.timeout + 10.0, each=request.timeout + 3.0, beat=_HEARTBEAT_TIMEOUT_S)
    why = f"broker login, attempt {request.attempt}"
    return await _call(LIFECYCLE_QUEUE, "connect_again", request, ClaimResult, limits, why)


async def stop_worker(request: StopWorker) -> Stopped:
    """Returns when the worker's end is certain: the launcher confirmed it, or the epoch was fenced
    and its lease has run out. Only then may another worker connect (one-owner).

    `STOP_TIMEOUT_S` beyond the grace: the launcher asks,
    waits and kills. The caller repeats a failed call.
    """
    each = request.grace + STOP_TIMEOUT_S
    limits = _Limits(each + 10.0, each=each, beat=_HEARTBEAT_TIMEOUT_S)
    why = f"stop the worker: {request.reason}"[:200]
    return await _call(LIFECYCLE_QUEUE, "stop_worker", request, Stopped, limits, why)


async def check_worker(request: CheckWorker) -> WorkerHealth:
    """Reads the mark and the launcher's list; a caller of `ensure_active` may wait for it."""
    limits = _Limits(20.0, each=_LOOKUP_TIMEOUT_S)
    why = "is the worker alive, and when was it last used?"
    return await _call(LIFECYCLE_QUEUE, "check_worker", request, WorkerHealth, limits, why)


async def reload_credentials(request: ReloadRequest) -> ReloadResult:
    """Gives the worker its new credentials. It answers when the accounts that changed are connected
    again."""
    limits = _Limits(request.timeout + 10.0, each=request.timeout + 3.0, beat=_HEARTBEAT_TIMEOUT_S)
    why = "give the worker its new credentials"
    return await _call(LIFECYCLE_QUEUE, "reload_credentials", request, ReloadResult, limits, why)


async def record_timeline(request: RecordTimeline) -> None:
    """Writes transitions to the timeline. Tried every 10 s: a closing run waits for it, and its
    user cannot start anew before."""
    limits = _Limits(TIMELINE_TIMEOUT_S, each=_STATEMENT_TIMEOUT_S, retry=_PATIENT_RETRY)
    why = f"write {len(request.transitions)} transitions to the timeline"
    await _call(LIFECYCLE_QUEUE, "record_timeline", request, type(None), limits, why)


# --- the pool -------------------------------------------------------------------------------------


async def count_pool(request: CountPool) -> PoolCount:
    """Counts the pool after every claim: a round trip to the launcher and two to Valkey. The pool
    itself counts again.

    Not a local activity: on a host without CPU its workflow task may take more than 10 s, and
    signals that come in between would stand before the count in the history, but after it in what
    the run did.
    """
    limits = _Limits(None, each=_LOOKUP_TIMEOUT_S, retry=_ONE_ATTEMPT)
    return await _call(LIFECYCLE_QUEUE, "count_pool", request, PoolCount, limits, "count the pool")


async def keep_pool(request: KeepPool) -> KeptPool:
    """Stores what operators have set for a pool, in one statement in PostgreSQL. An operator may
    wait for it, so the first repeats come quickly."""
    limits = _Limits(_OUTAGE_TIMEOUT_S, each=_STATEMENT_TIMEOUT_S)
    return await _call(
        LIFECYCLE_QUEUE, "keep_pool", request, KeptPool, limits, "keep what operators have set"
    )


async def launch_pool_worker(request: LaunchPoolWorker) -> Launched:
    """Returns when the worker is ready. One attempt: the pool backs off and takes a new token.

    An attempt waits up to 25 s for its turn, gives the worker its time, and has 10 s for a stop.
    """
    limits = _Limits(
        request.timeout + 60.0,
        each=request.timeout + 40.0,
        beat=_HEARTBEAT_TIMEOUT_S,
        retry=_ONE_ATTEMPT,
    )
    return await _call(
        LAUNCH_QUEUE, "launch_pool_worker", request, Launched, limits, "launch a pool worker"
    )


async def shrink_pool(request: StopPoolWorkers) -> int:
    """Stops free workers; each leaves the pool by a claim of its own,
    so no user's claim can meet it."""
    limits = _Limits(90.0, each=60.0, beat=_HEARTBEAT_TIMEOUT_S, retry=_PATIENT_RETRY)
    return await _call(
        LIFECYCLE_QUEUE, "shrink_pool", request, int, limits, f"stop {request.count} free workers"
    )


# --- orders ---------------------------------------------------------------------------------------


async def verify_order(request: VerifyOrder) -> Verified:
    """Asks PostgreSQL and the broker; it may have to start the user's worker first (50 s).

    Two attempts: the workflow comes back by itself, in a pause that grows.
    """
    whole = 2 * (request.timeout + 65.0)
    limits = _Limits(
        whole, each=request.timeout + 60.0, beat=_HEARTBEAT_TIMEOUT_S, retry=_TWO_ATTEMPTS
    )
    why = f"verify the order, {request.check + 1}"
    return await _call(ORDERS_QUEUE, "verify_order", request, Verified, limits, why)


async def settle_absent(request: UnresolvedOrder) -> bool:
    """Records that the order never reached the broker, in one statement in PostgreSQL."""
    limits = _Limits(60.0, each=_STATEMENT_TIMEOUT_S, retry=_PATIENT_RETRY)
    why = "the order never reached the broker"
    return await _call(ORDERS_QUEUE, "settle_absent", request, bool, limits, why)


async def demand_attention(request: UnresolvedOrder) -> bool:
    """Puts the order on the operators' list. Nobody waits for it, and it must not be lost:
    PostgreSQL may be away for an hour."""
    limits = _Limits(_OUTAGE_TIMEOUT_S, each=_STATEMENT_TIMEOUT_S, retry=_SLOW_RETRY)
    why = "put the order on the list for a person"
    return await _call(ORDERS_QUEUE, "demand_attention", request, bool, limits, why)


# --- maintenance ----------------------------------------------------------------------------------


async def scan_fleet(request: MaintenanceInput) -> Scanned:
    """Scans all workers; 10,000 take less than a second. It has one attempt: the next pass comes
    within a minute."""
    limits = _Limits(50.0, each=45.0, retry=_ONE_ATTEMPT)
    return await _call(BULK_QUEUE, "scan_fleet", request, Scanned, limits, "scan all workers")


async def clean_up(batch: Batch) -> Cleaned:
    """Repairs a batch of anomalies: a hundred stops, twenty at a time, each with the time for a
    logout. The next pass finds what is left."""
    limits = _Limits(240.0, each=120.0, beat=_SLOW_HEARTBEAT_TIMEOUT_S, retry=_TWO_ATTEMPTS)
    return await _call(
        BULK_QUEUE,
        "clean_up",
        batch,
        Cleaned,
        limits,
        f"clean up {batch.count} anomalies",
    )


async def finish_pass(request: FinishPass) -> float:
    """Records the outcome of a pass, in one statement in PostgreSQL."""
    limits = _Limits(60.0, each=_STATEMENT_TIMEOUT_S, retry=_PATIENT_RETRY)
    return await _call(
        BULK_QUEUE, "finish_pass", request, float, limits, "record the outcome of the pass"
    )


# --- rollouts -------------------------------------------------------------------------------------


async def check_release(request: CheckRelease) -> ReleaseSnapshot:
    """Counts workers by version: an update of the pool's workflow, a listing of the launcher and a
    page of Valkey."""
    limits = _Limits(60.0, each=20.0, retry=_TWO_ATTEMPTS)
    why = f"how many workers are of version {request.release.version or 'of the settings'}?"
    return await _call(BULK_QUEUE, "check_release", request, ReleaseSnapshot, limits, why)


async def retire_workers(request: RetireWorkers) -> int:
    """Ends free workers of other versions, several at a time, each with the grace of a logout. A
    repeat ends the same workers."""
    limits = _Limits(130.0, each=60.0, beat=_BULK_HEARTBEAT_TIMEOUT_S, retry=_TWO_ATTEMPTS)
    why = f"end {request.count} free workers of other versions"
    return await _call(BULK_QUEUE, "retire_workers", request, int, limits, why)


async def ask_to_move(request: AskToMove) -> int:
    """Asks the users of other versions to move: a signal for each user, several at a time."""
    limits = _Limits(130.0, each=60.0, beat=_BULK_HEARTBEAT_TIMEOUT_S, retry=_TWO_ATTEMPTS)
    why = "ask the users of other versions to move"
    return await _call(BULK_QUEUE, "ask_to_move", request, int, limits, why)


async def tell_rollout(request: TellRollout) -> None:
    """Records a rollout's step as one row of the audit trail."""
    limits = _Limits(_OUTAGE_TIMEOUT_S, each=_STATEMENT_TIMEOUT_S, retry=_SLOW_RETRY)
    await _call(
        BULK_QUEUE,
        "tell_rollout",
        request,
        type(None),
        limits,
        f"record: the rollout {request.event}",
    )


# --- the morning, daily statements and reports ----------------------------------------------------


async def plan_morning(request: PlanMorning) -> MorningPlan:
    """Asks whether it is a trading day and who traded recently. It is one count over the orders'
    index: seconds for millions of orders."""
    limits = _Limits(1800.0, each=30.0, retry=_PATIENT_RETRY)
    why = "is it a trading day, and who traded recently?"
    return await _call(BULK_QUEUE, "plan_morning", request, MorningPlan, limits, why)


async def recent_users(request: RecentUsers) -> list[str]:
    """Returns one page of the users that traded recently, read from an index."""
    limits = _Limits(1800.0, each=30.0, retry=_PATIENT_RETRY)
    return await _call(
        BULK_QUEUE, "recent_users", request, list[str], limits, f"users after {request.after!r}"
    )


async def connect_user(request: ConnectUser) -> Connected:
    """Connects a user before the bell. That is a claim and a login; the caller's own limit is 50 s
    with the default settings."""
    limits = _Limits(240.0, each=180.0, beat=_BULK_HEARTBEAT_TIMEOUT_S, retry=_ONE_ATTEMPT)
    return await _call(
        BULK_QUEUE,
        "connect_user",
        request,
        Connected,
        limits,
        f"connect user {request.user_id}",
    )


async def plan_statements(request: PlanStatements) -> StatementsPlan:
    """Returns which day's statements are due. It is one count over a table with at most one row for
    each user, tried until the next day's are due."""
    limits = _Limits(12 * 3600.0, each=30.0, retry=_SLOW_RETRY)
    why = "which day, and was it a trading day?"
    return await _call(BULK_QUEUE, "plan_statements", request, StatementsPlan, limits, why)


async def enqueue_statements(request: EnqueueStatements) -> StatementsPage:
    """Reads the orders of one page of users and enqueues a job for each user, in some ms each."""
    limits = _Limits(12 * 3600.0, each=300.0, beat=_SLOW_HEARTBEAT_TIMEOUT_S, retry=_SLOW_RETRY)
    why = f"users after {request.after!r}"
    return await _call(BULK_QUEUE, "enqueue_statements", request, StatementsPage, limits, why)


async def make_report(request: MakeReport) -> ReportResult:
    """Makes the daily report: some statements, up to 60 s for the figures, and a job for each mail.
    Tried until the next report is due."""
    limits = _Limits(24 * 3600.0, each=120.0, beat=_BULK_HEARTBEAT_TIMEOUT_S, retry=_SLOW_RETRY)
    return await _call(
        BULK_QUEUE, "make_report", request, ReportResult, limits, "make the daily report"
    )


# --- instruments ----------------------------------------------------------------------------------


async def plan_instruments(request: PlanInstruments) -> InstrumentsPlan:
    """Finds the brokers whose instruments are due, in some statements over small tables. The next
    look comes within a quarter of an hour."""
    limits = _Limits(300.0, each=_STATEMENT_TIMEOUT_S, retry=_PATIENT_RETRY)
    why = "which brokers' instruments are due?"
    return await _call(BULK_QUEUE, "plan_instruments", request, InstrumentsPlan, limits, why)


async def load_instruments(request: LoadInstruments) -> LoadOutcome:
    """Loads a broker's instruments: a claim, a login and some hundred pages of 200 instruments,
    each an answer of a worker that serves orders first. The workflow repeats it by itself."""
    limits = _Limits(1800.0, each=1200.0, beat=_SLOW_HEARTBEAT_TIMEOUT_S, retry=_ONE_ATTEMPT)
    why = f"load the instruments of {request.broker}"
    return await _call(BULK_QUEUE, "load_instruments", request, LoadOutcome, limits, why)


# --- what a failed call says ----------------------------------------------------------------------


def failure_type(error: FailureError) -> str:
    """Returns the code that an activity failed with; '' if it failed otherwise."""
    root = _root(error)
    return root.type or "" if isinstance(root, ApplicationError) else ""


def cause(error: FailureError) -> str:
    """Says in one short line what went wrong in an activity."""
    root = _root(error)
    return f"{failure_type(error) or type(root).__name__}: {root}"[:200]


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
