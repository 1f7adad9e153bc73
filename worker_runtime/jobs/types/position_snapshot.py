"""The job `position_snapshot_job`: asks the user's session, over the user's own queue, like everybody else.

So the question keeps its place among the orders and inside the broker's limits, and the job's process holds
no credentials and no broker connection.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol.catalog import PositionSnapshot, SnapshotPositions
from worker_runtime.jobs.protocol.messages import JobFailed
from worker_runtime.jobs.types.job_type import JobContext, JobType, RetryLater
from worker_runtime.process.valkey import Valkey, ValkeyUnreachable
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.errors import BerthError, MalformedMessage
from worker_runtime.protocol.messages import Answer, Failure, decode, encode
from worker_runtime.protocol.requests import QueryAccount, decode_report, parse_frame

#: Milliseconds that the question's id is remembered after its deadline: nobody asks again under it.
_REMEMBERED = 1000


class SessionSilent(RetryLater):
    """The user's session did not answer in time."""

    code = "SESSION_SILENT"


def position_snapshot_job(valkey_url: str) -> JobType:
    """The type, with the Valkey of the user's worker."""

    def snapshot(arguments: SnapshotPositions, _context: JobContext) -> PositionSnapshot:
        answer = _ask_session(valkey_url, arguments)
        if answer.failure is not None:
            raise _job_error(answer.failure)
        try:
            report = decode_report(answer.report or {})
        except msgspec.ValidationError:
            raise MalformedMessage("the session's report cannot be read") from None
        return PositionSnapshot(
            user_id=arguments.user_id,
            account_id=report.account_id,
            taken_at_ms=report.taken_at_ms,
            positions=[one for one in report.positions if one.quantity],
            balance=report.balance,
        )

    return JobType(name=catalog.SNAPSHOT.name, arguments=SnapshotPositions, run=snapshot)


def _job_error(failure: Failure) -> BerthError:
    text = f"{failure.code}: {failure.detail}"
    return RetryLater(text) if failure.retryable else JobFailed(text)


def _ask_session(valkey_url: str, arguments: SnapshotPositions) -> Answer:
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
        heard = _receive_answer(hearing, until) if mark else None
        stored = heard or client.execute("GET", keys.response(user_id, request_id))
        if stored is None:
            return _withdraw_question(client, user_id, parse_frame(item).raw, request_id)
        answer: Answer = decode(stored, Answer)
        return answer
    finally:
        hearing.close()
        client.close()


def _receive_answer(hearing: Valkey, until: float) -> bytes | None:
    """What is published; None when nothing came in time."""
    try:
        message: Any = hearing.receive(max(0.001, until - time.monotonic()))
    except ValkeyUnreachable:
        return None
    return message[2] if isinstance(message, list) and isinstance(message[2], bytes) else None


def _withdraw_question(client: Valkey, user_id: str, item: bytes, request_id: str) -> Answer:
    """Nobody asks the broker for an answer that nobody waits for."""
    error = SessionSilent("the user has no worker, or its session is busy")
    refusal = encode(Answer(request_id=request_id, failure=Failure.of(error)))
    where = [keys.requests(user_id), keys.response(user_id, request_id)]
    client.run(scripts.WITHDRAW, where, [item, refusal, keys.ANSWER_TTL])
    raise error
