"""Checks of a worker in service, and credentials for its session.

Each check returns a `WorkerDecision`, which the workflow carries out.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from worker_runtime.protocol import errors
    from workflows.entity import wait_until
    from workflows.user_worker.messages import (
        WAS_GONE,
        CheckWorker,
        ReloadRequest,
        ReloadResult,
        WorkerHealth,
        WorkerState,
    )
    from workflows.user_worker.state import CHECK_INTERVAL_S, MAX_RELOAD_ATTEMPTS

from workflows import calls
from workflows.user_worker.lifecycle import (
    ClaimWorkerGone,
    SharedFuture,
    StartFailed,
    WorkerLifecycle,
    WorkOutdated,
)

#: Longest pause, in seconds, between two tries to give a fresh session its credentials.
MAX_RESTORE_RETRY_INTERVAL_S = 60.0


@dataclass(frozen=True, kw_only=True)
class WorkerDecision:
    """Says what must happen to the worker; with all fields empty it stays."""

    #: It is dead or useless, for this reason: another one takes its place.
    replace: str = ""
    #: The infrastructure caused the need to replace it.
    outage: bool = False
    #: Its assignment is over, and the user may have another worker: that one is adopted.
    over: bool = False
    #: It cannot get its broker back, for this reason: it ends, and so does the run.
    give_up: str = ""
    #: Nobody used it for the idle timeout.
    idle: bool = False
    #: It is replaced by one of another version now.
    move: bool = False


KEEP_WORKER = WorkerDecision()
#: The run was reset to an event before the end of its worker.
ASSIGNMENT_OVER = WorkerDecision(replace="its assignment is over", over=True)


async def check_suspect(life: WorkerLifecycle) -> WorkerDecision:
    """Checks a worker whose mark or owner key somebody found missing.

    A running worker keeps its user, unless the watcher saw its mark expire and the mark is still
    missing under the same generation of Valkey: then it is cut off or frozen, and useless even if
    the launcher still lists it. With an order in hand it stays until its lease has ended. A check
    that fails changes nothing (no-healthy-kill).
    """
    unmarked, life.unmarked = life.unmarked, None
    life.suspect, unsure, life.unsure = False, life.unsure, False
    health = await _read_health(life)
    if not life.state.serving:
        return KEEP_WORKER
    if health is not None and health.over:
        return ASSIGNMENT_OVER
    reconnects = unsure and health is not None and health.worker_state == WorkerState.RECONNECTING
    if reconnects and life.state.state == WorkerState.ACTIVE:
        life.state = life.state.reconnecting("it was reconnecting when it was adopted", life.now())
    if health is not None and health.running is False:
        return WorkerDecision(replace=WAS_GONE, outage=health.unreported)
    if health is None or health.marked or health.in_flight:
        unmarked = None  # it is there, or must not be stopped yet, or nobody knows
    if health and unmarked and health.generation == unmarked.generation:
        return WorkerDecision(replace="the worker's mark expired", outage=unmarked.outage)
    if not life.ending:
        life.settle_start(life.answer())
    return KEEP_WORKER


async def check_deadline(life: WorkerLifecycle) -> WorkerDecision:
    """Decides at the deadline of a serving worker whether it has been idle long enough to end."""
    health = await _read_health(life)
    state, now = life.state, life.now()
    if not state.serving:
        return KEEP_WORKER
    if health is not None and health.over:
        return ASSIGNMENT_OVER
    last = max(state.last_activity, health.last_activity if health else 0.0)
    # In this order: without a reading, or without the mark of a worker that may run, nobody knows
    # when it was used last, so it stays. An idle one ends even if it is gone already: its user
    # needs no other. Only then is one that is gone replaced; what comes last keeps the worker.
    if health is None or (not health.marked and health.running is not False):
        life.state = state.checked(now + CHECK_INTERVAL_S, now)
    elif state.idle_at(last) <= now:
        return WorkerDecision(idle=True)
    elif health.running is False:
        return WorkerDecision(replace=WAS_GONE, outage=health.unreported)
    elif state.state == WorkerState.RECONNECTING and health.worker_state == WorkerState.ACTIVE:
        life.state = state.reconnected(now).used(last, now)  # its event was lost with Valkey's data
    elif state.state == WorkerState.RECONNECTING:
        life.state = state.checked(min(now + CHECK_INTERVAL_S, state.idle_at(last)), now)
    else:
        life.state = state.used(last, now)
    return KEEP_WORKER


async def check_quiet(life: WorkerLifecycle) -> WorkerDecision:
    """Decides whether a worker of another version is replaced now: it is quiet, or its time is
    up."""
    health = await _read_health(life)
    state, now = life.state, life.now()
    if not state.serving or not state.move_at:
        return KEEP_WORKER
    if health is not None and health.over:
        return ASSIGNMENT_OVER
    if now >= state.move_by:
        return WorkerDecision(move=True)
    if health is None or not health.marked:
        life.state = state.move_later(now + state.move_quiet, now)
        return KEEP_WORKER
    last = max(state.last_activity, health.last_activity)
    if state.state == WorkerState.ACTIVE and last + state.move_quiet <= now:
        return WorkerDecision(move=True)
    life.state = state.move_later(last + state.move_quiet, now)
    return KEEP_WORKER


async def _read_health(life: WorkerLifecycle) -> WorkerHealth | None:
    """Returns the worker's health; None if it could not be read."""
    state = life.state
    if state.worker is None:
        return None
    try:
        return await calls.check_worker(CheckWorker(user_id=state.user_id, worker=state.worker))
    except FailureError as error:
        life.note_cancellation(error)
        return None


