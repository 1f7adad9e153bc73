"""Reads the marks of all workers in service, and signals the workflows of those that lost theirs.

It finds deaths that no launcher reports: a lost host, a worker cut off from Valkey. One orchestrator watches
at a time. Nobody is stopped here: the workflow checks again, and acts only if the mark is still missing under
the same generation. It also restores owner keys and switches that Valkey has lost.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client
from temporalio.service import RPCError

from activities.events.absences import GAP, Absences
from activities.pool import entries
from infra.database.engine import DatabaseUnavailable
from infra.database.locks import lead
from infra.database.trading import switches
from infra.database.workers import sessions as worker_sessions
from infra.database.workers.sessions import WorkerInService
from infra.settings import Settings
from infra.temporal.client import signal_workflow
from infra.valkey import client as valkey
from infra.valkey import switch_fanout
from worker_runtime.protocol import keys
from workflows import names
from workflows.user_worker import messages as m

#: Names the watcher's lock among PostgreSQL's advisory locks; any constant that no other lock has.
LOCK = 0x6265727469
#: Keys of one MGET: it blocks Valkey, and 500 keys take about 0.1 ms.
CHUNK = 500
#: Seconds between two tries while PostgreSQL is away.
RETRY = 1.0

log = structlog.get_logger()


class MarkWatcher:
    """`run` until cancelled."""

    def __init__(self, client: Redis, temporal: Client, settings: Settings) -> None:
        self._client = client
        self._temporal = temporal
        self._settings = settings
        self._unreadable = False
        self._many = False
        #: The last server of which it was written down since when it is known.
        self._noted = ""
        #: The last server to which this process wrote the switches while it was on standby.
        self._restored_on = ""

    async def run(self) -> None:
        while True:
            try:
                await lead(
                    self._settings.database_url, LOCK, self.watch, on_standby=self.restore_on_new_server
                )
            except DatabaseUnavailable as error:
                log.warning("watcher_waits", reason=error.detail)
            await asyncio.sleep(RETRY)

    async def restore_on_new_server(self, connection: AsyncConnection) -> None:
        """Writes the switches to a Valkey server that is new, though another process leads.

        The leader may be frozen, or unable to reach Valkey while it keeps its lock. Until the switches stand
        on a new server, workers leave all requests in their queues.
        """
        try:
            server = await valkey.read_server_id(self._client)
            if server != self._restored_on:
                await valkey.note_server(self._client, server)
                workers = await worker_sessions.workers_in_service(connection)
                await self._restore_switches(workers, server, connection)
                self._restored_on = server
        except (RedisError, OSError) as error:
            log.info("standby_cannot_read", error=type(error).__name__, reason=str(error)[:200])

    async def watch(self, connection: AsyncConnection) -> None:
        """Checks the marks every `watch_period`; reads PostgreSQL by `connection`."""
        own = self._settings
        absences = Absences(confirm=own.watch_confirm, settle=own.mark_ttl)
        period = min(own.watch_period, GAP / 2)  # further apart they would prove nothing
        while True:
            began = _now()
            await self.check_marks(connection, absences)
            now = _now()
            await asyncio.sleep(absences.pause(now, max(0.0, began + period - now)))

    async def check_marks(self, connection: AsyncConnection, absences: Absences) -> None:
        """Checks once. Raises what the connection raises; an outage of Valkey is logged."""
        workers = await worker_sessions.workers_in_service(connection)
        try:
            generation, server, marks = await self._marks(workers)
            if server != self._noted:  # before any switch, without which no worker takes an order
                await valkey.note_server(self._client, server)
                self._noted = server
            due = absences.update(_now(), generation, dict(zip(workers, marks, strict=True)))
            if absences.missing:
                restored = await self._restore_owners(absences.missing, generation, server, connection)
                absences.restored(_now(), restored)
                due = [one for one in due if one not in restored]
            await self._restore_switches(workers, server, connection)
        except (RedisError, OSError) as error:
            absences.reset()
            if not self._unreadable:
                log.warning("watcher_cannot_read", error=type(error).__name__, reason=str(error)[:200])
            self._unreadable = True
            return
        if self._unreadable:
            log.info("watcher_reads_again")
        self._unreadable = False
        if absences.many != self._many:
            self._many = absences.many
            log.warning("many_marks_missing" if self._many else "marks_are_back", of=len(workers))
        await self._signal(due, generation, absences)

    async def _marks(self, workers: Sequence[WorkerInService]) -> tuple[str, str, list[bytes | None]]:
        """Valkey's generation and run id, and each mark. Raises `RedisError` when the generation changed."""
        generation, server = await valkey.read_generation_and_server(self._client, uuid.uuid4().hex)
        async with self._client.pipeline(transaction=False) as pipe:
            for start in range(0, len(workers), CHUNK):
                pipe.mget([keys.mark(one.user_id) for one in workers[start : start + CHUNK]])
            pipe.get(keys.GENERATION)
            *chunks, after = await pipe.execute()
        if after != generation.encode():
            raise RedisError("the generation changed during a read")
        return generation, server, [mark for chunk in chunks for mark in chunk]

    async def _restore_switches(
        self, workers: Sequence[WorkerInService], server: str, connection: AsyncConnection
    ) -> None:
        """Writes the switches that Valkey lost or never got, or that were copied from another server."""
        picture, users = await switches.read_switches(connection), [one.user_id for one in workers]
        behind = await switch_fanout.users_behind(self._client, server, picture, users)
        if behind:
            # Read again: a switch that was set since, and lost by Valkey, would come back open.
            picture = await switches.read_switches(connection)
            await switch_fanout.write_switches(
                self._client, server, {user_id: picture.for_user(user_id) for user_id in behind}
            )
            log.warning("switches_restored", count=len(behind))

    async def _restore_owners(
        self, missing: Sequence[WorkerInService], generation: str, server: str, connection: AsyncConnection
    ) -> set[WorkerInService]:
        """Writes missing owner keys again, without which no mark is renewed; returns their workers."""
        async with self._client.pipeline(transaction=False) as pipe:
            for one in missing:
                pipe.exists(keys.owner(one.user_id))
            present = await pipe.execute()
        without = {one for one, there in zip(missing, present, strict=True) if not there}
        if not without:
            return without
        picture = await switches.read_switches(connection)  # after the read of Valkey, as above
        for one in without:
            worker = m.WorkerRef(
                worker_id=one.worker_id, task_id="", epoch=one.epoch, claim_id=one.claim_id, pool=""
            )
            switch = switch_fanout.addressed_to(picture.for_user(one.user_id), server)
            await entries.write_owner(self._client, one.user_id, worker, generation, switch)
        log.warning("owner_keys_restored", count=len(without))
        return without

    async def _signal(self, due: Sequence[WorkerInService], generation: str, absences: Absences) -> None:
        for one in due:
            workflow_id = names.user_worker_id(one.user_id)
            unmarked = m.WorkerUnmarked(worker_id=one.worker_id, epoch=one.epoch, generation=generation)
            try:
                found = await signal_workflow(self._temporal, workflow_id, "worker_unmarked", unmarked)
            except RPCError as error:
                log.warning("unmarked_not_signalled", user_id=one.user_id, reason=str(error)[:200])
                return  # Temporal is away: the next check tries again
            if found:
                absences.signalled(_now(), one)
                log.warning("worker_unmarked", user_id=one.user_id, worker_id=one.worker_id, epoch=one.epoch)
            else:
                absences.without_workflow(one)
                log.warning("unmarked_worker_of_no_workflow", user_id=one.user_id, worker_id=one.worker_id)


def _now() -> float:
    """Seconds; a clock that also counts while the machine sleeps, as the lifetime of marks does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
