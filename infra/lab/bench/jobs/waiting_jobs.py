"""Claims jobs as a runner does, in this process: what a claim costs while many jobs wait."""

from __future__ import annotations

import time

from redis import Redis

from infra.lab.bench.jobs.contenders import OurRunner
from infra.lab.loadtest_job import KEYS
from worker_runtime.jobs.protocol.messages import JobResult, JobStatus, sign_result
from worker_runtime.jobs.queue import FinishedRun, JobQueue, RunnerIdentity
from worker_runtime.process.valkey import Valkey


class WaitingJobs:
    """A server with waiting jobs, and a runner's connection that claims them."""

    def __init__(self, url: str, count: int) -> None:
        with Redis.from_url(url, single_connection_client=True) as client:
            OurRunner("waiting", client, url, 1).fill(count, 0.0)
        self._client = Valkey(url, timeout=30)
        self._queue = JobQueue(self._client, RunnerIdentity("bench-1", "bench", "local"))
        self._queue.join()
        self._ended: list[FinishedRun] = []

    def claim(self) -> float:
        """Claims one job and ends the one before; returns the seconds."""
        began = time.perf_counter()
        _, batch = self._queue.finish_and_claim(self._ended, 1)
        taken = time.perf_counter() - began
        assert batch is not None  # noqa: S101 - it was asked for
        [claimed] = batch.jobs
        result = JobResult(job_id=claimed.job_id, status=JobStatus.DONE, attempt=1)
        signed = sign_result(result, KEYS)
        self._ended = [FinishedRun(claimed.job_id, claimed.fence, JobStatus.DONE, signed)]
        return taken

    def close(self) -> None:
        self._client.close()
