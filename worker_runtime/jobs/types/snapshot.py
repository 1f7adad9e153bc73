"""The job `position_snapshot`: asks the user's session, over the user's own queue, like everybody else.

So the question keeps its place among the orders and inside the broker's limits, and the job's process holds
no credentials and no broker connection.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from worker_runtime.jobs.context import JobContext
from worker_runtime.jobs.registry import JobType, RetryLater
from worker_runtime.protocol import job_work, keys, scripts
from worker_runtime.protocol.errors import BerthError, MalformedMessage
from worker_runtime.protocol.frames import parse
from worker_runtime.protocol.job_messages import JobFailed
from worker_runtime.protocol.job_work import PositionSnapshot, SnapshotPositions
from worker_runtime.protocol.messages import Answer, Failure, decode, encode
from worker_runtime.protocol.requests import QueryAccount, report_of
from worker_runtime.valkey import Valkey, ValkeyUnreachable

#: Milliseconds that the question's id is remembered after its deadline: nobody asks again under it.
_REMEMBERED = 1000


class SessionSilent(RetryLater):
    """The user's session did not answer in time."""

    code = "SESSION_SILENT"


def position_snapshot(valkey_url: str) -> JobType:
    """The type, with the Valkey of the user's worker."""

    def snapshot(arguments: SnapshotPositions, _context: JobContext) -> PositionSnapshot:
        answer = _ask(valkey_url, arguments)
        if answer.failure is not None:
            raise _of(answer.failure)
        try:
            report = report_of(answer.report or {})
        except msgspec.ValidationError:
            raise MalformedMessage("the session's report cannot be read") from None
        return PositionSnapshot(
            user_id=arguments.user_id,
            account_id=report.account_id,
            taken_at_ms=report.taken_at_ms,
            positions=[one for one in report.positions if one.quantity],
            balance=report.balance,
        )

    return JobType(name=job_work.SNAPSHOT.name, arguments=SnapshotPositions, run=snapshot)


def _of(failure: Failure) -> BerthError:
    text = f"{failure.code}: {failure.detail}"
    return RetryLater(text) if failure.retryable else JobFailed(text)


def _ask(valkey_url: str, arguments: SnapshotPositions) -> Answer:
    """Raises `SessionSilent`, `ValkeyFailed`, `MalformedMessage`."""
    user_id, request_id = arguments.user_id, f"job:{secrets.token_hex(16)}"
    until = time.monotonic() + arguments.patience
    client, hearing = Valkey(valkey_url), Valkey(valkey_url)
    channel = keys.answers(request_id)
    try:
        hearing.execute("SUBSCRIBE", channel)  # first: whatever is published from here on arrives
        generation = client.execute("GET", keys.GENERATION)
        query = QueryAccount(
            request_id=request_id,
            user_id=user_id,
            account_id=arguments.account_id,
            orders=False,
            positions=True,
            balance=True,
            reply_to=channel,
            generation=(generation or b"").decode(),
        )
        _, item, mark = client.run(
            scripts.ENQUEUE,
            [
                keys.seen(user_id, request_id),
                keys.requests(user_id),
                keys.doorbell(user_id),
                keys.mark(user_id),
            ],
            [request_id, encode(query), int(arguments.patience * 1000), _REMEMBERED],
        )
        heard = _hear(hearing, until) if mark else None
        stored = heard or client.execute("GET", keys.response(user_id, request_id))
        if stored is None:
            return _take_back(client, user_id, parse(item).raw, request_id)
        answer: Answer = decode(stored, Answer)
        return answer
    finally:
        hearing.close()
        client.close()


def _hear(hearing: Valkey, until: float) -> bytes | None:
    """What is published; None when nothing came in time."""
    try:
        message: Any = hearing.receive(max(0.001, until - time.monotonic()))
    except ValkeyUnreachable:
        return None
    return message[2] if isinstance(message, list) and isinstance(message[2], bytes) else None


def _take_back(client: Valkey, user_id: str, item: bytes, request_id: str) -> Answer:
    """Nobody asks the broker for an answer that nobody waits for."""
    error = SessionSilent("the user has no worker, or its session is busy")
    refusal = encode(Answer(request_id=request_id, failure=Failure.of(error)))
    where = [keys.requests(user_id), keys.response(user_id, request_id)]
    client.run(scripts.WITHDRAW, where, [item, refusal, keys.ANSWER_TTL])
    raise error
