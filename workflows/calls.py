"""Every activity call of the workflows, once: queue, timeouts, retries, and the reason for each number.

A call that failed raises a `FailureError`: `ActivityError` around the cause for a regular activity, the
cause itself for a local one. Activities are named by strings: this room must not import theirs. All of
them are safe to run twice. Durations are seconds. No call retries for ever: what a time limit ends, the
workflow's state shows.

The activity calls of a rollout; the rules are those of `calls.py`.

The activity calls of the morning; the rules are those of `calls.py`.

The activity calls of the daily statements; the rules are those of `calls.py`.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from workflows.maintenance import messages as mm
    from workflows.names import BULK_QUEUE, LAUNCH_QUEUE, LIFECYCLE_QUEUE, ORDERS_QUEUE
    from workflows.order import messages as om
    from workflows.user_worker import messages as m
    from workflows.user_worker.state import STOP_TIMEOUT
    from workflows.worker_pool import messages as pm

#: An activity that stopped heartbeating is started again elsewhere after this long. Each of ours beats
#: once a second, and the orchestrator passes on every second beat: a host may stand still for three seconds.
_HEARTBEAT = timedelta(seconds=5)
#: What a lookup or a script may take before it counts as lost: Valkey's socket timeout is 5 s.
_LOOK = timedelta(seconds=8)

#: A person waits: the first repeat comes quickly. Measured: a local retry costs no server timer.
_QUICKLY = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=2))
#: Nobody waits, or the other side is down and must not be hammered.
_PATIENTLY = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=10))
#: Nobody waits, and what is to be written is safe in the history.
_SLOWLY = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=60))
#: Seconds that a closing run waits for its timeline to be written.
TIMELINE_TIMEOUT = 3600.0
#: A local activity that waits for its next try keeps the workflow task open: signals, queries and the
#: shutdown of the orchestrator would wait with it. Longer pauses are timers of the server instead.
_LOCAL_PAUSE = timedelta(milliseconds=500)
#: For what the workflow repeats by itself anyway.
_TWICE = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_attempts=2)
#: The workflow itself decides about the next try (it takes a new claim id or token for it).
_ONCE = RetryPolicy(maximum_attempts=1)


def _s(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


async def claim_worker(request: m.ClaimRequest, claim_timeout: float) -> m.ClaimResult:
    """A local activity: with a warm worker it takes about 10 ms, and a regular one would add two hops.

    It waits `reply_wait` for the worker's answer, which must stay far below the workflow task's 10 s.
    """
    result: m.ClaimResult = await workflow.execute_local_activity(
        "claim_worker",
        request,
        result_type=m.ClaimResult,
        start_to_close_timeout=_s(request.reply_wait + 6.0),
        schedule_to_close_timeout=_s(claim_timeout),
        retry_policy=_QUICKLY,
        local_retry_threshold=_LOCAL_PAUSE,
        summary="claim a worker from the pool",
    )
    return result


async def launch_for_claim(request: m.LaunchForClaim) -> m.Launched:
    """On the launch queue, whose rate is limited. 10 s above the launch's own time: to stop a late one."""
    result: m.Launched = await workflow.execute_activity(
        "launch_for_claim",
        request,
        task_queue=LAUNCH_QUEUE,
        result_type=m.Launched,
        schedule_to_close_timeout=_s(request.timeout + 10.0),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_QUICKLY,
        summary="pool is empty: launch a worker for this claim",
    )
    return result


async def await_connected(request: m.ConnectRequest) -> m.ClaimResult:
    """Waits for the login that the claim began. A repeat waits again, bounded by the whole."""
    result: m.ClaimResult = await workflow.execute_activity(
        "await_connected",
        request,
        task_queue=LIFECYCLE_QUEUE,
        result_type=m.ClaimResult,
        start_to_close_timeout=_s(request.timeout + 3.0),
        schedule_to_close_timeout=_s(request.timeout + 10.0),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_QUICKLY,
        summary="wait for the broker login",
    )
    return result


async def connect_again(request: m.ConnectRequest) -> m.ClaimResult:
    """A further login: the worker counts attempts, so that a repeated message is one login."""
    result: m.ClaimResult = await workflow.execute_activity(
        "connect_again",
        request,
        task_queue=LIFECYCLE_QUEUE,
        result_type=m.ClaimResult,
        start_to_close_timeout=_s(request.timeout + 3.0),
        schedule_to_close_timeout=_s(request.timeout + 10.0),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_QUICKLY,
        summary=f"broker login, attempt {request.attempt}",
    )
    return result


