"""The orchestrator process: hosts the workflows and activities of the task queues it is given.

The composition root of this room: it makes every client and closes it. Several orchestrators may run
beside each other; none of them is a worker's parent, and stopping one stops no worker.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import structlog
from redis.asyncio import Redis
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.runtime import Runtime, TelemetryConfig
from temporalio.service import RPCError
from temporalio.worker import PollerBehaviorAutoscaling, Worker

from activities.checking import Checking
from activities.claiming import Claiming
from activities.event_stream import RECORDER_GROUP, RELAY_GROUP, EventStream
from activities.exit_watch import ExitWatch
from activities.launching import Launching
from activities.pool import Pool
from activities.recorder import Recorder
from activities.relay import Relay
from activities.reloading import Reloading
from activities.stopping import Stopping
from infra import tasks, valkey
from infra.database.engine import Database
from infra.launchers.port import Launcher
from infra.launchers.registry import create_launcher
from infra.settings import Settings
from infra.vault import master_key, orchestrator_keys
from infra.vault.master_key import KeyUnwrapper
from infra.vault.orchestrator_keys import OrchestratorKeys
from workflows import messages as m
from workflows import names
from workflows.sandbox import workflow_runner
from workflows.user_worker import UserWorkerWorkflow
from workflows.worker_pool import WorkerPoolWorkflow

#: Seconds that running activities get after SIGTERM: above the longest one that must not be repeated
#: blindly (none today), below a container's usual 30 s.
GRACE = 10.0
#: Workflows kept in memory. One of ours takes about 60 kB; past this number each update replays its
#: history (measured: 34 ms became 312 ms), so it lies above the users one host can serve.
MAX_CACHED_WORKFLOWS = 4000
#: Seconds between two tries to reach Temporal at start.
RETRY = 0.5
#: Seconds the Rust core needs to let go before the loop ends: without it 13 of 200 processes crashed at
#: exit (sdk-python issue 300).
CORE_SETTLES = 0.1
#: The pool of Valkey connections: each waiting claim holds one for up to 1.5 s.
VALKEY_CONNECTIONS = 256

READY_FILE = "orchestrator.ready"

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything the activities get in their constructors."""

    settings: Settings
    client: Redis
    database: Database
    launcher: Launcher
    unwrapper: KeyUnwrapper
    keys: OrchestratorKeys


def lifecycle_activities(parts: Parts) -> list[Callable[..., Any]]:
    claiming = Claiming(parts.client, parts.database, parts.unwrapper, parts.keys)
    stopping = Stopping(parts.client, parts.database, parts.launcher, parts.keys)
    checking = Checking(parts.client, parts.launcher)
    reloading = Reloading(parts.client, parts.database, parts.unwrapper, parts.keys)
    pool = Pool(parts.client, parts.database, parts.launcher)
    return [
        claiming.claim_worker,
        claiming.await_connected,
        claiming.connect_again,
        stopping.stop_worker,
        checking.check_worker,
        reloading.reload_credentials,
        pool.count_pool,
        pool.shrink_pool,
    ]


def launch_activities(parts: Parts) -> list[Callable[..., Any]]:
    launching = Launching(parts.client, parts.launcher, parts.settings, parts.keys)
    return [launching.launch_for_claim, launching.launch_pool_worker]


def workers(temporal: Client, parts: Parts) -> list[Worker]:
    """One Temporal worker for each of the configured task queues that has work today."""
    wanted = {f"berth-{name}" for name in parts.settings.task_queues}
    grace = timedelta(seconds=GRACE)
    made = []
    if names.LIFECYCLE_QUEUE in wanted:
        made.append(
            Worker(
                temporal,
                task_queue=names.LIFECYCLE_QUEUE,
                workflows=[UserWorkerWorkflow, WorkerPoolWorkflow],
                activities=lifecycle_activities(parts),
                workflow_runner=workflow_runner(),
                max_cached_workflows=MAX_CACHED_WORKFLOWS,
                workflow_task_poller_behavior=PollerBehaviorAutoscaling(),
                activity_task_poller_behavior=PollerBehaviorAutoscaling(),
                graceful_shutdown_timeout=grace,
            )
        )
    if names.LAUNCH_QUEUE in wanted:
        made.append(
            Worker(
                temporal,
                task_queue=names.LAUNCH_QUEUE,
                activities=launch_activities(parts),
                activity_task_poller_behavior=PollerBehaviorAutoscaling(),
                max_task_queue_activities_per_second=parts.settings.launch_rate,
                graceful_shutdown_timeout=grace,
            )
        )
    return made


