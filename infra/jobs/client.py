"""The job queue's client for API and orchestrator: enqueues, reads, waits for and cancels jobs."""

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.process_metrics import REFUSED
from infra.valkey import client as valkey
from infra.vault.message_secret import MessageSecrets
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.calls import reply_number, reply_progress, reply_text
from worker_runtime.jobs.protocol.messages import (
    RESULT_TTL_S,
    Job,
    JobOutcomeUnknown,
    JobResult,
    JobStatus,
    read_signed_job,
    read_signed_result,
)
from worker_runtime.jobs.protocol.scripts import ENQUEUE
from worker_runtime.jobs.protocol.telemetry import JobEvent, JobEventFormatter
from worker_runtime.protocol.authentication import RefusalCounter
from worker_runtime.protocol.errors import BerthError, MalformedMessage
from worker_runtime.protocol.messages import MAX_MESSAGE_BYTES, Failure
from worker_runtime.protocol.scripts import READ_BOUNDED

log = structlog.get_logger()

#: Calls of one process that may wait at a time: each holds a connection.
MAX_WAITERS = 32
#: States of a job that has not ended.
OPEN_STATES = frozenset({"waiting", "delayed", "grouped", "running"})


class JobIdReused(BerthError, code="JOB_ID_REUSED", status=409):
    """Another job was enqueued under this id. Choose another id."""


@dataclass(frozen=True, slots=True)
class JobState:
    """One job. `state` is one of `OPEN_STATES` or how it ended; times are Unix milliseconds."""

    job_id: str
    state: str
    name: str | None = None
    attempt: int = 0
    #: It runs, and someone has cancelled it.
    cancelling: bool = False
    queued_at_ms: int | None = None
    #: When it may run; None unless it is delayed.
    due_at_ms: int | None = None
    started_at_ms: int | None = None
    #: What the job last reported, as JSON.
    progress: Any = None
    #: How it ended; of a job that waits for another attempt, how the last one ended.
    result: JobResult | None = None

    @property
    def ended(self) -> bool:
        return self.state not in OPEN_STATES


class EnqueueReply(NamedTuple):
    """What became of a job: `queued`; `seen`: it was enqueued before; `duplicate`: another job has
    its unique key, and `job_id` names that one."""

    status: str
    job_id: str

    @property
    def queued(self) -> bool:
        return self.status == "queued"


