"""The fleet, as Temporal knows it; maintenance that is begun by hand; and the health of all
servers."""

import asyncio
import base64
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.client import (
    Client,
    ScheduleActionExecution,
    ScheduleActionExecutionStartWorkflow,
    ScheduleHandle,
    ScheduleListDescription,
    ScheduleOverlapPolicy,
    WorkflowFailureError,
)
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError, RPCStatusCode

from api.fleet.entities import EntityProbe
from api.fleet.schemas import FleetPage, FleetRowView, ServerView
from api.fleet.schemas import ReadinessView as View
from api.http.errors import InvalidRequest, NoMaintenance, OrchestratorUnavailable
from api.http.fields import ID_PATTERN
from api.workers.service import WorkerControl
from infra.database import accounts
from infra.database.engine import Database
from infra.database.locks import send_sign_of_life
from infra.database.workers import passes
from infra.doctor.servers import BROKER, run_check
from infra.settings import Settings
from infra.temporal.client import MAX_POLL_AGE_S, RPC_TIMEOUT, read_pollers, temporal_errors
from infra.temporal.executions import ExecutionState, list_page
from infra.valkey.client import check_writable
from infra.valkey.failures import explain_failure
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.installed_brokers import paper_exchange
from workflows import names
from workflows.maintenance.messages import Maintained, MaintenanceInput
from workflows.user_worker.messages import WorkerState

#: Bytes of a cursor that tell whether the rest is whole. Not a secret: a cursor shows nothing but
#: pages.
_CHECKSUM_BYTES = 6
_USER_PREFIX = re.compile(ID_PATTERN)


def fleet_query(state: WorkerState | None, user_prefix: str | None) -> str:
    """Builds the visibility query. Only a member of the enum and checked text stand between its
    quotes.

    Raises `InvalidRequest` for a prefix with which no user id begins.
    """
    parts = [f'WorkflowType = "{names.USER_WORKER}"', "CloseTime IS NULL"]
    if state is not None:
        parts.append(f'{names.SA_STATE.name} = "{WorkerState(state)}"')
    if user_prefix is not None:
        if not _USER_PREFIX.fullmatch(user_prefix):
            raise InvalidRequest("user_id: no user id can begin with this")
        parts.append(f'{names.SA_USER.name} STARTS_WITH "{user_prefix}"')
    return " AND ".join(parts)


@dataclass(frozen=True, eq=False)
class FleetList:
    """Reads Temporal's visibility store, an index a moment behind the truth."""

    client: Client

    async def page(
        self, *, state: WorkerState | None, user_prefix: str | None, limit: int, cursor: str | None
    ) -> FleetPage:
        """Returns at most `limit` rows behind `cursor`, the one started last first.

        Raises `InvalidRequest` for a cursor that is none, `TemporalUnavailable`.
        """
        query, token = fleet_query(state, user_prefix), _token(cursor) if cursor else b""
        with temporal_errors(server_only=True):
            try:
                runs, next_token = await list_page(self.client, query, limit=limit, token=token)
            except RPCError as error:
                if cursor and error.status == RPCStatusCode.INVALID_ARGUMENT:
                    raise _bad_cursor() from None
                raise
        return FleetPage(
            workers=[_row(run) for run in runs],
            next_cursor=_cursor(next_token) if next_token else None,
        )

    async def list_schedules(self) -> list[ScheduleListDescription]:
        """Lists what begins by the clock. Raises `TemporalUnavailable`."""
        with temporal_errors(server_only=True):
            return [
                schedule
                async for schedule in await self.client.list_schedules(rpc_timeout=RPC_TIMEOUT)
            ]

    async def count_by_state(self) -> dict[WorkerState, int]:
        """Counts the workers in each state. Raises `TemporalUnavailable`."""
        with temporal_errors(server_only=True):
            counts = [
                self.client.count_workflows(fleet_query(state, None), rpc_timeout=RPC_TIMEOUT)
                for state in WorkerState
            ]
            answers = await asyncio.gather(*counts)
        return {state: answer.count for state, answer in zip(WorkerState, answers, strict=True)}


