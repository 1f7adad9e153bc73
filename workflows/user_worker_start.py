"""How a user gets a connected worker: claim or launch, then log in, with bounded tries for each."""

from __future__ import annotations

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from worker_runtime.protocol import errors
    from workflows import messages as m
    from workflows.user_worker_state import LAUNCH_TIMEOUT

from workflows import calls
from workflows.calls import cause
from workflows.user_worker_life import Gone, Life, StartFailed

#: Claim ids tried for one start, each after its worker turned out dead or unusable.
CLAIM_TRIES = 3


async def start_worker(life: Life) -> None:
    """Ends with the user Active; raises `StartFailed`, then a worker may be left to be stopped."""
    why = ""
    for _ in range(CLAIM_TRIES):
        life.state = life.state.claimed(str(workflow.uuid4()), life.now())
        try:
            result = await _connect(life, await _claim(life))
        except Gone as gone:
            why = str(gone)
            life.state = life.state.failed(why, life.now())
            life.show()
            await life.confirm_stop(why, grace=0.0)
            if life.shutdown:
                break
            continue
        now = life.now()
        life.state = life.state.active(result.claimed_at or now, result.connected_at or now, now)
        return
    raise StartFailed(errors.WorkerUnavailable.code, why, retryable=True)


async def _claim(life: Life) -> m.ClaimResult:
    """A worker for the present claim id: from the pool, or launched."""
    state = life.state
    result = await _try_claim(life)
    if result.status == m.ClaimStatus.EMPTY:
        life.show()
        launch = m.LaunchForClaim(
            user_id=state.user_id, pool=state.pool, claim_id=state.claim_id, timeout=LAUNCH_TIMEOUT
        )
        try:
            await life.unless_interrupted(calls.launch_for_claim(launch))
        except FailureError as error:
            raise Gone(f"launch: {cause(error)}") from error
        result = await _try_claim(life)
    if result.worker is not None:
        life.state = life.state.assigned(result.worker)
        if result.worker.warm:
            life.tell_pool(result.worker)
    if result.status in (m.ClaimStatus.EMPTY, m.ClaimStatus.GONE):
        raise Gone(result.failure_detail or "the claimed worker is gone")
    return result


async def _try_claim(life: Life) -> m.ClaimResult:
    state = life.state
    request = m.ClaimRequest(
        user_id=state.user_id,
        pool=state.pool,
        claim_id=state.claim_id,
        connect_timeout=state.settings.connect_timeout,
    )
    try:
        return await calls.claim_worker(request, state.settings.claim_timeout)
    except FailureError as error:
        why = f"claim: {cause(error)}"
        raise StartFailed(errors.WorkerUnavailable.code, why, retryable=True) from error


async def _connect(life: Life, result: m.ClaimResult) -> m.ClaimResult:
    """Waits for the login, and repeats one that may succeed (W5)."""
    attempt = 1
    life.state = life.state.connecting(attempt, life.now())
    try:
        if result.status == m.ClaimStatus.CONNECTING:
            life.show()
            result = await life.unless_interrupted(calls.await_connected(_attempt(life, attempt)))
        while result.status != m.ClaimStatus.ACTIVE:
            if result.status == m.ClaimStatus.GONE:
                raise Gone(result.failure_detail or "the worker went away while it connected")
            if not result.retryable or attempt >= life.state.settings.connect_attempts:
                raise StartFailed(result.failure_code, result.failure_detail, retryable=result.retryable)
            await _back_off(life, result, attempt)
            attempt += 1
            life.state = life.state.connecting(attempt, life.now())
            life.show()
            result = await life.unless_interrupted(calls.connect_again(_attempt(life, attempt)))
    except FailureError as error:
        raise Gone(f"connect: {cause(error)}") from error
    return result


async def _back_off(life: Life, result: m.ClaimResult, attempt: int) -> None:
    """1, 2, 4 … s between two logins."""
    backoff = float(2 ** (attempt - 1))
    why = f"{result.failure_code}: {result.failure_detail}"
    life.state = life.state.failed(why, life.now(), backoff=backoff)
    life.show()
    await life.pause(backoff, "until the next broker login")


def _attempt(life: Life, attempt: int) -> m.ConnectRequest:
    state = life.state
    if state.worker is None:
        raise Gone("the claim has no worker")
    return m.ConnectRequest(
        user_id=state.user_id, worker=state.worker, attempt=attempt, timeout=state.settings.connect_timeout
    )
