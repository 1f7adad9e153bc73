"""The orchestrator process: hosts the workflows and activities of the task queues it is given.

The composition root of this room: it makes every client and closes it. Several orchestrators may run
beside each other; none of them is a worker's parent, and stopping one stops no worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.runtime import Runtime, TelemetryConfig
from temporalio.service import RPCError
from temporalio.worker import PollerBehaviorAutoscaling, Worker
from temporalio.workflow import NondeterminismError

from activities.claims.claim import ClaimActivities
from activities.claims.health import HealthActivity
from activities.claims.morning import MorningActivities
from activities.claims.reload import ReloadActivity
from activities.claims.stop import StopActivity
from activities.events.exit_watcher import ExitWatcher
from activities.events.mark_watcher import MarkWatcher
from activities.events.recorder import Recorder, TimelineActivity
from activities.events.relay import Relay
from activities.events.stream import RECORDER_GROUP, RELAY_GROUP, EventStream
from activities.maintenance.cleanup import AnomalyCleaner
from activities.maintenance.passes import MaintenanceActivities
from activities.maintenance.scan import FleetScanner
from activities.orchestrator import promotion as build
from activities.orchestrator import runtime as stop
from activities.orchestrator.deployment import Deployment
from activities.orchestrator.mover import WorkflowMover
from activities.orchestrator.pool_policy import ANSWERS, LONGEST, ensure_pool
from activities.orchestrator.promotion import Promotion
from activities.orchestrator.resources import OrchestratorResources, open_resources
from activities.orchestrator.runtime import Loop, run_in_background, unless_stopped
from activities.orders.account_query import AccountQueryClient
from activities.orders.sweeper import OrderSweeper
from activities.orders.verification import OrderActivities
from activities.pool.hosts import HostProvisioner
from activities.pool.launch import LaunchActivities
from activities.pool.sizing import PoolActivities, PoolDemand
from activities.pool.snapshot import PoolSnapshots
from activities.reports.statements import StatementActivities
from activities.rollout.replacement import RolloutActivities
from infra.jobs.client import JobClient
from infra.settings import EcsSettings, Settings
from infra.temporal.schedules import ScheduleMaker
from infra.temporal.starter import WorkerActivator
from workflows import names
from workflows.maintenance.workflow import MaintenanceBatchWorkflow, MaintenanceWorkflow
from workflows.morning.workflow import MorningWorkflow
from workflows.order.workflow import OrderWorkflow
from workflows.reports.workflow import StatementsWorkflow
from workflows.rollout.workflow import RolloutWorkflow
from workflows.sandbox import workflow_runner
from workflows.user_worker.workflow import UserWorkerWorkflow
from workflows.worker_pool.workflow import WorkerPoolWorkflow

#: Seconds that running activities get after SIGTERM: above the longest one that must not be repeated
#: blindly (none today), below a container's usual 30 s.
GRACE = 10.0
#: Seconds for the whole of a graceful stop; below the 15 s after which `berth up` kills.
STOP_LIMIT = GRACE + 3.0
#: Workflows kept in memory. One of ours takes about 60 kB; past this number each update replays its
#: history (measured: 34 ms became 312 ms), so it lies above the users one host can serve.
MAX_CACHED_WORKFLOWS = 4000
#: Orders that are followed at the same time; each wakes at the most every two seconds.
MAX_CACHED_ORDERS = 1000
#: Passes of maintenance, and the children of one.
MAX_CACHED_PASSES = 50
#: A run that no replay gets through fails, and whoever needs it starts it anew: the pool at the next look of
#: an orchestrator, a user's worker with the next order, an order's verification by the sweeper. Left alone
#: it would stand still for ever. (No release does this to runs of another one: versions are pinned.)
RATHER_FAILED = [NondeterminismError]
#: Launches under way at the same time. Each waits until its worker is ready, up to a minute where a host has
#: to start first, and costs a coroutine.
MAX_LAUNCHES = 2000
#: The SDK passes on a beat at the most so often; its own choice, four fifths of the timeout, would leave an
#: activity of ours one second of standstill out of five.
HEARTBEATS = timedelta(seconds=2)
#: How long a workflow waits for the orchestrator that has it in memory before any other may replay it: so
#: long its user waits when that one was killed. The SDK's own choice is 10 s.
STICKY = timedelta(seconds=5)
#: Seconds between two tries to reach Temporal at start.
RETRY = 0.5
#: Seconds the Rust core needs to let go before the loop ends: without it 13 of 200 processes crashed at
#: exit (sdk-python issue 300).
CORE_SETTLES = 0.1

log = structlog.get_logger()


def lifecycle_activities(parts: OrchestratorResources) -> list[Callable[..., Any]]:
    claiming = ClaimActivities(parts.client, parts.database, parts.unwrapper, parts.keys)
    stopping = StopActivity(parts.client, parts.database, parts.launcher, parts.keys)
    checking = HealthActivity(parts.client, parts.database, parts.launcher)
    reloading = ReloadActivity(parts.client, parts.database, parts.unwrapper, parts.keys)
    pool = PoolActivities(
        parts.client, parts.database, parts.launcher, PoolDemand(parts.database, parts.calendar)
    )
    return [
        claiming.claim_worker,
        claiming.await_connected,
        claiming.connect_again,
        stopping.stop_worker,
        checking.check_worker,
        reloading.reload_credentials,
        TimelineActivity(parts.database).record_timeline,
        pool.count_pool,
        pool.shrink_pool,
    ]


def launch_activities(temporal: Client, parts: OrchestratorResources) -> list[Callable[..., Any]]:
    launching = LaunchActivities(
        parts.client, parts.database, parts.launcher, parts.settings, parts.keys, PoolSnapshots(temporal)
    )
    return [launching.launch_for_claim, launching.launch_pool_worker]


def order_activities(parts: OrchestratorResources, ensuring: WorkerActivator) -> list[Callable[..., Any]]:
    verifying = OrderActivities(parts.client, parts.database, AccountQueryClient(parts.client, ensuring))
    return [verifying.verify_order, verifying.settle_absent, verifying.demand_attention]


def bulk_activities(temporal: Client, parts: OrchestratorResources) -> list[Callable[..., Any]]:
    survey = FleetScanner(parts.client, parts.database, parts.launcher, pool=parts.settings.pool)
    cleaning = AnomalyCleaner(parts.client, parts.database, parts.launcher, temporal)
    maintenance = MaintenanceActivities(survey, cleaning, parts.database, parts.settings)
    morning = MorningActivities(parts.database, parts.calendar, WorkerActivator(temporal, parts.settings))
    rollout = RolloutActivities(
        parts.client, parts.database, parts.launcher, temporal, parts.calendar, parts.settings
    )
    statements = StatementActivities(parts.database, JobClient(parts.client), parts.calendar, parts.settings)
    return [
        maintenance.scan_fleet,
        maintenance.clean_up,
        maintenance.finish_pass,
        morning.plan_morning,
        morning.recent_users,
        morning.connect_user,
        rollout.look_at_release,
        rollout.retire_workers,
        rollout.ask_to_move,
        rollout.tell_rollout,
        statements.plan_statements,
        statements.enqueue_statements,
    ]


def workers(temporal: Client, parts: OrchestratorResources, deployment: Deployment) -> list[Worker]:
    """One Temporal worker for each of the configured task queues that has work today.

    Those with workflows are versioned; one that has activities only takes them from every version.
    """
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
                workflow_failure_exception_types=RATHER_FAILED,
                deployment_config=deployment.config,
                sticky_queue_schedule_to_start_timeout=STICKY,
                max_cached_workflows=MAX_CACHED_WORKFLOWS,
                workflow_task_poller_behavior=PollerBehaviorAutoscaling(),
                activity_task_poller_behavior=PollerBehaviorAutoscaling(),
                graceful_shutdown_timeout=grace,
                max_heartbeat_throttle_interval=HEARTBEATS,
            )
        )
    if names.LAUNCH_QUEUE in wanted:
        made.append(
            Worker(
                temporal,
                task_queue=names.LAUNCH_QUEUE,
                activities=launch_activities(temporal, parts),
                activity_task_poller_behavior=PollerBehaviorAutoscaling(),
                # The rate is the launcher's: here it would keep a small pool waiting behind a large one.
                max_concurrent_activities=MAX_LAUNCHES,
                graceful_shutdown_timeout=grace,
                max_heartbeat_throttle_interval=HEARTBEATS,
            )
        )
    if names.ORDERS_QUEUE in wanted:
        made.append(
            Worker(
                temporal,
                task_queue=names.ORDERS_QUEUE,
                workflows=[OrderWorkflow],
                activities=order_activities(parts, WorkerActivator(temporal, parts.settings)),
                workflow_runner=workflow_runner(),
                workflow_failure_exception_types=RATHER_FAILED,
                deployment_config=deployment.config,
                sticky_queue_schedule_to_start_timeout=STICKY,
                max_cached_workflows=MAX_CACHED_ORDERS,
                workflow_task_poller_behavior=PollerBehaviorAutoscaling(),
                activity_task_poller_behavior=PollerBehaviorAutoscaling(),
                graceful_shutdown_timeout=grace,
                max_heartbeat_throttle_interval=HEARTBEATS,
            )
        )
    if names.BULK_QUEUE in wanted:
        made.append(
            Worker(
                temporal,
                task_queue=names.BULK_QUEUE,
                workflows=[
                    MaintenanceWorkflow,
                    MaintenanceBatchWorkflow,
                    MorningWorkflow,
                    RolloutWorkflow,
                    StatementsWorkflow,
                ],
                activities=bulk_activities(temporal, parts),
                workflow_runner=workflow_runner(),
                workflow_failure_exception_types=RATHER_FAILED,
                deployment_config=deployment.config,
                sticky_queue_schedule_to_start_timeout=STICKY,
                max_cached_workflows=MAX_CACHED_PASSES,
                workflow_task_poller_behavior=PollerBehaviorAutoscaling(),
                activity_task_poller_behavior=PollerBehaviorAutoscaling(),
                graceful_shutdown_timeout=grace,
                max_heartbeat_throttle_interval=HEARTBEATS,
            )
        )
    return made


def versioned_queues(hosted: Sequence[Worker]) -> list[str]:
    """The task queues with workflows, whose tasks go to workers of one version."""
    return [
        config["task_queue"]
        for config in (worker.config() for worker in hosted)
        if config.get("deployment_config") is not None
    ]


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


def ready_file(settings: Settings) -> Path:
    """Exists while this orchestrator serves; one for each, by its name.

    In it stands how many free workers there will be at the least: `berth up` waits for them.
    """
    return settings.data_dir / f"{settings.orchestrator_name}.ready"


async def run(settings: Settings) -> None:
    """Until SIGTERM or SIGINT; then it polls no more and gives what is in hand `GRACE` seconds."""
    ready = ready_file(settings)
    stopping = stop.stop_on_signals(lambda: ready.unlink(missing_ok=True), limit=STOP_LIMIT)
    ready.unlink(missing_ok=True)
    try:
        async with open_resources(settings) as parts:
            temporal = await unless_stopped(stopping, connect_temporal(settings))
            if temporal is not None:
                await _serve(temporal, parts, stopping)
    finally:
        ready.unlink(missing_ok=True)
        await asyncio.sleep(CORE_SETTLES)
    log.info("stopped")


async def _serve(temporal: Client, parts: OrchestratorResources, stopping: asyncio.Event) -> None:
    settings = parts.settings
    deployment = Deployment(
        temporal, name=settings.deployment_name, build=settings.build_id or build.build_id()
    )
    hosted = workers(temporal, parts, deployment)
    promotion = Promotion(deployment, wanted=settings.promote, queues=versioned_queues(hosted))
    mover = WorkflowMover(parts.database, deployment, promotion, rate=settings.move_rate)
    loops = _loops(temporal, parts)
    if _hosts_workflows(settings):
        loops = [*loops, mover.run]
    async with AsyncExitStack() as stack:
        for worker in hosted:
            await stack.enter_async_context(worker)
        async with run_in_background(loops):
            await unless_stopped(stopping, _ready(temporal, settings, promotion))
            await stopping.wait()
            log.info("stopping")
            ready_file(settings).unlink(missing_ok=True)
        # Beside each other: one after the other would take the sum of their graces.
        await asyncio.gather(*(worker.shutdown() for worker in hosted))


def _hosts_workflows(settings: Settings) -> bool:
    return "lifecycle" in settings.task_queues


async def _ready(temporal: Client, settings: Settings, promotion: Promotion) -> None:
    """When the pool's workflow has answered, somebody serves the current version, and we say so."""
    surely = 0
    if _hosts_workflows(settings):
        await promotion.run()
        patience = ANSWERS
        while True:
            try:
                surely = await ensure_pool(temporal, settings, patience)
                break
            except (RPCError, WorkflowUpdateFailedError) as error:
                log.warning("pool_not_started", reason=str(error)[:200])
                patience = min(patience * 2, LONGEST)
                await asyncio.sleep(RETRY)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    ready_file(settings).write_text(f"{surely}\n", encoding="utf-8")
    log.info("ready", task_queues=list(settings.task_queues), pool=settings.pool)


