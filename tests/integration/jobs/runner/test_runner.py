"""A real runner: each job in a process of its own, its result, its limits, its end."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from tests.support.jobs.queue import KEYS
from tests.support.jobs.runners import RunnerFleet
from tests.support.jobs.scripted_program import JobScript
from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobResult, JobStatus
from worker_runtime.protocol.authentication import sign_payload


def code(result: JobResult) -> str:
    assert result.failure is not None
    return result.failure.code


def test_a_job_runs_and_its_result_can_be_read(fleet: RunnerFleet) -> None:
    runner = fleet.start()
    fleet.add("j", script=JobScript(returns={"answer": 42}))
    result = fleet.result("j")
    assert result.failure is None, result.failure.detail + result.traceback
    assert result.status == JobStatus.DONE
    assert msgspec.json.decode(result.value) == {"answer": 42}
    assert (result.attempt, result.runner) == (1, fleet.beats()[0])
    completed = eventually(lambda: runner.job_events("job-completed"), "the event")
    assert [event["labels"]["job_id"] for event in completed] == ["j"]
    assert runner.job_events("job-processing")[0]["ecs.version"]


def test_each_job_gets_a_fresh_process_that_is_not_the_runner(fleet: RunnerFleet) -> None:
    runner = fleet.start()
    for number in range(5):
        fleet.add(f"j{number}")
        fleet.result(f"j{number}")
    pids = {entry.pid for entry in fleet.ledger()}
    assert len(pids) == 5
    assert runner.process.pid not in pids


def test_a_recycled_child_runs_a_maximum_of_jobs(fleet: RunnerFleet) -> None:
    fleet.start(recycle=3)
    for number in range(6):
        fleet.add(f"j{number}")
        fleet.result(f"j{number}")
    pids = [entry.pid for entry in fleet.ledger()]
    assert pids[:3] == [pids[0]] * 3
    assert pids[3:] == [pids[3]] * 3
    assert pids[0] != pids[3]


def test_what_a_job_prints_is_kept_with_its_result_and_bounded(fleet: RunnerFleet) -> None:
    fleet.start(recycle=10)
    fleet.add("a", script=JobScript(prints="hello"))
    fleet.add("b", script=JobScript(prints="x", times=1_000_000))
    fleet.add("c", script=JobScript())
    assert sorted(fleet.result("a").output) == sorted("hello[to standard error]")
    long = fleet.result("b").output
    assert len(long) < 20_000
    assert "bytes left out" in long
    assert fleet.result("c").output == ""


def test_an_error_ends_in_the_failed_queue_with_its_traceback(fleet: RunnerFleet) -> None:
    runner = fleet.start()
    fleet.add("j", script=JobScript(fails="no such account"))
    result = fleet.result("j")
    assert (result.status, code(result)) == (JobStatus.FAILED, "JOB_FAILED")
    assert "no such account" in result.traceback
    assert "in perform" in result.traceback
    assert (
        fleet.harness.client.execute("ZSCORE", job_keys.failed(job_keys.FLEET_TAG), "j") is not None
    )
    failed = eventually(lambda: runner.job_events("job-failed"), "the event")
    assert failed[0]["error"]["code"] == "JOB_FAILED"


def test_a_retryable_error_is_tried_again(fleet: RunnerFleet) -> None:
    fleet.start()
    fleet.add("j", script=JobScript(retries=2, returns=1))
    result = fleet.result("j")
    assert (result.status, result.attempt) == (JobStatus.DONE, 3)


def test_attempts_end(fleet: RunnerFleet) -> None:
    fleet.start()
    fleet.add("j", script=JobScript(retries=99), attempts=3)
    result = fleet.result("j")
    assert (result.status, result.attempt, code(result)) == (JobStatus.FAILED, 3, "JOB_RETRY")


@pytest.mark.parametrize("ignores_term", [False, True])
def test_a_job_past_its_time_is_killed_with_all_it_started(
    fleet: RunnerFleet, ignores_term: bool
) -> None:
    fleet.start()
    script = JobScript(until=fleet.gate(), ignores_term=ignores_term, spawns=True)
    fleet.add("slow", script=script, timeout=5.0)  # it has to have begun before that
    result = fleet.result("slow")
    assert (result.status, code(result)) == (JobStatus.FAILED, "JOB_OUTCOME_UNKNOWN")
    (entry,) = fleet.ledger()
    eventually(lambda: not alive(entry.pid), "the child's end")
    eventually(lambda: not alive(entry.grandchild), "the grandchild's end")
    fleet.add("next")
    assert fleet.result("next").status == JobStatus.DONE


def test_what_a_finished_job_left_running_is_killed(fleet: RunnerFleet) -> None:
    fleet.start()
    fleet.add("j", script=JobScript(spawns=True))
    fleet.result("j")
    eventually(lambda: not alive(fleet.ledger()[0].grandchild), "the grandchild's end")


def test_a_crash_stays_in_the_child_and_an_idempotent_job_runs_again(fleet: RunnerFleet) -> None:
    runner = fleet.start()
    fleet.add("bomb", script=JobScript(dies_by=signal.SIGSEGV), idempotent=True, retry_delay=0)
    result = fleet.result("bomb")
    assert (result.status, code(result)) == (JobStatus.FAILED, "JOB_CRASHED")
    assert len(fleet.ledger("bomb")) == 3
    assert len(runner.job_events("job-retry")) == 2
    fleet.add("once", script=JobScript(dies_by=signal.SIGKILL))
    assert code(fleet.result("once")) == "JOB_OUTCOME_UNKNOWN"
    assert len(fleet.ledger("once")) == 1


def test_a_job_that_takes_too_much_memory_fails_alone(fleet: RunnerFleet) -> None:
    fleet.start(recycle=10)
    fleet.add("greedy", script=JobScript(allocates=512 * 1024 * 1024))
    fleet.add("modest", script=JobScript(allocates=8 * 1024 * 1024))
    result = fleet.result("greedy")
    assert result.status == JobStatus.FAILED
    assert "MemoryError" in result.traceback
    assert fleet.result("modest").status == JobStatus.DONE


def test_a_running_job_is_cancelled(fleet: RunnerFleet) -> None:
    fleet.start()
    fleet.add("j", script=JobScript(until=fleet.gate()), idempotent=True)
    entry = fleet.started("j")
    assert fleet.harness.call(job_calls.cancel("j", KEYS)) == "asked"
    result = fleet.result("j")
    assert (result.status, code(result)) == (JobStatus.CANCELLED, "JOB_CANCELLED")
    eventually(lambda: not alive(entry.pid), "the child's end")


def test_progress_can_be_read_while_the_job_runs(fleet: RunnerFleet) -> None:
    fleet.start()
    fleet.add("j", script=JobScript(progress=40, until=fleet.gate()))
    eventually(lambda: fleet.harness.field("j", "progress") == "40", "the progress")
    fleet.open()
    assert fleet.result("j").status == JobStatus.DONE


def test_poisoned_jobs_are_refused_and_harm_nobody(fleet: RunnerFleet) -> None:
    fleet.start()
    fleet.harness.enqueue("unknown", "os.system", attempts=1)
    fleet.harness.enqueue("arguments", "scripted", args=msgspec.Raw(b'{"retries": "many"}'))
    fleet.harness.enqueue("nonsense", "scripted")
    key = job_keys.job(job_keys.FLEET_TAG, "later")
    fleet.harness.enqueue("later", "scripted", delay=60)
    poison = sign_payload(KEYS, b"job/1", b"\xff{" + b"[" * 100_000)
    fleet.harness.client.execute("HSET", key, "body", poison)
    fleet.harness.make_due("later")
    assert code(fleet.result("unknown")) == "JOB_UNKNOWN"
    assert code(fleet.result("arguments")) == "MALFORMED_MESSAGE"
    assert code(fleet.result("later")) == "MALFORMED_MESSAGE"
    assert fleet.result("nonsense").status == JobStatus.DONE


def test_a_runner_that_cannot_fork_keeps_its_jobs_until_it_can(
    fleet: RunnerFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BERTH_FULL", fleet.gate("full"))
    runner = fleet.start(slots=3)
    fleet.add("running", script=JobScript(until=fleet.gate()))
    fleet.started("running")
    eventually(lambda: len(runner.children()) == 2, "a child for the next job")
    fleet.open("full")
    for number in range(8):
        fleet.add(f"j{number}", attempts=2, retry_delay=0.0)
    eventually(lambda: runner.logged("job_child_not_forked"), "a fork that fails")
    Path(fleet.gate("full")).unlink()
    fleet.open()
    results = [
        fleet.result(job_id) for job_id in ("running", *(f"j{number}" for number in range(8)))
    ]
    assert [result.status for result in results] == [JobStatus.DONE] * 9
    assert not any(entry.attempt > 2 for entry in fleet.ledger())


def test_several_slots_run_several_jobs_at_once(fleet: RunnerFleet) -> None:
    fleet.start(slots=9)  # more than are claimed at once
    for number in range(10):
        fleet.add(f"j{number}", script=JobScript(until=fleet.gate()))
    for number in range(9):
        fleet.started(f"j{number}")
    assert fleet.ledger("j9") == []
    fleet.open()
    assert fleet.result("j9").status == JobStatus.DONE


def test_a_suspended_runner_continues_at_once_when_resumed(fleet: RunnerFleet) -> None:
    fleet.start()
    fleet.harness.call(job_calls.suspend())
    fleet.add("j")
    state = job_keys.runner(job_keys.FLEET_TAG, fleet.beats()[0])
    eventually(
        lambda: fleet.harness.client.execute("HGET", state, "state") == b"suspended", "suspension"
    )
    assert fleet.ledger() == []
    fleet.harness.call(job_calls.resume())
    assert fleet.result("j").status == JobStatus.DONE
    eventually(
        lambda: fleet.harness.client.execute("HGET", state, "state") == b"idle", "an idle runner"
    )


def test_a_delayed_job_starts_when_it_is_due(fleet: RunnerFleet) -> None:
    fleet.start(lease=60.0)  # no renewal will come to help
    fleet.add("later", delay=0.5)
    result = fleet.result("later")
    queued = int(fleet.harness.client.execute("TIME")[0]) * 1000
    assert result.status == JobStatus.DONE
    assert result.started_at_ms <= queued + 2000


def test_warm_shutdown_lets_the_running_job_end_and_takes_no_other(fleet: RunnerFleet) -> None:
    runner = fleet.start()
    fleet.add("running", script=JobScript(until=fleet.gate()))
    fleet.started("running")
    fleet.add("waiting")
    runner.send(signal.SIGTERM)
    eventually(lambda: runner.logged("stop_requested"), "the signal")
    fleet.open()
    assert runner.wait() == 0
    assert fleet.result("running").status == JobStatus.DONE
    assert fleet.ledger("waiting") == []
    assert fleet.beats() == []


def test_a_second_signal_kills_and_gives_the_jobs_back(fleet: RunnerFleet) -> None:
    runner = fleet.start(slots=2)
    fleet.add("again", script=JobScript(until=fleet.gate(), ignores_term=True), idempotent=True)
    fleet.add("once", script=JobScript(until=fleet.gate()))
    pids = [fleet.started(job).pid for job in ("again", "once")]
    runner.send(signal.SIGINT)
    eventually(lambda: runner.logged("stop_requested"), "the first signal")
    runner.send(signal.SIGINT)
    assert runner.wait() == 0
    assert not any(alive(pid) for pid in pids)
    assert code(fleet.result("once")) == "JOB_OUTCOME_UNKNOWN"
    assert fleet.harness.field("again", "state") == "waiting"
    assert fleet.harness.field("again", "crashes") == "0"


def test_what_a_second_signal_killed_in_an_outage_is_not_run_again(
    fleet: RunnerFleet,
) -> None:
    runner = fleet.start(slots=2, lease=30.0)
    fleet.add("ends", script=JobScript(until=fleet.gate()), idempotent=True)
    fleet.add("once", script=JobScript(until=fleet.gate("never")))
    for job in ("ends", "once"):
        fleet.started(job)
    fleet.harness.client.execute("CLIENT", "PAUSE", 5000, "ALL")
    fleet.open()  # its end, which cannot be written, keeps the runner until Valkey is back
    eventually(lambda: runner.logged("job_queue_unreachable"), "the outage")
    runner.send(signal.SIGINT)
    eventually(lambda: runner.logged("stop_requested"), "the first signal")
    runner.send(signal.SIGINT)
    assert runner.wait() == 0
    fleet.harness.client.timeout = 10.0
    assert code(fleet.result("once")) == "JOB_OUTCOME_UNKNOWN"
    assert fleet.result("ends").status is JobStatus.DONE
    assert len(fleet.ledger("once")) == 1
