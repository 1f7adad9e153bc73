"""Reads the marks of all workers in service, and signals the workflows of those that lost theirs.

It finds deaths that no launcher reports: a lost host, a worker cut off from Valkey. One
orchestrator watches at a time. It stops nobody: the workflow checks again, and acts only if the
mark is still missing under the same generation. `missing_marks.py` decides whom to signal;
`valkey_restorer.py` restores what Valkey has lost.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client
from temporalio.service import RPCError

from activities.events.missing_marks import MissingMarkTracker
from activities.events.valkey_restorer import ValkeyRestorer
from infra.database.engine import DatabaseUnavailable
from infra.database.locks import lead
from infra.database.workers import sessions as worker_sessions
from infra.database.workers.sessions import WorkerInService
from infra.process_metrics import MARKS
from infra.settings import Settings
from infra.temporal.client import signal_workflow
from infra.valkey import client as valkey
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys
from workflows import names
from workflows.user_worker.messages import WorkerUnmarked

log = structlog.get_logger()

#: Names the watcher's lock among PostgreSQL's advisory locks; any constant that no other lock has.
LOCK_ID = 0x6265727469
#: Seconds between two looks at all marks: one command of Valkey for 500 of them. Far below
#: `missing_marks.MAX_READ_GAP_S`, so that a slow look or two do not make all absences begin anew.
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
#: Seconds after which a check leaves the other signals to the next check. The last signal may take
#: 5 s more. Both together are less than `missing_marks.MAX_READ_GAP_S`, from which all absences
#: would begin anew, and less than the silence that ends the leadership.
MAX_SIGNALLING_S = 3.0


@dataclass(eq=False, repr=False)
class MarkWatcher:
    """Watches the workers' marks, and has owner keys, switches and logins restored. `run` ends only
    when it is cancelled."""

    client: Redis
    temporal: Client
    settings: Settings
    restorer: ValkeyRestorer
    #: Seconds; each constant says what its value is for.
    signalling: float = MAX_SIGNALLING_S
    interval: float = CHECK_INTERVAL_S
    min_absence: float = MIN_ABSENCE_S

    def __post_init__(self) -> None:
        self._unreadable = False
        self._many = False
        #: The last server that this process has noted (`valkey.note_server`).
        self._noted_server = ""

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
            await self.restorer.restore_new_server(connection)
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
            # Before the switches are restored: from then on workers take orders.
            if server != self._noted_server:
                await valkey.note_server(self.client, server)
                self._noted_server = server
            missing = marks.count(None)
            MARKS.labels("missing").set(missing)
            MARKS.labels("present").set(len(marks) - missing)
            await self.restorer.restore_logins(server, connection)
            valkey_identity = f"{generation} {server}"
            due = absences.update(_now(), valkey_identity, dict(zip(workers, marks, strict=True)))
            if absences.missing:
                restored = await self.restorer.restore_owners(
                    absences.missing, generation, server, connection
                )
                absences.note_restored(_now(), restored)
                due = [worker for worker in due if worker not in restored]
            if absences.many:
                due = await self._order_by_need(due)
            await self.restorer.restore_switches(workers, server, connection)
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

    async def _order_by_need(self, due: Sequence[WorkerInService]) -> list[WorkerInService]:
        """Returns the workers whose users' orders or jobs wait, then some of the others, so that
        not all users launch a worker and log in at once."""
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
