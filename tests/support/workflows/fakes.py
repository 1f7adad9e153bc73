"""Activities under the real names with scripted answers, and a server to run workflows on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHandle, WorkflowHistory
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from activities.orchestrator.queues import FATAL_WORKFLOW_ERRORS
from workflows import names
from workflows.sandbox import workflow_runner
from workflows.user_worker import messages as worker_messages
from workflows.user_worker.workflow import UserWorkerWorkflow
from workflows.worker_pool.messages import (
    NOTHING_RUNS,
    CountPool,
    KeepPool,
    KeptPool,
    LaunchPoolWorker,
    PoolCount,
    StopPoolWorkers,
    WindowNow,
)
from workflows.worker_pool.workflow import WorkerPoolWorkflow

Answer = worker_messages.ClaimResult | Exception
#: How often an activity that is held tells the server that it lives. The SDK's own pause would be 4
#: of the 5 s that it has: where the machine stands still for more than a second, it would be begun
#: a second time.
BEAT = timedelta(seconds=1)


def patient(worker: Worker) -> Worker:
    """The SDK takes a moment of 2 s in which the machine stands still for a workflow that does not
    yield. It fails the task then and tries it again, with all local activities, and tests count
    those."""
    if worker._workflow_worker is not None:
        worker._workflow_worker._deadlock_timeout_seconds = 30
    return worker


class FakeFleet:
    """A pool and its workers, scripted: each list gives the answers in order, then the usual
    ones."""

    def __init__(self) -> None:
        self.claims: list[str] = []
        self.launches: list[str] = []
        self.stops: list[worker_messages.StopWorker] = []
        self.connects: list[int] = []
        self.checks = 0
        self.reloads: list[worker_messages.ReloadRequest] = []
        self.reload_script: list[worker_messages.ReloadResult] = []
        self.reload_failures = 0
        self.hold_reload = asyncio.Event()
        self.hold_reload.set()
        self.crashes_known: list[bool] = []
        self.crashes: tuple[float, ...] = ()
        #: Batches that were written to the timeline, by chain of runs.
        self.written: list[worker_messages.RecordTimeline] = []
        self.record_failures = 0
        self.claim_script: list[str] = []
        self.connect_script: list[worker_messages.ClaimResult] = []
        self.launch_failures = 0
        #: What a launch takes.
        self.launch_seconds = 0.0
        self.launch_failure = "LAUNCH_FAILED"
        self.claim_failures = 0
        self.claim_failure = "DATABASE_UNAVAILABLE"
        self.check_failures = 0
        self.stop_failures = 0
        self.stop_started = asyncio.Event()
        self.hold_stop = asyncio.Event()
        self.hold_stop.set()
        self.waiting_orders = 0
        self.health: list[worker_messages.WorkerHealth] = []
        #: When the worker was last used, seen from the time of a check (both Unix seconds).
        self.last_use: Callable[[float], float] = lambda _now: 0.0
        self.hold_connect = asyncio.Event()
        self.hold_connect.set()
        #: Workers whose held connection is given up: the clock never jumps while an activity runs.
        self.gone: set[str] = set()
        self.claim_started = asyncio.Event()
        self.connect_started = asyncio.Event()
        self.hold_claim = asyncio.Event()
        self.hold_claim.set()

    def worker(self, claim_id: str, warm: bool = True) -> worker_messages.WorkerRef:
        number = 1 + list(dict.fromkeys(self.claims)).index(claim_id)
        return worker_messages.WorkerRef(
            worker_id=f"w{number}",
            task_id=f"t{number}",
            epoch=number,
            claim_id=claim_id,
            pool="default",
            warm=warm,
        )

    @activity.defn
    async def claim_worker(
        self, request: worker_messages.ClaimRequest
    ) -> worker_messages.ClaimResult:
        self.claims.append(request.claim_id)
        self.claim_started.set()
        await self.hold_claim.wait()
        if self.claim_failures:
            self.claim_failures -= 1
            raise ApplicationError("no database", type=self.claim_failure, non_retryable=True)
        self.crashes_known.append(request.check_crashes)
        if request.check_crashes and self.crashes:
            return worker_messages.ClaimResult(
                status=worker_messages.ClaimStatus.BACK_OFF, crashes=self.crashes
            )
        status = (
            self.claim_script.pop(0) if self.claim_script else worker_messages.ClaimStatus.ACTIVE
        )
        warm = request.claim_id not in self.launches
        worker = (
            None
            if status == worker_messages.ClaimStatus.EMPTY
            else self.worker(request.claim_id, warm)
        )
        result = worker_messages.ClaimResult(
            status=status, worker=worker, claimed_at=1.0, connected_at=2.0
        )
        if status == worker_messages.ClaimStatus.FAILED:
            failed = self.connect_script.pop(0)
            result = replace(failed, worker=worker)
        return result

    @activity.defn
    async def launch_for_claim(
        self, request: worker_messages.LaunchForClaim
    ) -> worker_messages.Launched:
        self.launches.append(request.claim_id)
        async with asyncio.timeout(request.timeout):
            await asyncio.sleep(self.launch_seconds)
        if self.launch_failures:
            self.launch_failures -= 1
            raise ApplicationError("no host", type=self.launch_failure, non_retryable=True)
        return worker_messages.Launched(worker_id="w", task_id="t")

    async def _connected(
        self, request: worker_messages.ConnectRequest
    ) -> worker_messages.ClaimResult:
        self.connects.append(request.attempt)
        self.connect_started.set()
        while not self.hold_connect.is_set() and request.worker.worker_id not in self.gone:
            activity.heartbeat()
            await asyncio.sleep(0.02)
        if self.connect_script:
            return replace(self.connect_script.pop(0), worker=request.worker)
        return worker_messages.ClaimResult(
            status=worker_messages.ClaimStatus.ACTIVE, worker=request.worker, connected_at=3.0
        )

    @activity.defn
    async def await_connected(
        self, request: worker_messages.ConnectRequest
    ) -> worker_messages.ClaimResult:
        return await self._connected(request)

    @activity.defn
    async def connect_again(
        self, request: worker_messages.ConnectRequest
    ) -> worker_messages.ClaimResult:
        return await self._connected(request)

    @activity.defn
    async def stop_worker(self, request: worker_messages.StopWorker) -> worker_messages.Stopped:
        self.stop_started.set()
        while not self.hold_stop.is_set():
            activity.heartbeat()
            await asyncio.sleep(0.02)
        if self.stop_failures:
            self.stop_failures -= 1
            raise ApplicationError("node down", type="LAUNCHER_UNREACHABLE", non_retryable=True)
        self.stops.append(request)
        waiting, self.waiting_orders = self.waiting_orders, 0
        return worker_messages.Stopped(waiting=waiting)

    @activity.defn
    async def check_worker(
        self, request: worker_messages.CheckWorker
    ) -> worker_messages.WorkerHealth:
        self.checks += 1
        if self.check_failures:
            self.check_failures -= 1
            raise ApplicationError("no valkey", non_retryable=True)
        if self.health:
            return self.health.pop(0)
        now = activity.info().current_attempt_scheduled_time.timestamp()
        return worker_messages.WorkerHealth(
            marked=True, running=True, last_activity=self.last_use(now)
        )

    @activity.defn
    async def reload_credentials(
        self, request: worker_messages.ReloadRequest
    ) -> worker_messages.ReloadResult:
        self.reloads.append(request)
        while not self.hold_reload.is_set():
            activity.heartbeat()
            await asyncio.sleep(0.02)
        if self.reload_failures:
            self.reload_failures -= 1
            raise ApplicationError("no database", type="DATABASE_UNAVAILABLE", non_retryable=True)
        return (
            self.reload_script.pop(0)
            if self.reload_script
            else worker_messages.ReloadResult(ok=True)
        )

    @activity.defn
    async def record_timeline(self, request: worker_messages.RecordTimeline) -> None:
        if self.record_failures:
            self.record_failures -= 1
            raise ApplicationError("no database", type="DATABASE_UNAVAILABLE")
        self.written.append(request)

    @property
    def timeline(self) -> list[worker_messages.Transition]:
        """Every transition that was written, in the order of writing."""
        return [transition for batch in self.written for transition in batch.transitions]

    def activities(self) -> list[Callable[..., Any]]:
        return [
            self.claim_worker,
            self.launch_for_claim,
            self.await_connected,
            self.connect_again,
            self.stop_worker,
            self.check_worker,
            self.reload_credentials,
            self.record_timeline,
        ]


class FakePool:
    """A pool that counts what it launched."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.starting = 0
        self.launched: list[str] = []
        self.highest = 0
        self.failures = 0
        #: Type of a failed launch.
        self.failure = "LAUNCH_FAILED"
        #: Launches that go well, and whose answers nobody gets.
        self.lost_replies = 0
        self.counts = 0
        #: What PostgreSQL keeps of the pool.
        self.kept: KeptPool | None = None
        #: No count ends until it is set.
        self.may_count = asyncio.Event()
        self.may_count.set()
        #: No launch ends until it is set.
        self.may_launch = asyncio.Event()
        self.may_launch.set()
        self.uncounted = 0
        self.in_use = 0
        self.claims: int | None = 0
        #: The window that holds now.
        self.window: Callable[[], Awaitable[WindowNow]] | None = None

    @activity.defn
    async def count_pool(self, request: CountPool) -> PoolCount:
        self.counts += 1
        await self.may_count.wait()
        if self.uncounted:
            self.uncounted -= 1
            raise ApplicationError("node down", type="LAUNCHER_UNREACHABLE")
        known = self.ready - set(request.launching)
        return PoolCount(
            ready=len(known),
            starting=self.starting,
            in_use=self.in_use,
            claims=self.claims,
            window=await self.window() if self.window else WindowNow(),
        )

    @activity.defn
    async def launch_pool_worker(self, request: LaunchPoolWorker) -> worker_messages.Launched:
        while not self.may_launch.is_set():
            activity.heartbeat()
            await asyncio.sleep(0.02)
        if self.failures:
            self.failures -= 1
            raise ApplicationError("no room", NOTHING_RUNS, type=self.failure)
        self.launched.append(request.token)
        self.ready.add(request.token)
        self.highest = max(self.highest, len(self.ready))
        if self.lost_replies:
            self.lost_replies -= 1
            raise ApplicationError("the answer was lost", type="LauncherUnreachable")
        return worker_messages.Launched(worker_id=request.token, task_id=request.token)

    @activity.defn
    async def shrink_pool(self, request: StopPoolWorkers) -> int:
        for _ in range(request.count):
            self.ready.pop()
        return request.count

    @activity.defn
    async def keep_pool(self, request: KeepPool) -> KeptPool:
        if self.kept is None or request.kept.number > self.kept.number:
            self.kept = request.kept
        return self.kept

    def activities(self) -> list[Callable[..., Any]]:
        return [self.count_pool, self.keep_pool, self.launch_pool_worker, self.shrink_pool]


