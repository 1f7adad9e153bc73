"""The activity that ends a user's worker: asks it, stops it, waits until the launcher confirms the end."""

from __future__ import annotations

import asyncio
import time

import structlog
from redis.asyncio import Redis
from temporalio import activity

from activities.claims.handshake import push_signed
from activities.heartbeat import Heartbeat
from activities.pool import entries
from infra.database.engine import Database
from infra.database.workers import sessions as worker_sessions
from infra.launchers.port import Launcher
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.vault.key_pairs import OrchestratorKeys
from infra.worker_task import Task
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys, scripts, sealing
from worker_runtime.protocol.errors import WorkerUnavailable
from worker_runtime.protocol.messages import ReleaseClaim, Shutdown
from workflows.user_worker import messages as m

#: Seconds between two checks whether the worker has ended by itself: that takes at least 0.1 s.
POLL = 0.1

#: Seconds of grace for a worker that is stopped at once, so that it can log out. A worker that lost its mark
#: has to be replaced within the mark's lifetime + 10 s, of which its discovery takes up to 8.
AT_ONCE = 1.0

log = structlog.get_logger()


class StopActivity:
    """Activity `stop_worker`."""

    def __init__(
        self, client: Redis, database: Database, launcher: Launcher, orchestrator_keys: OrchestratorKeys
    ) -> None:
        self._client = client
        self._database = database
        self._launcher = launcher
        self._keys = orchestrator_keys

    @activity.defn
    async def stop_worker(self, request: m.StopWorker) -> m.Stopped:
        """Returns when the worker has certainly ended; finds it by its claim if its id is unknown."""
        asked = request.worker
        known = worker_id = asked.worker_id or await self._worker_of(asked)
        if worker_id and await self._serves_another(asked, worker_id):
            log.warning("worker_serves_another_claim", worker_id=worker_id, claim_id=asked.claim_id)
            worker_id = ""
        if worker_id:
            marked = await self._ask_to_end(request, worker_id)
            if request.grace > 0:
                await self._wait_for_end(worker_id, request.grace)
            async with Heartbeat():
                for task in await self._tasks(worker_id, asked.task_id):
                    await self._launcher.stop(
                        task.task_id, request.reason, grace=None if request.grace > 0 else AT_ONCE
                    )
            await self._clean_up(request, worker_id)
            log.info(
                "worker_stopped",
                user_id=request.user_id,
                worker_id=worker_id,
                reason=request.reason,
                was_marked=marked,
            )
        async with self._database.session() as session:
            late = await worker_sessions.end_session(
                session, claim_id=asked.claim_id, reason=request.reason[:200], crashed=request.crashed
            )
        if late not in ("", known):
            raise WorkerUnavailable(f"worker {late} was claimed meanwhile")  # the repeat stops it
        return m.Stopped(waiting=await self._waiting(request.user_id))

    async def _waiting(self, user_id: str) -> int:
        """What needs another worker: queued orders, orders that the ended worker had in hand, and jobs.

        Jobs count as one for each of: some wait, some are delayed, a runner did not sign off.
        """
        tag = job_keys.user_tag(user_id)
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.llen(keys.requests(user_id))
            pipe.llen(keys.processing(user_id))
            pipe.exists(job_keys.ready(tag), job_keys.delayed(tag), job_keys.beats(tag))
            queued, in_hand, jobs = await pipe.execute()
        return int(queued) + int(in_hand) + int(jobs)

    async def _worker_of(self, asked: m.WorkerRef) -> str:
        """The worker of a claim, from Valkey, or from the assignment's row if Valkey has lost it."""
        worker_id = await entries.worker_of_claim(self._client, asked.pool, asked.claim_id)
        if worker_id:
            return worker_id
        async with self._database.session() as session:
            row = await worker_sessions.session_of_claim(session, asked.claim_id)
        return (row.worker_id or "") if row is not None else ""

    async def _serves_another(self, asked: m.WorkerRef, worker_id: str) -> bool:
        """Whether the worker was claimed anew after its entry had expired; it refuses this claim."""
        if await entries.claim_of_worker(self._client, asked.pool, worker_id) not in ("", asked.claim_id):
            return True
        async with self._database.session() as session:
            return await worker_sessions.serves_another(session, worker_id, asked.claim_id)

    async def _ask_to_end(self, request: m.StopWorker, worker_id: str) -> bool:
        """Sends signed messages to the worker's inbox and, if it has its mark, to the control list."""
        worker, user = request.worker, request.user_id
        # A worker that has not confirmed the claim cannot do so from here on.
        await entries.release_claim(self._client, worker.pool, worker_id, worker.claim_id)
        mark = await reply_of(self._client.get(keys.mark(user)))
        marked = bool(mark == f"{worker.epoch}:{worker_id}".encode())
        if request.grace <= 0:
            return marked
        if marked:
            order = Shutdown(user_id=user, epoch=worker.epoch, reason=request.reason)
            signed = sealing.sign(order, self._keys.signing_key)
            await valkey.run_script(
                self._client, scripts.SEND_CONTROL, [keys.control(user), keys.doorbell(user)], [signed]
            )
        # A worker that could not log in has its mark already, and still listens to its inbox only.
        release = ReleaseClaim(claim_id=worker.claim_id, worker_id=worker_id, reason=request.reason)
        inbox = keys.pool_inbox(worker.pool, worker_id)
        await push_signed(self._client, inbox, release, self._keys.signing_key)
        return marked

    async def _wait_for_end(self, worker_id: str, grace: float) -> None:
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and await self._tasks(worker_id):
            activity.heartbeat()
            await asyncio.sleep(POLL)

    async def _tasks(self, worker_id: str, task_id: str = "") -> list[Task]:
        return [
            task
            for task in await self._launcher.list()
            if task.worker_id == worker_id or (task_id and task.task_id == task_id)
        ]

    async def _clean_up(self, request: m.StopWorker, worker_id: str) -> None:
        """Removes the entry and the mark at once; the mark would else stay for up to 30 s."""
        user, worker = request.user_id, request.worker
        await entries.remove_entry(self._client, worker.pool, worker_id)
        await valkey.run_script(
            self._client,
            scripts.REMOVE_MARK,
            [keys.mark(user), keys.metadata(user)],
            [f"{worker.epoch}:{worker_id}"],
        )
