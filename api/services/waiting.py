"""Waiting for a worker's answer to what was queued for it, with a worker started while there is none."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from redis.exceptions import RedisError

from api.services.answers import AnswerListener
from infra.request_queue import Queued, RequestQueue
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Answer
from workflows.starting import WorkerStarter

#: Seconds without an answer after which the mark is looked at again: the worker may have died meanwhile.
LOOK_PERIOD = 1.0
#: The first look at a request that was enqueued before, perhaps by another process: its answer may be
#: published there, and only the response key is ours to see. Doubles up to `LOOK_PERIOD`.
FIRST_LOOK = 0.05


class Waiting:
    def __init__(self, queue: RequestQueue, answers: AnswerListener, starter: WorkerStarter) -> None:
        self._queue = queue
        self._answers = answers
        self._starter = starter

    async def wait(
        self, user_id: str, queued: Queued, answer: asyncio.Future[Answer], until: float, *, marked: bool
    ) -> BerthError | None:
        """Until the answer is there or `until` (time.monotonic) has passed; or why there will be no worker.

        `marked`: a worker is taken to be there until the first look.
        """
        look = LOOK_PERIOD if queued.new else FIRST_LOOK
        looks = 0
        while not answer.done() and (left := until - time.monotonic()) > 0:
            if not marked:
                error = await self._started(user_id, answer, left)
                if error is not None:
                    return error
            await asyncio.wait({answer}, timeout=min(look, max(0.0, until - time.monotonic())))
            look = min(look * 2, LOOK_PERIOD)
            if not answer.done():
                looks += 1
                # At the looks 1, 2, 4, 8…: while its broker is away, an order stands in the queue on purpose.
                ring = looks.bit_count() == 1
                marked = await self._look(user_id, queued.frame.request_id, ring=ring)
        return None

    async def _started(self, user_id: str, answer: asyncio.Future[Answer], left: float) -> BerthError | None:
        """Has a worker started, until it is there or the answer is. Returns why there will be none."""
        task = self._starter.ensure(user_id, mark_missing=True)
        either: set[asyncio.Future[Any]] = {task, answer}
        await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if answer.done() or not task.done() or task.cancelled():
            return None
        error = task.exception()
        if error is None or isinstance(error, BerthError):
            return error
        return BerthError("the worker could not be started")

    async def _look(self, user_id: str, request_id: str, *, ring: bool) -> bool:
        """Whether the mark is there; finds an answer that was announced elsewhere, or not at all.

        `ring`: once more, if nobody has taken the request.
        """
        try:
            await self._answers.read(user_id, request_id)
            return await (self._queue.remind if ring else self._queue.marked)(user_id)
        except RedisError:
            return True  # nothing is known, so nobody is called