async def stop_worker(request: m.StopWorker) -> m.Stopped:
    """Returns when the launcher confirms the end: nothing else lets another worker connect (one-owner).

    STOP_TIMEOUT beyond the grace: the launcher asks, waits and kills. The caller repeats a failed call.
    """
    result: m.Stopped = await workflow.execute_activity(
        "stop_worker",
        request,
        task_queue=LIFECYCLE_QUEUE,
        result_type=m.Stopped,
        start_to_close_timeout=_s(request.grace + STOP_TIMEOUT),
        schedule_to_close_timeout=_s(request.grace + STOP_TIMEOUT + 10.0),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_QUICKLY,
        summary=f"stop the worker: {request.reason}"[:200],
    )
    return result


async def check_worker(request: m.CheckWorker) -> m.WorkerHealth:
    """A look at the mark and at the launcher's list; a caller of `ensure_active` may wait for it."""
    result: m.WorkerHealth = await workflow.execute_activity(
        "check_worker",
        request,
        task_queue=LIFECYCLE_QUEUE,
        result_type=m.WorkerHealth,
        start_to_close_timeout=_LOOK,
        schedule_to_close_timeout=_s(20.0),
        retry_policy=_QUICKLY,
        summary="is the worker alive, and when was it last used?",
    )
    return result


async def reload_credentials(request: m.ReloadRequest) -> m.ReloadResult:
    """The worker answers when the accounts that changed are connected again."""
    result: m.ReloadResult = await workflow.execute_activity(
        "reload_credentials",
        request,
        task_queue=LIFECYCLE_QUEUE,
        result_type=m.ReloadResult,
        start_to_close_timeout=_s(request.timeout + 3.0),
        schedule_to_close_timeout=_s(request.timeout + 10.0),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_QUICKLY,
        summary="give the worker its new credentials",
    )
    return result


async def record_timeline(request: m.RecordTimeline) -> None:
    """PostgreSQL may be away for an hour before a batch is dropped. Nobody waits but a closing run, whose
    user cannot start anew before it is written: so it is tried every 10 s."""
    await workflow.execute_activity(
        "record_timeline",
        request,
        task_queue=LIFECYCLE_QUEUE,
        start_to_close_timeout=_s(15.0),
        schedule_to_close_timeout=_s(TIMELINE_TIMEOUT),
        retry_policy=_PATIENTLY,
        summary=f"write {len(request.transitions)} transitions to the timeline",
    )


async def count_pool(request: pm.CountPool, *, local: bool) -> pm.PoolCount:
    """A round trip to the launcher and two to Valkey, after every claim. One attempt: the pool looks again.

    `local` only in runs that began so (`PoolInput.counts_apart`).
    """
    if local:
        result: pm.PoolCount = await workflow.execute_local_activity(
            "count_pool",
            request,
            result_type=pm.PoolCount,
            start_to_close_timeout=_LOOK,
            retry_policy=_ONCE,
            summary="count the pool",
        )
        return result
    result = await workflow.execute_activity(
        "count_pool",
        request,
        result_type=pm.PoolCount,
        start_to_close_timeout=_LOOK,
        retry_policy=_ONCE,
        summary="count the pool",
    )
    return result


async def launch_pool_worker(request: pm.LaunchPoolWorker) -> m.Launched:
    """Returns when the worker is ready. One attempt: the pool backs off and takes a new token."""
    result: m.Launched = await workflow.execute_activity(
        "launch_pool_worker",
        request,
        task_queue=LAUNCH_QUEUE,
        result_type=m.Launched,
        schedule_to_close_timeout=_s(request.timeout + 60.0),
        # It waits for its turn first, 25 s at the most; then its worker has its time, and 10 s for a stop.
        start_to_close_timeout=_s(request.timeout + 40.0),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_ONCE,
        summary="launch a pool worker",
    )
    return result


async def shrink_pool(request: pm.StopPoolWorkers) -> int:
    """Stops free workers; each leaves the pool by a claim of its own, so no user's claim can meet it."""
    result: int = await workflow.execute_activity(
        "shrink_pool",
        request,
        task_queue=LIFECYCLE_QUEUE,
        result_type=int,
        start_to_close_timeout=_s(60.0),
        schedule_to_close_timeout=_s(90.0),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_PATIENTLY,
        summary=f"stop {request.count} free workers",
    )
    return result