def _row(run: ExecutionState) -> FleetRowView:
    known = run.attributes
    state = known.get(names.SA_STATE.name)
    return FleetRowView(
        user_id=known.get(names.SA_USER.name) or run.workflow_id.removeprefix("user-worker-"),
        state=WorkerState(state) if state else None,
        worker_id=known.get(names.SA_WORKER.name),
        pool=known.get(names.SA_POOL.name),
        started_at=run.started_at,
    )


def _bad_cursor() -> InvalidRequest:
    return InvalidRequest("cursor: take it from `next_cursor` of the page before")


def _cursor(token: bytes) -> str:
    return base64.urlsafe_b64encode(_check(token) + token).decode()


def _token(cursor: str) -> bytes:
    """Raises `InvalidRequest`: Temporal answers a garbled token as if it had failed itself."""
    try:
        data = base64.b64decode(cursor.encode("ascii"), altchars=b"-_", validate=True)
    except ValueError:
        raise _bad_cursor() from None
    token = data[_CHECKSUM_BYTES:]
    if not token or data[:_CHECKSUM_BYTES] != _check(token):
        raise _bad_cursor()
    return token


def _check(token: bytes) -> bytes:
    return sha256(token).digest()[:_CHECKSUM_BYTES]


#: Seconds between two reads of the schedule, until it has begun the pass.
CHECK_INTERVAL_S = 0.1


@dataclass(frozen=True, eq=False)
class MaintenanceTrigger:
    client: Client

    async def run_pass(self, wait: float, *, override_guard: bool = False) -> Maintained | None:
        """Runs one pass and returns what it saw and did; None if it is not done after `wait`
        seconds, and continues.

        A pass that is under way is waited for instead: none overtakes another. With
        `override_guard` a pass of its own is run, which acts though much looks odd at once. Raises
        `NoMaintenance`, `TemporalUnavailable`, `OrchestratorUnavailable` when the pass failed.
        """
        schedule = self.client.get_schedule_handle(names.MAINTENANCE_SCHEDULE)
        try:
            with temporal_errors(missing=NoMaintenance()):
                async with asyncio.timeout(wait):
                    if override_guard:
                        return await self._override()
                    begun = await self._start_pass(schedule)
                    if not isinstance(begun, ScheduleActionExecutionStartWorkflow):
                        raise NoMaintenance("the schedule starts something else")
                    handle = self.client.get_workflow_handle(
                        begun.workflow_id,
                        run_id=begun.first_execution_run_id,
                        result_type=Maintained,
                    )
                    done: Maintained = await handle.result()
                    return done
        except TimeoutError:
            return None
        except WorkflowFailureError as error:
            raise OrchestratorUnavailable(f"the pass failed: {error.cause}"[:300]) from None

    async def _override(self) -> Maintained:
        handle = await self.client.start_workflow(
            names.MAINTENANCE,
            MaintenanceInput(override_guard=True),
            id=f"{names.MAINTENANCE_SCHEDULE}-override",
            task_queue=names.BULK_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            execution_timeout=timedelta(minutes=10),
            result_type=Maintained,
            rpc_timeout=RPC_TIMEOUT,
        )
        done: Maintained = await handle.result()
        return done

    async def _start_pass(self, schedule: ScheduleHandle) -> ScheduleActionExecution:
        """Returns the pass that is under way, or the next one to begin: by our trigger, or by the
        clock just then."""
        before = (await schedule.describe(rpc_timeout=RPC_TIMEOUT)).info
        if before.running_actions:
            return before.running_actions[0]
        await schedule.trigger(overlap=ScheduleOverlapPolicy.SKIP, rpc_timeout=RPC_TIMEOUT)
        while True:
            now = (await schedule.describe(rpc_timeout=RPC_TIMEOUT)).info
            if now.num_actions > before.num_actions:
                return now.recent_actions[-1].action
            await asyncio.sleep(CHECK_INTERVAL_S)


#: Seconds that one answer may take.
ANSWER_TIMEOUT_S = 1.0
#: Three of maintenance's periods: what it saw before tells nothing any more.
MAX_PASS_AGE = timedelta(minutes=3)
#: Orchestrators poll all of them for activities, two for workflows, too.
QUEUES = (names.LIFECYCLE_QUEUE, names.LAUNCH_QUEUE, names.ORDERS_QUEUE, names.BULK_QUEUE)


