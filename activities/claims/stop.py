"""Ends a user's worker and confirms its end. The activities stop a worker (`stop_worker`) and check
it (`check_worker`).

A worker counts as ended when its launcher confirmed it, or when its epoch was fenced long enough
ago. A listing proves nothing, because it may be minutes behind what another orchestrator launched.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from temporalio import activity

from activities.claims.handshake import push_signed, send_control
from activities.heartbeat import beating
from activities.pool import entries
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.trading import switches
from infra.database.workers import assignments, launches
from infra.database.workers import sessions as worker_sessions
from infra.launchers.port import Launcher
from infra.valkey import client as valkey
from infra.valkey.switch_fanout import SwitchSigner
from infra.valkey.worker_users import WorkerUsers
from infra.vault.key_pairs import OrchestratorKeys
from infra.vault.message_secret import MessageSecrets
from infra.worker_task import LauncherUnreachable, StopFailed, Task
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import WorkerUnavailable
from worker_runtime.protocol.messages import ReleaseClaim, Shutdown
from worker_runtime.protocol.worker_reports import read_metadata
from workflows.user_worker.messages import (
    WAS_GONE,
    CheckWorker,
    Stopped,
    StopWorker,
    WorkerHealth,
    WorkerRef,
)

log = structlog.get_logger()

#: Seconds between two checks whether the worker has ended by itself: that takes at least 0.1 s.
POLL_INTERVAL_S = 0.1
#: Seconds beyond the life of its mark for which a fenced worker may still hold its broker session.
FENCING_MARGIN_S = 10.0
#: Seconds that the launcher gets to confirm the end of a worker whose mark has run out, before it
#: is fenced.
CONFIRM_TIMEOUT_S = 2.0
#: The worker id in the owner key of a user whose last worker was fenced. No worker has this name.
NO_OWNER = "-"


@dataclass(eq=False, repr=False)
class _WorkerAccess:
    """Holds what the check of a user's worker and its end share."""

    client: Redis
    database: Database
    launcher: Launcher
    message_secrets: MessageSecrets
    mark_ttl: float

    def __post_init__(self) -> None:
        self._switches = SwitchSigner(self.message_secrets)

    async def _write_owner(self, user_id: str, worker: WorkerRef) -> None:
        """Makes the worker the user's owner, and writes the user's switch next to it."""
        generation, server = await valkey.read_generation_and_server(self.client, uuid.uuid4().hex)
        switch = await self.database.fetch(switches.switch_of_user, user_id)
        words = self._switches.words(user_id, switch, server)
        await entries.write_owner(self.client, user_id, worker, generation, words)


