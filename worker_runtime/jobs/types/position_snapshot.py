"""The job `position_snapshot`: asks the user's session for positions and balance.

The query goes over the user's request queue like any other, so it waits its turn among the orders
and counts for the broker's limits. The job's process holds no credentials and no broker connection.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any

from worker_runtime.jobs.protocol.catalog import JOB_KINDS, PositionSnapshot, SnapshotPositions
from worker_runtime.jobs.protocol.messages import JobFailed
from worker_runtime.jobs.types.job_type import JobContext, JobType, RetryLater
from worker_runtime.process.valkey import Valkey, ValkeyUnreachable
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.answers import read_answer
from worker_runtime.protocol.authentication import AssignmentKeys
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.messages import Answer, encode
from worker_runtime.protocol.requests import QueryAccount, decode_report, sign_request

#: Milliseconds that the query's id is remembered after its deadline. Nobody uses the id again.
_REQUEST_ID_TTL_MS = 1000


class SessionSilent(RetryLater, code="SESSION_SILENT"):
    """The user's session did not answer in time."""


def position_snapshot_job(valkey_url: str, message_keys: Callable[[], AssignmentKeys]) -> JobType:
    """Returns the type `position_snapshot`, with the Valkey of the user's worker and the keys of
    its messages."""

    def snapshot(arguments: SnapshotPositions, _context: JobContext) -> PositionSnapshot:
        answer = _ask_session(valkey_url, arguments, message_keys())
        if answer.failure is not None:
            text = f"{answer.failure.code}: {answer.failure.detail}"
            raise RetryLater(text) if answer.failure.retryable else JobFailed(text)
        report = decode_report(answer.report or {})
        return PositionSnapshot(
            user_id=arguments.user_id,
            account_id=report.account_id,
            taken_at_ms=report.taken_at_ms,
            positions=[position for position in report.positions if position.shares],
            balance=report.balance,
        )

    return JobType(
        name=JOB_KINDS[SnapshotPositions].name, arguments=SnapshotPositions, run=snapshot
    )


def _ask_session(
    valkey_url: str, arguments: SnapshotPositions, message_keys: AssignmentKeys
) -> Answer:
    """Raises `SessionSilent`, `ValkeyFailed`, `MalformedMessage`."""
    user_id, request_id = arguments.user_id, f"job:{secrets.token_hex(16)}"
    until = time.monotonic() + arguments.patience
    client, subscriber = Valkey(valkey_url), Valkey(valkey_url)
    channel = keys.own_answers(user_id, request_id)
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
        payload = encode(query)
        seconds, micros = client.execute("TIME")
        deadline_ms = int(seconds) * 1000 + int(micros) // 1000 + int(arguments.patience * 1000)
        mac = sign_request(message_keys.request, user_id, request_id, deadline_ms, payload)
        _, item, mark = client.run(
            scripts.ENQUEUE,
            keys.enqueueing(user_id, request_id),
            [request_id, payload, deadline_ms, _REQUEST_ID_TTL_MS, mac],
        )
        heard = _receive_answer(subscriber, until) if mark else None
        stored = heard or client.execute("GET", keys.response(user_id, request_id))
        if not stored:
            # Taken back, so that the broker is not asked in vain.
            client.run(
                scripts.WITHDRAW,
                keys.withdrawing(user_id, request_id),
                [item, b"", keys.ANSWER_TTL_S],
            )
            raise SessionSilent("the user has no worker, or its session is busy")
        signed = read_answer(stored)
        if not signed.is_authentic(message_keys.assignment, user_id) or not signed.is_about(
            request_id, ""
        ):
            raise MalformedMessage("an answer to this question that is not the session's")
        return signed.answer
    finally:
        subscriber.close()
        client.close()


def _receive_answer(subscriber: Valkey, until: float) -> bytes | None:
    """Returns the published answer; None if none came in time."""
    try:
        message: Any = subscriber.receive(max(0.001, until - time.monotonic()))
    except ValkeyUnreachable:
        return None
    return message[2] if isinstance(message, list) and isinstance(message[2], bytes) else None
