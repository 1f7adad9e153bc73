"""Makes a user's worker Active: update-with-start of the user's workflow."""

import asyncio
import time
from contextlib import suppress
from uuid import uuid4

import structlog
from temporalio.client import (
    Client,
    WithStartWorkflowOperation,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from infra.settings import Settings
from infra.tasks import SharedTasks
from infra.temporal.client import (
    RPC_TIMEOUT,
    UNREACHABLE_CODES,
    OrchestratorUnavailable,
    TemporalUnavailable,
    error_of_rpc,
)
from worker_runtime.protocol.errors import (
    BerthError,
    Draining,
    MemoryShort,
    PoolExhausted,
    WorkerUnavailable,
    from_code,
)
from workflows.names import LIFECYCLE_QUEUE, USER_WORKER, user_worker_id
from workflows.user_worker.messages import (
    ActiveWorker,
    EnsureActive,
    UserWorkerInput,
    UserWorkerSettings,
)

#: Seconds for which an `ensure_active` that was under way is repeated after its connection broke. A
#: restarted Temporal was back after 0.45 s.
MAX_OUTAGE_S = 5.0

#: A call that failed after more seconds than these had reached Temporal, whatever its status: a
#: refused connection fails within 25 ms, repeats included.
MIN_CALL_UNDER_WAY_S = 0.15

#: The run had closed, or closed before it took the update (ABORTED: "workflow update was aborted by
#: closing workflow").
_RUN_CLOSED = {RPCStatusCode.NOT_FOUND, RPCStatusCode.ABORTED}
#: The workflow's task failed or timed out on its orchestrator (the server's `WorkflowNotReady`),
#: and the server tries it again: seen once in 1,200 starts on a machine with 60 waiting processes a
#: core.
_NOT_READY = {RPCStatusCode.FAILED_PRECONDITION}
#: Failure types by which the server or the SDK says that the run closed under the update.
RUN_CLOSED_TYPES = {"AcceptedUpdateCompletedWorkflow", "WorkflowExecutionCompleted"}


log = structlog.get_logger()


class _RetryStart(Exception):
    """The same call will succeed a moment later."""

    def __init__(self, reason: BerthError) -> None:
        super().__init__(reason.detail)
        self.reason = reason


class _TemporalOutage(Exception):
    """Temporal could not be reached; `under_way`: it could when the call was made."""

    def __init__(self, under_way: bool) -> None:
        super().__init__(under_way)
        self.under_way = under_way


class WorkerStarter:
    """Calls `ensure_active`, once per user at a time: callers in between share the call."""

    def __init__(self, client: Client, settings: Settings, *, pool: str = "") -> None:
        """Claims workers from `pool`; from the settings' pool if it is ''."""
        self._client = client
        self._pool = pool or settings.pool
        self._settings = UserWorkerSettings(
            idle_timeout=settings.idle_timeout,
            connect_attempts=settings.connect_attempts,
            connect_timeout=settings.connect_timeout,
            claim_timeout=settings.claim_timeout,
            launch_timeout=settings.launch_timeout,
        )
        self._deadline = settings.claim_timeout + settings.launch_timeout + settings.connect_timeout
        self._running: SharedTasks[str, ActiveWorker] = SharedTasks(_log_failure)

    def ensure(self, user_id: str, *, check_worker: bool) -> asyncio.Task[ActiveWorker]:
        """Returns the task that makes the user's worker Active. Callers wait for it; they must not
        cancel it.

        `check_worker`: do not believe an Active state, but check the worker first. It is ignored
        while another caller's start is under way.

        The task fails with a `BerthError`: the reason the workflow gave, `TemporalUnavailable` at
        once when Temporal is down, `WorkerUnavailable` after the timeouts of claim, launch and
        connect together.
        """
        return self._running.join(user_id, lambda: self._ensure(user_id, check_worker))

    async def ensure_active(self, user_id: str, stay_until: float = 0.0) -> None:
        """Returns when the user's worker is Active; it does not count as idle before `stay_until`
        (Unix seconds). Raises as `ensure` does."""
        if stay_until:  # no other caller's
            await self._ensure(user_id, True, stay_until)
            return
        # Shielded: another caller may wait for the same task.
        await asyncio.shield(self.ensure(user_id, check_worker=True))

    async def adopt(self, user_id: str, pool: str) -> None:
        """Starts the user's workflow for the worker that the user has; one that runs continues.

        Without such a worker it ends at once. Raises `RPCError`.
        """
        given = UserWorkerInput(user_id=user_id, pool=pool, settings=self._settings, adopt=True)
        await self._client.start_workflow(
            USER_WORKER,
            given,
            id=user_worker_id(user_id),
            task_queue=LIFECYCLE_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            static_summary=f"worker of user {user_id}",
            rpc_timeout=RPC_TIMEOUT,
        )

    async def close(self) -> None:
        """Cancels the calls under way; the workflows continue without us."""
        await self._running.close()

    async def _ensure(
        self, user_id: str, check_worker: bool, stay_until: float = 0.0
    ) -> ActiveWorker:
        began = time.monotonic()
        down_since: float | None = None
        pause = 0.02
        reason: BerthError = WorkerUnavailable()
        while (seconds_left := began + self._deadline - time.monotonic()) > 0:
            asked = time.monotonic()
            try:
                async with asyncio.timeout(seconds_left):
                    active = await self._call(user_id, check_worker, stay_until)
                ms = round((time.monotonic() - began) * 1000, 1)
                log.info("ensure_active", user=user_id, worker=active.worker.worker_id, ms=ms)
                return active
            except TimeoutError:
                break
            except _RetryStart as again:
                reason, down_since = again.reason, None
            except _TemporalOutage as outage:
                now = time.monotonic()
                if down_since is None and (outage.under_way or now - asked > MIN_CALL_UNDER_WAY_S):
                    down_since = now
                if down_since is None or now - down_since > MAX_OUTAGE_S:
                    raise TemporalUnavailable from None
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.5)
        raise WorkerUnavailable(f"no worker within {self._deadline:.0f} s ({reason.detail})")

    async def _call(self, user_id: str, check_worker: bool, stay_until: float) -> ActiveWorker:
        start: WithStartWorkflowOperation[object, object] = WithStartWorkflowOperation(
            USER_WORKER,
            UserWorkerInput(user_id=user_id, pool=self._pool, settings=self._settings),
            id=user_worker_id(user_id),
            task_queue=LIFECYCLE_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            static_summary=f"worker of user {user_id}",
        )
        # A new update id each time: idempotence comes from the user's state (ids dedupe within a
        # run only).
        request_id = uuid4().hex
        try:
            active: ActiveWorker = await self._client.execute_update_with_start_workflow(
                "ensure_active",
                EnsureActive(
                    request_id=request_id, mark_missing=check_worker, stay_until=stay_until
                ),
                start_workflow_operation=start,
                id=request_id,
                result_type=ActiveWorker,
            )
        except WorkflowUpdateFailedError as failed:
            raise _error_of_update(failed) from None
        except WorkflowUpdateRPCTimeoutOrCancelledError:
            raise _RetryStart(WorkerUnavailable("the update took too long")) from None
        except RPCError as error:
            if error.status in _RUN_CLOSED:
                raise _RetryStart(WorkerUnavailable("the run closed under the update")) from None
            if error.status in _NOT_READY:
                raise _RetryStart(OrchestratorUnavailable(error.message)) from None
            if error.status in UNREACHABLE_CODES:
                raise _TemporalOutage(error.status == RPCStatusCode.UNKNOWN) from None
            raise error_of_rpc(error) from None
        except RuntimeError:  # what a lazy client raises when its first connect fails
            raise _TemporalOutage(under_way=False) from None
        finally:
            await _retrieve_start_result(start)
        return active


