"""Reads the marks of all workers in service, and signals the workflows of those that lost theirs.

It finds deaths that no launcher reports: a lost host, a worker cut off from Valkey. One
orchestrator watches at a time. Nobody is stopped here: the workflow checks again, and acts only if
the mark is still missing under the same generation. It also restores owner keys and switches that
Valkey has lost.
"""

import asyncio
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client
from temporalio.service import RPCError

from activities.maintenance.anomalies import is_many
from activities.pool import entries
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.locks import lead
from infra.database.trading import switches
from infra.database.workers import sessions as worker_sessions
from infra.database.workers.sessions import WorkerInService
from infra.launchers.port import Launcher
from infra.process_metrics import MARKS
from infra.settings import Settings
from infra.temporal.client import signal_workflow
from infra.valkey import client as valkey
from infra.valkey import switch_fanout
from infra.valkey.job_users import JobUsers
from infra.valkey.switch_fanout import SwitchSigner
from infra.valkey.worker_users import WorkerUsers, load_worker_scripts
from infra.vault.message_secret import MessageSecrets
from infra.worker_task import LauncherUnreachable
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys
from workflows import names
from workflows.user_worker.messages import WorkerRef, WorkerUnmarked

log = structlog.get_logger()

#: Seconds between two reads after which what happened in between is unknown.
MAX_READ_GAP_S = 10.0
#: Seconds after which a worker that is still unmarked is signalled again.
SIGNAL_RETRY_INTERVAL_S = 60.0


class MissingMarkTracker:
    """Tracks which marks are missing and since when, and decides when that means that a worker is
    dead; without I/O.

    Other reasons for a missing mark concern many workers at once (Valkey was emptied, restarted or
    out of reach) or end within seconds (the worker renews it). In doubt nobody is signalled
    (no-healthy-kill). But on a server that kept its data and could be read all the time, a mark
    goes when its worker's lease has ended, and that worker has fenced itself. If many marks are
    missing, the watcher waits longer: a host may be lost.

    `now` is in seconds of a monotonic clock.

    `confirm`: seconds that a mark must be missing at every read before its workflow is signalled.
    `settle`: seconds without a decision after the first read, and after Valkey was out of reach,
    emptied, restarted or replaced, so that workers can renew. It is the lifetime of a mark. While
    many marks are missing, a third of it is waited for instead of `confirm`, and once more when
    most are back: workers that reach Valkey again renew within seconds.
    """

    def __init__(self, *, confirm: float, settle: float) -> None:
        self._confirm = confirm
        self._settle = settle
        self._hold = max(confirm, settle / 3)
        self._updated_at: float | None = None
        self._place = ""
        #: Seconds that a mark must be missing now.
        self._wanted = confirm
        self._settled_at = 0.0
        self._since: dict[WorkerInService, float] = {}
        self._signalled_at: dict[WorkerInService, float] = {}
        self._without_workflow: set[WorkerInService] = set()
        #: Whether the last read missed enough of them to be an outage.
        self.many = False

    @property
    def missing(self) -> list[WorkerInService]:
        """Workers whose marks were missing at the last read."""
        return list(self._since)

    def reset(self) -> None:
        """Forgets what was known before, because a read failed."""
        self._updated_at = None
        self._since.clear()

    def update(
        self, now: float, place: str, marks: Mapping[WorkerInService, bytes | None]
    ) -> list[WorkerInService]:
        """Adds one read: the mark of each worker in service. Returns the workers to signal now, the
        longest due first. `place`: names Valkey's generation and server process."""
        updated_at, self._updated_at = self._updated_at, now
        if updated_at is None or now - updated_at > MAX_READ_GAP_S or place != self._place:
            self._since.clear()
            self._settled_at = now + self._settle
        self._place = place
        missing = [worker for worker, mark in marks.items() if mark != worker.mark]
        self._since = {worker: self._since.get(worker, now) for worker in missing}
        self._signalled_at = {
            worker: at for worker, at in self._signalled_at.items() if worker in self._since
        }
        self._without_workflow &= self._since.keys()
        counted = len(missing) - len(self._without_workflow)
        were_many, self.many = self.many, is_many(counted, len(marks))
        self._wanted = self._hold if self.many else self._confirm
        if were_many and not self.many:  # most are back: the others may be about to
            self._settled_at = max(self._settled_at, now + self._hold)
        if now < self._settled_at:
            return []
        return sorted(
            (worker for worker in missing if self._due_at(worker) <= now), key=self._due_at
        )

    def _due_at(self, worker: WorkerInService) -> float:
        if worker in self._without_workflow:
            return float("inf")
        signalled_at = self._signalled_at.get(worker)
        due = self._since[worker] + self._wanted
        return due if signalled_at is None else max(due, signalled_at + SIGNAL_RETRY_INTERVAL_S)

    def seconds_until_read(self, now: float, period: float) -> float:
        """Returns the seconds until the next read: `period`, or less if a worker becomes due
        before."""
        times = (max(self._due_at(worker), self._settled_at) for worker in self._since)
        return min((at - now for at in times if now < at < now + period), default=period)

    def note_signalled(self, now: float, worker: WorkerInService) -> None:
        self._signalled_at[worker] = now

    def note_without_workflow(self, worker: WorkerInService) -> None:
        """Notes a worker without a workflow to signal; it does not count as missing while its mark
        is."""
        self._without_workflow.add(worker)

    def note_restored(self, now: float, workers: Iterable[WorkerInService]) -> None:
        """Notes workers whose owner keys were restored, without which they could not renew."""
        for worker in workers:
            self._since[worker] = now + self._settle


