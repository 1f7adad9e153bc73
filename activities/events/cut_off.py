"""Cuts off a worker that uses more of Valkey than it may, and removes what only this worker wrote.

1. Its login is deleted, so that it writes nothing more.
2. Its epoch is fenced. From there on PostgreSQL says that it gets neither its login nor its user
   back, also if Valkey loses what it has.
3. A limited number of its unread events is passed on.
4. Its names are removed. What services wrote stays: queued requests, owner, switch, and the names
   that show what became of unsettled orders. An order that the worker may have sent becomes unknown
   and is verified with the broker. Jobs are enqueued again from PostgreSQL.
5. The worker is stopped. Its end counts as a crash, so a user whose workers are cut off again and
   again is parked.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, RedisError

from activities.claims.stop import WorkerTerminator
from activities.pool import entries
from infra import tasks
from infra.database.engine import Database
from infra.database.workers import assignments
from infra.database.workers.assignments import AssignmentRow
from infra.launchers.port import Launcher
from infra.process_metrics import CUT_OFF
from infra.valkey import client as valkey
from infra.valkey.client import reply_of, text_of
from infra.valkey.request_queue import SEEN_AFTER_DEADLINE_MS
from infra.valkey.worker_users import WorkerUsers
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.errors import BerthError, MalformedMessage
from worker_runtime.protocol.requests import parse_frame
from workflows.user_worker.messages import WorkerRef

#: Seconds until a step that failed is tried again, and the grace of a worker that is stopped.
RETRY_INTERVAL_S = 1.0
#: A list that services write is kept unchanged up to this many entries and bytes. A string of an
#: order is kept up to the same number of bytes: twice the size of a message with its frame.
MAX_KEPT_ENTRIES, MAX_KEPT_BYTES = 1_000, 600_000
#: Unsettled orders of a user whose names are kept: the newest. All others count as unknown, too.
MAX_KEPT_ORDERS = 500
#: Seconds that a journal entry is kept (`keys.journal`).
JOURNAL_TTL_S = 172_800
#: Names of one step of a removal: about 0.5 ms, in which Valkey serves nobody else.
NAMES_PER_STEP = 500

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Offender:
    """Names a worker, its user, or both; an unknown one is ''."""

    user_id: str = ""
    worker_id: str = ""
    #: The name of the count of broker calls that has grown too large; it is removed, too.
    budget: str = ""


@dataclass(eq=False, repr=False)
class WorkerCutOff:
    """Used by everything that watches workers."""

    client: Redis
    database: Database
    launcher: Launcher
    ends: WorkerTerminator
    #: None: workers log in to Valkey as we do, so that only their end stops them.
    users: WorkerUsers | None = None

    def __post_init__(self) -> None:
        #: Workers that were cut off.
        self.count = 0
        self._running = tasks.SharedTasks[Offender, None](_failed)

    async def cut_off_writer(self, writer: str, reason: str) -> bool:
        """Cuts off, like `cut_off`, a writer by the name that `writer_of` in `writer_lib.lua`
        gave."""
        kind, _, name = writer.partition(" ")
        if kind == "user":
            return await self.cut_off(Offender(user_id=name), reason)
        if kind == "worker":
            return await self.cut_off(Offender(worker_id=name), reason)
        # A budget. An operator may have linked several users to one person, who share it: nobody
        # can tell which of their workers made it too large.
        workers = (await self.users.workers_with_budgets([name]))[name] if self.users else []
        begun = [
            await self.cut_off(Offender(worker_id=worker_id, budget=name), reason)
            for worker_id in workers
        ]
        if not workers:
            log.error("budget_too_large", budget=name, reason=reason)
        return any(begun)

    async def cut_off(self, offender: Offender, reason: str) -> bool:
        """Deletes the worker's login, and does the rest in the background. Raises `RedisError`.

        Returns False if this offender is being cut off already.
        """
        if not offender.worker_id:
            # Only the orchestrator writes the owner key.
            owner = await reply_of(self.client.hget(keys.owner(offender.user_id), "worker"))
            offender = replace(offender, worker_id=text_of(owner))
        if self.users and offender.worker_id:
            await self.users.delete(offender.worker_id)  # a claim may have made it again
        if offender in self._running.keys:
            return False
        self.count += 1
        CUT_OFF.inc()
        log.error(
            "worker_cut_off", worker_id=offender.worker_id, user_id=offender.user_id, reason=reason
        )
        self._running.join(offender, partial(self._finish, offender, reason))
        return True

    async def wait(self) -> None:
        """Waits until no cut-off is under way."""
        while running := self._running.keys:
            await asyncio.wait([self._running.join(running[0], partial(asyncio.sleep, 0))])

    async def close(self) -> None:
        await self._running.close()

    async def _finish(self, offender: Offender, reason: str) -> None:
        while True:
            try:
                await self._remove(offender, reason)
                return
            except (RedisError, OSError, BerthError) as error:
                # Its login is gone: nothing grows meanwhile.
                log.warning("cut_off_waits", error=type(error).__name__, reason=str(error)[:200])
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _remove(self, offender: Offender, reason: str) -> None:
        rows = await self._assignments(offender)
        users = {offender.user_id, *(row.user_id for row in rows)} - {""}
        workers = {offender.worker_id, *(row.worker_id for row in rows)} - {""}
        await self._delete_logins(workers - {offender.worker_id})
        await self._fence(rows)
        await self._delete_logins(workers)  # a reload may have made one again before the fence
        for worker_id in workers:
            await entries.pump_events(
                self.client,
                worker_id,
                each=entries.MAX_LAST_EVENTS,
                each_bytes=entries.MAX_LAST_EVENT_BYTES,
            )
        kept = [name for user_id in users for name in await self._keep_orders(user_id)]
        writers = [
            *(f"user {user_id}" for user_id in users),
            *(f"worker {worker_id}" for worker_id in workers),
        ]
        writers += [f"budget {offender.budget}"] if offender.budget else []
        removed = await self._remove_names(writers, kept)
        for user_id in users:
            await self._note_queued(user_id)
        await self._fence(rows)  # again: with full memory no owner key can be written
        log.warning(
            "worker_names_removed", workers=sorted(workers), users=sorted(users), count=removed
        )
        for worker_id in workers:
            await self.client.set(keys.cut_off(worker_id), reason, ex=keys.CUT_OFF_TTL_S)
            for task in await self.launcher.find_tasks(worker_id):
                await self.launcher.stop(task.task_id, reason, grace=RETRY_INTERVAL_S)

    async def _delete_logins(self, workers: Collection[str]) -> None:
        if self.users:
            for worker_id in workers:
                await self.users.delete(worker_id)

    async def _assignments(self, offender: Offender) -> list[AssignmentRow]:
        users, workers = [offender.user_id], [offender.worker_id]
        rows = await self.database.fetch(assignments.open_assignments_of, users, workers, ())
        # A later worker of the same user has done nothing.
        return [
            row for row in rows if not offender.worker_id or row.worker_id == offender.worker_id
        ]

    async def _fence(self, rows: Sequence[AssignmentRow]) -> None:
        for row in rows:
            worker = WorkerRef(
                worker_id=row.worker_id,
                task_id=row.task_id,
                epoch=row.epoch,
                claim_id=row.claim_id,
                pool=row.pool,
            )
            try:
                await self.ends.fence(row.user_id, worker)
            except OutOfMemoryError:
                log.warning("fence_waits_for_memory", user_id=row.user_id)

    async def _keep_orders(self, user_id: str) -> list[str]:
        """Makes orders that the worker may have sent unknown; returns the names that stay."""
        unanswered = await self.database.fetch(assignments.unanswered_orders, [user_id])
        lists = [keys.requests(user_id), keys.processing(user_id), keys.control(user_id)]
        orders: list[str] = []
        for _, order_id in unanswered[-MAX_KEPT_ORDERS:]:
            orders += [
                keys.seen(user_id, order_id),
                keys.response(user_id, order_id),
                keys.journal(user_id, order_id),
            ]
        names = [*lists, keys.doorbell(user_id), *orders]
        words = [MAX_KEPT_ENTRIES, MAX_KEPT_BYTES, JOURNAL_TTL_S]
        unknown = await valkey.run_script(self.client, scripts.KEEP_ORDERS, names, words)
        if unknown:
            log.warning("orders_made_unknown", user_id=user_id, count=unknown)
        return [*lists, *orders]

    async def _remove_names(self, writers: Sequence[str], kept: Sequence[str]) -> int:
        cursor, count = b"0", 0
        while True:
            words = [cursor, NAMES_PER_STEP, "\n".join(writers), *kept]
            cursor, removed = await valkey.run_script(self.client, scripts.REMOVE_NAMES, [], words)
            count += int(removed)
            if cursor == b"0":
                return count

    async def _note_queued(self, user_id: str) -> None:
        """Notes again which requests are in the queue. Without the note, a request that came
        meanwhile could be queued twice."""
        now_ms = await valkey.read_clock(self.client)
        items = await reply_of(self.client.lrange(keys.requests(user_id), -MAX_KEPT_ENTRIES, -1))
        async with self.client.pipeline(transaction=False) as pipe:
            for item in items:
                try:
                    frame = parse_frame(item)
                except MalformedMessage:
                    continue
                lifetime_ms = max(0, frame.deadline_ms - now_ms) + SEEN_AFTER_DEADLINE_MS
                pipe.set(keys.seen(user_id, frame.request_id), item, px=lifetime_ms, nx=True)
            await pipe.execute()


def _failed(offender: Offender, error: BaseException) -> None:
    log.error("cut_off_failed", worker_id=offender.worker_id, error=type(error).__name__)
