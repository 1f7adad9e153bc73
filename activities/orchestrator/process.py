"""The orchestrator process: hosts the workflows and activities of the task queues it is given.

It makes every client and closes it. Several orchestrators may run next to each other; none of them
is a worker's parent, and stopping one stops no worker.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from temporalio.client import Client, WorkflowQueryFailedError, WorkflowUpdateFailedError
from temporalio.service import RPCError

from activities.claims.handshake import send_control
from activities.events.cut_off import WorkerCutOff
from activities.events.exit_watcher import ExitWatcher
from activities.events.mark_watcher import MarkWatcher
from activities.events.pump import EventPump
from activities.events.quota_watcher import QuotaWatcher
from activities.events.recorder import Recorder
from activities.events.relay import Relay
from activities.events.stream import RECORDER_GROUP, RELAY_GROUP, EventStream
from activities.events.valkey_restorer import ValkeyRestorer
from activities.maintenance.certificates import warn_of_certificates
from activities.maintenance.failures import FailureCollector
from activities.maintenance.kept_jobs import KeptJobSweeper
from activities.maintenance.person_matches import find_person_matches
from activities.orchestrator.deployment import Deployment
from activities.orchestrator.mover import WorkflowMover
from activities.orchestrator.promotion import Promotion, build_id
from activities.orchestrator.queues import (
    OrchestratorResources,
    ends_of,
    hosted_queues,
    make_worker,
    open_resources,
)
from activities.orchestrator.restorer import EntityRestorer
from activities.orders.sweeper import OrderSweeper
from activities.pool.sizing import FIRST_ANSWER_TIMEOUT, MAX_ANSWER_TIMEOUT, ensure_pool
from activities.pool.snapshot import HostProvisioner, PoolSnapshots
from infra import tasks
from infra.alerts.errors import send_errors
from infra.database.dead_letters import DeadLetters
from infra.database.retention import purge_each_hour
from infra.doctor.checks import LAUNCHER, ORCHESTRATOR_KEYS
from infra.doctor.servers import POSTGRESQL, VALKEY, log_problems
from infra.jobs.client import JobClient
from infra.jobs.kept import KeptJobs
from infra.log import drain_log
from infra.settings import EcsSettings, Settings
from infra.temporal.connection import RETRY_INTERVAL_S, connect_orchestrator, watch_connection
from infra.temporal.schedules import make_schedules
from infra.temporal.starter import WorkerStarter
from infra.valkey.job_users import JobUsers

log = structlog.get_logger()


def stop_on_signals(cut_short: Callable[[], None], *, limit: float) -> asyncio.Event:
    """Returns an event that the first SIGTERM or SIGINT sets; a second one, or `limit` seconds, end
    the process.

    The limit is needed because Temporal's client waits for ever while Temporal is away. Activities
    in hand are repeated elsewhere, as after a crash. `cut_short` is called before an end at once.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(number: signal.Signals, reason: str) -> None:
        log.warning("stopped_at_once", reason=reason)
        cut_short()
        drain_log()
        os._exit(128 + number)  # without clean-up, which is what takes time

    def heard(number: signal.Signals) -> None:
        if stopping.is_set():
            end(number, f"a second signal, {number.name}")
        stopping.set()
        loop.call_later(limit, end, number, f"the stop took longer than {limit:.0f} s")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heard, number)
    return stopping


#: Seconds until a loop that failed is started again.
LOOP_RETRY_INTERVAL_S = 0.5

Loop = Callable[[], Coroutine[Any, Any, None]]
T = TypeVar("T")


@asynccontextmanager
async def run_in_background(loops: Sequence[Loop]) -> AsyncIterator[None]:
    """Runs loops that never end; one that fails or ends is started again."""
    running = [asyncio.create_task(_forever(loop)) for loop in loops]
    try:
        yield
    finally:
        await tasks.cancel_tasks(*running)


async def _forever(loop: Loop) -> None:
    while True:
        try:
            await loop()
        except Exception as error:  # the boundary of a loop, which is started again
            log.exception(
                "background_loop_failed", loop=loop.__qualname__, error=type(error).__name__
            )
        await asyncio.sleep(LOOP_RETRY_INTERVAL_S)


