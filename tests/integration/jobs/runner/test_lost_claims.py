"""Claims whose reply is lost: the runner asks what it holds, and every job runs once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.support.jobs.queue import KEYS
from tests.support.jobs.runners import RunnerFleet, RunnerProcess
from tests.support.proxies.valkey_wire import ValkeyWire
from tests.support.waiting import eventually
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol.messages import JobStatus

#: Stands in the reply to a claim that brings a job.
CLAIMED = b'"name":"scripted"'


@pytest.fixture
def wire(fleet: RunnerFleet) -> Iterator[ValkeyWire]:
    parts = urlsplit(fleet.harness.url)
    with ValkeyWire((parts.hostname or "", parts.port or 0)) as wire:
        wire.about = CLAIMED
        yield wire


def ran_once(fleet: RunnerFleet, job_id: str) -> bool:
    return fleet.result(job_id).status == JobStatus.DONE and len(fleet.ledger(job_id)) == 1


def blocked_connections(fleet: RunnerFleet) -> int:
    """How many connections wait in BLPOP."""
    clients = fleet.harness.client.execute("CLIENT", "LIST").decode().splitlines()
    fields = [dict(field.partition("=")[::2] for field in client.split()) for client in clients]
    return sum("b" in client["flags"] for client in fields)


def stop_while_idle(fleet: RunnerFleet, runner: RunnerProcess) -> None:
    """Stops a runner that waits for its doorbell and its mail."""
    eventually(lambda: blocked_connections(fleet) == 2, "an idle runner")
    runner.send(signal.SIGSTOP)


@pytest.mark.parametrize("recycle", [1, 50])
def test_a_job_whose_claim_reply_is_lost_is_found_and_runs_once(
    fleet: RunnerFleet, wire: ValkeyWire, recycle: int
) -> None:
    runner = fleet.start(valkey_url=wire.url, recycle=recycle)
    wire.lose = 1
    fleet.add("j")  # one that must not run twice
    assert ran_once(fleet, "j")
    assert wire.lose == 0
    assert runner.logged("job_queue_reached")  # it asked what it holds
    assert fleet.result("j").attempt == 1
    fleet.add("next", idempotent=True)
    assert ran_once(fleet, "next")
    assert runner.process.poll() is None


def test_a_job_that_is_cancelled_before_it_is_found_does_not_run(
    fleet: RunnerFleet, wire: ValkeyWire
) -> None:
    runner = fleet.start(valkey_url=wire.url)
    for number in range(50):  # the runner may have found the job before it is stopped
        job_id = f"j{number}"
        wire.lose = 1
        fleet.add(job_id, idempotent=True)
        eventually(lambda: wire.lose == 0, "the claim")
        runner.send(signal.SIGSTOP)
        cancelled = fleet.harness.call(job_calls.cancel(job_id, KEYS))
        runner.send(signal.SIGCONT)
        result = fleet.result(job_id)
        if cancelled == "asked" and not fleet.ledger(job_id):
            break
    assert result.status == JobStatus.CANCELLED
    assert fleet.ledger(job_id) == []


def test_a_runner_that_waited_through_a_flush_runs_the_next_job(fleet: RunnerFleet) -> None:
    runner = fleet.warm()
    stop_while_idle(fleet, runner)
    fleet.harness.client.execute("FLUSHALL")
    fleet.add("j", idempotent=True)
    runner.send(signal.SIGCONT)
    assert ran_once(fleet, "j")


def test_a_runner_stopped_right_after_a_ring_loses_no_job(fleet: RunnerFleet) -> None:
    runner = fleet.warm()
    stop_while_idle(fleet, runner)
    fleet.add("j", idempotent=True)
    eventually(lambda: blocked_connections(fleet) < 2, "the ring")
    runner.send(signal.SIGTERM)
    runner.send(signal.SIGCONT)
    assert runner.wait() == 0
    fleet.start("two")
    assert ran_once(fleet, "j")


def test_a_runner_killed_right_after_a_ring_loses_no_job(fleet: RunnerFleet) -> None:
    runner = fleet.warm()
    stop_while_idle(fleet, runner)
    fleet.add("j", idempotent=True)
    eventually(lambda: blocked_connections(fleet) < 2, "the ring")
    runner.send(signal.SIGKILL)
    fleet.start("two")
    assert ran_once(fleet, "j")


def test_a_job_waits_unclaimed_for_a_runner_that_stands_still(fleet: RunnerFleet) -> None:
    runner = fleet.warm()
    stop_while_idle(fleet, runner)
    fleet.add("j", idempotent=True)
    eventually(lambda: blocked_connections(fleet) == 1, "the ring")
    assert fleet.waits("j")
    other = fleet.start("two")
    assert fleet.result("j").attempt == 1
    eventually(lambda: other.logged("job_runner_reaped"), "the end of the first runner's lease")
    runner.send(signal.SIGCONT)
    eventually(lambda: runner.logged("job_runner_lost"), "the runner's notice")
    assert ran_once(fleet, "j")
