"""Asks a user's worker, through the user's queue, for the broker's list of an account's orders.

Several orders of an account are verified at the same time; concurrent callers share one query.
"""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.tasks import SharedTasks
from infra.temporal.starter import WorkerStarter
from infra.valkey import client as valkey
from infra.valkey.request_queue import RequestQueue
from worker_runtime.protocol.errors import BerthError, MalformedMessage, WorkerUnavailable
from worker_runtime.protocol.messages import Answer
from worker_runtime.protocol.requests import AccountReport, QueryAccount, decode_report

#: Seconds between two reads of the response key: at first, and at most.
FIRST_POLL = 0.02
LONGEST_POLL = 0.5
#: Seconds after which the doorbell is rung again for a worker that has not answered; then twice as many.
FIRST_RING = 1.0


class AccountQueryClient:
    def __init__(self, client: Redis, starter: WorkerStarter) -> None:
        self._client = client
        self._queue = RequestQueue(client)
        self._starter = starter
        self._running: SharedTasks[tuple[str, str], AccountReport] = SharedTasks()

    async def orders(self, user_id: str, account_id: str, timeout: float) -> AccountReport:
        """The orders of an account as the broker lists them now. `timeout` begins when a worker is active.

        Raises a `BerthError` with the reason if the broker could not be asked.
        """
        task = self._running.join((user_id, account_id), lambda: self._ask(user_id, account_id, timeout))
        # Shielded: another caller waits for the same.
        return await asyncio.shield(task)

    async def _ask(self, user_id: str, account_id: str, timeout: float) -> AccountReport:
        try:
            # A queued query neither starts a worker nor keeps one alive.
            if not await self._queue.marked(user_id):
                await self._starter.ensure_active(user_id)
            query = QueryAccount(
                request_id=uuid4().hex,
                user_id=user_id,
                account_id=account_id,
                reply_to="",
                generation=await valkey.ensure_generation(self._client, uuid4().hex),
            )
            await self._queue.enqueue(query, timeout)
            answer = await self._wait(user_id, query.request_id, timeout)
        except (RedisError, OSError) as error:
            raise WorkerUnavailable(f"Valkey: {type(error).__name__}") from None
        if answer is None:
            raise WorkerUnavailable(f"no answer of the worker within {timeout:.0f} s")
        if answer.failure is not None:
            raise answer.failure.error()
        return _report(answer)

    async def _wait(self, user_id: str, request_id: str, timeout: float) -> Answer | None:
        began = time.monotonic()
        pause, ring_after = FIRST_POLL, FIRST_RING
        while (answer := await self._queue.answer(user_id, request_id)) is None:
            waited = time.monotonic() - began
            if waited >= timeout:
                return None
            if waited >= ring_after:
                ring_after *= 2
                await self._queue.ring_again(user_id)
            await asyncio.sleep(min(pause, timeout - waited))
            pause = min(2 * pause, LONGEST_POLL)
        return answer


def _report(answer: Answer) -> AccountReport:
    if answer.report is None:
        raise BerthError("the worker answered without a report")
    try:
        return decode_report(answer.report)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"the worker's report: {error}") from None
