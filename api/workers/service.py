"""The API's connection to Temporal, and the starter of workers on it.

Signals to a user's workflow, updates of it, and its view.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import structlog
from temporalio.client import (
    Client,
    Interceptor,
    WorkflowExecutionStatus,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
    WorkflowUpdateStage,
)
from temporalio.exceptions import ApplicationError
from temporalio.service import RetryConfig, RPCError

from api.http.errors import NoWorker, OrchestratorUnavailable, TemporalUnavailable
from infra.settings import Settings
from infra.temporal.client import RPC_TIMEOUT, temporal_errors
from infra.temporal.connection import open_client
from infra.temporal.starter import RUN_CLOSED_TYPES
from worker_runtime.protocol.errors import BerthError, LoginRejected, from_code
from workflows.names import user_worker_id
from workflows.user_worker.messages import ReloadResult, UserWorkerView

#: One short repeat inside the SDK (a connection that broke while idle), then the truth at once. The
#: SDK's default would hide an outage for 10 s.
RPC_RETRY = RetryConfig(
    initial_interval_millis=20, max_interval_millis=50, max_elapsed_time_millis=300, max_retries=2
)


async def connect_temporal(settings: Settings, interceptors: Sequence[Interceptor] = ()) -> Client:
    """Returns a lazy client: the API starts while Temporal is down, and connects with its first
    call."""
    return await open_client(
        settings,
        lazy=True,
        retry_config=RPC_RETRY,
        connect_timeout=RPC_TIMEOUT,
        interceptors=interceptors,
    )


@dataclass(frozen=True, eq=False)
class WorkerControl:
    client: Client

    async def require_worker(self, user_id: str) -> None:
        """Raises `NoWorker` if the user's workflow does not run, and `TemporalUnavailable`."""
        handle = self.client.get_workflow_handle(user_worker_id(user_id))
        with temporal_errors(missing=NoWorker(), server_only=True):
            description = await handle.describe(rpc_timeout=RPC_TIMEOUT)
        if description.status is not WorkflowExecutionStatus.RUNNING:
            raise NoWorker

    async def signal(self, user_id: str, name: str, *args: object) -> None:
        """Raises `NoWorker`, `TemporalUnavailable`."""
        handle = self.client.get_workflow_handle(user_worker_id(user_id))
        with temporal_errors(missing=NoWorker(), server_only=True):
            await handle.signal(name, args=args, rpc_timeout=RPC_TIMEOUT)

    async def signal_reload(self, user_id: str) -> bool:
        """Asks for a reload of credentials; False: no worker, or no Temporal. Then what is stored
        counts from the next start of a worker."""
        try:
            await self.signal(user_id, "reload_credentials")
        except BerthError as error:
            structlog.get_logger().info("reload_not_signalled", user=user_id, code=error.code)
            return False
        return True

    async def reload_credentials_now(self, user_id: str, wait: float) -> str | None:
        """Reloads and returns what came of it, in words; None if it takes longer than `wait`
        seconds.

        Raises what the worker answered (`LoginRejected` …), `NoWorker`, `TemporalUnavailable`, and
        `OrchestratorUnavailable` when nobody took the update in time: then nothing was done.
        """
        handle = self.client.get_workflow_handle(user_worker_id(user_id))
        until = time.monotonic() + wait
        accepted = False
        try:
            with temporal_errors(missing=NoWorker()):
                async with asyncio.timeout(max(wait, RPC_TIMEOUT.total_seconds())):
                    update = await handle.start_update(
                        "reload_credentials_now",
                        wait_for_stage=WorkflowUpdateStage.ACCEPTED,
                        result_type=ReloadResult,
                    )
                accepted = True
                async with asyncio.timeout(until - time.monotonic()):
                    result = await update.result()
        except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError):
            if accepted:
                return None
            raise OrchestratorUnavailable from None
        except WorkflowUpdateFailedError as failed:
            cause = failed.cause
            if isinstance(cause, ApplicationError) and cause.type not in RUN_CLOSED_TYPES:
                raise from_code(cause.type or "", cause.message) from None
            raise NoWorker(
                "The worker has ended in the meantime. The next one loads the credentials."
            ) from None
        if result.ok:
            return result.failure_detail or "reloaded"
        raise _reload_error(result)

    async def view(self, user_id: str) -> UserWorkerView | None:
        """Returns what the workflow shows, also after its end; None if the user never had one.

        Raises `TemporalUnavailable`, `OrchestratorUnavailable` when nobody answers the query, and
        `WorkflowPaused`.
        """
        handle = self.client.get_workflow_handle(user_worker_id(user_id))
        with suppress(NoWorker), temporal_errors(missing=NoWorker()):
            view: UserWorkerView = await handle.query(
                "view", result_type=UserWorkerView, rpc_timeout=RPC_TIMEOUT
            )
            return view
        return None

    async def check(self, timeout: float) -> None:
        """Raises `TemporalUnavailable` unless the server answers within `timeout` seconds."""
        try:
            await self.client.service_client.check_health(timeout=timedelta(seconds=timeout))
        except (RPCError, RuntimeError):
            raise TemporalUnavailable from None


def _reload_error(result: ReloadResult) -> BerthError:
    detail = result.failure_detail
    if result.failure_code == LoginRejected.code:
        detail = f"{detail or LoginRejected.title()}; the worker keeps the session it had"
    return from_code(result.failure_code, detail)
