"""Signals workflows when the launcher reports the end of their workers."""

import asyncio
from dataclasses import KW_ONLY, dataclass

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client
from temporalio.service import RPCError

from activities.pool import entries
from infra import tasks
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.locks import MAX_SILENCE_S, lead, send_sign_of_life
from infra.database.workers import sessions as worker_sessions
from infra.launchers.port import Launcher
from infra.temporal.client import signal_workflow
from infra.valkey.client import reply_of, text_of
from infra.valkey.worker_users import WorkerUsers
from infra.worker_task import (
    HOST_LOST,
    HOST_RESTARTED,
    LOST,
    STOPPED,
    LauncherUnreachable,
    TaskExit,
)
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.launch import ExitCode
from workflows import names
from workflows.user_worker.messages import WAS_GONE, WorkerLostSignal
from workflows.worker_pool.messages import WorkerLeft

#: Ends that are not the worker's own doing: somebody asked for it, or its host or node went away.
NO_CRASH = frozenset({STOPPED, HOST_RESTARTED, HOST_LOST, LOST})
#: Exit codes of planned ends, whatever the launcher gives as the reason.
_NO_CRASH_CODES = frozenset(
    {
        ExitCode.OK,  # it got SIGTERM, for example because its host shuts down
        ExitCode.SHUTDOWN_TIMEOUT,  # the same, and its session did not end in time
        ExitCode.CLAIM_REFUSED,  # nobody completed the claim, for example a dead orchestrator
    }
)
#: Seconds between two tries while the launcher, Valkey, PostgreSQL or Temporal is away.
RETRY_INTERVAL_S = 1.0
#: The name of this advisory lock; any constant that no other lock has.
LOCK_ID = 0x6265727478

log = structlog.get_logger()


def is_planned(ended: TaskExit) -> bool:
    """Returns True if the reason or the exit code says that the worker's end was no crash."""
    return ended.reason in NO_CRASH or ended.exit_code in _NO_CRASH_CODES


@dataclass(eq=False, repr=False)
class ExitWatcher:
    """Follows the launcher's stream of exits until cancelled."""

    client: Redis
    database: Database
    launcher: Launcher
    temporal: Client
    _: KW_ONLY
    pool: str
    users: WorkerUsers | None = None

    def __post_init__(self) -> None:
        #: Pools that lost a free worker, with the last one that each lost.
        self._lost: dict[str, str] = {}
        self._losing = asyncio.Event()

    async def run_alone(self, database_url: str) -> None:
        """Executes `run` in one process at a time, for a launcher whose queue (SQS) gives each exit
        to one reader only."""
        while True:
            try:
                await lead(database_url, LOCK_ID, self._run_while_leading)
            except DatabaseUnavailable as error:
                log.warning("exits_wait", reason=error.detail)
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _run_while_leading(self, connection: AsyncConnection) -> None:
        async with tasks.running(self.run()):
            while True:
                await send_sign_of_life(connection)
                await asyncio.sleep(MAX_SILENCE_S / 6)

    async def run(self) -> None:
        """Reports how workers end, including ends that happened while no orchestrator ran."""
        pools = asyncio.create_task(self._signal_pools(), name="ends of free workers")
        try:
            while True:
                try:
                    # With '' the launcher reports all ends that it still knows.
                    position = await reply_of(self.client.get(keys.EXITS_HANDLED))
                    async for ended in self.launcher.exits(text_of(position)):
                        await self._report_until_done(ended)
                except (LauncherUnreachable, RedisError) as error:
                    log.warning(
                        "exits_not_read", error=type(error).__name__, reason=str(error)[:200]
                    )
                await asyncio.sleep(RETRY_INTERVAL_S)
        finally:
            await tasks.cancel_tasks(pools)

    async def _signal_pools(self) -> None:
        """Signals pools that lost free workers; ends of users' workers do not wait for it.

        When a host is lost, hundreds of free workers end, and a busy Temporal takes a second for a
        signal: one signal covers all ends since the last one. If this process dies before, the pool
        counts within a minute.
        """
        while True:
            await self._losing.wait()
            self._losing.clear()
            while self._lost:
                # The one that waits longest: a pool that fails holds up no other.
                pool = next(iter(self._lost))
                worker_id = self._lost.pop(pool)
                try:
                    gone = WorkerLeft(worker_id=worker_id)
                    await signal_workflow(
                        self.temporal, names.worker_pool_id(pool), "worker_gone", gone
                    )
                except (RPCError, OSError) as error:
                    log.warning("pool_not_signalled", pool=pool, error=type(error).__name__)
                except Exception:  # the boundary of a loop, which would end unseen
                    log.exception("pool_signals_crashed", pool=pool)
                else:
                    continue
                self._lost.setdefault(pool, worker_id)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _report_until_done(self, ended: TaskExit) -> None:
        """Reports one end, again and again until it succeeds."""
        while True:
            try:
                await self.report(ended)
                position = ended.detail.get("position")
                if position:
                    await reply_of(self.client.set(keys.EXITS_HANDLED, position))
                return
            except (BerthError, RedisError, RPCError, OSError) as error:
                log.warning(
                    "exit_not_reported", worker_id=ended.worker_id, error=type(error).__name__
                )
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def report(self, ended: TaskExit) -> None:
        """Takes the worker out of its pool, then signals its user's workflow; `run` signals the
        pool's."""
        row = await self.database.fetch(worker_sessions.latest_session, worker_id=ended.worker_id)
        pool = row.pool if row else self.pool
        if self.users:
            await self.users.delete(ended.worker_id)
        await entries.remove_entry(self.client, pool, ended.worker_id)
        log.info(
            "worker_exited",
            worker_id=ended.worker_id,
            task_id=ended.task_id,
            user_id=row.user_id if row else "",
            exit_code=ended.exit_code,
            reason=ended.reason,
        )
        if row is None:
            self._lost[pool] = ended.worker_id
            self._losing.set()
        elif row.ended_at is None or (row.end_reason or "").startswith(
            (worker_sessions.CLOSED_BY_WORKER, WAS_GONE)
        ):
            was_cut_off = await self.client.exists(keys.cut_off(ended.worker_id))
            lost = WorkerLostSignal(
                task_id=ended.task_id,
                worker_id=ended.worker_id,
                exit_code=ended.exit_code,
                reason=ended.reason[:200],
                planned=not was_cut_off and is_planned(ended),
            )
            workflow_id = names.user_worker_id(row.user_id)
            if not await signal_workflow(self.temporal, workflow_id, "worker_lost", lost):
                # The assignment of a worker without workflow would else stay open for ever.
                reason = f"{ended.reason}, no workflow"[:200]
                async with self.database.session() as session:
                    await worker_sessions.end_session(
                        session, claim_id=row.claim_id, reason=reason, crashed=not lost.planned
                    )
