"""Reads workers' answers from their response keys and hands them to the calls that wait for them.

Valkey keeps a response key for 60 s. The orchestrator looks at the keys only; the API also receives
each answer as a message (`api/workers/answers.py`).
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from redis.asyncio import Redis

from infra.valkey import client as valkey
from infra.valkey.answer_authenticator import AnswerAuthenticator
from infra.valkey.request_queue import QueuedRequest
from infra.vault.message_secret import MessageSecrets
from worker_runtime.protocol.messages import Answer

#: Seconds until the first look at a response key. A worker answers a query within milliseconds.
FIRST_LOOK_S = 0.02


@dataclass(eq=False)
class _PendingAnswer:
    user_id: str
    order_id: str
    first_epoch: int
    future: asyncio.Future[Answer]
    waiters: int = 0


@dataclass(eq=False)
class AnswerReader:
    """Holds one future for each request whose answer is expected in this process."""

    client: Redis
    message_secrets: MessageSecrets

    def __post_init__(self) -> None:
        self._authenticator = AnswerAuthenticator(self.message_secrets)
        self._pending: dict[str, _PendingAnswer] = {}

    @property
    def pending(self) -> int:
        """Return how many answers are expected."""
        return len(self._pending)

    def seconds_until_look(self, queued: QueuedRequest) -> float:
        """Return how long a caller waits before it looks at the response key for the first time."""
        return FIRST_LOOK_S

    @contextmanager
    def expect(
        self, user_id: str, request_id: str, order_id: str, first_epoch: int
    ) -> Iterator[asyncio.Future[Answer]]:
        """Yields the future of one answer (`AnswerAuthenticator.read`). All who expect it share it,
        and the last one forgets it."""
        pending = self._pending.get(request_id)
        if pending is None:
            future = asyncio.get_running_loop().create_future()
            pending = _PendingAnswer(user_id, order_id, first_epoch, future)
            self._pending[request_id] = pending
            self._listen_for(user_id)
        pending.waiters += 1
        try:
            yield pending.future
        finally:
            pending.waiters -= 1
            if not pending.waiters:
                pending.future.cancel()
                self._pending.pop(request_id, None)

    async def read(
        self, user_id: str, request_id: str, order_id: str, first_epoch: int
    ) -> Answer | None:
        """Returns the answer in the response key, if any, and hands it to the call that waits for
        it. Raises `RedisError`."""
        data = await valkey.read_answer(self.client, user_id, request_id)
        answer = self._authenticator.read(data, user_id, request_id, order_id, first_epoch)
        pending = self._pending.get(request_id)
        if answer is not None and pending is not None and not pending.future.done():
            pending.future.set_result(answer)
        return answer

    async def read_pending(self, request_id: str) -> Answer | None:
        """Reads the answer to a pending request; see `read`."""
        pending = self._pending.get(request_id)
        if pending is None:
            return None
        return await self.read(pending.user_id, request_id, pending.order_id, pending.first_epoch)

    def _listen_for(self, user_id: str) -> None:
        """Starts to receive this user's answers as messages, if this process does that."""