def _log_failure(user_id: str, error: BaseException) -> None:
    if isinstance(error, BerthError):
        log.warning("ensure_active_failed", user=user_id, code=error.code, detail=error.detail)
    else:
        log.error("ensure_active_crashed", user=user_id, exc_info=error)


async def _retrieve_start_result(start: WithStartWorkflowOperation[object, object]) -> None:
    """Looks at the start's own result, so that asyncio does not report its error as never
    retrieved."""
    with suppress(Exception):
        async with asyncio.timeout(0):
            await start.workflow_handle()


def _error_of_update(failed: WorkflowUpdateFailedError) -> Exception:
    cause = failed.cause
    if not isinstance(cause, ApplicationError):
        return _RetryStart(WorkerUnavailable("the run closed under the update"))
    if cause.type in RUN_CLOSED_TYPES:
        return _RetryStart(WorkerUnavailable(cause.message))
    error = from_code(cause.type or "", cause.message)
    if isinstance(error, (PoolExhausted, MemoryShort)):
        error.retry_after = error.RETRY_AFTER_S
    if type(error) is BerthError and not cause.non_retryable:
        # A code of the orchestrator's own, such as a launcher's: here it only means that no worker
        # came.
        error = WorkerUnavailable(f"{cause.type}: {cause.message}")
    return _RetryStart(error) if isinstance(error, Draining) else error
