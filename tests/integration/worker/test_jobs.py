"""A user's own jobs, run next to the session in the user's worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec

from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from tests.support.workers.process import SpawnedWorker
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.catalog import PingRunner, PositionSnapshot, SnapshotPositions
from worker_runtime.jobs.protocol.messages import Job, JobResult, JobStatus, read_result
from worker_runtime.protocol.messages import Shutdown


def enqueue(harness: WorkerHarness, job_id: str, work: msgspec.Struct, **options: Any) -> None:
    put(harness, catalog.make_job(job_id, work, **options))


def put(harness: WorkerHarness, job: Job) -> None:
    reply = harness.client.run(
        *job_calls.enqueue(
            job, harness.secrets.request_keys(harness.user), job_keys.user_tag(harness.user)
        )
    )
    assert reply[0] == b"queued"


def result(harness: WorkerHarness, job_id: str) -> JobResult:
    key = job_keys.result(job_keys.user_tag(harness.user), job_id)
    return read_result(
        eventually(lambda: harness.client.execute("GET", key), f"the result of {job_id}")
    )


def runner(worker: SpawnedWorker) -> int:
    return eventually(lambda: worker.child("jobs"), "a job runner")


def gone(worker: SpawnedWorker) -> None:
    eventually(lambda: not worker.child("jobs"), "the end of the job runner")


def job_child(children: Path) -> int:
    """The pid of a job's process; 0 while there is none."""
    for pid in children.read_text().split():
        if Path(f"/proc/{pid}/comm").read_text() == "berth-job\n":
            return int(pid)
    return 0


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_a_runner_comes_with_the_first_job_and_goes_when_there_is_none(
    harness: WorkerHarness,
) -> None:
    worker = harness.active(jobs_idle=0.3)
    processes = worker.both()
    assert worker.child("jobs") == 0
    for number in range(3):
        enqueue(harness, f"j-{number}", PingRunner(text=str(number)))
        assert result(harness, f"j-{number}").status is JobStatus.DONE
        gone(worker)
    assert worker.both() == processes
    assert not worker.logged("job_runner_died")
    assert harness.client.execute("EXISTS", job_keys.beats(job_keys.user_tag(harness.user))) == 0


def test_jobs_that_came_before_the_worker_are_run(harness: WorkerHarness) -> None:
    enqueue(harness, "early", PingRunner())
    harness.active()
    assert result(harness, "early").status is JobStatus.DONE


def test_a_snapshot_is_taken_by_the_session_of_the_same_worker(harness: WorkerHarness) -> None:
    worker = harness.active()
    enqueue(harness, "p-1", SnapshotPositions(user_id=harness.user, account_id="a1"))
    done = result(harness, "p-1")
    assert done.status is JobStatus.DONE, done
    snapshot = msgspec.json.decode(done.value, type=PositionSnapshot)
    assert (snapshot.user_id, snapshot.account_id) == (harness.user, "a1")
    assert snapshot.balance is not None
    assert worker.child("jobs")


def test_a_user_has_no_jobs_of_the_fleet(harness: WorkerHarness) -> None:
    harness.active()
    put(harness, Job(job_id="w-1", name="webhook", attempts=1))
    failure = result(harness, "w-1").failure
    assert failure is not None
    assert failure.code == "JOB_UNKNOWN"


def test_a_killed_runner_is_followed_by_another_one_and_leaves_the_session_alone(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    processes = worker.both()
    enqueue(harness, "j-1", PingRunner())
    result(harness, "j-1")
    first = runner(worker)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: worker.child("jobs") not in (0, first), "another runner")
    enqueue(harness, "j-2", PingRunner())
    assert result(harness, "j-2").status is JobStatus.DONE
    assert worker.both() == processes
    assert worker.logged("job_runner_died")


def test_runners_that_die_again_and_again_cost_the_worker_nothing(harness: WorkerHarness) -> None:
    worker = harness.active()
    processes = worker.both()
    enqueue(harness, "j-1", PingRunner())
    seen: set[int] = set()

    def paused() -> bool:
        pid = worker.child("jobs")
        if pid and pid not in seen:
            seen.add(pid)
            os.kill(pid, signal.SIGKILL)
        return bool(worker.logged("job_runners_paused"))

    eventually(paused, "an end of the attempts", 30.0)
    assert [line["pause_s"] for line in worker.logged("job_runners_paused")] == [300.0]
    assert len(seen) <= 6
    assert worker.both() == processes
    assert worker.end() == 0


def test_a_host_without_room_for_a_runner_leaves_the_session_alone(harness: WorkerHarness) -> None:
    worker = harness.active()
    processes = worker.both()
    worker.tell_broker("full")
    enqueue(harness, "j-1", PingRunner())
    eventually(lambda: worker.logged("job_runner_not_forked"), "a fork that fails")
    (worker.folder / "full").unlink()
    assert result(harness, "j-1").status is JobStatus.DONE
    assert worker.both() == processes


def test_a_runner_and_its_jobs_are_what_the_kernel_ends_when_memory_runs_out(
    harness: WorkerHarness,
) -> None:
    worker = harness.active()
    enqueue(harness, "later", PingRunner(), delay=3600.0)
    children = Path(f"/proc/{runner(worker)}/task/{runner(worker)}/children")
    child = eventually(lambda: job_child(children), "a child for the next job")
    assert [oom_score(pid) for pid in (runner(worker), child)] == [1000, 1000]
    assert [oom_score(pid) for pid in worker.both()] == [oom_score(os.getpid())] * 2


def test_a_drain_gives_the_job_in_hand_back(harness: WorkerHarness) -> None:
    worker = harness.active(shutdown_timeout=15.0)
    enqueue(harness, "later", PingRunner(), delay=3600.0)
    children = Path(f"/proc/{runner(worker)}/task/{runner(worker)}/children")
    os.kill(eventually(lambda: job_child(children), "a child for the next job"), signal.SIGSTOP)
    enqueue(harness, "j-1", PingRunner(), idempotent=True)
    key = job_keys.job(job_keys.user_tag(harness.user), "j-1")
    eventually(lambda: harness.client.execute("HGET", key, "state") == b"running", "a job in hand")
    harness.control(Shutdown(user_id=harness.user, epoch=1, reason="test"))
    assert worker.wait() == 0
    assert worker.logged("job_runner_ended")
    assert harness.client.execute("HGET", key, "state") == b"waiting"


def test_the_worker_takes_its_runner_and_jobs_along(harness: WorkerHarness) -> None:
    worker = harness.active()
    enqueue(harness, "j-1", PingRunner())
    assert result(harness, "j-1").status is JobStatus.DONE
    pids = [runner(worker), *worker.both()]
    assert worker.end() == 0
    for pid in pids:
        assert not alive(pid)
    assert worker.logged("job_runner_ended")
