"""A worker that runs jobs is in use, though no order comes."""

from __future__ import annotations

from tests.integration.worker.stage import Stage
from tests.integration.worker.worker import eventually
from worker_runtime.protocol import job_calls, job_keys, job_work, keys


def test_a_job_runner_counts_as_use_of_the_worker(stage: Stage) -> None:
    worker = stage.active(jobs_idle=60.0)

    def last_use() -> int:
        return int(stage.client.execute("HGET", keys.metadata(stage.user), "last_activity_ms"))

    before = last_use()
    job = job_work.job_of("j-1", job_work.Ping())
    stage.client.run(*job_calls.enqueue(job, job_keys.of_user(stage.user)))
    runner = eventually(lambda: worker.child("jobs"), "a job runner")
    first = eventually(lambda: max(0, last_use() - before), "a use")
    eventually(lambda: last_use() - before > first, "a later use, while the runner is there")
    assert worker.child("jobs") == runner