class JobClient:
    """All calls may be repeated, and raise `RedisError` when Valkey is down."""

    def __init__(self, client: Redis, secrets: MessageSecrets) -> None:
        self._client = client
        self.secrets = secrets
        self._refused = RefusalCounter(REFUSED.labels("job result").inc)
        self._formatter = JobEventFormatter("berth-jobs", socket.gethostname())
        self._waiters = asyncio.Semaphore(MAX_WAITERS)

    async def enqueue(self, job: Job, *, tag: str = job_keys.FLEET_TAG) -> bool:
        """Puts a job that is kept (`kept.py`) on its queue; false if known. Raises
        `MalformedMessage`."""
        [reply] = await self.enqueue_many([job], tag=tag)
        return reply.queued

    async def enqueue_many(self, jobs: Sequence[Job], *, tag: str) -> list[EnqueueReply]:
        """Puts jobs that are kept on their queues, in one round trip; what became of each. Raises
        `MalformedMessage`."""
        keys = self.secrets.job_keys(tag)
        calls = [job_calls.enqueue(job, keys, tag) for job in jobs]
        if len(calls) == 1:
            raw_replies = [await valkey.run_script(self._client, *calls[0])]
        else:
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.script_load(ENQUEUE.source)
                for call in calls:
                    pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
                raw_replies = (await pipe.execute())[1:]
        replies = [EnqueueReply(*map(reply_text, reply)) for reply in raw_replies]
        for job, reply in zip(jobs, replies, strict=True):
            if reply.queued:
                self._log_queued(job, tag)
        return replies

    def _log_queued(self, job: Job, tag: str) -> None:
        labels = {
            "job_id": job.job_id,
            "job": job.name,
            "queue": job.queue,
            "priority": job.priority,
        }
        line = self._formatter.line(JobEvent("job-queued"), "info", {**labels, "tag": tag})
        with suppress(OSError):  # nobody reads the log any more
            os.write(2, line)  # at once, so that lines of several processes do not mix

    async def cancel(self, job_id: str, *, tag: str = job_keys.FLEET_TAG) -> bool:
        """Ends a waiting job, or has a running one killed. Returns False if there is no such job,
        or it has ended."""
        state = await self.get(job_id, tag=tag)
        if state is None or state.ended:
            return False
        call = job_calls.cancel(job_id, self.secrets.job_keys(tag), tag)
        reply = await valkey.run_script(self._client, *call)
        return reply_text(reply) in ("cancelled", "asked")

    async def count_waiting(self, names: list[tuple[str, str]], *, tag: str) -> int:
        """Counts the waiting jobs of these (queue, type), and all delayed ones."""
        pipeline = self._client.pipeline(transaction=False)
        for queue, name in names:
            pipeline.zcard(job_keys.subqueue(tag, queue, name))
        pipeline.zcard(job_keys.delayed(tag))
        return sum(await pipeline.execute())

    async def count_request(self, *, tag: str) -> int:
        """Counts a request for a job. Returns the number of requests in the time that a result is
        kept."""
        pipeline = self._client.pipeline(transaction=True)
        pipeline.set(job_keys.recent_requests(tag), 0, ex=RESULT_TTL_S, nx=True)
        pipeline.incr(job_keys.recent_requests(tag))
        return int((await pipeline.execute())[1])

    async def ids_of_others(self, jobs: Sequence[Job], *, tag: str) -> set[str]:
        """Returns the ids among those of `jobs` under which Valkey has another job, or the end of
        one: one that a direct producer has enqueued. The same type with the same arguments is no
        other job. Raises `RedisError`."""
        keys = self.secrets.job_keys(tag)
        names = [job_keys.job(tag, job.job_id) for job in jobs]
        arguments = ["hash", 2 * MAX_MESSAGE_BYTES]
        stored = await valkey.run_script(self._client, READ_BOUNDED, names, arguments)
        async with self._client.pipeline(transaction=False) as pipe:
            for job in jobs:
                pipe.exists(job_keys.result(tag, job.job_id))
            results = await pipe.execute()
        others = set()
        for job, flat, has_result in zip(jobs, stored, results, strict=True):
            if flat is None and not has_result:
                continue
            fields = dict(zip(map(reply_text, (flat or ())[::2]), (flat or ())[1::2], strict=True))
            with suppress(BerthError):
                known = read_signed_job(fields.get("body", b""), job.job_id, keys)[0]
                if known.queued_type == job.queued_type and known.args == job.args:
                    continue
            others.add(job.job_id)
        return others

    async def get(self, job_id: str, *, tag: str = job_keys.FLEET_TAG) -> JobState | None:
        """Returns the job; None if there is none, or its result has expired. Raises
        `MalformedMessage` for a value that is not a job: a user's worker may write any of it."""
        names, max_bytes = [job_keys.job(tag, job_id)], 2 * MAX_MESSAGE_BYTES
        [flat] = await valkey.run_script(self._client, READ_BOUNDED, names, ["hash", max_bytes])
        stored = await valkey.reply_of(
            self._client.getrange(job_keys.result(tag, job_id), 0, max_bytes)
        )
        if flat == []:
            raise MalformedMessage(f"job {job_id}: the value in Valkey is not a job")
        fields = dict(zip(map(reply_text, (flat or ())[::2]), (flat or ())[1::2], strict=True))
        stored_state = reply_text(fields.get("state", b""))
        if fields and not stored and stored_state not in (*OPEN_STATES, "failed"):
            # No script leaves a job in this state, so its outcome is unknown.
            return _state_after_end(job_id, fields, _unknown_end(job_id))
        if stored:
            return _state_after_end(job_id, fields, self._result(stored, job_id, tag))
        failure = fields.get("failure")
        result = None if failure is None else self._result(failure, job_id, tag)
        return _state(job_id, fields, result)

    def _result(self, kept: bytes, job_id: str, tag: str) -> JobResult:
        """Reads how the job ended, as far as its runner or a service says so."""
        try:
            return read_signed_result(kept, job_id, self.secrets.job_keys(tag))
        except BerthError as error:
            # A script writes it without a MAC when a runner has died, as anybody might.
            if not kept.startswith(b"{") and self._refused.add(job_id):
                log.error("job_result_not_authentic", job_id=job_id, tag=tag, code=error.code)
            return _unknown_end(job_id)

    async def wait(
        self, job_id: str, seconds: float, *, tag: str = job_keys.FLEET_TAG
    ) -> JobState | None:
        """Returns what `get` returns once the job has ended or `seconds` have passed; at once if
        too many calls wait."""
        if seconds <= 0 or self._waiters.locked():
            return await self.get(job_id, tag=tag)
        until = time.monotonic() + seconds
        async with self._waiters:
            pubsub = self._client.pubsub()
            try:
                await pubsub.subscribe(job_keys.done(tag, job_id))
                # After the confirmation, everything that is published arrives.
                await pubsub.get_message(timeout=min(2.0, seconds))
                job = await self.get(job_id, tag=tag)
                if job is None or job.ended:
                    return job
                while (remaining_s := until - time.monotonic()) > 0:
                    published = await pubsub.get_message(
                        ignore_subscribe_messages=True, timeout=remaining_s
                    )
                    if published is not None:
                        break
                return await self.get(job_id, tag=tag)
            finally:
                with suppress(RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]


def _unknown_end(job_id: str) -> JobResult:
    error = JobOutcomeUnknown("its runner died while it ran, or did not write its end")
    return JobResult(job_id=job_id, status=JobStatus.FAILED, failure=Failure.of(error))


def _state_after_end(job_id: str, fields: dict[str, bytes], result: JobResult) -> JobState | None:
    """Returns the state that `result` says, whatever state the job's fields have."""
    return _state(job_id, {**fields, "state": result.ended_as.encode()}, result)


def _state(job_id: str, fields: dict[str, bytes], result: JobResult | None) -> JobState | None:
    state = reply_text(fields.get("state", b""))
    if not state:
        return None
    names = ("attempt", "queued_at", "due", "started_at")
    number = {name: reply_number(fields[name]) for name in names if name in fields}
    return JobState(
        job_id=job_id,
        state=state,
        name=reply_text(fields["name"]) if "name" in fields else None,
        attempt=number.get("attempt", result.attempt if result else 0),
        cancelling="cancelled" in fields and state in OPEN_STATES,
        queued_at_ms=number.get("queued_at"),
        due_at_ms=number.get("due") if state == "delayed" else None,
        started_at_ms=number.get("started_at", result.started_at_ms if result else None),
        progress=reply_progress(fields.get("progress")),
        result=result,
    )