async def verify_order(request: om.VerifyOrder) -> om.Verified:
    """A look at PostgreSQL and at the broker; it may have to start the user's worker first (50 s).

    Two attempts: the workflow comes back by itself, in a pause that grows.
    """
    result: om.Verified = await workflow.execute_activity(
        "verify_order",
        request,
        task_queue=ORDERS_QUEUE,
        result_type=om.Verified,
        start_to_close_timeout=_s(request.timeout + 60.0),
        schedule_to_close_timeout=_s(2 * (request.timeout + 65.0)),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_TWICE,
        summary=f"look at the order, {request.look + 1}",
    )
    return result


async def settle_absent(request: om.SettleAbsent) -> bool:
    """One statement in PostgreSQL."""
    result: bool = await workflow.execute_activity(
        "settle_absent",
        request,
        task_queue=ORDERS_QUEUE,
        result_type=bool,
        start_to_close_timeout=_s(15.0),
        schedule_to_close_timeout=_s(60.0),
        retry_policy=_PATIENTLY,
        summary="the order never reached the broker",
    )
    return result


async def demand_attention(request: om.DemandAttention) -> bool:
    """Nobody waits for it, and it must not be lost: PostgreSQL may be away for an hour."""
    result: bool = await workflow.execute_activity(
        "demand_attention",
        request,
        task_queue=ORDERS_QUEUE,
        result_type=bool,
        start_to_close_timeout=_s(15.0),
        schedule_to_close_timeout=_s(3600.0),
        retry_policy=_SLOWLY,
        summary="put the order on the list for a person",
    )
    return result


async def scan_fleet(request: mm.ScanFleet) -> mm.Scanned:
    """10,000 workers take below a second. One attempt: the next pass comes within a minute."""
    result: mm.Scanned = await workflow.execute_activity(
        "scan_fleet",
        request,
        task_queue=BULK_QUEUE,
        result_type=mm.Scanned,
        start_to_close_timeout=_s(45.0),
        schedule_to_close_timeout=_s(50.0),
        retry_policy=_ONCE,
        summary="look at all workers",
    )
    return result


async def clean_up(batch: mm.Batch) -> mm.Cleaned:
    """A hundred stops, twenty at a time, each with the time for a logout. What is left is found again.

    The heartbeat is slow: nobody waits, and a second attempt beside a first one that is only slow cannot tell
    what it did (on a busy machine 200 of 2,000 anomalies counted as healed).
    """
    result: mm.Cleaned = await workflow.execute_activity(
        "clean_up",
        batch,
        task_queue=BULK_QUEUE,
        result_type=mm.Cleaned,
        start_to_close_timeout=_s(120.0),
        schedule_to_close_timeout=_s(240.0),
        heartbeat_timeout=_s(30.0),
        retry_policy=_TWICE,
        summary=f"clean up {batch.count} anomalies",
    )
    return result


async def finish_pass(request: mm.FinishPass) -> float:
    """One statement in PostgreSQL."""
    result: float = await workflow.execute_activity(
        "finish_pass",
        request,
        task_queue=BULK_QUEUE,
        result_type=float,
        start_to_close_timeout=_s(15.0),
        schedule_to_close_timeout=_s(60.0),
        retry_policy=_PATIENTLY,
        summary="write down what came of the pass",
    )
    return result


def failure_type(error: FailureError) -> str:
    """The code that an activity failed with; '' if it failed otherwise."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    return root.type or "" if isinstance(root, ApplicationError) else ""


def cause(error: FailureError) -> str:
    """What went wrong in an activity, in one short line."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    kind = root.type if isinstance(root, ApplicationError) and root.type else type(root).__name__
    return f"{kind}: {root}"[:200]


with workflow.unsafe.imports_passed_through():
    from workflows.names import BULK_QUEUE
    from workflows.rollout import messages as rm


async def look_at_release(request: rm.LookAtRelease) -> rm.ReleaseLook:
    """An update of the pool's workflow, a listing of the launcher and a page of Valkey."""
    result: rm.ReleaseLook = await workflow.execute_activity(
        "look_at_release",
        request,
        task_queue=BULK_QUEUE,
        result_type=rm.ReleaseLook,
        start_to_close_timeout=timedelta(seconds=20),
        schedule_to_close_timeout=timedelta(seconds=60),
        retry_policy=_TWICE,
        summary=f"how many workers are of version {request.release.version or 'of the settings'}?",
    )
    return result


