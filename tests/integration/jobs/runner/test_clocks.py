"""Clocks that step: a runner's, on which nothing depends, and Valkey's, which tells when a job is
due."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.jobs import valkey_clock
from tests.support.jobs.queue import QueueHarness, claim, die, end, ids
from tests.support.jobs.runners import RunnerFleet
from tests.support.jobs.scripted_program import JobScript
from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import JobStatus
from worker_runtime.jobs.queue import JobQueue

HOUR = 3600
FLEET = job_keys.FLEET_TAG
#: Seconds of a lease of runners that live: one that stands still for a while is not taken for dead.
CALM = 3.0
both_ways = pytest.mark.parametrize("step", [HOUR, -HOUR])


def drain(runner: JobQueue) -> list[str]:
    order = []
    while jobs := claim(runner):
        order += ids(jobs)
        end(runner, jobs[0])
    return order


# --- a runner's clock -----------------------------------------------------------------------------


@both_ways
@pytest.mark.timeout(120)
def test_a_step_of_a_runners_clock_neither_ends_nor_prolongs_a_lease(
    fleet: RunnerFleet, short_directory: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    hand = short_directory / "clock"
    hand.write_text("0")
    monkeypatch.setenv("BERTH_CLOCK", str(hand))
    stepped = fleet.start(
        "stepped", module="tests.support.jobs.stepped_program", slots=3, lease=CALM
    )
    fleet.add("first", script=JobScript(until=fleet.gate()), idempotent=True)
    fleet.started("first")
    other = fleet.start("other", lease=CALM)
    fleet.harness.call(job_calls.suspend(runner="stepped"))
    fleet.add("second", script=JobScript(until=fleet.gate()), idempotent=True)
    old = fleet.started("second")
    fleet.harness.call(job_calls.resume(runner="stepped"))

    hand.write_text(str(step))
    seen = [fleet.beat(name) for name in ("stepped", "other")]
    # For more than a lease, of three beats.
    for name, before in zip(("stepped", "other"), seen, strict=True):
        eventually(
            lambda name=name, before=before: fleet.beat(name) > before + 4,  # type: ignore[misc]
            f"beats of {name}",
        )
    for runner in (stepped, other):
        assert runner.logged("job_runner_reaped") == runner.logged("job_runner_lost") == []

    fleet.add("later", delay=1.0)  # by Valkey's clock
    due = int(fleet.harness.field("later", "due") or 0)
    result = fleet.result("later")
    assert result.attempt == 1
    assert abs(result.started_at_ms - due) > HOUR * 900  # the step was real: its own clock says so
    assert fleet.harness.now_ms() >= due

    other.send(signal.SIGKILL)  # within a lease it is noticed: not within an hour, nor at once
    new = fleet.started("second", times=2)
    assert new.fence > old.fence
    assert alive(fleet.ledger("first")[0].pid)
    fleet.open()
    assert [fleet.result(job).attempt for job in ("first", "second")] == [1, 2]
    totals = job_keys.totals(FLEET)
    done = "HGET", totals, "ended|default|scripted|done"
    eventually(lambda: fleet.harness.client.execute(*done) == b"3", "the counts of all jobs")
    assert int(fleet.harness.client.execute("HGET", totals, "run|scripted|sum")) >= 0


# --- Valkey's clock -------------------------------------------------------------------------------


@both_ways
def test_a_step_of_valkeys_clock_changes_no_order_and_loses_and_doubles_nothing(
    harness: QueueHarness, step: int
) -> None:
    for number in range(3):
        harness.enqueue(f"j{number}", idempotent=True)
    valkey_clock.step(harness.client, step)
    for number in range(3, 5):
        harness.enqueue(f"j{number}")
    assert harness.enqueue("j0") == "seen"
    runner = harness.runner()
    assert drain(runner) == [f"j{number}" for number in range(5)]
    assert harness.client.execute("EXISTS", *(job_keys.job(FLEET, f"j{n}") for n in range(5))) == 0


def test_what_is_in_hand_stays_in_hand_when_valkeys_clock_steps_back(harness: QueueHarness) -> None:
    runner = harness.runner()
    for name in ("ends", "again", "held"):
        harness.enqueue(name)
    ends, again, held = claim(runner, 3)
    valkey_clock.step(harness.client, -HOUR)
    assert runner.renew("busy", ["ends", "again", "held"]).registered
    assert sorted(ids(runner.list_held() or [])) == ["again", "ends", "held"]
    assert end(runner, ends) == "done"
    assert end(runner, again, JobStatus.RETRY) == "retry"
    (second,) = claim(runner)  # at once, not an hour later
    assert (second.job_id, second.attempt) == ("again", 2)
    assert second.fence > held.fence
    assert [end(runner, job) for job in (again, second, held)] == ["gone", "done", "done"]


def test_delays_move_with_valkeys_clock(harness: QueueHarness) -> None:
    runner = harness.runner()
    harness.enqueue("later", delay=60)
    valkey_clock.step(harness.client, -HOUR)
    claims = runner.finish_and_claim([], 1)[1]
    assert claims is not None
    assert claims.jobs == []
    assert HOUR < (claims.due or 0) <= HOUR + 60
    valkey_clock.step(harness.client, HOUR + 61)
    runner = harness.runner()
    assert ids(claim(runner)) == ["later"]


def test_a_job_of_a_dead_runner_is_due_at_once_after_a_step_back(harness: QueueHarness) -> None:
    first, second = harness.runner("one"), harness.runner("two")
    harness.enqueue("j", idempotent=True)
    claim(first)
    valkey_clock.step(harness.client, -HOUR)
    assert die(first, second) == {"j": "returned"}
    assert ids(claim(second)) == ["j"]


def test_the_next_of_a_group_is_due_at_once_after_a_step_back(harness: QueueHarness) -> None:
    runner = harness.runner()
    for number in range(2):
        harness.enqueue(f"g{number}", group="g")
    (first,) = claim(runner)
    valkey_clock.step(harness.client, -HOUR)
    end(runner, first)
    assert ids(claim(runner)) == ["g1"]


def test_a_rate_does_not_hold_a_key_back_for_the_size_of_a_step_back(harness: QueueHarness) -> None:
    harness.setting(job_calls.rate_field("work"), 10_000)  # milliseconds between two
    runner = harness.runner()
    harness.enqueue("j0", rate_key="a")
    end(runner, claim(runner)[0])
    valkey_clock.step(harness.client, -HOUR)
    harness.enqueue("j1", rate_key="a")
    claims = runner.finish_and_claim([], 1)[1]
    assert claims is not None
    assert claims.jobs or (claims.due or 0) <= 10


def test_a_step_ahead_beyond_a_runners_entry_is_taken_for_its_loss(harness: QueueHarness) -> None:
    first, second = harness.runner("one"), harness.runner("two")
    harness.enqueue("again", idempotent=True)
    harness.enqueue("once")
    claimed = claim(first, 2)
    valkey_clock.step(harness.client, HOUR)
    # And so it ends them, and joins anew.
    assert not first.renew("busy", ["again", "once"]).registered
    assert die(first, second) == {"again": "returned", "once": "failed"}
    assert [end(first, job) for job in claimed] == ["gone", "gone"]
    assert ids(claim(harness.runner("three"), 2)) == ["again"]
