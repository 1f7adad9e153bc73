"""The orchestrator process: hosts the workflows and activities of the task queues it is given.

It makes every client and closes it. Several orchestrators may run beside each other; none of them is a
worker's parent, and stopping one stops no worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import structlog
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.service import RPCError

from activities.events.exit_watcher import ExitWatcher
from activities.events.mark_watcher import MarkWatcher
from activities.events.recorder import Recorder
from activities.events.relay import Relay
from activities.events.stream import RECORDER_GROUP, RELAY_GROUP, EventStream
from activities.orchestrator.deployment import Deployment
from activities.orchestrator.mover import WorkflowMover
from activities.orchestrator.pool_policy import ANSWERS, LONGEST, ensure_pool
from activities.orchestrator.promotion import Promotion, build_id
from activities.orchestrator.queues import hosted_queues, make_worker
from activities.orchestrator.resources import OrchestratorResources, open_resources
from activities.orchestrator.runtime import Loop, run_in_background, stop_on_signals, unless_stopped
from activities.orders.sweeper import OrderSweeper
from activities.pool.hosts import HostProvisioner
from activities.pool.snapshot import PoolSnapshots
from infra.settings import EcsSettings, Settings
from infra.temporal.client import RETRY, connect_orchestrator
from infra.temporal.schedules import ScheduleMaker
from infra.temporal.starter import WorkerStarter

#: Seconds that a graceful stop may take besides the activities' grace.
STOP_MARGIN = 3.0
#: Seconds the Rust core needs to let go before the loop ends: without it 13 of 200 processes crashed at
#: exit (sdk-python issue 300).
CORE_SETTLES = 0.1

log = structlog.get_logger()


def ready_file(settings: Settings) -> Path:
    """Exists while this orchestrator serves; holds how many free workers `berth up` may expect."""
    return settings.data_dir / f"{settings.orchestrator_name}.ready"


async def run(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT; then it stops polling and gives activities `stop_grace` to end."""
    ready = ready_file(settings)
    stopping = stop_on_signals(lambda: ready.unlink(missing_ok=True), limit=settings.stop_grace + STOP_MARGIN)
    ready.unlink(missing_ok=True)
    try:
        async with open_resources(settings) as parts:
            temporal = await unless_stopped(stopping, connect_orchestrator(settings))
            if temporal is not None:
                await _serve(temporal, parts, stopping)
    finally:
        ready.unlink(missing_ok=True)
        await asyncio.sleep(CORE_SETTLES)
    log.info("stopped")


async def _serve(temporal: Client, parts: OrchestratorResources, stopping: asyncio.Event) -> None:
    settings = parts.settings
    async with AsyncExitStack() as stack:
        starter = WorkerStarter(temporal, settings)
        stack.push_async_callback(starter.close)
        deployment = Deployment(
            temporal, name=settings.deployment_name, build=settings.build_id or build_id()
        )
        queues = hosted_queues(temporal, starter, parts)
        workers = [make_worker(temporal, hosted, deployment, settings.stop_grace) for hosted in queues]
        versioned = [hosted.name for hosted in queues if hosted.workflows]
        promotion = Promotion(deployment, wanted=settings.promote, queues=versioned)
        loops = _loops(temporal, starter, parts)
        if _hosts_workflows(settings):
            mover = WorkflowMover(
                parts.database, deployment, promotion, rate=settings.move_rate, period=settings.move_period
            )
            loops = [*loops, mover.run]
        for worker in workers:
            await stack.enter_async_context(worker)
        async with run_in_background(loops):
            await unless_stopped(stopping, _become_ready(temporal, settings, promotion))
            await stopping.wait()
            log.info("stopping")
            ready_file(settings).unlink(missing_ok=True)
        # All at once: one after the other would take the sum of their graces.
        await asyncio.gather(*(worker.shutdown() for worker in workers))


def _hosts_workflows(settings: Settings) -> bool:
    return "lifecycle" in settings.task_queues


async def _become_ready(temporal: Client, settings: Settings, promotion: Promotion) -> None:
    """Writes the ready file when the pool's workflow has answered, so that the current version is served."""
    free = 0
    if _hosts_workflows(settings):
        await promotion.run()
        patience = ANSWERS
        while True:
            try:
                free = await ensure_pool(temporal, settings, patience)
                break
            except (RPCError, WorkflowUpdateFailedError) as error:
                log.warning("pool_not_started", reason=str(error)[:200])
                patience = min(patience * 2, LONGEST)
                await asyncio.sleep(RETRY)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    ready_file(settings).write_text(f"{free}\n", encoding="utf-8")
    log.info("ready", task_queues=list(settings.task_queues), pool=settings.pool)


def _loops(temporal: Client, starter: WorkerStarter, parts: OrchestratorResources) -> Sequence[Loop]:
    settings = parts.settings
    recorder = Recorder(parts.database, differences_block=settings.differences_block)
    loops = [
        EventStream(parts.client, RECORDER_GROUP, recorder).run,
        EventStream(parts.client, RELAY_GROUP, Relay(temporal)).run,
        ExitWatcher(parts.client, parts.database, parts.launcher, temporal, pool=settings.pool).run,
        MarkWatcher(parts.client, temporal, settings).run,
    ]
    if "orders" in settings.task_queues:
        loops.append(OrderSweeper(parts.client, parts.database, temporal, starter, settings).run)
    if "bulk" in settings.task_queues:
        loops.append(ScheduleMaker(temporal, settings).run)
        if parts.hosts is not None:
            ecs = EcsSettings()
            provisioner = HostProvisioner(
                parts.hosts,
                parts.launcher,
                PoolSnapshots(temporal),
                pool=settings.pool,
                warm=ecs.hosts_warm,
                rate=ecs.hosts_rate,
            )
            loops.append(provisioner.run)
    return loops