class WorkerTerminator(_WorkerAccess):
    """Ends a user's worker, and knows when that is certain (one-owner)."""

    async def end(
        self,
        user_id: str,
        worker: WorkerRef,
        reason: str,
        *,
        wait: float = 0.0,
        grace: float | None = None,
    ) -> None:
        """Returns when the worker has certainly ended; `wait`: seconds that it gets to end by
        itself first.

        Fences the epoch if the launcher does not answer. The end is then confirmed once the mark's
        life and `FENCING_MARGIN_S` have passed; until then this raises `StopFailed`. A repeat does
        not wait anew. If the mark has already expired, so has the lease: then this waits at most
        `FENCING_MARGIN_S`, even if the launcher does not answer.
        """
        mark = f"{worker.epoch}:{worker.worker_id}"
        known_for = self.mark_ttl + FENCING_MARGIN_S
        lapsed = wait <= 0.0 and await valkey.has_lapsed(self.client, user_id, mark, known_for)
        why = await self._ask(worker, reason, wait, grace, CONFIRM_TIMEOUT_S if lapsed else None)
        if not why:
            return
        fenced = await self.fence(user_id, worker)
        # Read after the fence: from there on nothing renews it.
        lapsed = await valkey.has_lapsed(self.client, user_id, mark, known_for)
        seconds_left = (min(FENCING_MARGIN_S, known_for) if lapsed else known_for) - fenced
        log.warning(
            "worker_fenced",
            user_id=user_id,
            worker_id=worker.worker_id,
            why=why,
            seconds_left=seconds_left,
        )
        if not lapsed and seconds_left > 0:
            raise StopFailed(f"{why}; it is fenced, and counts as ended in {seconds_left:.0f} s")
        until = time.monotonic() + seconds_left
        if seconds_left > 0 and await self._ask(worker, reason, 0.0, grace, seconds_left):
            await asyncio.sleep(until - time.monotonic())

    async def _ask(
        self,
        worker: WorkerRef,
        reason: str,
        wait: float,
        grace: float | None,
        timeout: float | None,
    ) -> str:
        """Asks the launcher to stop the worker. Returns '' if it confirmed the end within `timeout`
        seconds, else the reason."""
        try:
            async with asyncio.timeout(timeout):
                confirmed = await self._stop(worker, reason, wait, grace)
            return "" if confirmed else "its launcher does not know it"
        except TimeoutError:
            return "its launcher does not answer"
        except (LauncherUnreachable, StopFailed) as error:
            return error.detail

    async def _stop(self, worker: WorkerRef, reason: str, wait: float, grace: float | None) -> bool:
        """Stops the worker's tasks. Returns True if at least one is known and the launcher
        confirmed the end of each.

        Ends the task that was noted, and any other that the launcher finds: a worker may run twice.

        Costs the same however many other workers run.
        """
        noted = await self.database.fetch(launches.task_of, worker.worker_id)
        known = {worker.task_id, noted} - {""}
        deadline = time.monotonic() + wait
        ends = [await self._end_task(task, reason, deadline, grace) for task in known]
        running: Sequence[Task] = ()
        with suppress(LauncherUnreachable):
            running = await self.launcher.find_tasks(worker.worker_id)
        others = {task.task_id for task in running} - known
        ends += [await self._end_task(task, reason, deadline, grace) for task in others]
        return bool(ends) and all(ends)

    async def _end_task(
        self, task_id: str, reason: str, deadline: float, grace: float | None
    ) -> bool:
        while True:
            runs = await self.launcher.is_running(task_id)
            if not runs or time.monotonic() >= deadline:
                break
            await asyncio.sleep(POLL_INTERVAL_S)
        return runs is False or await self.launcher.stop(task_id, reason, grace=grace)

    async def fence(self, user_id: str, worker: WorkerRef) -> float:
        """Fences the worker's epoch. Returns the seconds since it was fenced, 0.0 if just now.

        Writes to PostgreSQL first, because a lost owner key is rewritten from it. The time counts
        from the write of the owner key.
        """
        epoch, since = await self.database.fetch(assignments.leave_epoch, worker.claim_id)
        if since is not None:
            return since
        if epoch:
            nobody = WorkerRef(
                worker_id=NO_OWNER, task_id="", epoch=epoch, claim_id="", pool=worker.pool
            )
            await self._write_owner(user_id, nobody)
        await self.database.fetch(assignments.set_fenced, worker.claim_id)
        return 0.0


#: Seconds of grace for a worker that is stopped at once, so that it can log out. A worker that lost
#: its mark has to be replaced within the mark's lifetime + 10 s, of which its discovery takes up to
#: 8.
IMMEDIATE_STOP_GRACE_S = 1.0


