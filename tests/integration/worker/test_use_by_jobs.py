"""A worker that runs jobs is in use, though no order comes."""

from __future__ import annotations

from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys


def test_a_job_runner_counts_as_use_of_the_worker(harness: WorkerHarness) -> None:
    worker = harness.active(jobs_idle=60.0, mark_period=0.5)

    def last_use() -> int:
        return int(harness.client.execute("HGET", keys.metadata(harness.user), "last_activity_ms"))

    before = last_use()
    job = catalog.make_job("j-1", catalog.PingRunner())
    harness.client.run(
        *job_calls.enqueue(
            job, harness.secrets.request_keys(harness.user), job_keys.user_tag(harness.user)
        )
    )
    runner = eventually(lambda: worker.child("jobs"), "a job runner")
    first = eventually(lambda: max(0, last_use() - before), "a use")
    eventually(lambda: last_use() - before > first, "a later use, while the runner is there")
    assert worker.child("jobs") == runner