#: Names the watcher's lock among PostgreSQL's advisory locks; any constant that no other lock has.
LOCK_ID = 0x6265727469
#: Seconds between two looks at all marks: one command of Valkey for 500 of them. Far below
#: `MAX_READ_GAP_S`, so that a slow look or two do not make all absences begin anew.
CHECK_INTERVAL_S = 2.0
#: Seconds that a mark must be missing before its workflow is signalled: two looks at least, and a
#: worker that renews every 5 s gets a turn.
MIN_ABSENCE_S = 5.0
#: Keys of one script, which blocks Valkey.
MAX_KEYS_PER_SCRIPT = 500
#: Seconds between two tries while PostgreSQL is away.
RETRY_INTERVAL_S = 1.0
#: Users who ask for nothing and are signalled at one check while many marks are missing: 5 a
#: second. Each needs a launch and a login, and those who ask go first.
MAX_QUIET_USERS_PER_CHECK = 10
#: Seconds after which a check leaves the other signals to the next one. One may take 5 s: together
#: they stay below `MAX_READ_GAP_S`, or else all absences would begin anew, and below the silence
#: that ends the leadership.
MAX_SIGNALLING_S = 3.0


@dataclass(eq=False, repr=False)
class MarkWatcher:
    """Watches the workers' marks, owner keys and switches. `run` ends only when it is cancelled."""

    client: Redis
    temporal: Client
    settings: Settings
    message_secrets: MessageSecrets
    #: The workers' logins at Valkey; needs `launcher`. None: workers log in to Valkey as we do.
    users: WorkerUsers | None = None
    launcher: Launcher | None = None
    #: Says which scripts to load for workers that share a login, which may load none themselves.
    #: None: no worker needs them.
    database: Database | None = None
    #: The logins of the fleets of job runners; None: they log in to Valkey as we do.
    job_users: JobUsers | None = None
    #: As the constants of these names.
    signalling: float = MAX_SIGNALLING_S
    interval: float = CHECK_INTERVAL_S
    min_absence: float = MIN_ABSENCE_S

    def __post_init__(self) -> None:
        #: The last server on which this process made the workers' users.
        self._users_on = ""
        #: The last server on which this process loaded scripts without users, and the day
        #: (`SCRIPTS_KEPT`).
        self._scripts_on: tuple[str, date] | None = None
        self._switches = SwitchSigner(self.message_secrets)
        self._unreadable = False
        self._many = False
        #: The last server for which this process wrote down since when it is known.
        self._noted = ""
        #: The last server to which this process wrote the switches while it was on standby.
        self._restored_on = ""

    async def run(self) -> None:
        while True:
            try:
                await lead(
                    self.settings.session_database_url,
                    LOCK_ID,
                    self.watch,
                    on_standby=self.restore_on_new_server,
                )
            except DatabaseUnavailable as error:
                log.warning("watcher_waits", reason=error.detail)
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def restore_on_new_server(self, connection: AsyncConnection) -> None:
        """Writes the switches to a Valkey server that is new, though another process leads.

        The leader may be frozen, or unable to reach Valkey while it keeps its lock. Until the
        switches are on a new server, workers leave all requests in their queues.
        """
        MARKS.clear()  # the leader shows them
        try:
            server = await valkey.read_server_id(self.client)
            if server != self._restored_on:
                await valkey.note_server(self.client, server)
                await self._restore_users(server, connection)
                workers = await worker_sessions.workers_in_service(connection)
                await self._restore_switches(workers, server, connection)
                self._restored_on = server
        except (RedisError, OSError) as error:
            log.info("standby_cannot_read", error=type(error).__name__, reason=str(error)[:200])

    async def watch(self, connection: AsyncConnection) -> None:
        """Checks the marks every `interval`; reads PostgreSQL by `connection`."""
        absences = MissingMarkTracker(confirm=self.min_absence, settle=self.settings.mark_ttl)
        while True:
            began = _now()
            await self.check_marks(connection, absences)
            now = _now()
            await asyncio.sleep(
                absences.seconds_until_read(now, max(0.0, began + self.interval - now))
            )

    async def check_marks(self, connection: AsyncConnection, absences: MissingMarkTracker) -> None:
        """Checks once. Raises what the connection raises; an outage of Valkey is logged."""
        workers = await worker_sessions.workers_in_service(connection)
        try:
            generation, server, marks = await self._marks(workers)
            if server != self._noted:  # before any switch, without which no worker takes an order
                await valkey.note_server(self.client, server)
                self._noted = server
            missing = marks.count(None)
            MARKS.labels("missing").set(missing)
            MARKS.labels("present").set(len(marks) - missing)
            await self._restore_users(server, connection)
            place = f"{generation} {server}"
            due = absences.update(_now(), place, dict(zip(workers, marks, strict=True)))
            if absences.missing:
                restored = await self._restore_owners(
                    absences.missing, generation, server, connection
                )
                absences.note_restored(_now(), restored)
                due = [worker for worker in due if worker not in restored]
            if absences.many:
                due = await self._asking_first(due)
            await self._restore_switches(workers, server, connection)
        except (RedisError, OSError) as error:
            absences.reset()
            if not self._unreadable:
                log.warning(
                    "watcher_cannot_read", error=type(error).__name__, reason=str(error)[:200]
                )
            self._unreadable = True
            return
        if self._unreadable:
            log.info("watcher_reads_again")
        self._unreadable = False
        if absences.many != self._many:
            self._many = absences.many
            log.warning("many_marks_missing" if self._many else "marks_are_back", of=len(workers))
        await self._signal(due, generation, absences)

    async def _marks(
        self, workers: Sequence[WorkerInService]
    ) -> tuple[str, str, list[bytes | None]]:
        """Returns Valkey's generation and run id, and each mark. Raises `RedisError` when the
        generation changed."""
        generation, server = await valkey.read_generation_and_server(self.client, uuid.uuid4().hex)
        marks: list[bytes | None] = []
        for start in range(0, len(workers), MAX_KEYS_PER_SCRIPT):
            mark_keys = [
                keys.mark(worker.user_id) for worker in workers[start : start + MAX_KEYS_PER_SCRIPT]
            ]
            marks += await valkey.read_strings(self.client, mark_keys)
        if await self.client.get(keys.GENERATION) != generation.encode():
            raise RedisError("the generation changed during a read")
        return generation, server, marks

    async def _restore_users(self, server: str, connection: AsyncConnection) -> None:
        """Lets workers and job runners log in to a server that is new: it has neither users nor
        scripts."""
        if self.job_users is not None:
            await self.job_users.ensure(server)
        if (
            self.users is None
            and self.database is not None
            and self._scripts_on != (server, date.today())
        ):
            await load_worker_scripts(self.client, self.database)
            self._scripts_on = server, date.today()
        if self.users is None or self.launcher is None or server == self._users_on:
            return
        assigned = await worker_sessions.assigned_now(connection)
        try:
            running = await self.launcher.list()
        except LauncherUnreachable as error:  # the next check tries again
            log.warning("free_workers_not_restored", reason=error.detail)
            await self.users.restore((), assigned)
            return
        await self.users.restore(((task.worker_id, task.pool) for task in running), assigned)
        self._users_on = server

    async def _restore_switches(
        self, workers: Sequence[WorkerInService], server: str, connection: AsyncConnection
    ) -> None:
        """Writes the switches that Valkey lost or never got, that were forged, or copied from
        another server."""
        picture, users = (
            await switches.read_switches(connection),
            [worker.user_id for worker in workers],
        )
        behind = await switch_fanout.users_behind(
            self.client, self._switches, server, picture, users
        )
        if behind:
            # Read again: a switch that was set since, and lost by Valkey, would come back open.
            picture = await switches.read_switches(connection)
            by_user = {user_id: picture.for_user(user_id) for user_id in behind}
            try:
                await switch_fanout.write_switches(
                    self.client, self._switches, server, by_user, behind
                )
            except ResponseError as error:
                # Only these users' orders wait; the marks are read all the same.
                log.error("switches_refused", of=len(behind), reason=str(error)[:200])
            else:
                log.warning("switches_restored", count=len(behind))

    async def _restore_owners(
        self,
        missing: Sequence[WorkerInService],
        generation: str,
        server: str,
        connection: AsyncConnection,
    ) -> set[WorkerInService]:
        """Writes missing owner keys again, without which no mark is renewed; returns their
        workers."""
        async with self.client.pipeline(transaction=False) as pipe:
            for unowned in missing:
                pipe.exists(keys.owner(unowned.user_id))
            present = await pipe.execute()
        without = {worker for worker, there in zip(missing, present, strict=True) if not there}
        if not without:
            return without
        picture = await switches.read_switches(connection)  # after the read of Valkey, as above
        for unowned in without:
            worker = WorkerRef(
                worker_id=unowned.worker_id,
                task_id="",
                epoch=unowned.epoch,
                claim_id=unowned.claim_id,
                pool="",
            )
            words = self._switches.words(unowned.user_id, picture.for_user(unowned.user_id), server)
            await entries.write_owner(self.client, unowned.user_id, worker, generation, words)
        log.warning("owner_keys_restored", count=len(without))
        return without

    async def _asking_first(self, due: Sequence[WorkerInService]) -> list[WorkerInService]:
        """Returns those whose orders or jobs wait, and some of the others: not all launch and log
        in at once."""
        asked: list[int] = []
        for start in range(0, len(due), MAX_KEYS_PER_SCRIPT):
            async with self.client.pipeline(transaction=False) as pipe:
                for worker in due[start : start + MAX_KEYS_PER_SCRIPT]:
                    tag = job_keys.user_tag(worker.user_id)
                    pipe.exists(
                        keys.requests(worker.user_id),
                        keys.processing(worker.user_id),
                        job_keys.ready(tag),
                        job_keys.beats(tag),
                    )
                asked += await pipe.execute()
        asking = [worker for worker, work in zip(due, asked, strict=True) if work]
        quiet = [worker for worker, work in zip(due, asked, strict=True) if not work]
        return asking + quiet[:MAX_QUIET_USERS_PER_CHECK]

    async def _signal(
        self, due: Sequence[WorkerInService], generation: str, absences: MissingMarkTracker
    ) -> None:
        until = _now() + self.signalling
        for number, worker in enumerate(due):
            if number and _now() >= until:
                return
            workflow_id = names.user_worker_id(worker.user_id)
            unmarked = WorkerUnmarked(
                worker_id=worker.worker_id, epoch=worker.epoch, generation=generation, outage=True
            )
            try:
                signalled = await signal_workflow(
                    self.temporal, workflow_id, "worker_unmarked", unmarked
                )
            except RPCError as error:
                log.warning(
                    "unmarked_not_signalled", user_id=worker.user_id, reason=str(error)[:200]
                )
                return  # Temporal is away: the next check tries again
            if signalled:
                absences.note_signalled(_now(), worker)
                log.warning(
                    "worker_unmarked",
                    user_id=worker.user_id,
                    worker_id=worker.worker_id,
                    epoch=worker.epoch,
                )
            else:
                absences.note_without_workflow(worker)
                log.warning(
                    "unmarked_worker_of_no_workflow",
                    user_id=worker.user_id,
                    worker_id=worker.worker_id,
                )


def _now() -> float:
    """Returns the seconds of a clock that also counts while the machine sleeps, as the lifetime of
    marks does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