async def connect_temporal(settings: Settings) -> Client:
    """Tries until Temporal answers: it may start after us, or be away for a while."""
    runtime = Runtime(telemetry=TelemetryConfig())
    while True:
        try:
            return await Client.connect(
                settings.temporal_address, namespace=settings.temporal_namespace, runtime=runtime
            )
        except (RuntimeError, RPCError) as error:
            log.warning("temporal_not_reachable", address=settings.temporal_address, reason=str(error)[:200])
            await asyncio.sleep(RETRY)


async def ensure_pool(temporal: Client, settings: Settings) -> None:
    """Starts the pool's workflow, or tells the running one the target of the settings."""
    handle = await temporal.start_workflow(
        WorkerPoolWorkflow.run,
        m.PoolInput(pool=settings.pool, target=settings.pool_target),
        id=names.worker_pool_id(settings.pool),
        task_queue=names.LIFECYCLE_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        static_summary=f"keeps {settings.pool_target} workers ready",
    )
    view = await handle.query(WorkerPoolWorkflow.view)
    if view.target != settings.pool_target:
        await handle.execute_update(WorkerPoolWorkflow.set_target, m.SetTarget(target=settings.pool_target))
        log.info("pool_target_changed", pool=settings.pool, target=settings.pool_target)


@asynccontextmanager
async def open_parts(settings: Settings) -> AsyncIterator[Parts]:
    """Keys are read first: an orchestrator without them is of no use and says so at once."""
    keys = orchestrator_keys.load(settings.orchestrator_key_file)
    unwrapper = master_key.MasterKeyFiles(settings.master_key_file, *settings.master_key_retired)
    async with AsyncExitStack() as stack:
        client = valkey.connect(settings.valkey_url, max_connections=VALKEY_CONNECTIONS)
        stack.push_async_callback(client.aclose)
        database = Database(
            settings.database_url,
            pool_size=settings.database_pool,
            pool_wait=settings.database_pool_wait,
        )
        stack.push_async_callback(database.close)
        launcher = create_launcher(settings)
        stack.push_async_callback(launcher.close)
        yield Parts(
            settings=settings,
            client=client,
            database=database,
            launcher=launcher,
            unwrapper=unwrapper,
            keys=keys,
        )


async def run(settings: Settings) -> None:
    """Until SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    ready_file = settings.data_dir / READY_FILE
    ready_file.unlink(missing_ok=True)
    try:
        async with open_parts(settings) as parts:
            temporal = await _unless(stopping, connect_temporal(settings))
            if temporal is not None:
                await _serve(temporal, parts, stopping)
    finally:
        ready_file.unlink(missing_ok=True)
        await asyncio.sleep(CORE_SETTLES)
    log.info("stopped")


async def _serve(temporal: Client, parts: Parts, stopping: asyncio.Event) -> None:
    settings = parts.settings
    async with AsyncExitStack() as stack:
        for worker in workers(temporal, parts):
            await stack.enter_async_context(worker)
        async with _background(_loops(temporal, parts)):
            await _unless(stopping, _ready(temporal, settings))
            await stopping.wait()
            log.info("stopping")


async def _ready(temporal: Client, settings: Settings) -> None:
    """When the pool's workflow has answered, our workers poll, and say so to `berth up`."""
    if "lifecycle" in settings.task_queues:
        while True:
            try:
                await ensure_pool(temporal, settings)
                break
            except RPCError as error:
                log.warning("pool_not_started", reason=str(error)[:200])
                await asyncio.sleep(RETRY)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    (settings.data_dir / READY_FILE).write_text("ready\n", encoding="utf-8")
    log.info("ready", task_queues=list(settings.task_queues), pool=settings.pool)


def _loops(temporal: Client, parts: Parts) -> Sequence[Callable[[], Any]]:
    watch = ExitWatch(parts.client, parts.database, parts.launcher, temporal, pool=parts.settings.pool)
    return (
        EventStream(parts.client, RECORDER_GROUP, Recorder(parts.database)).run,
        EventStream(parts.client, RELAY_GROUP, Relay(temporal)).run,
        watch.run,
    )


@asynccontextmanager
async def _background(loops: Sequence[Callable[[], Any]]) -> AsyncIterator[None]:
    """Runs loops that never end by themselves; one that does is logged and started again."""
    running = [asyncio.create_task(_forever(loop)) for loop in loops]
    try:
        yield
    finally:
        await tasks.end(*running)


async def _forever(loop: Callable[[], Any]) -> None:
    while True:
        try:
            await loop()
        except Exception as error:  # a loop's boundary: the others must go on, and this one come back
            log.exception("background_loop_failed", loop=loop.__qualname__, error=type(error).__name__)
        await asyncio.sleep(RETRY)


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the process is asked to stop first."""
    task, stop = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    await tasks.end(stop)
    if task.done():
        return task.result()
    await tasks.end(task)
    return None