async def restore_credentials(life: WorkerLifecycle) -> WorkerDecision:
    """Tries once to give a fresh session process its credentials, and pauses if that failed.

    A worker that does not answer is replaced after `MAX_RELOAD_ATTEMPTS`. While the activity itself
    fails, because PostgreSQL or Valkey is away, the worker stays and this is tried again
    (no-healthy-kill).
    """
    await life.renew_within_step(life.state.note or "the session's credentials are not given yet")
    number = life.state.replacements
    life.state = life.state.postponed(life.now() + life.state.settings.connect_timeout + 10.0)
    life.show()
    try:
        result = await _reload(
            life, "session replaced", outdated=lambda: life.state.replacements != number
        )
    except (ClaimWorkerGone, StartFailed, WorkOutdated):
        return KEEP_WORKER  # the next step sees why
    except FailureError as error:
        life.restore_failures += 1
        life.state = life.state.with_note(f"credentials not given: {calls.cause(error)}")
        await _pause_restore(
            life, min(2.0 ** min(life.restore_failures - 1, 10), MAX_RESTORE_RETRY_INTERVAL_S)
        )
        return KEEP_WORKER
    life.restore_failures = 0
    return await _decide_restored(life, result)


async def _decide_restored(life: WorkerLifecycle, result: ReloadResult) -> WorkerDecision:
    state, why = life.state, f"{result.failure_code}: {result.failure_detail}"
    error = errors.from_code(result.failure_code)
    if not state.serving or not state.needs_credentials:  # CONNECTED came meanwhile
        return KEEP_WORKER
    if result.ok:
        life.state = state.reconnected(life.now()).with_note("")
    elif error.retryable and isinstance(error, errors.BrokerError):
        # The worker retries by itself and sends CONNECTED.
        life.state = state.provided().degraded(why, life.now())
    elif error.retryable or isinstance(error, errors.InvalidSeal):
        # The credentials were sealed to the key of its predecessor.
        life.state = state.not_answered().with_note(f"credentials not given: {why}")
        if life.state.unanswered >= MAX_RELOAD_ATTEMPTS:
            return WorkerDecision(replace="the replaced session did not take its credentials")
        await _pause_restore(life, float(life.state.unanswered))
    else:
        return WorkerDecision(give_up=why)
    return KEEP_WORKER


async def _pause_restore(life: WorkerLifecycle, seconds: float) -> None:
    """Waits until `seconds` have passed or something more urgent happens."""
    number = life.state.replacements

    def urgent() -> bool:
        moved = not life.state.needs_credentials or life.state.replacements != number
        return bool(moved or life.suspect or life.unmarked or life.interrupted)

    life.state = life.state.postponed(life.now() + seconds)
    life.show()
    await wait_until(urgent, seconds, "until the session is given its credentials again")


async def serve_reload(life: WorkerLifecycle, ticket: SharedFuture[ReloadResult]) -> None:
    """Gives the running worker new credentials. If the broker refuses them, the old session stays
    up."""
    cause, life.reload, life.reload_cause = life.reload_cause, None, ""
    if not life.state.serving or life.state.worker is None:
        ticket.settle(ReloadResult(ok=True, failure_detail="no worker: the next one loads them"))
        return
    code = errors.WorkerUnavailable.code
    try:
        result = await _reload(life, cause)
    except asyncio.CancelledError:  # callers that still wait would keep the run from closing
        ticket.settle(
            ReloadResult(ok=False, failure_code=code, failure_detail="the run was cancelled")
        )
        raise
    except (FailureError, ClaimWorkerGone, StartFailed) as error:
        why = calls.cause(error) if isinstance(error, FailureError) else str(error)
        result = ReloadResult(ok=False, failure_code=code, failure_detail=why)
    refused = f"credentials refused: {result.failure_code}: {result.failure_detail}"
    life.state = life.state.with_note("" if result.ok else refused)
    ticket.settle(result)


async def _reload(
    life: WorkerLifecycle, why: str, outdated: Callable[[], bool] = lambda: False
) -> ReloadResult:
    state = life.state
    if state.worker is None:
        raise ClaimWorkerGone("no worker")
    request = ReloadRequest(
        user_id=state.user_id,
        worker=state.worker,
        reload_id=str(workflow.uuid4()),
        timeout=state.settings.connect_timeout,
        cause=why,
    )
    return await life.unless_interrupted(calls.reload_credentials(request), outdated)
