"""The resources of an orchestrator (clients, keys, calendar), and what each task queue hosts: its
activities and workflows, and the Temporal worker that serves it.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from temporalio.client import Client
from temporalio.worker import PollerBehaviorAutoscaling, Worker
from temporalio.workflow import NondeterminismError

from activities.claims.budgets import BudgetPlanner
from activities.claims.claim import ClaimActivities
from activities.claims.handshake import AssignmentSealer
from activities.claims.morning import MorningActivities
from activities.claims.reload import ReloadActivity
from activities.claims.stop import HealthActivity, StopActivity, WorkerTerminator
from activities.events.recorder import TimelineActivity
from activities.instruments.loading import InstrumentActivities
from activities.maintenance.cleanup import AnomalyCleaner
from activities.maintenance.passes import MaintenanceActivities
from activities.maintenance.scan import FleetScanner
from activities.orchestrator.deployment import Deployment
from activities.orders.verification import AccountQueryClient, OrderActivities
from activities.pool.launch import LaunchActivities
from activities.pool.sizing import PoolActivities, policy_of
from activities.pool.snapshot import PoolSnapshots
from activities.reports.daily import DailyActivities
from activities.rollout.replacement import RolloutActivities
from activities.worker_calls import WorkerCaller
from infra.database.engine import Database
from infra.hosts.scaling import HostScaler
from infra.jobs.client import JobClient
from infra.jobs.kept import KeptJobs
from infra.launchers.limited import LaunchTurns, LimitedLauncher, SharedRate
from infra.launchers.port import Launcher
from infra.launchers.registry import create_host_scaler, create_launcher
from infra.market.calendar import Calendar, MarketCalendars
from infra.settings import EcsSettings, Settings
from infra.temporal.starter import WorkerStarter
from infra.tracing import Traces, closing_traces
from infra.valkey import client as valkey
from infra.valkey.worker_users import WorkerUsers
from infra.vault.key_pairs import KeyUnwrapper, OrchestratorKeys
from infra.vault.master_key import master_unwrapper
from infra.vault.message_secret import MessageSecretFile, MessageSecrets
from workflows import names
from workflows.instruments.workflow import InstrumentLoadWorkflow, InstrumentsWorkflow
from workflows.maintenance.workflow import MaintenanceBatchWorkflow, MaintenanceWorkflow
from workflows.morning.workflow import MorningWorkflow
from workflows.order.workflow import OrderWorkflow
from workflows.reports.workflow import DailyReportWorkflow, StatementsWorkflow
from workflows.rollout.workflow import RolloutWorkflow
from workflows.sandbox import workflow_runner
from workflows.user_worker.workflow import UserWorkerWorkflow
from workflows.worker_pool.workflow import WorkerPoolWorkflow

#: The pool of Valkey connections: each waiting claim holds one for up to 1.5 s.
MAX_VALKEY_CONNECTIONS = 256


@dataclass(frozen=True, kw_only=True)
class OrchestratorResources:
    """Everything the activities get in their constructors."""

    settings: Settings
    client: Redis
    database: Database
    launcher: Launcher
    unwrapper: KeyUnwrapper
    keys: OrchestratorKeys
    message_secrets: MessageSecrets
    calendar: Calendar
    calendars: MarketCalendars
    #: None: all workers log in to Valkey as we do.
    users: WorkerUsers | None = None
    #: None: the number of hosts is not managed here.
    hosts: HostScaler | None = None
    #: None: nobody collects traces.
    traces: Traces | None = None


@asynccontextmanager
async def open_resources(settings: Settings) -> AsyncIterator[OrchestratorResources]:
    """Opens and closes the resources. Reads keys and calendar first, so that a missing one fails at
    once."""
    policy_of(settings)
    calendars = MarketCalendars(Path(settings.calendar_file) if settings.calendar_file else None)
    keys = OrchestratorKeys(settings.orchestrator_key_dir)
    message_secrets = MessageSecretFile(settings.message_key_file)
    unwrapper = master_unwrapper(settings)
    traces = Traces(settings.traces_url, "berth-orchestrator") if settings.traces_url else None
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(closing_traces(traces))
        client = valkey.connect_valkey(settings.valkey_url, max_connections=MAX_VALKEY_CONNECTIONS)
        stack.push_async_callback(client.aclose)
        database = Database(
            settings.database_url,
            pool_size=settings.database_pool,
            pool_wait=settings.database_pool_wait,
        )
        stack.push_async_callback(database.close)
        rate = SharedRate(client, settings.launch_rate, settings.launch_burst)
        launcher = LimitedLauncher(create_launcher(settings), LaunchTurns(rate))
        stack.push_async_callback(launcher.close)
        hosts = create_host_scaler(settings, EcsSettings())
        if hosts is not None:
            stack.push_async_callback(hosts.close)
        yield OrchestratorResources(
            settings=settings,
            client=client,
            database=database,
            launcher=launcher,
            unwrapper=unwrapper,
            keys=keys,
            message_secrets=message_secrets,
            calendar=calendars.home,
            calendars=calendars,
            users=WorkerUsers(client, database, keys) if settings.valkey_users else None,
            hosts=hosts,
            traces=traces,
        )


#: A run whose history cannot be replayed fails; otherwise it would stand still for ever. The
#: restorer starts a new one, which continues with what PostgreSQL knows. (No release does this to
#: runs of another one: versions are pinned.)
FATAL_WORKFLOW_ERRORS = [NondeterminismError]
#: The SDK passes on a heartbeat at most this often; its own choice, four fifths of the timeout,
#: would leave an activity of ours one second of standstill out of five.
MAX_HEARTBEAT_INTERVAL = timedelta(seconds=2)
#: The time that a workflow waits for the orchestrator that has it in memory before another one may
#: replay it: its user waits that long when the first was killed. The SDK's own choice is 10 s.
STICKY_QUEUE_TIMEOUT = timedelta(seconds=5)

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
            # One of ours takes about 60 kB; past this number each update replays its history
            # (measured: 34 ms became 312 ms), so it lies above the users that one host can serve.
            cached=4000,
        ),
        HostedQueue(
            name=names.LAUNCH_QUEUE,
            activities=lambda: launch_activities(temporal, parts),
            # Each launch waits until its worker is ready, up to a minute where a host has to start
            # first, and costs a coroutine. The rate is the launcher's: here it would keep a small
            # pool waiting behind a large one.
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
                DailyReportWorkflow,
                InstrumentsWorkflow,
                InstrumentLoadWorkflow,
            ),
            cached=50,
        ),
    )
    served = {f"berth-{name}" for name in parts.settings.task_queues}
    return [queue for queue in known if queue.name in served]


def make_worker(
    temporal: Client, hosted: HostedQueue, deployment: Deployment, grace: float
) -> Worker:
    """Makes a queue's worker. One with workflows is versioned; one with activities only takes tasks
    of every version.

    `grace`: seconds that running activities get when it is shut down.
    """
    return Worker(
        temporal,
        task_queue=hosted.name,
        workflows=hosted.workflows,
        activities=hosted.activities(),
        workflow_runner=workflow_runner(),
        workflow_failure_exception_types=FATAL_WORKFLOW_ERRORS,
        deployment_config=deployment.config if hosted.workflows else None,
        sticky_queue_schedule_to_start_timeout=STICKY_QUEUE_TIMEOUT,
        max_cached_workflows=hosted.cached,
        max_concurrent_activities=hosted.concurrent,
        workflow_task_poller_behavior=PollerBehaviorAutoscaling(),
        activity_task_poller_behavior=PollerBehaviorAutoscaling(),
        graceful_shutdown_timeout=timedelta(seconds=grace),
        max_heartbeat_throttle_interval=MAX_HEARTBEAT_INTERVAL,
    )


def lifecycle_activities(parts: OrchestratorResources) -> Activities:
    own = parts.settings
    planner = BudgetPlanner(parts.database, parts.keys, own.egress_address, own.egress_persons)
    sealer = AssignmentSealer(
        parts.unwrapper,
        parts.keys,
        parts.message_secrets,
        planner,
        books_first=own.differences_block,
    )
    claiming = ClaimActivities(parts.client, parts.database, sealer, parts.users, parts.traces)
    stopping = StopActivity(parts.client, parts.database, ends_of(parts), parts.keys, parts.users)
    checking = HealthActivity(
        parts.client, parts.database, parts.launcher, parts.message_secrets, parts.settings.mark_ttl
    )
    reloading = ReloadActivity(parts.client, parts.database, sealer, parts.users)
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
        pool.keep_pool,
        pool.shrink_pool,
    ]


def ends_of(parts: OrchestratorResources) -> WorkerTerminator:
    return WorkerTerminator(
        parts.client, parts.database, parts.launcher, parts.message_secrets, parts.settings.mark_ttl
    )


def launch_activities(temporal: Client, parts: OrchestratorResources) -> Activities:
    launching = LaunchActivities(
        parts.client,
        parts.database,
        parts.launcher,
        parts.settings,
        parts.keys,
        PoolSnapshots(temporal),
        parts.users,
    )
    return [launching.launch_for_claim, launching.launch_pool_worker]


def order_activities(starter: WorkerStarter, parts: OrchestratorResources) -> Activities:
    asking = AccountQueryClient(parts.client, parts.database, starter, parts.message_secrets)
    verifying = OrderActivities(parts.client, parts.database, asking, parts.message_secrets)
    return [verifying.verify_order, verifying.settle_absent, verifying.demand_attention]


def bulk_activities(
    temporal: Client,
    starter: WorkerStarter,
    parts: OrchestratorResources,
    *,
    maintenance_confirm: float | None = None,
) -> Activities:
    """Returns the activities of the bulk queue; `maintenance_confirm` is
    `MaintenanceActivities.confirm`."""
    scanner = FleetScanner(
        parts.client,
        parts.database,
        parts.launcher,
        parts.message_secrets,
        pool=parts.settings.pool,
    )
    cleaner = AnomalyCleaner(parts.client, parts.database, parts.launcher, ends_of(parts), temporal)
    maintenance = MaintenanceActivities(
        scanner, cleaner, parts.database, parts.settings, parts.users, maintenance_confirm
    )
    morning = MorningActivities(parts.database, parts.calendar, starter.ensure_active)
    rollout = RolloutActivities(
        parts.client, parts.database, parts.launcher, temporal, parts.calendars, parts.settings
    )
    jobs = KeptJobs(parts.database, JobClient(parts.client, parts.message_secrets))
    daily = DailyActivities(parts.database, jobs, parts.calendar, parts.settings)
    lister = WorkerCaller(
        parts.client,
        parts.database,
        WorkerStarter(temporal, parts.settings, pool=parts.settings.instruments_pool),
        parts.message_secrets,
    )
    instruments = InstrumentActivities(parts.database, parts.calendars, lister.call)
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
        daily.plan_statements,
        daily.enqueue_statements,
        daily.make_report,
        instruments.plan_instruments,
        instruments.load_instruments,
    ]
