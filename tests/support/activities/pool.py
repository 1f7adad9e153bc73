"""A pool under its real workflows, with workers of versions: some never become ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

from redis.exceptions import RedisError
from sqlalchemy import text
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.events.exit_watcher import ExitWatcher
from activities.events.recorder import TimelineActivity
from activities.pool import entries
from activities.pool.launch import LaunchActivities
from activities.pool.snapshot import PoolSnapshots
from activities.rollout.replacement import RolloutActivities
from infra import tasks
from infra.market import calendar
from infra.temporal.starter import WorkerStarter
from infra.valkey.client import reply_of
from infra.worker_task import LaunchSpec, Task
from tests.support.activities.harness import ActivityHarness
from tests.support.workers.pool_worker import POOL, ScriptedPoolWorker
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import Claim
from workflows import names
from workflows.rollout.messages import Release, RolloutInput, RolloutView
from workflows.rollout.workflow import RolloutWorkflow
from workflows.sandbox import workflow_runner
from workflows.user_worker.messages import UserWorkerView
from workflows.user_worker.workflow import UserWorkerWorkflow
from workflows.worker_pool.messages import PoolInput
from workflows.worker_pool.policy import PoolPolicy
from workflows.worker_pool.workflow import WorkerPoolWorkflow


class PoolHarness:
    """The workers of one pool, as scripted ones of a version each."""

    def __init__(self, harness: ActivityHarness, temporal: Client) -> None:
        self.harness = harness
        self.temporal = temporal
        #: Versions whose workers end before they are ready, those that never say anything, and
        #: those that become ready and hear nothing from then on.
        self.bad: set[str] = set()
        self.hanging: set[str] = set()
        self.frozen: set[str] = set()
        #: How far the free workers were below what the pool keeps at the worst moment, but for
        #: those that users have asked for by then.
        self.shortage = 0
        self.begun = 0
        self.starter = WorkerStarter(temporal, harness.settings)
        self._serving: set[asyncio.Task[None]] = set()
        harness.launcher._on_launch = self._launched

    async def _launched(self, spec: LaunchSpec, task: Task) -> None:
        if spec.config.version in self.bad:
            # It ends by itself, as an image without the right program would.
            self.harness.launcher.end(task.task_id, 1, "exited")
            return
        if spec.config.version in self.hanging:
            return
        worker = ScriptedPoolWorker(
            self.harness.client,
            self.harness.keys,
            task.worker_id,
            task_id=task.task_id,
            reserved_claim=spec.config.reserved_claim,
            version=spec.config.version,
        )
        await worker.announce()
        serving = asyncio.create_task(self._serve(worker, task))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, worker: ScriptedPoolWorker, task: Task) -> None:
        """Waits in the pool, then belongs to a user until it has to shut down."""
        launcher = self.harness.launcher
        while task.version in self.frozen and task in await launcher.list():
            await worker.announce()
            await asyncio.sleep(1.0)
        if task.version in self.frozen:  # it may have announced itself at the moment of its end
            await entries.remove_entry(self.harness.client, POOL, task.worker_id)
            return
        while task in await launcher.list() and not worker.received:
            with suppress(AssertionError, RedisError):  # nothing came yet
                await worker.serve(patience=3.0)
            if not worker.received and task in await launcher.list():
                await worker.announce()
        claims = [message for message in worker.received if isinstance(message, Claim)]
        if not claims:
            return
        user_id, control = claims[0].user_id, keys.control(claims[0].user_id)
        while task in await launcher.list():
            mark = f"{claims[0].epoch}:{worker.worker_id}"
            await reply_of(self.harness.client.set(keys.mark(user_id), mark, ex=30))
            if await reply_of(self.harness.client.lpop(control)):
                launcher.end(task.task_id, 0, "exited")
            await asyncio.sleep(0.1)
        await reply_of(self.harness.client.delete(keys.mark(user_id)))

    async def close(self) -> None:
        await tasks.cancel_tasks(*self._serving)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        harness = self.harness
        launching = LaunchActivities(
            harness.client,
            harness.database,
            harness.launcher,
            harness.settings,
            harness.keys,
            PoolSnapshots(self.temporal),
        )
        rollout = RolloutActivities(
            harness.client,
            harness.database,
            harness.launcher,
            self.temporal,
            calendar.MarketCalendars(),
            harness.settings,
        )
        lifecycle = Worker(
            self.temporal,
            task_queue=names.LIFECYCLE_QUEUE,
            workflows=[UserWorkerWorkflow, WorkerPoolWorkflow],
            activities=[
                harness.claiming.claim_worker,
                harness.claiming.await_connected,
                harness.claiming.connect_again,
                harness.stopping.stop_worker,
                harness.checking.check_worker,
                TimelineActivity(harness.database).record_timeline,
                harness.pool.count_pool,
                harness.pool.keep_pool,
                harness.pool.shrink_pool,
            ],
            workflow_runner=workflow_runner(),
        )
        launch = Worker(
            self.temporal,
            task_queue=names.LAUNCH_QUEUE,
            activities=[launching.launch_for_claim, launching.launch_pool_worker],
        )
        bulk = Worker(
            self.temporal,
            task_queue=names.BULK_QUEUE,
            workflows=[RolloutWorkflow],
            activities=[
                rollout.check_release,
                rollout.retire_workers,
                rollout.ask_to_move,
                rollout.tell_rollout,
            ],
            workflow_runner=workflow_runner(),
        )
        try:
            async with lifecycle, launch, bulk:
                try:
                    yield
                finally:
                    await self._end_workflows()
        finally:  # not sooner: a launch under way would bring another one to serve
            await self.close()

    @asynccontextmanager
    async def hearing_exits(self) -> AsyncIterator[None]:
        """The pool hears of its workers' ends; else it checks once a minute when nothing else
        happens."""
        harness = self.harness
        exits = ExitWatcher(
            harness.client, harness.database, harness.launcher, self.temporal, pool=POOL
        )
        watching = asyncio.create_task(exits.run())
        try:
            yield
        finally:
            await tasks.cancel_tasks(watching)

    async def _end_workflows(self) -> None:
        """The server is shared with other tests, which have users and a pool of the same names."""
        async with self.harness.database.session() as session:
            users = list(await session.scalars(text("select id from users")))
        ours = {
            names.worker_pool_id(POOL),
            names.rollout_id(POOL),
            *map(names.user_worker_id, users),
        }
        # The list is a moment behind: it may lack one, and show another that has ended by itself.
        listed = {
            execution.id
            async for execution in self.temporal.list_workflows("ExecutionStatus = 'Running'")
        }
        for workflow_id in ours | listed:
            with suppress(RPCError):
                await self.temporal.get_workflow_handle(workflow_id).terminate("the test is over")

    # --- what a test does -------------------------------------------------------------------------

    async def start_pool(
        self, target: int, launch_timeout: float = 10.0
    ) -> WorkflowHandle[WorkerPoolWorkflow, None]:
        handle = await self.temporal.start_workflow(
            WorkerPoolWorkflow.run,
            PoolInput(
                pool=POOL,
                policy=PoolPolicy(target=target),
                launch_timeout=launch_timeout,
            ),
            id=names.worker_pool_id(POOL),
            task_queue=names.LIFECYCLE_QUEUE,
        )
        await self.until_ready({"1": target})
        return handle

    async def start_rollout(
        self, version: str, **given: float
    ) -> WorkflowHandle[RolloutWorkflow, RolloutView]:
        request = RolloutInput(
            pool=POOL,
            release=Release(version=version),
            batch=2,
            quiet=0.0,
            pause=0.1,
            moving_pause=0.2,
            deadline=given.get("deadline", 3600.0),
            proof=given.get("proof", 0.0),
        )
        return await self.temporal.start_workflow(
            RolloutWorkflow.run,
            request,
            id=names.rollout_id(POOL),
            task_queue=names.BULK_QUEUE,
            execution_timeout=timedelta(minutes=5),
        )

    async def free(self) -> dict[str, int]:
        """Free workers by version."""
        counts: dict[str, int] = {}
        for worker in await reply_of(self.harness.client.zrange(keys.pool_ready(POOL), 0, -1)):
            entry = keys.pool_worker(POOL, worker.decode())
            state, version = await reply_of(self.harness.client.hmget(entry, ["state", "version"]))
            if state == b"ready":
                counts[version.decode()] = counts.get(version.decode(), 0) + 1
        return counts

    def patience(self, seconds: float) -> None:
        """How long a user's start waits for a worker that says nothing."""
        settings = self.harness.settings.model_copy(update={"connect_timeout": seconds})
        self.starter = WorkerStarter(self.temporal, settings)

    async def ensure(self, user_id: str) -> None:
        """Asks for a worker as a user does; raises the error of the answer."""
        self.begun += 1
        await self.starter.ensure_active(user_id)

    async def watch_floor(self, target: int) -> None:
        """Until it is cancelled: notes the shortage."""
        while True:
            free, begun = sum((await self.free()).values()), self.begun
            self.shortage = max(self.shortage, target - free - begun)
            await asyncio.sleep(0.05)

    async def until_ready(self, ready_by_version: dict[str, int]) -> None:
        while await self.free() != ready_by_version:  # noqa: ASYNC110 — a condition that only a question tells
            await asyncio.sleep(0.05)

    async def view(self, user_id: str) -> UserWorkerView:
        handle: WorkflowHandle[UserWorkerWorkflow, None] = self.temporal.get_workflow_handle_for(
            UserWorkerWorkflow.run, names.user_worker_id(user_id)
        )
        return await handle.query(UserWorkerWorkflow.view)
