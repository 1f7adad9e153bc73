"""What each task queue hosts: its activities and workflows, and the Temporal worker that serves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.worker import PollerBehaviorAutoscaling, Worker
from temporalio.workflow import NondeterminismError

from activities.claims.claim import ClaimActivities
from activities.claims.health import HealthActivity
from activities.claims.morning import MorningActivities
from activities.claims.reload import ReloadActivity
from activities.claims.stop import StopActivity
from activities.events.recorder import TimelineActivity
from activities.maintenance.cleanup import AnomalyCleaner
from activities.maintenance.passes import MaintenanceActivities
from activities.maintenance.scan import FleetScanner
from activities.orchestrator.deployment import Deployment
from activities.orchestrator.resources import OrchestratorResources
from activities.orders.account_query import AccountQueryClient
from activities.orders.verification import OrderActivities
from activities.pool.launch import LaunchActivities
from activities.pool.sizing import PoolActivities
from activities.pool.snapshot import PoolSnapshots
from activities.reports.statements import StatementActivities
from activities.rollout.replacement import RolloutActivities
from infra.jobs.client import JobClient
from infra.temporal.starter import WorkerStarter
from workflows import names
from workflows.maintenance.workflow import MaintenanceBatchWorkflow, MaintenanceWorkflow
from workflows.morning.workflow import MorningWorkflow
from workflows.order.workflow import OrderWorkflow
from workflows.reports.workflow import StatementsWorkflow
from workflows.rollout.workflow import RolloutWorkflow
from workflows.sandbox import workflow_runner
from workflows.user_worker.workflow import UserWorkerWorkflow
from workflows.worker_pool.workflow import WorkerPoolWorkflow

#: A run whose history cannot be replayed fails; otherwise it would stand still for ever. It is started anew:
#: the pool at the next check of an orchestrator, a user's worker with the next order, an order's verification
#: by the sweeper. (No release does this to runs of another one: versions are pinned.)
FAIL_ON = [NondeterminismError]
#: The SDK passes on a heartbeat at most this often; its own choice, four fifths of the timeout, would leave
#: an activity of ours one second of standstill out of five.
HEARTBEATS = timedelta(seconds=2)
#: How long a workflow waits for the orchestrator that has it in memory before another one may replay it: its
#: user waits that long when the first was killed. The SDK's own choice is 10 s.
STICKY = timedelta(seconds=5)

Activities = list[Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class HostedQueue:
    name: str
    #: Made only where the queue is hosted.
    activities: Callable[[], Activities]
    workflows: Sequence[type] = ()
    #: Workflows kept in memory.
    cached: int = 1000
    #: Activities at the same time; None: the SDK's default.
    concurrent: int | None = None


def hosted_queues(
    temporal: Client, starter: WorkerStarter, parts: OrchestratorResources
) -> list[HostedQueue]:
    known = (
        HostedQueue(
            name=names.LIFECYCLE_QUEUE,
            activities=lambda: lifecycle_activities(parts),
            workflows=(UserWorkerWorkflow, WorkerPoolWorkflow),
            # One of ours takes about 60 kB; past this number each update replays its history (measured: 34 ms
            # became 312 ms), so it lies above the users that one host can serve.
            cached=4000,
        ),
        HostedQueue(
            name=names.LAUNCH_QUEUE,
            activities=lambda: launch_activities(temporal, parts),
            # Each launch waits until its worker is ready, up to a minute where a host has to start first, and
            # costs a coroutine. The rate is the launcher's: here it would keep a small pool waiting behind a
            # large one.
            concurrent=2000,
        ),
        HostedQueue(
            name=names.ORDERS_QUEUE,
            activities=lambda: order_activities(starter, parts),
            workflows=(OrderWorkflow,),
            cached=1000,  # each wakes at most every two seconds
        ),
        HostedQueue(
            name=names.BULK_QUEUE,
            activities=lambda: bulk_activities(temporal, starter, parts),
            workflows=(
                MaintenanceWorkflow,
                MaintenanceBatchWorkflow,
                MorningWorkflow,
                RolloutWorkflow,
                StatementsWorkflow,
            ),
            cached=50,
        ),
    )
    wanted = {f"berth-{name}" for name in parts.settings.task_queues}
    return [queue for queue in known if queue.name in wanted]


def make_worker(temporal: Client, hosted: HostedQueue, deployment: Deployment, grace: float) -> Worker:
    """Workers with workflows are versioned; one with activities only takes tasks of every version.

    `grace`: seconds that running activities get when it is shut down.
    """
    return Worker(
        temporal,
        task_queue=hosted.name,
        workflows=hosted.workflows,
        activities=hosted.activities(),
        workflow_runner=workflow_runner(),
        workflow_failure_exception_types=FAIL_ON,
        deployment_config=deployment.config if hosted.workflows else None,
        sticky_queue_schedule_to_start_timeout=STICKY,
        max_cached_workflows=hosted.cached,
        max_concurrent_activities=hosted.concurrent,
        workflow_task_poller_behavior=PollerBehaviorAutoscaling(),
        activity_task_poller_behavior=PollerBehaviorAutoscaling(),
        graceful_shutdown_timeout=timedelta(seconds=grace),
        max_heartbeat_throttle_interval=HEARTBEATS,
    )


def lifecycle_activities(parts: OrchestratorResources) -> Activities:
    claiming = ClaimActivities(parts.client, parts.database, parts.unwrapper, parts.keys)
    stopping = StopActivity(parts.client, parts.database, parts.launcher, parts.keys)
    checking = HealthActivity(parts.client, parts.database, parts.launcher)
    reloading = ReloadActivity(parts.client, parts.database, parts.unwrapper, parts.keys)
    pool = PoolActivities(parts.client, parts.database, parts.launcher, parts.calendar)
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


def launch_activities(temporal: Client, parts: OrchestratorResources) -> Activities:
    launching = LaunchActivities(
        parts.client, parts.database, parts.launcher, parts.settings, parts.keys, PoolSnapshots(temporal)
    )
    return [launching.launch_for_claim, launching.launch_pool_worker]


def order_activities(starter: WorkerStarter, parts: OrchestratorResources) -> Activities:
    verifying = OrderActivities(parts.client, parts.database, AccountQueryClient(parts.client, starter))
    return [verifying.verify_order, verifying.settle_absent, verifying.demand_attention]


def bulk_activities(temporal: Client, starter: WorkerStarter, parts: OrchestratorResources) -> Activities:
    scanner = FleetScanner(parts.client, parts.database, parts.launcher, pool=parts.settings.pool)
    cleaner = AnomalyCleaner(parts.client, parts.database, parts.launcher, temporal)
    maintenance = MaintenanceActivities(scanner, cleaner, parts.database, parts.settings)
    morning = MorningActivities(parts.database, parts.calendar, starter)
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
        rollout.check_release,
        rollout.retire_workers,
        rollout.ask_to_move,
        rollout.tell_rollout,
        statements.plan_statements,
        statements.enqueue_statements,
    ]
