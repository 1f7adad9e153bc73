"""The start of a user's worker: claim or launch, then log in, with limited tries for each."""

from dataclasses import replace

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from worker_runtime.protocol import errors
    from workflows.user_worker.messages import (
        ClaimRequest,
        ClaimResult,
        ClaimStatus,
        ConnectRequest,
        LaunchForClaim,
        WorkerState,
    )

from workflows import calls
from workflows.user_worker.lifecycle import ClaimWorkerGone, StartFailed, WorkerLifecycle

#: Claim ids tried for one start, each after its worker turned out dead or unusable.
MAX_CLAIM_ATTEMPTS = 3


class CrashedTooOften(Exception):
    """The user's workers crashed so often that a person has to look."""


class NothingToAdopt(Exception):
    """The user has no worker to adopt."""


class _StartHeldBack(Exception):
    """Workers of the user's earlier runs crashed recently; nothing was claimed yet."""


class _NoWorker(Exception):
    """The claim was to adopt a worker only, and the user has none."""


async def start_worker(life: WorkerLifecycle, *, adopt_only: bool = False) -> None:
    """Returns when the user is Active. After `StartFailed` the caller has to stop the worker, if
    there is one.

    With `adopt_only`, raises `NothingToAdopt` if the user has no worker and no caller has asked for
    one meanwhile.
    """
    why, tries = "", 0
    failed_versions: tuple[str, ...] = ()
    while tries < MAX_CLAIM_ATTEMPTS:
        adopts = adopt_only and life.start is None
        if tries and adopts:
            raise NothingToAdopt
        life.state = life.state.claimed(str(workflow.uuid4()), life.now())
        try:
            result = await _connect(life, await _claim(life, failed_versions, adopt_only=adopts))
        except _NoWorker:
            if life.start is None:
                raise NothingToAdopt from None
            life.state = life.state.failed("no worker to adopt", life.now())
            continue
        except _StartHeldBack:
            await _wait_out_backoff(life)
            continue
        except ClaimWorkerGone as gone:
            why, now = str(gone), life.now()
            if life.state.worker is not None and life.state.worker.version:
                failed_versions = (*failed_versions, life.state.worker.version)
            # A worker that died during its login counts like one that died in service. Else a
            # library that crashes there would cost three logins an order, for ever.
            crashed = (
                life.lost
                and life.state.state in (WorkerState.CONNECTING, WorkerState.FAILED)
                and not life.ended_as_planned
            )
            life.state = life.state.crashed(why, now) if crashed else life.state.failed(why, now)
            life.show()
            await life.confirm_stop(why, grace=0.0, crashed=crashed)
            if life.shutdown:
                break
            if crashed:
                await _wait_out_backoff(life)
            tries += 1
            continue
        now = life.now()
        life.state = life.state.active(result.claimed_at or now, result.connected_at or now, now)
        return
    raise StartFailed(errors.WorkerUnavailable.code, why, retryable=True)


async def _wait_out_backoff(life: WorkerLifecycle) -> None:
    """Waits for the rest of the pause after the last crash, even if that was in an earlier run of
    the workflow."""
    if life.state.crashes_too_often:
        raise CrashedTooOften
    remaining = life.state.retry_at - life.now()
    if remaining > 0:
        life.show()
        await life.pause(remaining, "until a user whose workers crashed starts again")