def _loops(temporal: Client, parts: OrchestratorResources) -> Sequence[Loop]:
    watch = ExitWatcher(parts.client, parts.database, parts.launcher, temporal, pool=parts.settings.pool)
    swept: Sequence[Loop] = ()
    if "orders" in parts.settings.task_queues:
        ensuring = WorkerActivator(temporal, parts.settings)
        swept = (OrderSweeper(parts.client, parts.database, temporal, ensuring, parts.settings).run,)
    recorder = Recorder(parts.database, differences_block=parts.settings.differences_block)
    timed: Sequence[Loop] = ()
    if "bulk" in parts.settings.task_queues:
        timed = (ScheduleMaker(temporal, parts.settings).run, *_host_loops(temporal, parts))
    return (
        *swept,
        *timed,
        EventStream(parts.client, RECORDER_GROUP, recorder).run,
        EventStream(parts.client, RELAY_GROUP, Relay(temporal)).run,
        watch.run,
        MarkWatcher(parts.client, temporal, parts.settings).run,
    )


def _host_loops(temporal: Client, parts: OrchestratorResources) -> Sequence[Loop]:
    if parts.hosts is None:
        return ()
    ecs = EcsSettings()
    keeping = HostProvisioner(
        parts.hosts,
        parts.launcher,
        PoolSnapshots(temporal),
        pool=parts.settings.pool,
        warm=ecs.hosts_warm,
        rate=ecs.hosts_rate,
    )
    return (keeping.run,)
