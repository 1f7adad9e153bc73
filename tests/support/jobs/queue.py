"""A producer, an operator, and runners that claim and end jobs by hand, on a real Valkey."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support.message_signing import SECRETS
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import (
    BOOST_MS,
    FAILED_TTL_S,
    Job,
    JobResult,
    JobStatus,
    read_result,
)
from worker_runtime.jobs.queue import ClaimedJob, FinishedRun, JobQueue, RunnerIdentity
from worker_runtime.process.valkey import Argument, Valkey
from worker_runtime.protocol.messages import Failure, encode

#: Of the fleet.
KEYS = SECRETS.job_keys(job_keys.FLEET_TAG)

_numbers = itertools.count(1)
#: Seconds that Valkey may take for an answer: the machine may stand still.
PATIENCE = 25.0


class QueueHarness:
    """A producer, an operator, and runners by name."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = Valkey(url, timeout=PATIENCE)
        self._clients = [self.client]

    def runner(
        self, name: str = "r", *, node: str = "n", queues: tuple[str, ...] = ("*",)
    ) -> JobQueue:
        """A registered runner with a connection of its own."""
        client = Valkey(self.url, timeout=PATIENCE)
        self._clients.append(client)
        queue = JobQueue(client, RunnerIdentity(f"{name}-{next(_numbers)}", name, node, queues))
        queue.join()
        return queue

    def call(self, call: job_calls.QueueCall) -> Any:
        reply = self.client.run(*call)
        if isinstance(reply, list):
            return [part.decode() if isinstance(part, bytes) else part for part in reply]
        return reply.decode() if isinstance(reply, bytes) else reply

    def enqueue(self, job_id: str, name: str = "work", **fields: Any) -> str:
        return str(self.call(job_calls.enqueue(Job(job_id=job_id, name=name, **fields), KEYS))[0])

    def setting(self, field: str, value: object) -> None:
        self.client.execute("HSET", job_keys.meta(job_keys.FLEET_TAG), field, str(value))

    def result(self, job_id: str) -> JobResult | None:
        stored = self.client.execute("GET", job_keys.result(job_keys.FLEET_TAG, job_id))
        return None if stored is None else read_result(stored)

    def field(self, job_id: str, field: str) -> str | None:
        value = self.client.execute("HGET", job_keys.job(job_keys.FLEET_TAG, job_id), field)
        return None if value is None else str(value.decode())

    def now_ms(self) -> int:
        """Valkey's clock."""
        seconds, micros = self.client.execute("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def make_due(self, job_id: str) -> None:
        """Time passes for one delayed job."""
        self.client.execute("HSET", job_keys.job(job_keys.FLEET_TAG, job_id), "due", 1)
        self.client.execute("ZADD", job_keys.delayed(job_keys.FLEET_TAG), "XX", 1, job_id)

    def close(self) -> None:
        for client in self._clients:
            client.close()


def claim(runner: JobQueue, want: int = 1) -> list[ClaimedJob]:
    claims = runner.finish_and_claim([], want)[1]
    assert claims is not None
    return claims.jobs


def ids(jobs: list[ClaimedJob]) -> list[str]:
    return [job.job_id for job in jobs]


def claiming(runner: JobQueue, number: int) -> tuple[Argument, ...]:
    """What a claim of this number sends, for those that come late or twice."""
    identity = runner.identity
    queues = ",".join(identity.queues)
    return (
        identity.runner_id,
        number,
        identity.node,
        1,
        1,
        queues,
        0,
        "",
        FAILED_TTL_S,
        BOOST_MS,
        0,
        "",
    )


def ending(
    job: ClaimedJob,
    status: JobStatus = JobStatus.DONE,
    *,
    delay: float = 0.0,
    crashed: bool = False,
) -> FinishedRun:
    failure = Failure(code="X", detail="") if status is JobStatus.FAILED else None
    result = encode(
        JobResult(job_id=job.job_id, status=status, attempt=job.attempt, failure=failure)
    )
    return FinishedRun(job.job_id, job.fence, status, result, delay=delay, crashed=crashed)


def end(
    runner: JobQueue, job: ClaimedJob, status: JobStatus = JobStatus.DONE, **fields: Any
) -> str:
    return runner.finish_and_claim([ending(job, status, **fields)], 0)[0][0]


def die(runner: JobQueue, finder: JobQueue) -> dict[str, str] | None:
    """The end of a runner, as another one notices it."""
    return finder.reap(runner.identity.runner_id, finder.beats()[runner.identity.runner_id])