async def _claim(
    life: WorkerLifecycle, failed_versions: tuple[str, ...], *, adopt_only: bool = False
) -> ClaimResult:
    """Gets a worker for the present claim id: the one that the user has, one of the pool, or a
    launched one."""
    state = life.state
    result = await _try_claim(life, failed_versions, adopt_only=adopt_only)
    if result.status == ClaimStatus.NONE:
        raise _NoWorker
    if result.status == ClaimStatus.ADOPTED and result.worker is not None:
        life.adopted(result.worker, result.crashes)
        return result
    if result.status == ClaimStatus.EMPTY:
        life.show()
        launch = LaunchForClaim(
            user_id=state.user_id,
            pool=state.pool,
            claim_id=state.claim_id,
            timeout=state.settings.launch_timeout,
            failed=failed_versions,
        )
        try:
            await life.unless_interrupted(calls.launch_for_claim(launch))
        except FailureError as error:
            if calls.failure_type(error) == errors.PoolExhausted.code:
                why = calls.cause(error).partition(": ")[2]
                raise StartFailed(errors.PoolExhausted.code, why, retryable=True) from error
            raise ClaimWorkerGone(f"launch: {calls.cause(error)}") from error
        result = await _try_claim(life, failed_versions)
    if result.worker is not None:
        life.assigned(result.worker)
        if result.worker.warm:
            life.signal_pool(result.worker)
    if result.status in (ClaimStatus.EMPTY, ClaimStatus.GONE):
        raise ClaimWorkerGone(result.failure_detail or "the claimed worker is gone")
    return result


async def _try_claim(
    life: WorkerLifecycle, failed_versions: tuple[str, ...], *, adopt_only: bool = False
) -> ClaimResult:
    state = life.state
    request = ClaimRequest(
        user_id=state.user_id,
        pool=state.pool,
        claim_id=state.claim_id,
        connect_timeout=state.settings.connect_timeout,
        check_crashes=not state.crashes_known,
        failed=failed_versions,
        adopt_only=adopt_only,
    )
    try:
        result = await calls.claim_worker(request, state.settings.claim_timeout)
    except FailureError as error:
        life.note_cancellation(error)
        if calls.failure_type(error) == errors.MemoryShort.code:
            why = errors.MemoryShort.title()
            raise StartFailed(errors.MemoryShort.code, why, retryable=True) from error
        why = f"claim: {calls.cause(error)}"
        raise StartFailed(errors.WorkerUnavailable.code, why, retryable=True) from error
    life.state = life.state.answered()
    if result.status == ClaimStatus.BACK_OFF:
        life.state = life.state.backs_off(result.crashes, life.now())
        raise _StartHeldBack
    return result


async def _connect(life: WorkerLifecycle, result: ClaimResult) -> ClaimResult:
    """Waits for the login, and repeats one that may succeed."""
    attempt = 1
    life.state = life.state.connecting(attempt, life.now())
    if result.status == ClaimStatus.ADOPTED:
        connected = result.connected_at > 0.0
        result = replace(
            result,
            status=ClaimStatus.ACTIVE if connected else ClaimStatus.CONNECTING,
        )
    try:
        if result.status == ClaimStatus.CONNECTING:
            life.show()
            result = await life.unless_interrupted(
                calls.await_connected(_connect_request(life, attempt))
            )
        while result.status != ClaimStatus.ACTIVE:
            if result.status == ClaimStatus.GONE:
                raise ClaimWorkerGone(
                    result.failure_detail or "the worker went away while it connected"
                )
            if not result.retryable or attempt >= life.state.settings.connect_attempts:
                raise StartFailed(
                    result.failure_code, result.failure_detail, retryable=result.retryable
                )
            await _wait_between_logins(life, result, attempt)
            attempt += 1
            life.state = life.state.connecting(attempt, life.now())
            life.show()
            result = await life.unless_interrupted(
                calls.connect_again(_connect_request(life, attempt))
            )
    except FailureError as error:
        raise ClaimWorkerGone(f"connect: {calls.cause(error)}") from error
    return result


async def _wait_between_logins(life: WorkerLifecycle, result: ClaimResult, attempt: int) -> None:
    """Waits 1, 2, 4 … s between two logins."""
    backoff = float(2 ** (attempt - 1))
    why = f"{result.failure_code}: {result.failure_detail}"
    life.state = life.state.failed(why, life.now(), backoff=backoff)
    life.show()
    await life.pause(backoff, "until the next broker login")


def _connect_request(life: WorkerLifecycle, attempt: int) -> ConnectRequest:
    state = life.state
    if state.worker is None:
        raise ClaimWorkerGone("the claim has no worker")
    return ConnectRequest(
        user_id=state.user_id,
        worker=state.worker,
        attempt=attempt,
        timeout=state.settings.connect_timeout,
    )
