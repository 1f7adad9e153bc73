"""Every activity call of the workflows, once: queue, timeouts, retries, and the reason for each number.

A call that failed raises a `FailureError`: `ActivityError` around the cause for a regular activity, the
cause itself for a local one. Activities are named by strings: this room must not import theirs. All of
them are safe to run twice. Durations are seconds. No call retries for ever: what a time limit ends, the
workflow's state shows.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from workflows import messages as m
    from workflows.names import LAUNCH_QUEUE, LIFECYCLE_QUEUE
    from workflows.user_worker_state import STOP_TIMEOUT

#: An activity that stopped heartbeating is started again elsewhere after this long. Each of ours beats
#: once a second, so three beats may be late on a starved host.
_HEARTBEAT = timedelta(seconds=5)
#: What a lookup or a script may take before it counts as lost: Valkey's socket timeout is 5 s.
_LOOK = timedelta(seconds=8)

#: A person waits: the first repeat comes quickly. Measured: a local retry costs no server timer.
_QUICKLY = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=2))
#: Nobody waits, or the other side is down and must not be hammered.
_PATIENTLY = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=10))
#: A local activity that waits for its next try keeps the workflow task open: signals, queries and the
#: shutdown of the orchestrator would wait with it. Longer pauses are timers of the server instead.
_LOCAL_PAUSE = timedelta(milliseconds=500)
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


async def count_pool(request: m.CountPool) -> m.PoolCount:
    """A local activity: a round trip to the launcher and two to Valkey, after every claim.

    One attempt: the pool looks again by itself, and a retrying local activity holds up its signals.
    """
    result: m.PoolCount = await workflow.execute_local_activity(
        "count_pool",
        request,
        result_type=m.PoolCount,
        start_to_close_timeout=_LOOK,
        retry_policy=_ONCE,
        summary="count the pool",
    )
    return result


async def launch_pool_worker(request: m.LaunchPoolWorker) -> m.Launched:
    """Returns when the worker is ready. One attempt: the pool backs off and takes a new token."""
    result: m.Launched = await workflow.execute_activity(
        "launch_pool_worker",
        request,
        task_queue=LAUNCH_QUEUE,
        result_type=m.Launched,
        schedule_to_close_timeout=_s(request.timeout + 40.0),
        # From the start, not from the queue: the queue's rate limit may hold a burst back.
        start_to_close_timeout=_s(request.timeout + 10.0),
        heartbeat_timeout=_HEARTBEAT,
        retry_policy=_ONCE,
        summary="launch a pool worker",
    )
    return result


async def shrink_pool(request: m.StopPoolWorkers) -> int:
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


def cause(error: FailureError) -> str:
    """What went wrong in an activity, in one short line."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    kind = root.type if isinstance(root, ApplicationError) and root.type else type(root).__name__
    return f"{kind}: {root}"[:200]
