"""What dies, and what must not be lost or doubled: runners, children, Valkey's data, Valkey."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from infra.local.servers import ValkeyServer
from tests.support.jobs.queue import QueueHarness
from tests.support.jobs.runners import LEASE, RunnerFleet
from tests.support.jobs.scripted_program import JobScript
from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobStatus
from worker_runtime.protocol.keys import ERRORS

#: Seconds of a lease of two runners that live: one that stands still for a while is not taken for
#: dead.
CALM = 6.0


def test_a_killed_runners_job_starts_again_within_lease_plus_one_second(fleet: RunnerFleet) -> None:
    first = fleet.start("first")
    fleet.add("j", script=JobScript(until=fleet.gate()), idempotent=True)
    entry = fleet.started("j")
    second = fleet.start("second")
    first.send(signal.SIGKILL)
    killed = fleet.harness.now_ms()
    again = fleet.started("j", times=2)
    passed = (int(fleet.harness.field("j", "started_at") or 0) - killed) / 1000
    # While the second one, or Valkey, stands still nothing can happen: its next renewal says how
    # late it was.
    seen = fleet.beat("second")
    eventually(lambda: fleet.beat("second") > seen + 1, "another renewal")
    stood_still = sum(line["after_s"] for line in second.logged("job_lease_renewed_late"))
    assert passed <= LEASE + 1.0 + stood_still
    assert not alive(entry.pid)  # the child died with its runner: never two at once
    assert again.fence > entry.fence
    fleet.open()
    result = fleet.result("j")
    assert (result.status, result.attempt) == (JobStatus.DONE, 2)


def test_a_job_that_must_not_run_twice_is_reported_instead(fleet: RunnerFleet) -> None:
    first = fleet.start("first")
    fleet.add("j", script=JobScript(until=fleet.gate()))
    fleet.started("j")
    second = fleet.start("second")
    first.send(signal.SIGKILL)
    result = fleet.result("j")
    assert result.failure is not None
    assert result.failure.code == "JOB_OUTCOME_UNKNOWN"
    assert len(fleet.ledger("j")) == 1
    eventually(lambda: second.job_events("job-failed"), "the event")


def test_a_runner_alone_finds_what_its_predecessor_left(fleet: RunnerFleet) -> None:
    first = fleet.start("only")
    fleet.add("j", script=JobScript(until=fleet.gate()), idempotent=True)
    fleet.started("j")
    first.send(signal.SIGKILL)
    first.wait()
    fleet.start("only")
    fleet.started("j", times=2)
    fleet.open()
    assert fleet.result("j").status == JobStatus.DONE


def test_a_frozen_runner_that_wakes_up_writes_nothing_and_joins_as_another(
    fleet: RunnerFleet,
) -> None:
    frozen = fleet.start("frozen", lease=CALM)
    fleet.add("j", script=JobScript(until=fleet.gate(), returns="x"), idempotent=True)
    old = fleet.started("j")
    fleet.start("second", lease=CALM)
    frozen.send(signal.SIGSTOP)
    new = fleet.started("j", times=2)
    assert alive(old.pid)  # nobody can stop it: this is what the fencing number is for
    frozen.send(signal.SIGCONT)
    eventually(lambda: frozen.logged("job_runner_lost"), "the frozen one to notice")
    eventually(lambda: not alive(old.pid), "the old child's end")
    fleet.open()
    assert fleet.result("j").attempt == 2
    assert [entry.fence for entry in fleet.ledger("j")] == [old.fence, new.fence]
    assert frozen.job_events("job-completed") == []
    eventually(lambda: len(fleet.beats()) == 2, "both registered")


def test_a_live_runner_with_a_long_job_keeps_it(fleet: RunnerFleet) -> None:
    fleet.start("busy", lease=CALM)
    fleet.add("long", script=JobScript(until=fleet.gate()), idempotent=True)
    fleet.started("long")
    other = fleet.start("other", lease=CALM)
    beats = job_keys.beats(job_keys.FLEET_TAG)
    before = dict.fromkeys(fleet.beats(), 0)
    # Both beat on for more than one lease, of three beats each.
    eventually(
        lambda: all(int(fleet.harness.client.execute("HGET", beats, name)) > 5 for name in before),
        "5 beats",
    )
    assert other.logged("job_runner_reaped") == []
    fleet.open()
    assert fleet.result("long").attempt == 1
    assert len(fleet.ledger("long")) == 1


def test_runners_come_back_by_themselves_after_a_flush(fleet: RunnerFleet) -> None:
    runner = fleet.start(report_errors=True)
    fleet.add("gone", script=JobScript(until=fleet.gate()), idempotent=True)
    entry = fleet.started("gone")
    fleet.harness.client.execute("FLUSHALL")
    eventually(lambda: runner.logged("job_runner_lost"), "the runner to notice")
    eventually(lambda: not alive(entry.pid), "the end of a job that nobody knows any more")
    eventually(fleet.beats, "a registered runner")
    fleet.add("next")
    assert fleet.result("next").status == JobStatus.DONE
    told = eventually(
        lambda: fleet.harness.client.execute("XRANGE", ERRORS, "-", "+"), "operators are told"
    )
    assert b"job_runner_lost in jobs on " in told[0][1][3]


def test_a_restart_of_valkey_costs_no_job(short_directory: Path) -> None:
    with ValkeyServer(short_directory / "valkey", durable=True) as server:
        port = server.port
        harness = QueueHarness(server.url)
        fleet = RunnerFleet(harness, short_directory)
        runner = fleet.start(slots=2)
        fleet.add("running", script=JobScript(until=fleet.gate()))
        child = fleet.started("running").pid
        fleet.add("later", delay=5)  # not before the outage
        # Written with the second's fsync: what was acknowledged before that may be lost (ADR 0008).
        harness.client.execute("WAITAOF", 1, 0, 2000)
    try:
        harness.client.close()
        eventually(lambda: runner.logged("job_queue_unreachable"), "the outage")
        fleet.open()
        eventually(lambda: not alive(child), "the job's end while Valkey is away")
        assert runner.job_events("job-completed") == []
        with ValkeyServer(short_directory / "valkey", port, durable=True):
            assert fleet.result("running").attempt == 1
            assert fleet.result("later").status == JobStatus.DONE
            assert [entry.job_id for entry in fleet.ledger()] == ["running", "later"]
            harness.close()
            fleet.close()
    finally:
        fleet.close()


@pytest.mark.timeout(120)
def test_connections_that_break_at_any_moment_lose_and_double_nothing(fleet: RunnerFleet) -> None:
    runners = [fleet.start(f"r{number}", slots=2, recycle=50, lease=10.0) for number in range(2)]
    jobs = [f"j{number}" for number in range(300)]
    for job_id in jobs:
        fleet.add(job_id, script=JobScript(sleeps=0.005))
    broken = 0
    while len(fleet.ledger()) < len(jobs) and broken < 60:
        broken += 1
        fleet.harness.client.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        seen = len(fleet.ledger())
        eventually(lambda seen=seen: len(fleet.ledger()) > min(seen, 299), "some work")  # type: ignore[misc]
    statuses = {job_id: fleet.result(job_id).status for job_id in jobs}
    assert set(statuses.values()) == {JobStatus.DONE}
    assert sorted(entry.job_id for entry in fleet.ledger()) == sorted(jobs)
    ended = [
        event["labels"]["job_id"]
        for runner in runners
        for event in runner.job_events("job-completed")
    ]
    assert len(ended) == len(set(ended))
    assert [runner for runner in runners if runner.logged("job_runner_lost")] == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_runners_killed_at_any_moment_lose_no_job_and_double_none_that_must_not_be(
    fleet: RunnerFleet,
) -> None:
    chance = random.Random(6)  # noqa: S311
    runners = [fleet.start(f"r{number}", slots=2, recycle=5) for number in range(2)]
    jobs = {f"{kind}{number}": kind for number in range(150) for kind in ("again", "once")}
    for job_id, kind in jobs.items():
        fleet.add(job_id, script=JobScript(sleeps=0.05), idempotent=kind == "again", retry_delay=0)
    kills = 0
    while kills < 8 and len(fleet.ledger()) < len(jobs) - 20:
        done = len(fleet.ledger())
        eventually(lambda done=done: len(fleet.ledger()) > done, "some work")  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.05))  # a moment, any moment: this is the point
        runners.pop(0).send(signal.SIGKILL)
        kills += 1
        runners.append(fleet.start(f"n{kills}", slots=2, recycle=5))
    assert kills > 1
    results = {job_id: fleet.result(job_id, patience=40) for job_id in jobs}
    starts = {job_id: len(fleet.ledger(job_id)) for job_id in jobs}
    for job_id, kind in jobs.items():
        if kind == "again":
            failure = results[job_id].failure
            # One that was in hand of three runners that died is not run again.
            gave_up = (
                failure is not None
                and failure.code == "JOB_CRASHED"
                and results[job_id].attempt >= 3
            )
            assert results[job_id].status == JobStatus.DONE or gave_up
        else:
            assert starts[job_id] <= 1
            if results[job_id].status == JobStatus.FAILED:
                failure = results[job_id].failure
                assert failure is not None
                assert failure.code == "JOB_OUTCOME_UNKNOWN"
    unknown = [job_id for job_id in jobs if results[job_id].status == JobStatus.FAILED]
    # One that stood still for a lease was taken for dead.
    lost = sum(len(runner.logged("job_runner_lost")) for runner in fleet.runners)
    assert len(unknown) <= 2 * (kills + lost)  # one a slot of a killed runner, and no others
