"""The claim that stands behind the bell: whom a ring wakes has the job already, and nothing is lost by it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.jobs.fleet import RunnerFleet, RunnerProcess, eventually
from tests.integration.jobs.stage import QueueStage, claim, end, ids
from tests.integration.worker.wire import ValkeyWire
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol.messages import JobStatus
from worker_runtime.jobs.queue import ClaimBatch, JobQueue
from worker_runtime.process.valkey import Valkey


class Sleeper:
    """A runner that waits on its bell, with a claim behind it."""

    def __init__(self, stage: QueueStage, bell: Valkey) -> None:
        self.queue: JobQueue = stage.runner()
        self._bell = bell
        self._number, behind = self.queue.claim_later("work")
        bell.send_all([("BLPOP", *self.queue.bells(), 0), behind])

    def woken(self) -> ClaimBatch | None:
        """What the ring has brought."""
        rung, reply = self._bell.receive(), self._bell.receive()
        assert rung[1] == b"1"
        return self.queue.claimed(self._number, reply)


@pytest.fixture
def sleeper(stage: QueueStage) -> Any:
    bell = Valkey(stage.url, timeout=25.0)
    yield Sleeper(stage, bell)
    bell.close()


def brought(claims: ClaimBatch | None) -> tuple[str, list[str]]:
    assert claims is not None
    return claims.status, ids(claims.jobs)


def test_a_ring_brings_the_job(stage: QueueStage, sleeper: Sleeper) -> None:
    stage.enqueue("j", idempotent=True)
    claims = sleeper.woken()
    assert brought(claims) == ("jobs", ["j"])
    assert claims is not None
    assert end(sleeper.queue, claims.jobs[0]) == "done"


@pytest.mark.parametrize("fields", [{"idempotent": False}, {"group": "g"}, {"name": "other"}])
def test_a_job_that_is_not_plain_waits_for_the_claim_after_the_ring(
    stage: QueueStage, sleeper: Sleeper, fields: dict[str, Any]
) -> None:
    stage.enqueue("j", **{"idempotent": True, **fields})
    assert brought(sleeper.woken()) == ("empty", [])
    assert ids(claim(sleeper.queue)) == ["j"]


def test_a_suspended_runner_gets_nothing_by_a_ring(stage: QueueStage, sleeper: Sleeper) -> None:
    stage.call(job_calls.suspend())
    stage.enqueue("j", idempotent=True)
    assert brought(sleeper.woken()) == ("suspended", [])
    assert stage.field("j", "state") == "waiting"


def test_claims_that_come_between_do_not_make_it_stale(stage: QueueStage, sleeper: Sleeper) -> None:
    assert claim(sleeper.queue) == []
    stage.enqueue("j", idempotent=True)
    assert brought(sleeper.woken()) == ("jobs", ["j"])
    stage.enqueue("k", idempotent=True)
    assert ids(claim(sleeper.queue)) == ["k"]  # nor is that one late now


def test_it_takes_nothing_once_its_runner_was_told_what_it_holds(stage: QueueStage, sleeper: Sleeper) -> None:
    assert sleeper.queue.held() == []
    stage.enqueue("j", idempotent=True)
    assert sleeper.woken() is None
    assert stage.field("j", "state") == "waiting"


def test_a_reply_is_not_read_once_its_job_was_found_in_hand(stage: QueueStage, sleeper: Sleeper) -> None:
    stage.enqueue("j", idempotent=True)
    assert ids(sleeper.queue.held() or []) == ["j"]
    assert sleeper.woken() is None


# --- real runners ---------------------------------------------------------------------------------


def asleep(fleet: RunnerFleet, runner: RunnerProcess) -> None:
    """Stops a runner that waits on its bell and its mail."""
    eventually(lambda: waiting(fleet) == 2, "a runner that waits")
    runner.send(signal.SIGSTOP)


def waiting(fleet: RunnerFleet) -> int:
    """How many connections wait in BLPOP."""
    clients = fleet.stage.client.execute("CLIENT", "LIST").decode().splitlines()
    told = [dict(field.partition("=")[::2] for field in client.split()) for client in clients]
    return sum("b" in client["flags"] for client in told)


@dataclass
class Rung:
    """A runner that stands still, with the job in hand that a ring has brought."""

    runner: RunnerProcess
    job_id: str


@pytest.fixture
def rung(fleet: RunnerFleet) -> Rung:
    runner = fleet.warm()
    for number in range(50):  # on a slow host even these jobs are not always brief
        job_id = f"j{number}"
        asleep(fleet, runner)
        fleet.add(job_id, idempotent=True)
        eventually(lambda: waiting(fleet) < 2, "the ring")
        if fleet.stage.field(job_id, "state") == "running":
            return Rung(runner, job_id)
        runner.send(signal.SIGCONT)
        fleet.result(job_id)
    raise AssertionError("no ring has brought a job")


def ran_once(fleet: RunnerFleet, job_id: str) -> bool:
    return fleet.result(job_id).status == JobStatus.DONE and len(fleet.ledger(job_id)) == 1


def test_whom_a_ring_wakes_has_the_job_already(fleet: RunnerFleet, rung: Rung) -> None:
    rung.runner.send(signal.SIGCONT)
    assert ran_once(fleet, rung.job_id)
    assert fleet.result(rung.job_id).attempt == 1


def test_a_job_that_must_not_run_twice_is_not_taken_by_who_stands_still(fleet: RunnerFleet) -> None:
    asleep(fleet, fleet.warm())
    fleet.add("j")
    eventually(lambda: waiting(fleet) == 1, "the ring")
    assert fleet.stage.field("j", "state") == "waiting"
    fleet.start("two")
    assert fleet.result("j").attempt == 1


def test_after_all_its_connections_broke_it_runs_what_it_was_rung_for(fleet: RunnerFleet, rung: Rung) -> None:
    fleet.stage.client.execute("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES")
    rung.runner.send(signal.SIGCONT)
    assert ran_once(fleet, rung.job_id)
    fleet.add("next", idempotent=True)
    assert ran_once(fleet, "next")


def test_a_job_whose_ring_is_lost_with_its_claim_is_found_in_hand(fleet: RunnerFleet) -> None:
    parts = urlsplit(fleet.stage.url)
    with ValkeyWire((parts.hostname or "", parts.port or 0)) as wire:
        runner = fleet.warm(valkey_url=wire.url)
        eventually(lambda: waiting(fleet) == 2, "a runner that waits")
        wire.about, wire.lose = b":bell", 1
        fleet.add("j", idempotent=True)
        assert ran_once(fleet, "j")
        assert wire.lose == 0
        assert runner.logged("job_queue_reached")  # it asked what it had in hand
        assert fleet.result("j").attempt == 1
        fleet.add("next", idempotent=True)
        assert ran_once(fleet, "next")
        assert runner.process.poll() is None


def test_who_is_told_to_stop_with_the_ring_loses_no_job(fleet: RunnerFleet, rung: Rung) -> None:
    rung.runner.send(signal.SIGTERM)
    rung.runner.send(signal.SIGCONT)
    assert rung.runner.wait() == 0
    fleet.start("two")
    assert ran_once(fleet, rung.job_id)


def test_what_a_killed_runner_was_rung_for_runs_elsewhere(fleet: RunnerFleet, rung: Rung) -> None:
    rung.runner.send(signal.SIGKILL)
    fleet.start("two")
    assert ran_once(fleet, rung.job_id)


def test_who_stands_still_past_its_lease_does_not_begin_what_it_was_rung_for(
    fleet: RunnerFleet, rung: Rung
) -> None:
    fleet.start("two")
    assert ran_once(fleet, rung.job_id)
    rung.runner.send(signal.SIGCONT)
    eventually(lambda: rung.runner.logged("job_runner_lost"), "the runner's notice")
    fleet.add("next", idempotent=True)
    assert ran_once(fleet, "next")
    assert len(fleet.ledger(rung.job_id)) == 1


def test_a_job_that_is_cancelled_before_it_is_found_in_hand_does_not_run(fleet: RunnerFleet) -> None:
    parts = urlsplit(fleet.stage.url)
    with ValkeyWire((parts.hostname or "", parts.port or 0)) as wire:
        runner = fleet.warm(valkey_url=wire.url)
        for number in range(50):  # as above
            job_id = f"j{number}"
            asleep(fleet, runner)
            wire.about, wire.lose = b":bell", 1
            fleet.add(job_id, idempotent=True)
            eventually(lambda: wire.lose == 0, "the ring")
            cancelled = fleet.stage.call(job_calls.cancel(job_id))
            runner.send(signal.SIGCONT)
            if cancelled == "asked":
                break
        assert fleet.result(job_id).status == JobStatus.CANCELLED
        assert fleet.ledger(job_id) == []


def test_a_runner_that_waited_through_a_flush_runs_the_next_job(fleet: RunnerFleet) -> None:
    runner = fleet.warm()
    asleep(fleet, runner)
    fleet.stage.client.execute("FLUSHALL")
    fleet.add("j", idempotent=True)
    runner.send(signal.SIGCONT)
    assert ran_once(fleet, "j")