@asynccontextmanager
async def serving(client: Client, activities: list[Callable[..., Any]]) -> AsyncIterator[None]:
    """Workers for the two task queues that the workflows use."""
    async with (
        patient(
            Worker(
                client,
                task_queue=names.LIFECYCLE_QUEUE,
                workflows=[UserWorkerWorkflow, WorkerPoolWorkflow],
                activities=activities,
                workflow_runner=workflow_runner(passed=()),
                workflow_failure_exception_types=FATAL_WORKFLOW_ERRORS,
                max_heartbeat_throttle_interval=BEAT,
            )
        ),
        Worker(
            client,
            task_queue=names.LAUNCH_QUEUE,
            activities=activities,
            max_heartbeat_throttle_interval=BEAT,
        ),
    ):
        yield


async def ensure_active(
    client: Client,
    user_id: str,
    settings: worker_messages.UserWorkerSettings | None = None,
    *,
    mark_missing: bool = False,
    stay_until: float = 0.0,
) -> worker_messages.ActiveWorker:
    """What the API does, in two calls: the time-skipping server does not know update-with-start."""
    await client.start_workflow(
        UserWorkerWorkflow.run,
        worker_messages.UserWorkerInput(
            user_id=user_id, settings=settings or worker_messages.UserWorkerSettings()
        ),
        id=names.user_worker_id(user_id),
        task_queue=names.LIFECYCLE_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
    )
    answer: worker_messages.ActiveWorker = await handle(client, user_id).execute_update(
        "ensure_active",
        worker_messages.EnsureActive(mark_missing=mark_missing, stay_until=stay_until),
        result_type=worker_messages.ActiveWorker,
    )
    return answer


