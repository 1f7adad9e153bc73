"""The job queue's client for API and orchestrator: enqueues, reads, waits for and cancels jobs."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.valkey import client as valkey
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.calls import reply_text
from worker_runtime.jobs.protocol.messages import RESULT_TTL, Job, JobResult, JobStatus, read_result
from worker_runtime.jobs.protocol.telemetry import JobEvent, JobEventFormatter
from worker_runtime.protocol.errors import BerthError, MalformedMessage

#: Seconds that an id chosen by the caller stands for one request; longer while the job exists.
REQUEST_TTL = 86_400
#: Calls of one process that may wait at a time: each holds a connection.
MAX_WAITERS = 32
#: States of a job that has not ended.
OPEN_STATES = frozenset({"waiting", "delayed", "grouped", "running"})


class JobIdReused(BerthError):
    """Another job was asked for under this id."""

    code = "JOB_ID_REUSED"


@dataclass(frozen=True, slots=True)
class JobState:
    """One job. `state` is one of `OPEN_STATES` or how it ended; times are Unix milliseconds."""

    job_id: str
    state: str
    name: str | None = None
    queue: str | None = None
    priority: int | None = None
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
    result: JobResult | None = field(default=None)

    @property
    def ended(self) -> bool:
        return self.state not in OPEN_STATES


def write_to_stderr(line: bytes) -> None:
    """Writes each line at once, so that lines of several processes do not mix."""
    with suppress(OSError):
        os.write(2, line)


class JobClient:
    """All calls may be repeated, and raise `RedisError` when Valkey is down."""

    def __init__(self, client: Redis, write_line: Callable[[bytes], None] = write_to_stderr) -> None:
        """`write_line` gets a line in the Elastic Common Schema for each job that was queued."""
        self._client = client
        self._write_line = write_line
        self._formatter = JobEventFormatter("berth-jobs", socket.gethostname())
        self._waiters = asyncio.Semaphore(MAX_WAITERS)

    async def enqueue(self, job: Job, *, tag: str = job_keys.FLEET_TAG, digest: str = "") -> bool:
        """Puts a job on its queue; false if it is there already, or has ended.

        `digest` stands for the request if the caller chose the id: raises `JobIdReused` if the id was used
        for another request. Also raises `MalformedMessage`.
        """
        call = job_calls.enqueue(job, tag, digest)
        key = job_keys.request_digest(tag, job.job_id)
        if digest:
            before = await self._client.set(key, digest, nx=True, get=True, ex=REQUEST_TTL)
            if isinstance(before, bytes | str) and reply_text(before) != digest:
                raise JobIdReused(f"another job was asked for as {job.job_id}")
        reply = await valkey.run_script(self._client, *call)
        if reply_text(reply[0]) == "seen" and digest and (known := reply_text(reply[2])) not in ("", digest):
            # A failed or delayed job outlives its request key: corrects what was just written there.
            await self._client.set(key, known, ex=REQUEST_TTL)
            raise JobIdReused(f"another job was asked for as {job.job_id}")
        if reply_text(reply[0]) != "queued":
            return False
        labels = {"job_id": job.job_id, "job": job.name, "queue": job.queue, "priority": job.priority}
        self._write_line(self._formatter.line(JobEvent("job-queued"), "info", {**labels, "tag": tag}))
        return True

    async def cancel(self, job_id: str, *, tag: str = job_keys.FLEET_TAG) -> bool:
        """Ends a waiting job, has a running one killed. False if there is none, or it has ended."""
        state = await self.get(job_id, tag=tag)
        if state is None or state.ended:
            return False
        reply = await valkey.run_script(self._client, *job_calls.cancel(job_id, tag))
        return reply_text(reply) in ("cancelled", "asked")

    async def count_waiting(self, names: list[tuple[str, str]], *, tag: str) -> int:
        """The number of waiting jobs of these (queue, type), and of all delayed ones."""
        pipeline = self._client.pipeline(transaction=False)
        for queue, name in names:
            pipeline.zcard(job_keys.subqueue(tag, queue, name))
        pipeline.zcard(job_keys.delayed(tag))
        return sum(await pipeline.execute())

    async def count_request(self, *, tag: str) -> int:
        """Counts a request for a job; returns the number of requests in the time that a result is kept."""
        pipeline = self._client.pipeline(transaction=True)
        pipeline.set(job_keys.recent_requests(tag), 0, ex=RESULT_TTL, nx=True)
        pipeline.incr(job_keys.recent_requests(tag))
        return int((await pipeline.execute())[1])

    async def get(self, job_id: str, *, tag: str = job_keys.FLEET_TAG) -> JobState | None:
        """The job; None if there is none, or its result has expired."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hgetall(job_keys.job(tag, job_id))
        pipeline.get(job_keys.result(tag, job_id))
        fields, stored = await pipeline.execute()
        return _state(job_id, {reply_text(name): value for name, value in fields.items()}, stored)

    async def wait(self, job_id: str, seconds: float, *, tag: str = job_keys.FLEET_TAG) -> JobState | None:
        """As `get`, once the job has ended or `seconds` have passed; at once if too many calls wait."""
        if seconds <= 0 or self._waiters.locked():
            return await self.get(job_id, tag=tag)
        until = time.monotonic() + seconds
        async with self._waiters:
            pubsub = self._client.pubsub()
            try:
                await pubsub.subscribe(job_keys.done(tag, job_id))
                # After the confirmation, everything that is published arrives.
                await pubsub.get_message(timeout=min(2.0, seconds))
                found = await self.get(job_id, tag=tag)
                while found is not None and not found.ended and (left := until - time.monotonic()) > 0:
                    heard = await pubsub.get_message(ignore_subscribe_messages=True, timeout=left)
                    if heard is not None:
                        return await self.get(job_id, tag=tag)
                return await self.get(job_id, tag=tag) if found is not None else None
            finally:
                with suppress(RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]


def _state(job_id: str, fields: dict[str, bytes], stored: bytes | None) -> JobState | None:
    kept = stored if stored is not None else fields.get("failure")
    result = None
    if kept is not None:
        try:
            result = read_result(kept)
        except MalformedMessage:
            result = JobResult(job_id=job_id, status=JobStatus.FAILED)
    state = result.status.value if stored is not None and result else reply_text(fields.get("state", b""))
    if not state:
        return None
    names = ("priority", "attempt", "queued_at", "due", "started_at")
    number = {name: int(float(fields[name])) for name in names if name in fields}
    return JobState(
        job_id=job_id,
        state=state,
        name=reply_text(fields["name"]) if "name" in fields else None,
        queue=reply_text(fields["queue"]) if "queue" in fields else None,
        priority=number.get("priority"),
        attempt=number.get("attempt", result.attempt if result else 0),
        cancelling="cancelled" in fields and state in OPEN_STATES,
        queued_at_ms=number.get("queued_at"),
        due_at_ms=number.get("due") if state == "delayed" else None,
        started_at_ms=number.get("started_at", result.started_at_ms if result else None),
        progress=msgspec.json.decode(fields["progress"]) if "progress" in fields else None,
        result=result,
    )