@dataclass(frozen=True, eq=False)
class ReadinessProbe:
    database: Database
    client: Redis
    control: WorkerControl
    require_schema: Callable[[], None]
    settings: Settings
    entities: EntityProbe

    async def check(self) -> View:
        views = await asyncio.gather(
            _probe(self._postgresql()),
            _probe(check_writable(self.client)),
            _probe(self.control.check(ANSWER_TIMEOUT_S)),
        )
        names = ("postgresql", "valkey", "temporal")
        dependencies = dict(zip(names, views, strict=True))
        return View(ready=all(view.state == "up" for view in views), dependencies=dependencies)

    async def list_servers(self) -> dict[str, ServerView]:
        """Lists the servers of `check`, and others as their users know them. Leaves out what a
        server that is down would tell. Raises `TemporalUnavailable`, `DatabaseUnavailable` if one
        goes down meanwhile."""
        servers = dict((await self.check()).dependencies)
        if servers["temporal"].state == "up":
            servers |= await self._orchestrators()
        if servers["temporal"].state == servers["postgresql"].state == "up":
            servers |= await self.entities.list_entities()
        if servers["postgresql"].state == "up":
            async with self.database.session(autocommit=True) as session:
                last = await passes.pass_summary(session)
                paper = await accounts.has_accounts_at(session, paper_exchange())
            servers["launcher"] = _launcher(last)
            if paper and self.settings.exchange_address:
                problem = (await run_check(BROKER, self.settings, ANSWER_TIMEOUT_S)).problem
                servers["paper exchange"] = ServerView(
                    state="down" if problem else "up", reason=problem
                )
        return servers

    async def _orchestrators(self) -> dict[str, ServerView]:
        """Lists each orchestrator that Temporal lists, and each task queue that none serves."""
        kind, since = TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY, time.time() - MAX_POLL_AGE_S
        with temporal_errors(server_only=True):
            lists = await asyncio.gather(
                *(read_pollers(self.control.client, queue, kind) for queue in QUEUES)
            )
        rows = {}
        for name in sorted(set().union(*lists)):
            at = max(pollers.get(name, 0.0) for pollers in lists)
            queues = " ".join(
                queue for queue, pollers in zip(QUEUES, lists, strict=True) if name in pollers
            )
            rows[f"orchestrator {name}"] = ServerView(
                state="up" if at > since else "unknown",
                reason=queues if at > since else "it polls no more: it was stopped, or died",
                seen_at=datetime.fromtimestamp(at, UTC),
            )
        for queue, pollers in zip(QUEUES, lists, strict=True):
            if max(pollers.values(), default=0.0) < since:
                rows[f"queue {queue}"] = ServerView(
                    state="down", reason="no orchestrator serves it"
                )
        return rows

    async def _postgresql(self) -> None:
        self.require_schema()
        async with self.database.session() as session:
            await send_sign_of_life(session)


def _launcher(last: passes.MaintenancePass | None) -> ServerView:
    """Returns the launcher's state as the last pass of maintenance met it."""
    if last is None or datetime.now(UTC) - last.began_at > MAX_PASS_AGE:
        return ServerView(state="unknown", reason="there was no pass of maintenance of late")
    if last.server:
        return ServerView(
            state="up", reason=f"it lists {last.tasks} workers", seen_at=last.began_at
        )
    away = last.guarded == passes.LAUNCHER_UNREAD
    return ServerView(
        state="down" if away else "unknown", reason=last.guarded, seen_at=last.began_at
    )


async def _probe(call: Awaitable[Any]) -> ServerView:
    began = time.perf_counter()
    reason = ""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await call
    except TimeoutError:
        reason = f"no answer within {ANSWER_TIMEOUT_S:.0f} s"
    except RedisError as error:
        reason = explain_failure(error)
    except BerthError as error:
        reason = error.detail
    ms = round((time.perf_counter() - began) * 1000, 2)
    return ServerView(state="down" if reason else "up", ms=ms, reason=reason)
