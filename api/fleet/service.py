"""The fleet, as Temporal knows it: the list of running workers, and maintenance that is begun by hand."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from dataclasses import dataclass
from hashlib import sha256

from temporalio.client import (
    Client,
    ScheduleActionExecution,
    ScheduleActionExecutionStartWorkflow,
    ScheduleHandle,
    ScheduleOverlapPolicy,
    WorkflowExecution,
    WorkflowFailureError,
)
from temporalio.service import RPCError, RPCStatusCode

from api.fleet.schemas import FleetPage, FleetRowView
from api.http.errors import InvalidRequest, NoMaintenance, OrchestratorUnavailable
from api.http.fields import ID_PATTERN
from infra.temporal.client import CALL, temporal_errors
from workflows.maintenance.messages import Maintained
from workflows.names import MAINTENANCE_SCHEDULE, SA_POOL, SA_STATE, SA_USER, SA_WORKER, USER_WORKER
from workflows.user_worker.messages import WorkerState

#: Bytes of a cursor that tell whether the rest is whole. Not a secret: a cursor shows nothing but pages.
_CHECK = 6
_PREFIX = re.compile(ID_PATTERN)


def fleet_query(state: WorkerState | None, user_prefix: str | None) -> str:
    """The visibility query. Only a member of the enum and checked text stand between its quotes.

    Raises `InvalidRequest` for a prefix with which no user id begins.
    """
    parts = [f'WorkflowType = "{USER_WORKER}"', 'ExecutionStatus = "Running"']
    if state is not None:
        parts.append(f'{SA_STATE.name} = "{WorkerState(state)}"')
    if user_prefix is not None:
        if not _PREFIX.fullmatch(user_prefix):
            raise InvalidRequest("not valid: user_id: no user id begins like that")
        parts.append(f'{SA_USER.name} STARTS_WITH "{user_prefix}"')
    return " AND ".join(parts)


@dataclass(frozen=True, eq=False)
class FleetList:
    """Reads Temporal's visibility store, an index a moment behind the truth."""

    client: Client

    async def page(
        self, *, state: WorkerState | None, user_prefix: str | None, limit: int, cursor: str | None
    ) -> FleetPage:
        """At most `limit` rows behind `cursor`, the one started last first.

        Raises `InvalidRequest` for a cursor that is none, `TemporalUnavailable`.
        """
        found = self.client.list_workflows(
            fleet_query(state, user_prefix),
            page_size=limit,
            next_page_token=_token(cursor) if cursor else None,
            rpc_timeout=CALL,
        )
        with temporal_errors(server_only=True):
            try:
                await found.fetch_next_page()
            except RPCError as error:
                if cursor and error.status == RPCStatusCode.INVALID_ARGUMENT:
                    raise _bad_cursor() from None
                raise
        token = found.next_page_token
        return FleetPage(
            workers=[_row(one) for one in found.current_page or ()],
            next_cursor=_cursor(token) if token else None,
        )


def _row(found: WorkflowExecution) -> FleetRowView:
    known = found.typed_search_attributes
    return FleetRowView(
        user_id=known.get(SA_USER) or found.id.removeprefix("user-worker-"),
        state=known.get(SA_STATE),
        worker_id=known.get(SA_WORKER),
        pool=known.get(SA_POOL),
        started_at=found.start_time,
    )


def _bad_cursor() -> InvalidRequest:
    return InvalidRequest("not valid: cursor: take it from `next_cursor` of the page before")


def _cursor(token: bytes) -> str:
    return base64.urlsafe_b64encode(_check(token) + token).decode()


def _token(cursor: str) -> bytes:
    """Raises `InvalidRequest`: Temporal answers a garbled token as if it had failed itself."""
    try:
        data = base64.b64decode(cursor.encode("ascii"), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        raise _bad_cursor() from None
    token = data[_CHECK:]
    if not token or data[:_CHECK] != _check(token):
        raise _bad_cursor()
    return token


def _check(token: bytes) -> bytes:
    return sha256(token).digest()[:_CHECK]


#: Seconds between two reads of the schedule, until it has begun the pass.
CHECK_PERIOD = 0.1


@dataclass(frozen=True, eq=False)
class MaintenanceTrigger:
    client: Client

    async def run_pass(self, wait: float) -> Maintained | None:
        """What one pass saw and did; None: it is not done after `wait` seconds, and goes on.

        A pass that is under way is waited for instead: none overtakes another. Raises `NoMaintenance`,
        `TemporalUnavailable`, `OrchestratorUnavailable` when the pass failed.
        """
        schedule = self.client.get_schedule_handle(MAINTENANCE_SCHEDULE)
        try:
            with temporal_errors(missing=NoMaintenance()):
                async with asyncio.timeout(wait):
                    begun = await self._start_pass(schedule)
                    if not isinstance(begun, ScheduleActionExecutionStartWorkflow):
                        raise NoMaintenance("the schedule starts something else")
                    handle = self.client.get_workflow_handle(
                        begun.workflow_id, run_id=begun.first_execution_run_id, result_type=Maintained
                    )
                    done: Maintained = await handle.result()
                    return done
        except TimeoutError:
            return None
        except WorkflowFailureError as error:
            raise OrchestratorUnavailable(f"the pass failed: {error.cause}"[:300]) from None

    async def _start_pass(self, schedule: ScheduleHandle) -> ScheduleActionExecution:
        """The pass that is under way, or the next one to begin: by our trigger, or by the clock just then."""
        before = (await schedule.describe(rpc_timeout=CALL)).info
        if before.running_actions:
            return before.running_actions[0]
        await schedule.trigger(overlap=ScheduleOverlapPolicy.SKIP, rpc_timeout=CALL)
        while True:
            now = (await schedule.describe(rpc_timeout=CALL)).info
            if now.num_actions > before.num_actions:
                return now.recent_actions[-1].action
            await asyncio.sleep(CHECK_PERIOD)
