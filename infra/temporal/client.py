"""Signals to workflows, and what a failed call to Temporal means."""

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import (
    Client,
    Interceptor,
    OutboundInterceptor,
    QueryWorkflowInput,
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
)
from temporalio.service import RPCError, RPCStatusCode

from worker_runtime.protocol.errors import BerthError

#: The time that a call may take that does not wait for a workflow. A busy host stands still for 2
#: to 3 s.
RPC_TIMEOUT = timedelta(seconds=5)

#: Seconds within which a process that serves a task queue polls it: a long poll takes 60.
MAX_POLL_AGE_S = 90.0

#: A connection that breaks under a call is UNKNOWN ("transport error"), one that cannot be made
#: UNAVAILABLE.
UNREACHABLE_CODES = {
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.UNKNOWN,
    RPCStatusCode.RESOURCE_EXHAUSTED,
}
#: FAILED_PRECONDITION: the server's `WorkflowNotReady`, a task of the workflow failed or was never
#: done.
_SLOW = {
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.CANCELLED,
    RPCStatusCode.FAILED_PRECONDITION,
}
#: The texts of UNAVAILABLE answers of a server that was reached and could not ask the workflow: its
#: task failed or is late, or another call holds it (`ErrBufferedQueryCleared` and
#: `ErrWorkflowBusy` in temporalio/temporal, service/history/consts).
_WORKFLOW_BUSY_TEXTS = ("buffered query cleared", "timeout locking workflow execution")
#: Answers that no repetition changes: there is no such workflow, or its id is not allowed.
_REFUSED = {RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT}

T = TypeVar("T")


class OrchestratorUnavailable(BerthError, code="ORCHESTRATOR_UNAVAILABLE", retryable=True):
    """Temporal answers, but no orchestrator took the work in time."""


class TemporalUnavailable(BerthError, code="TEMPORAL_UNAVAILABLE", retryable=True):
    """Temporal cannot be reached."""


async def signal_workflow(client: Client, workflow_id: str, signal: str, *message: object) -> bool:
    """Sends a signal; False if there is no such workflow. Raises `RPCError` when Temporal does not
    answer."""
    try:
        await client.get_workflow_handle(workflow_id).signal(
            signal, args=message, rpc_timeout=RPC_TIMEOUT
        )
    except RPCError as error:
        if error.status not in _REFUSED:
            raise
        return False
    return True


async def read_pollers(
    client: Client, queue: str, kind: TaskQueueType.ValueType
) -> dict[str, float]:
    """Returns when each process (`pid@host`) last polled a task queue, in Unix seconds. The server
    forgets one after five minutes. Raises `RPCError`."""
    answer = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
        ),
        timeout=RPC_TIMEOUT,
    )
    return {
        poller.identity: poller.last_access_time.ToMicroseconds() / 1e6 for poller in answer.pollers
    }


async def unless_missing(call: Awaitable[T]) -> T | None:
    """Returns the answer of a call; None if what it asks about does not exist. Raises other
    `RPCError`s."""
    try:
        return await call
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        return None


class WorkflowPaused(BerthError, code="WORKFLOW_PAUSED", retryable=True):
    """The workflow is paused in Temporal. Unpause it there, with `temporal workflow unpause` or in
    its UI."""


class QueryOfPausedWorkflow(RPCError):
    """A query that the server rejected since the workflow is paused."""

    def __init__(self) -> None:
        super().__init__("the workflow is paused", RPCStatusCode.FAILED_PRECONDITION, b"")


class PausedQueries(Interceptor):
    """Raises `QueryOfPausedWorkflow` where the SDK raises `ValueError`: its enum of states lacks
    `PAUSED`."""

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        return _PausedQueries(next)


class _PausedQueries(OutboundInterceptor):
    async def query_workflow(self, input: QueryWorkflowInput) -> Any:
        try:
            return await super().query_workflow(input)
        except ValueError as error:
            if WorkflowExecutionStatus.__name__ not in str(error):
                raise
            raise QueryOfPausedWorkflow from None


def error_of_rpc(error: RPCError, *, server_only: bool = False) -> BerthError:
    """Returns what a failed call to Temporal means to our caller. `server_only` says that no
    orchestrator has a part in it."""
    if isinstance(error, QueryOfPausedWorkflow):
        return WorkflowPaused()
    if not server_only and any(text in error.message for text in _WORKFLOW_BUSY_TEXTS):
        return OrchestratorUnavailable("the workflow did not answer; ask again")
    if error.status in UNREACHABLE_CODES:
        return TemporalUnavailable()
    if error.status in _SLOW:
        return TemporalUnavailable() if server_only else OrchestratorUnavailable()
    return BerthError(f"Temporal: {error.status.name.lower()}")


@contextmanager
def temporal_errors(
    *, missing: BerthError | None = None, server_only: bool = False
) -> Iterator[None]:
    """Turns errors of Temporal into ours; `missing` is raised for an unknown workflow or
    schedule."""
    try:
        yield
    except RPCError as error:
        if missing is not None and error.status == RPCStatusCode.NOT_FOUND:
            raise missing from None
        raise error_of_rpc(error, server_only=server_only) from None
    except WorkflowQueryFailedError:  # an orchestrator is taking the workflow over
        raise OrchestratorUnavailable("the workflow did not answer; ask again") from None
    except RuntimeError:  # what a lazy client raises when its first connect fails
        raise TemporalUnavailable from None