def handle(client: Client, user_id: str) -> WorkflowHandle[UserWorkerWorkflow, None]:
    return client.get_workflow_handle_for(UserWorkerWorkflow.run, names.user_worker_id(user_id))


async def until_state(client: Client, user_id: str, *states: str) -> worker_messages.UserWorkerView:
    """Waits until the workflow shows one of these states."""
    while True:
        view = await handle(client, user_id).query(UserWorkerWorkflow.view)
        if view.state in states:
            return view
        assert view.state != worker_messages.WorkerState.TERMINATED, view.reason
        await asyncio.sleep(0.02)


def skipped(env: WorkflowEnvironment) -> AbstractAsyncContextManager[None]:
    """While it is open, the server jumps over timers; the class that has it is not public."""
    unlocked: AbstractAsyncContextManager[None] = cast("Any", env).time_skipping_unlocked()
    return unlocked


async def tell(client: Client, user_id: str, kind: str, sequence: int, detail: str = "") -> None:
    """Signals an event of the user's first worker, as the relay does."""
    event = worker_messages.WorkerEventSignal(
        worker_id="w1", epoch=1, sequence=sequence, kind=kind, at=0.0, detail=detail
    )
    await handle(client, user_id).signal(UserWorkerWorkflow.worker_event, event)


async def finished(env: WorkflowEnvironment, user_id: str) -> None:
    """Waits for the end of the run, its timers skipped."""
    async with skipped(env):
        await handle(env.client, user_id).result()


