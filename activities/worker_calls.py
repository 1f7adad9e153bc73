"""Asks a user's worker on behalf of an activity, and starts one if the user has none."""

import time
from collections.abc import Callable
from uuid import uuid4

from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.database.engine import Database
from infra.database.workers import sessions as worker_sessions
from infra.temporal.starter import WorkerStarter
from infra.valkey import client as valkey
from infra.valkey.failures import ValkeyUnavailable, explain_failure
from infra.valkey.request_queue import RequestQueue
from infra.vault.message_secret import MessageSecrets
from infra.worker_calls.answers import AnswerReader
from infra.worker_calls.client import NoAnswer, RequestWithdrawn, WorkerClient
from worker_runtime.protocol.errors import WorkerUnavailable
from worker_runtime.protocol.messages import Answer
from worker_runtime.protocol.requests import Request

#: Makes a request of its id and Valkey's generation.
MakeRequest = Callable[[str, str], Request]


class WorkerCaller:
    def __init__(
        self,
        client: Redis,
        database: Database,
        starter: WorkerStarter,
        message_secrets: MessageSecrets,
    ) -> None:
        self._client = client
        self._database = database
        self._starter = starter
        self._queue = RequestQueue(client, message_secrets)
        answers = AnswerReader(client, message_secrets)
        self._workers = WorkerClient(self._queue, answers, starter)

    async def call(self, user_id: str, make_request: MakeRequest, timeout: float) -> Answer:
        """Returns the worker's answer. `timeout` (seconds) begins when a worker is active.

        Raises the `BerthError` that the worker answered, or `WorkerUnavailable`.
        """
        try:
            # A queued query neither starts a worker nor keeps one alive.
            if not await self._queue.has_live_worker(user_id):
                await self._starter.ensure_active(user_id)
            generation = await valkey.ensure_generation(self._client, uuid4().hex)
            request = make_request(uuid4().hex, generation)
            first_epoch = await worker_sessions.first_epoch(self._database, user_id)
            deadline = time.monotonic() + timeout
            answer = await self._workers.call(request, deadline, first_epoch=first_epoch)
        except RequestWithdrawn as withdrawn:
            if not isinstance(withdrawn.reason, NoAnswer):
                raise withdrawn.reason from None
            raise _no_answer_within(timeout) from None
        except NoAnswer:
            raise _no_answer_within(timeout) from None
        except ValkeyUnavailable as error:
            raise WorkerUnavailable(error.detail) from None
        except (RedisError, OSError) as error:
            raise WorkerUnavailable(explain_failure(error)) from None
        if answer.failure is not None:
            raise answer.failure.error()
        return answer


def _no_answer_within(seconds: float) -> WorkerUnavailable:
    return WorkerUnavailable(f"no answer of the worker within {seconds:.0f} s")