async def unless_stopped(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of `work`, or None when the process is asked to stop first."""
    task, stop = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    await tasks.cancel_tasks(stop)
    if task.done():
        return task.result()
    await tasks.cancel_tasks(task)
    return None


#: Seconds that a graceful stop may take besides the activities' grace.
STOP_MARGIN_S = 3.0
#: Seconds the Rust core needs to let go before the loop ends: without it 13 of 200 processes
#: crashed at exit (sdk-python issue 300).
CORE_SETTLE_TIME_S = 0.1


def ready_file(settings: Settings) -> Path:
    """Exists while this orchestrator serves; holds how many free workers `berth up` may expect."""
    return settings.data_dir / f"{settings.orchestrator_name}.ready"


def write_ready_file(settings: Settings, free: int) -> None:
    """Writes the ready file. If that fails, the orchestrator serves all the same; its starter times
    out."""
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        ready_file(settings).write_text(f"{free}\n", encoding="utf-8")
    except OSError as error:
        log.error("ready_file_not_written", reason=str(error))


def remove_ready_file(settings: Settings) -> None:
    try:
        ready_file(settings).unlink(missing_ok=True)
    except OSError as error:
        log.error("ready_file_not_removed", reason=str(error))


async def run(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT; then it stops polling and gives activities `stop_grace` to
    end."""
    stopping = stop_on_signals(
        lambda: remove_ready_file(settings), limit=settings.stop_grace + STOP_MARGIN_S
    )
    remove_ready_file(settings)
    try:
        # Connecting to Temporal says itself what is wrong with it.
        trying = tasks.running(
            log_problems(settings, POSTGRESQL, VALKEY, LAUNCHER, ORCHESTRATOR_KEYS)
        )
        async with open_resources(settings) as parts, trying:
            interceptors = parts.traces.interceptors if parts.traces else ()
            temporal = await unless_stopped(stopping, connect_orchestrator(settings, interceptors))
            if temporal is not None:
                await _serve(temporal, parts, stopping)
    finally:
        remove_ready_file(settings)
        await asyncio.sleep(CORE_SETTLE_TIME_S)
    log.info("stopped")


async def _serve(temporal: Client, parts: OrchestratorResources, stopping: asyncio.Event) -> None:
    settings = parts.settings
    async with AsyncExitStack() as stack:
        starter = WorkerStarter(temporal, settings)
        stack.push_async_callback(starter.close)
        build = settings.build_id or build_id()
        deployment = Deployment(temporal, name=settings.deployment_name, build=build)
        queues = hosted_queues(temporal, starter, parts)
        workers = [
            make_worker(temporal, hosted, deployment, settings.stop_grace) for hosted in queues
        ]
        versioned = [hosted.name for hosted in queues if hosted.workflows]
        promotion = Promotion(deployment, promotes=settings.promote, queues=versioned)
        loops = _loops(temporal, starter, parts)
        if _hosts_workflows(settings):
            mover = WorkflowMover(parts.database, deployment, promotion)
            restorer = EntityRestorer(parts.database, temporal, starter, settings)
            loops = [*loops, mover.run, restorer.run]
        for worker in workers:
            await stack.enter_async_context(worker)
        async with run_in_background(loops):
            await unless_stopped(stopping, _become_ready(temporal, settings, promotion))
            await stopping.wait()
            log.info("stopping")
            remove_ready_file(settings)
        # All at once: one after the other would take the sum of their graces.
        await asyncio.gather(*(worker.shutdown() for worker in workers))


def _hosts_workflows(settings: Settings) -> bool:
    return "lifecycle" in settings.task_queues


async def _become_ready(temporal: Client, settings: Settings, promotion: Promotion) -> None:
    """Writes the ready file when the pool's workflow has answered, so that the current version is
    served."""
    free = 0
    if _hosts_workflows(settings):
        await promotion.run()
        patience = FIRST_ANSWER_TIMEOUT
        while True:
            try:
                free = await ensure_pool(temporal, settings, patience)
                break
            except (RPCError, WorkflowQueryFailedError, WorkflowUpdateFailedError) as error:
                log.warning("pool_not_started", reason=str(error)[:200])
                patience = min(patience * 2, MAX_ANSWER_TIMEOUT)
                await asyncio.sleep(RETRY_INTERVAL_S)
    write_ready_file(settings, free)
    log.info("ready", task_queues=list(settings.task_queues), pool=settings.pool)


def _loops(
    temporal: Client, starter: WorkerStarter, parts: OrchestratorResources
) -> Sequence[Loop]:
    settings, relay = parts.settings, Relay(temporal)
    recorder = Recorder(
        parts.database,
        traces=parts.traces,
        differences_block=settings.differences_block,
        send_control=partial(send_control, parts.client, parts.keys),
    )
    letters = DeadLetters(parts.database)
    exits = ExitWatcher(
        parts.client,
        parts.database,
        parts.launcher,
        temporal,
        pool=settings.pool,
        users=parts.users,
    )
    alone = settings.launcher == "ecs"
    ends = ends_of(parts)
    cutting = WorkerCutOff(parts.client, parts.database, parts.launcher, ends, parts.users)
    pump = EventPump(parts.client, parts.database, cutting, parts.keys)
    restorer = ValkeyRestorer(
        parts.client,
        parts.message_secrets,
        users=parts.users,
        launcher=parts.launcher,
        database=parts.database,
        job_users=JobUsers(parts.client, parts.message_secrets) if parts.users else None,
    )
    loops = [
        pump.run,
        pump.attend,
        EventStream(
            parts.client, RECORDER_GROUP, recorder, parts.message_secrets, dead_letters=letters
        ).run,
        EventStream(
            parts.client, RELAY_GROUP, relay, parts.message_secrets, dead_letters=letters
        ).run,
        (lambda: exits.run_alone(settings.session_database_url)) if alone else exits.run,
        MarkWatcher(parts.client, temporal, settings, restorer).run,
        lambda: watch_connection(temporal, settings),
        lambda: parts.message_secrets.compare_with_others(parts.client),
    ]
    if parts.users:
        watcher = QuotaWatcher(
            parts.client,
            settings.session_database_url,
            cutting,
            JobUsers(parts.client, parts.message_secrets),
        )
        loops.append(watcher.run)
    if settings.sends_alerts:
        loops.append(lambda: send_errors(parts.client, "orchestrator"))
    if "orders" in settings.task_queues:
        sweeper = OrderSweeper(
            parts.client, parts.database, temporal, starter, settings, parts.message_secrets
        )
        loops.append(sweeper.run)
    if "bulk" in settings.task_queues:
        loops.append(lambda: make_schedules(temporal, settings))
        loops.append(lambda: purge_each_hour(parts.database, settings))
        loops.append(lambda: find_person_matches(parts.database))
        kept = KeptJobs(parts.database, JobClient(parts.client, parts.message_secrets))
        loops.append(lambda: warn_of_certificates(parts.database, kept))
        logins = JobUsers(parts.client, parts.message_secrets) if parts.users else None
        job_sweeper = KeptJobSweeper(
            parts.client, kept, starter, logins, defaults=settings.job_defaults
        )
        loops.append(job_sweeper.run)
        loops.append(FailureCollector(parts.database, temporal, settings.dead_letter_days).run)
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