async def at_rest(client: Client, user_id: str) -> bool:
    """Whether nothing is under way in the run. A cancellation that meets the end of an activity can
    leave the time-skipping server's run as it is, for ever."""
    history = await handle(client, user_id).fetch_history()
    kinds = Counter(
        EventType.Name(event.event_type).removeprefix("EVENT_TYPE_") for event in history.events
    )

    def ended(task_kind: str) -> int:
        return sum(
            kinds[f"{task_kind}_{how}"] for how in ("COMPLETED", "FAILED", "TIMED_OUT", "CANCELED")
        )

    return all(
        kinds[f"{task_kind}_SCHEDULED"] == ended(task_kind)
        for task_kind in ("ACTIVITY_TASK", "WORKFLOW_TASK")
    )


def failed_tasks(history: WorkflowHistory) -> list[str]:
    """The workflow tasks that failed. Not those in which the machine stood still: after 2 s the SDK
    takes that for a workflow that does not yield, and the task is tried again."""
    failed = [
        str(event)
        for event in history.events
        if event.HasField("workflow_task_failed_event_attributes")
    ]
    return [failure for failure in failed if "TMPRL1101" not in failure]


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Waits for something that only a question can tell; the test's time limit ends it."""
    while not (answer if isinstance(answer := condition(), bool) else await answer):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
