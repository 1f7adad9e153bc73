"""The job `position_snapshot`: asks the user's session for positions and balance.

The query goes over the user's request queue like any other, so it waits its turn among the orders and counts
for the broker's limits. The job's process holds no credentials and no broker connection.
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
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.messages import Answer, Failure, decode, encode
from worker_runtime.protocol.requests import QueryAccount, decode_report, parse_frame

#: Milliseconds that the query's id is remembered after its deadline. Nobody uses the id again.
_REMEMBERED = 1000


class SessionSilent(RetryLater):
    """The user's session did not answer in time."""

    code = "SESSION_SILENT"


def position_snapshot_job(valkey_url: str) -> JobType:
    """The type `position_snapshot`, with the Valkey of the user's worker."""

    def snapshot(arguments: SnapshotPositions, _context: JobContext) -> PositionSnapshot:
        answer = _ask_session(valkey_url, arguments)
        if answer.failure is not None:
            text = f"{answer.failure.code}: {answer.failure.detail}"
            raise RetryLater(text) if answer.failure.retryable else JobFailed(text)
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


def _ask_session(valkey_url: str, arguments: SnapshotPositions) -> Answer:
    """Raises `SessionSilent`, `ValkeyFailed`, `MalformedMessage`."""
    user_id, request_id = arguments.user_id, f"job:{secrets.token_hex(16)}"
    until = time.monotonic() + arguments.patience
    client, subscriber = Valkey(valkey_url), Valkey(valkey_url)
    channel = keys.answers(request_id)
    try:
        subscriber.execute("SUBSCRIBE", channel)  # first, so that the answer is not missed
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
        heard = _receive_answer(subscriber, until) if mark else None
        stored = heard or client.execute("GET", keys.response(user_id, request_id))
        if stored is None:
            return _withdraw_query(client, user_id, parse_frame(item).raw, request_id)
        answer: Answer = decode(stored, Answer)
        return answer
    finally:
        subscriber.close()
        client.close()


def _receive_answer(subscriber: Valkey, until: float) -> bytes | None:
    """The published answer; None if none came in time."""
    try:
        message: Any = subscriber.receive(max(0.001, until - time.monotonic()))
    except ValkeyUnreachable:
        return None
    return message[2] if isinstance(message, list) and isinstance(message[2], bytes) else None


def _withdraw_query(client: Valkey, user_id: str, item: bytes, request_id: str) -> Answer:
    """Takes the query back, so that the broker is not asked in vain. Raises `SessionSilent`."""
    error = SessionSilent("the user has no worker, or its session is busy")
    refusal = encode(Answer(request_id=request_id, failure=Failure.of(error)))
    where = [keys.requests(user_id), keys.response(user_id, request_id)]
    client.run(scripts.WITHDRAW, where, [item, refusal, keys.ANSWER_TTL])
    raise error
