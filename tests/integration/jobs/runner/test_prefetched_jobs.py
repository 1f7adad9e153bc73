"""Runners with recycled children that claim ahead: what has not begun is as it was, whatever
happens."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial

import pytest

from tests.support.jobs.queue import KEYS
from tests.support.jobs.runners import RunnerFleet
from tests.support.jobs.scripted_program import JobScript
from tests.support.waiting import eventually
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol.messages import JobStatus

#: Fewer than a claim brings ahead.
BEHIND = [f"behind{number}" for number in range(6)]


def at_once(
    fleet: RunnerFleet, script: JobScript, first: str = "first", behind: Sequence[str] = BEHIND
) -> None:
    """One job with others behind it, so that one claim finds them all."""
    fleet.harness.call(job_calls.suspend())
    fleet.add(first, script=script, idempotent=True)
    for job_id in behind:
        fleet.add(job_id, idempotent=True)
    fleet.harness.call(job_calls.resume())


def states(fleet: RunnerFleet, field: str = "state") -> set[str | None]:
    return {fleet.harness.field(job_id, field) for job_id in BEHIND}


def test_all_jobs_run_once_and_in_their_order(fleet: RunnerFleet) -> None:
    fleet.warm()
    at_once(fleet, JobScript())
    assert [fleet.result(job_id).attempt for job_id in ("first", *BEHIND)] == [1] * 7
    assert [entry.job_id for entry in fleet.ledger()][-7:] == ["first", *BEHIND]


def test_what_waits_behind_a_slow_job_goes_back_and_runs_elsewhere(fleet: RunnerFleet) -> None:
    runner = fleet.warm()
    for number in range(50):  # on a slow host even these jobs are not always brief
        if runner.logged("jobs_given_back"):
            break
        gate, tried = f"gate{number}", f"tried{number}"
        at_once(
            fleet,
            JobScript(until=fleet.gate(gate)),
            tried,
            [f"{tried}-{job_id}" for job_id in BEHIND],
        )
        fleet.started(tried)
        last = f"{tried}-{BEHIND[-1]}"
        eventually(partial(fleet.waits, last), "the jobs' return")
        fleet.open(gate)
        fleet.result(last)
    assert runner.logged("jobs_given_back")
    at_once(fleet, JobScript(until=fleet.gate()))
    fleet.started("first")
    eventually(lambda: states(fleet) == {"waiting"}, "the jobs' return")
    assert states(fleet, "attempt") == {"0"}
    fleet.start("two")
    assert [fleet.result(job_id).attempt for job_id in BEHIND] == [1] * 6
    fleet.open()
    assert fleet.result("first").status == JobStatus.DONE


def test_a_job_in_hand_that_has_not_begun_is_cancelled_without_running(fleet: RunnerFleet) -> None:
    runner = fleet.warm()
    at_once(fleet, JobScript(until=fleet.gate()))
    fleet.started("first")
    runner.send(signal.SIGSTOP)  # most likely while they are still in hand
    assert fleet.harness.call(job_calls.cancel(BEHIND[0], KEYS)) in ("asked", "cancelled")
    runner.send(signal.SIGCONT)
    assert fleet.result(BEHIND[0]).status == JobStatus.CANCELLED
    fleet.open()
    assert {fleet.result(job_id).status for job_id in BEHIND[1:]} == {JobStatus.DONE}
    assert fleet.ledger(BEHIND[0]) == []


@pytest.mark.parametrize("queue", ["", "default"])
def test_what_is_in_hand_does_not_begin_while_all_or_its_queue_is_suspended(
    fleet: RunnerFleet, queue: str
) -> None:
    fleet.warm()
    at_once(fleet, JobScript(until=fleet.gate()))
    fleet.started("first")
    fleet.harness.call(job_calls.suspend(queue=queue))
    eventually(lambda: states(fleet) == {"waiting"}, "the jobs' return")
    fleet.open()
    fleet.result("first")
    assert not any(fleet.ledger(job_id) for job_id in BEHIND)
    fleet.harness.call(job_calls.resume(queue=queue))
    assert {fleet.result(job_id).status for job_id in BEHIND} == {JobStatus.DONE}


def test_a_warm_shutdown_gives_back_what_has_not_begun(fleet: RunnerFleet) -> None:
    runner = fleet.warm()
    at_once(fleet, JobScript(until=fleet.gate()))
    fleet.started("first")
    runner.send(signal.SIGTERM)
    eventually(lambda: runner.logged("stop_requested"), "the signal")
    fleet.open()
    assert runner.wait() == 0
    assert fleet.result("first").status == JobStatus.DONE
    assert (states(fleet), states(fleet, "attempt")) == ({"waiting"}, {"0"})


def test_a_second_signal_gives_all_back(fleet: RunnerFleet) -> None:
    runner = fleet.warm()
    at_once(fleet, JobScript(until=fleet.gate()))
    fleet.started("first")
    runner.send(signal.SIGTERM)
    eventually(lambda: runner.logged("stop_requested"), "the signal")
    runner.send(signal.SIGTERM)
    assert runner.wait() == 0
    assert fleet.harness.field("first", "state") == "waiting"
    assert (states(fleet), states(fleet, "attempt"), states(fleet, "crashes")) == (
        {"waiting"},
        {"0"},
        {"0"},
    )


def test_jobs_in_hand_of_a_killed_runner_run_elsewhere(fleet: RunnerFleet) -> None:
    runner = fleet.warm()
    at_once(fleet, JobScript(until=fleet.gate()))
    fleet.started("first")
    runner.send(signal.SIGKILL)
    fleet.open()
    fleet.start("two", recycle=50)
    assert {fleet.result(job_id).status for job_id in ("first", *BEHIND)} == {JobStatus.DONE}
    assert [len(fleet.ledger(job_id)) for job_id in BEHIND] == [1] * 6


def test_a_job_that_kills_its_runner_again_and_again_takes_no_other_with_it(
    fleet: RunnerFleet,
) -> None:
    runner = fleet.warm()
    at_once(fleet, JobScript(kills_runner=True))
    for number in range(1, 4):
        runner.wait()
        runner = fleet.start(f"r{number}", recycle=50)
    failure = fleet.result("first").failure
    assert failure is not None
    assert failure.code == "JOB_CRASHED"
    results = [fleet.result(job_id) for job_id in BEHIND]
    assert {result.status for result in results} == {JobStatus.DONE}
    assert max(result.attempt for result in results) <= 2


def test_a_runner_that_stood_still_past_its_lease_begins_nothing_that_it_has_lost(
    fleet: RunnerFleet,
) -> None:
    runner = fleet.warm()
    fleet.start("two", recycle=50)
    fleet.harness.call(job_calls.suspend(runner="two"))
    at_once(fleet, JobScript(until=fleet.gate()))
    fleet.started("first")
    runner.send(signal.SIGSTOP)
    fleet.open()
    fleet.harness.call(job_calls.resume(runner="two"))
    assert {fleet.result(job_id).status for job_id in ("first", *BEHIND)} == {JobStatus.DONE}
    runner.send(signal.SIGCONT)
    eventually(lambda: runner.logged("job_runner_lost"), "the runner's notice")
    assert [len(fleet.ledger(job_id)) for job_id in BEHIND] == [1] * 6


def test_after_an_outage_what_was_in_hand_runs(fleet: RunnerFleet) -> None:
    runner = fleet.warm()
    at_once(fleet, JobScript(until=fleet.gate()))
    fleet.started("first")
    fleet.harness.client.execute("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES")
    fleet.open()
    assert {fleet.result(job_id).status for job_id in ("first", *BEHIND)} == {JobStatus.DONE}
    assert [entry.job_id for entry in fleet.ledger()][-7:] == ["first", *BEHIND]
    assert runner.process.poll() is None