@dataclass(frozen=True, eq=False, repr=False)
class StopActivity:
    client: Redis
    database: Database
    ends: WorkerTerminator
    orchestrator_keys: OrchestratorKeys
    #: None: workers log in to Valkey as we do.
    users: WorkerUsers | None = None

    @activity.defn
    async def stop_worker(self, request: StopWorker) -> Stopped:
        """Returns when the worker has certainly ended; finds it by its claim if its id is
        unknown."""
        asked = request.worker
        worker_id = await self._worker_of(asked)
        if worker_id:
            marked = await self._ask_to_end(request, worker_id)
            grace = None if request.grace > 0 else IMMEDIATE_STOP_GRACE_S
            async with beating():
                await self.ends.end(
                    request.user_id,
                    replace(asked, worker_id=worker_id),
                    request.reason,
                    wait=request.grace,
                    grace=grace,
                )
            await self._clean_up(request, worker_id)
            ids = {"user_id": request.user_id, "worker_id": worker_id}
            log.info("worker_stopped", reason=request.reason, was_marked=marked, **ids)
        async with self.database.session() as session:
            late = await worker_sessions.end_session(
                session,
                claim_id=asked.claim_id,
                reason=request.reason[:200],
                crashed=request.crashed,
            )
        if late not in ("", worker_id):
            raise WorkerUnavailable(f"worker {late} was claimed meanwhile")  # the repeat stops it
        return Stopped(waiting=await self._waiting(request.user_id))

    async def _waiting(self, user_id: str) -> int:
        """Counts what needs another worker: queued orders, orders that the ended worker had in
        hand, and jobs.

        Jobs count as one for each of: some wait, some are delayed, a runner did not sign off.
        """
        tag = job_keys.user_tag(user_id)
        async with self.client.pipeline(transaction=False) as pipe:
            pipe.llen(keys.requests(user_id))
            pipe.llen(keys.processing(user_id))
            pipe.exists(job_keys.ready(tag), job_keys.delayed(tag), job_keys.beats(tag))
            queued, in_hand, jobs = await pipe.execute()
        return int(queued) + int(in_hand) + int(jobs)

    async def _worker_of(self, asked: WorkerRef) -> str:
        """Returns the worker of a claim, from the assignment's row, or from Valkey if its claimer
        died before that.

        Empty if it is another claim's: anyone who can write to Valkey may name any worker there.
        """
        async with self.database.session() as session:
            row = await worker_sessions.latest_session(session, claim_id=asked.claim_id)
            own = (row.worker_id or "") if row is not None else ""
            noted = (
                ""
                if own
                else await entries.worker_of_claim(self.client, asked.pool, asked.claim_id)
            )
            worker_id = asked.worker_id or own or noted
            if worker_id in ("", own):
                return worker_id
            other = await worker_sessions.latest_session(session, worker_id=worker_id)
        holder = "" if other is None else other.claim_id
        if not holder and not asked.worker_id:
            holder = await entries.claim_of_worker(self.client, asked.pool, worker_id) or "nobody's"
        if holder in ("", asked.claim_id):
            return worker_id
        log.warning("worker_of_another_claim", worker_id=worker_id, claim_id=asked.claim_id)
        return ""

    async def _ask_to_end(self, request: StopWorker, worker_id: str) -> bool:
        """Sends signed messages to the worker's inbox and, if it has its mark, to the control
        list."""
        worker, user = request.worker, request.user_id
        # A worker that has not confirmed the claim cannot do so from here on.
        await entries.release_claim(self.client, worker.pool, worker_id, worker.claim_id)
        mark = await valkey.reply_of(self.client.get(keys.mark(user)))
        marked = bool(mark == f"{worker.epoch}:{worker_id}".encode())
        if request.grace <= 0:
            return marked
        if marked:
            order = Shutdown(user_id=user, epoch=worker.epoch, reason=request.reason)
            await send_control(self.client, self.orchestrator_keys, order)
        # A worker that could not log in has its mark already, and still listens to its inbox only.
        release = ReleaseClaim(claim_id=worker.claim_id, worker_id=worker_id, reason=request.reason)
        inbox = keys.pool_inbox(worker.pool, worker_id)
        await push_signed(self.client, inbox, release, self.orchestrator_keys.signing_keys)
        return marked

    async def _clean_up(self, request: StopWorker, worker_id: str) -> None:
        user, worker = request.user_id, request.worker
        await entries.remove_entry(self.client, worker.pool, worker_id)
        await entries.remove_mark(self.client, user, f"{worker.epoch}:{worker_id}")
        if self.users:  # the report of its exit may be lost
            await self.users.delete(worker_id)


