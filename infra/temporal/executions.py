"""Workflow executions as Temporal's server describes them: whether one runs, and how it ended.

It reads the server's own messages: the SDK's enum of states lacks `PAUSED`, and its listing and its
description raise `ValueError` for such a run.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums import v1 as enums
from temporalio.api.workflow.v1 import WorkflowExecutionInfo
from temporalio.api.workflowservice import v1 as api
from temporalio.client import Client, WorkflowHistoryEventFilterType
from temporalio.service import RPCError, RPCStatusCode

from infra.temporal.client import RPC_TIMEOUT, temporal_errors, unless_missing
from worker_runtime.protocol.errors import BerthError
from workflows import names

#: Rows of one page of a listing.
PAGE_SIZE = 1000
#: `WORKFLOW_EXECUTION_STATUS_PAUSED` of newer servers.
_PAUSED_STATUS = 8
_RUNNING = enums.WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_RUNNING
_ENDS = {
    enums.WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_COMPLETED: "completed",
    enums.WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_FAILED: "failed",
    enums.WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_CANCELED: "cancelled",
    enums.WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_TERMINATED: "terminated",
    enums.WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_TIMED_OUT: "timed out",
}


@dataclass(frozen=True, kw_only=True)
class ExecutionState:
    workflow_id: str
    run_id: str
    #: The workflow's type.
    kind: str
    #: It has not ended; it may be paused.
    is_open: bool
    is_paused: bool
    #: The end of it, such as "terminated"; empty: it did not end.
    end: str
    #: The search attribute of a user's worker; empty: none.
    worker_id: str
    started_at: datetime
    #: Those of `names` that are set, by name.
    attributes: Mapping[str, str]


def _state_of(info: WorkflowExecutionInfo) -> ExecutionState:
    status = int(info.status)
    attributes = _attributes_of(info)
    return ExecutionState(
        workflow_id=info.execution.workflow_id,
        run_id=info.execution.run_id,
        kind=info.type.name,
        is_open=status in (int(_RUNNING), _PAUSED_STATUS),
        is_paused=status == _PAUSED_STATUS,
        end=_ENDS.get(info.status, "" if status in (int(_RUNNING), _PAUSED_STATUS) else "ended"),
        worker_id=attributes.get(names.SA_WORKER.name, ""),
        started_at=info.start_time.ToDatetime(UTC),
        attributes=attributes,
    )


def _attributes_of(info: WorkflowExecutionInfo) -> dict[str, str]:
    """Returns the search attributes of users' workflows. Those that are no text are left out."""
    fields = info.search_attributes.indexed_fields
    attributes: dict[str, str] = {}
    for key in (names.SA_USER, names.SA_STATE, names.SA_WORKER, names.SA_POOL):
        payload = fields.get(key.name)
        if payload is None or not payload.data:
            continue
        try:
            value = json.loads(payload.data)
        except ValueError:
            continue
        if isinstance(value, str):
            attributes[key.name] = value
    return attributes


async def read_execution(client: Client, workflow_id: str) -> ExecutionState | None:
    """Returns the last run of a workflow, as it is now; None: there is none. Raises `RPCError`."""
    request = api.DescribeWorkflowExecutionRequest(
        namespace=client.namespace, execution=WorkflowExecution(workflow_id=workflow_id)
    )
    answer = await unless_missing(
        client.workflow_service.describe_workflow_execution(request, timeout=RPC_TIMEOUT)
    )
    return None if answer is None else _state_of(answer.workflow_execution_info)


async def list_open(client: Client, kinds: Sequence[str]) -> list[ExecutionState]:
    """Lists the open runs of these types, as Temporal's index has them: a moment late. Raises
    `RPCError`."""
    named = ", ".join(f"'{kind}'" for kind in kinds)
    return await list_all(client, f"WorkflowType IN ({named}) AND CloseTime IS NULL")


async def list_all(client: Client, query: str) -> list[ExecutionState]:
    """Lists all runs that a visibility query finds, paused ones included. Raises `RPCError`."""
    runs, token = await list_page(client, query)
    while token:
        page, token = await list_page(client, query, token=token)
        runs += page
    return runs


async def list_page(
    client: Client, query: str, *, limit: int = PAGE_SIZE, token: bytes = b""
) -> tuple[list[ExecutionState], bytes]:
    """Returns at most `limit` runs behind `token`, and the token of the next page; empty: there is
    none.

    Raises `RPCError`; INVALID_ARGUMENT for a token that is none.
    """
    request = api.ListWorkflowExecutionsRequest(
        namespace=client.namespace, page_size=limit, query=query, next_page_token=token
    )
    page = await client.workflow_service.list_workflow_executions(request, timeout=RPC_TIMEOUT)
    return [_state_of(info) for info in page.executions], page.next_page_token


async def explain_end(client: Client, workflow_id: str, state: ExecutionState | None) -> str:
    """Says how a workflow ended, by whom and why, such as "terminated by cli:erika: test"."""
    if state is None:
        return "deleted"
    handle = client.get_workflow_handle(workflow_id, run_id=state.run_id)
    identity = why = ""
    try:
        events = handle.fetch_history_events(
            event_filter_type=WorkflowHistoryEventFilterType.CLOSE_EVENT, rpc_timeout=RPC_TIMEOUT
        )
        async for event in events:
            if event.HasField("workflow_execution_terminated_event_attributes"):
                ended = event.workflow_execution_terminated_event_attributes
                identity, why = ended.identity, ended.reason
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
    return state.end + (f" by {identity}" if identity else "") + (f": {why}" if why else "")


async def terminate_workflows(client: Client, reason: str) -> int:
    """Terminates all workflows of Berth and returns how many there were. Raises `BerthError`.

    Schedules, requests and orchestrators start them anew.
    """
    queues = (names.LIFECYCLE_QUEUE, names.LAUNCH_QUEUE, names.ORDERS_QUEUE, names.BULK_QUEUE)
    query = f"CloseTime IS NULL AND TaskQueue IN {queues}"  # also those that are paused
    ended = set[str]()
    with temporal_errors(server_only=True):
        for _ in range(120):  # a minute in addition to the terminations, which take long of many
            running = await list_all(client, query)
            for run in running:
                handle = client.get_workflow_handle(run.workflow_id, run_id=run.run_id)
                # Listings lag.
                await unless_missing(handle.terminate(reason=reason, rpc_timeout=RPC_TIMEOUT))
                ended.add(run.run_id)
            if not running:
                return len(ended)
            await asyncio.sleep(0.5)
    raise BerthError("Temporal lists workflows that were terminated as running: run it again")
