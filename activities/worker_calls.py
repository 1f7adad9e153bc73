"""Asks a user's worker through its queue, and waits for the answer: for activities, which nobody
waits for within milliseconds."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.database.engine import Database
from infra.database.workers import sessions as worker_sessions
from infra.valkey import client as valkey
from infra.valkey.failures import explain_failure
from infra.valkey.request_queue import RequestQueue
from infra.vault.message_secret import MessageSecrets
from worker_runtime.protocol.errors import WorkerUnavailable
from worker_runtime.protocol.messages import Answer
from worker_runtime.protocol.requests import Request

#: Seconds between two reads of the response key: at first, and at most.
FIRST_POLL = 0.02
LONGEST_POLL = 0.5
#: Seconds after which the doorbell is rung again for a worker that has not answered; then twice as
#: many.
FIRST_RING = 1.0

#: Makes a request of its id and Valkey's generation.
MakeRequest = Callable[[str, str], Request]


class WorkerCaller:
    def __init__(
        self,
        client: Redis,
        database: Database,
        ensure_active: Callable[[str], Awaitable[None]],
        message_secrets: MessageSecrets,
    ) -> None:
        """`ensure_active` returns when the user's worker is Active; raises `BerthError`."""
        self._client = client
        self._database = database
        self._queue = RequestQueue(client, message_secrets)
        self._ensure_active = ensure_active

    async def call(self, user_id: str, make_request: MakeRequest, timeout: float) -> Answer:
        """Returns the worker's answer. `timeout` (seconds) begins when a worker is active.

        Raises the `BerthError` that the worker answered, or `WorkerUnavailable`.
        """
        try:
            # A queued query neither starts a worker nor keeps one alive.
            if not await self._queue.has_live_worker(user_id):
                await self._ensure_active(user_id)
            generation = await valkey.ensure_generation(self._client, uuid4().hex)
            request = make_request(uuid4().hex, generation)
            first_epoch = await worker_sessions.first_epoch(self._database, user_id)
            await self._queue.enqueue(request, timeout)
            answer = await self._wait(user_id, request.request_id, timeout, first_epoch)
        except (RedisError, OSError) as error:
            raise WorkerUnavailable(explain_failure(error)) from None
        if answer is None:
            raise WorkerUnavailable(f"no answer of the worker within {timeout:.0f} s")
        if answer.failure is not None:
            raise answer.failure.error()
        return answer

    async def _wait(
        self, user_id: str, request_id: str, timeout: float, first_epoch: int
    ) -> Answer | None:
        began = time.monotonic()
        pause, ring_after = FIRST_POLL, FIRST_RING
        while (answer := await self._queue.answer(user_id, request_id, "", first_epoch)) is None:
            waited = time.monotonic() - began
            if waited >= timeout:
                return None
            if waited >= ring_after:
                ring_after *= 2
                await self._queue.ring_again(user_id)
            await asyncio.sleep(min(pause, timeout - waited))
            pause = min(2 * pause, LONGEST_POLL)
        return answer