#: Seconds that the launcher gets to answer: a frozen node would else use up the activity's 8 s.
LAUNCHER_TIMEOUT_S = 2.0


class HealthActivity(_WorkerAccess):
    @activity.defn
    async def check_worker(self, request: CheckWorker) -> WorkerHealth:
        """Reads the mark and the metadata, asks the launcher for the task; writes a missing owner
        key again.

        Only the orchestrator writes that key. A flushed Valkey has lost it, and the worker takes no
        order until it is there again. The workflow decides what a running worker without a mark
        means.
        """
        running, over = await asyncio.gather(
            self._running(request.worker), self._is_over(request.worker)
        )
        if running is not False and not over:
            await self._restore_owner(request)
        mark, metadata, now_ms = await valkey.read_mark(self.client, request.user_id)
        generation = await self.client.get(keys.GENERATION)
        marked = mark == f"{request.worker.epoch}:{request.worker.worker_id}".encode()
        keys_of = self.message_secrets.assignment_keys
        reported = read_metadata(metadata, mark, request.user_id, now_ms, keys_of) if marked else {}
        if marked and not reported:
            # Nobody can say how long it was not used: no healthy worker ends for that
            # (no-healthy-kill).
            log.warning(
                "metadata_not_authentic", user_id=request.user_id, epoch=request.worker.epoch
            )
            reported = {"last_activity_ms": str(time.time_ns() // 1_000_000)}
        return WorkerHealth(
            unreported=running is False,
            over=over,
            in_flight=not marked and await self._in_flight(request),
            marked=marked,
            running=running,
            last_activity=valkey.seconds_of(reported.get("last_activity_ms")),
            generation=valkey.text_of(generation),
            worker_state=reported.get("state", ""),
        )

    async def _is_over(self, worker: WorkerRef) -> bool:
        """Returns True if somebody has ended the assignment, as far as PostgreSQL answers.

        A worker that announced its own end is still to be ended by its workflow.
        """
        try:
            row = await self.database.fetch(
                worker_sessions.latest_session, claim_id=worker.claim_id
            )
        except DatabaseUnavailable:
            return False
        if row is None or row.ended_at is None:
            return False
        return not (row.end_reason or "").startswith((worker_sessions.CLOSED_BY_WORKER, WAS_GONE))

    async def _in_flight(self, request: CheckWorker) -> bool:
        user, worker = request.user_id, request.worker
        if not await valkey.reply_of(self.client.llen(keys.processing(user))):
            return False
        mark = f"{worker.epoch}:{worker.worker_id}"
        return not await valkey.has_lapsed(self.client, user, mark, self.mark_ttl)

    async def _running(self, worker: WorkerRef) -> bool | None:
        """Returns True if the worker's task runs, and None if nobody knows."""
        try:
            task = worker.task_id
            if not task:  # its launcher had not answered when it was claimed
                task = await self.database.fetch(launches.task_of, worker.worker_id)
            async with asyncio.timeout(LAUNCHER_TIMEOUT_S):
                return await self.launcher.is_running(task) if task else None
        except (DatabaseUnavailable, LauncherUnreachable, TimeoutError):
            return None

    async def _restore_owner(self, request: CheckWorker) -> None:
        owner = keys.owner(request.user_id)
        try:
            if await valkey.reply_of(self.client.exists(owner)):
                return
            if await self.database.fetch(worker_sessions.is_fenced, request.worker.claim_id):
                return  # it was cut off, and nobody has confirmed its end yet
            await self._write_owner(request.user_id, request.worker)
            log.warning("owner_key_restored", user_id=request.user_id, epoch=request.worker.epoch)
        except (RedisError, DatabaseUnavailable) as error:  # the watcher tries again
            log.warning("owner_key_not_restored", user_id=request.user_id, reason=str(error))