async def retire_workers(request: rm.RetireWorkers) -> int:
    """Some stops beside each other, each with the grace of a logout. A repeat ends the same workers."""
    result: int = await workflow.execute_activity(
        "retire_workers",
        request,
        task_queue=BULK_QUEUE,
        result_type=int,
        start_to_close_timeout=timedelta(seconds=60),
        schedule_to_close_timeout=timedelta(seconds=130),
        heartbeat_timeout=timedelta(seconds=10),
        retry_policy=_TWICE,
        summary=f"end {request.count} free workers of other versions",
    )
    return result


async def ask_to_move(request: rm.AskToMove) -> int:
    """A signal a user, some at a time."""
    result: int = await workflow.execute_activity(
        "ask_to_move",
        request,
        task_queue=BULK_QUEUE,
        result_type=int,
        start_to_close_timeout=timedelta(seconds=60),
        schedule_to_close_timeout=timedelta(seconds=130),
        heartbeat_timeout=timedelta(seconds=10),
        retry_policy=_TWICE,
        summary="ask the users of other versions to move",
    )
    return result


async def tell_rollout(request: rm.TellRollout) -> None:
    """One row of the audit trail."""
    await workflow.execute_activity(
        "tell_rollout",
        request,
        task_queue=BULK_QUEUE,
        start_to_close_timeout=timedelta(seconds=15),
        schedule_to_close_timeout=timedelta(hours=1),
        retry_policy=_SLOWLY,
        summary=f"the rollout {request.event}",
    )


with workflow.unsafe.imports_passed_through():
    from workflows.morning import messages as mo
    from workflows.names import BULK_QUEUE


async def plan_morning(request: mo.PlanMorning) -> mo.MorningPlan:
    """One count over the orders' index: seconds for millions of orders."""
    result: mo.MorningPlan = await workflow.execute_activity(
        "plan_morning",
        request,
        task_queue=BULK_QUEUE,
        result_type=mo.MorningPlan,
        start_to_close_timeout=timedelta(seconds=30),
        schedule_to_close_timeout=timedelta(minutes=30),
        retry_policy=_PATIENTLY,
        summary="is it a trading day, and who traded of late?",
    )
    return result


async def recent_users(request: mo.RecentUsers) -> list[str]:
    """One page of an index."""
    result: list[str] = await workflow.execute_activity(
        "recent_users",
        request,
        task_queue=BULK_QUEUE,
        result_type=list[str],
        start_to_close_timeout=timedelta(seconds=30),
        schedule_to_close_timeout=timedelta(minutes=30),
        retry_policy=_PATIENTLY,
        summary=f"users after {request.after!r}",
    )
    return result


async def connect_user(request: mo.ConnectUser) -> mo.Connected:
    """A claim and a login: the caller's own limit is 50 s with the default settings."""
    result: mo.Connected = await workflow.execute_activity(
        "connect_user",
        request,
        task_queue=BULK_QUEUE,
        result_type=mo.Connected,
        start_to_close_timeout=timedelta(seconds=180),
        schedule_to_close_timeout=timedelta(seconds=240),
        # It beats once a second.
        heartbeat_timeout=timedelta(seconds=10),
        retry_policy=_ONCE,
        summary=f"connect user {request.user_id}",
    )
    return result


with workflow.unsafe.imports_passed_through():
    from workflows.names import BULK_QUEUE
    from workflows.reports import messages as sm


async def plan_statements(request: sm.PlanStatements) -> sm.StatementsPlan:
    """One count over a table with a row for each user at the most."""
    result: sm.StatementsPlan = await workflow.execute_activity(
        "plan_statements",
        request,
        task_queue=BULK_QUEUE,
        result_type=sm.StatementsPlan,
        start_to_close_timeout=timedelta(seconds=30),
        schedule_to_close_timeout=timedelta(hours=12),
        retry_policy=_SLOWLY,
        summary="which day, and was it a trading day?",
    )
    return result


async def enqueue_statements(request: sm.EnqueueStatements) -> sm.StatementsPage:
    """One page of users: a look into the orders and a job for each, some ms a user."""
    result: sm.StatementsPage = await workflow.execute_activity(
        "enqueue_statements",
        request,
        task_queue=BULK_QUEUE,
        result_type=sm.StatementsPage,
        start_to_close_timeout=timedelta(minutes=5),
        schedule_to_close_timeout=timedelta(hours=12),
        # It beats once a second.
        heartbeat_timeout=timedelta(seconds=30),
        retry_policy=_SLOWLY,
        summary=f"users after {request.after!r}",
    )
    return result
