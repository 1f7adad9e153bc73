"""Valkey loses everything while orders flow: nobody healthy is stopped, and service comes back by
itself."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack

import pytest

from infra.lab.processes import processes_of
from tests.support.chaos.ledger_judge import violations
from tests.support.chaos.order_stream import OrderStream, wait_filled
from tests.support.chaos.system import ChaosSystem
from tests.support.systems.local import RunningSystem, until
from worker_runtime.protocol import keys

USERS = 6


@pytest.mark.drill
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_flush_under_load_stops_no_worker_and_service_comes_back(
    chaos_system: ChaosSystem,
) -> None:
    system = chaos_system.system
    traders = [system.trader() for _ in range(USERS)]
    workers = [str(system.start_until_active(trader)["worker_id"]) for trader in traders]
    before = [processes_of(worker_id) for worker_id in workers]
    streams = [OrderStream(system.stack.api_url, trader) for trader in traders]
    admin, accepted = system.stack.admin_key, [f"kept-{number}" for number in range(10)]
    limit = {"running": 7}
    assert system.call("PUT", "/v1/job-limits/ping", admin, json=limit).status_code == 200
    for job_id in accepted:
        body = {"job": {"type": "ping", "job_id": job_id}, "delay": 15}
        assert system.call("POST", "/v1/jobs", admin, json=body).status_code == 202
    with ExitStack() as flowing:
        for stream in streams:
            flowing.enter_context(stream)
        for stream in streams:
            wait_filled(stream, 0.0)
        with system.valkey() as client:
            generation = client.get(keys.GENERATION)
            flushed = time.monotonic()
            client.flushall()
        took = [wait_filled(stream, flushed, 60.0) - flushed for stream in streams]
    logging.getLogger(__name__).info(
        "served again after %s s", [round(seconds, 1) for seconds in sorted(took)]
    )
    with system.valkey() as client:
        assert client.get(keys.GENERATION) not in (None, generation)
        for trader, worker_id in zip(traders, workers, strict=True):
            owner = client.hgetall(keys.owner(trader.user_id))
            assert isinstance(owner, dict)
            assert owner[b"worker"] == worker_id.encode()
            assert owner[b"generation"] == client.get(keys.GENERATION)
    assert [processes_of(worker_id) for worker_id in workers] == before
    for stream in streams:
        # Of the same worker. (Where the owner keys are back later than so short a lease lasts, it
        # closes its session by itself, and opens it again.)
        until(lambda trader=stream.trader: len(system.open_sessions(trader)) == 1, "single session")  # type: ignore[misc]
        assert len({session.client for session in system.sessions(stream.trader)}) == 1
        answers = {answer.order_id: answer for answer in stream.settle(60.0).values()}
        assert (
            violations(system.sessions(stream.trader), system.ledger(stream.trader), answers) == []
        )
        stream.close()
        system.call(
            "POST", f"/v1/users/{stream.trader.user_id}/worker/stop", stream.trader.api_key, json={}
        )
    # The orchestrator enqueues accepted jobs again, and brings settings of queues back, by itself.
    for job_id in accepted:
        until(lambda job_id=job_id: _done(system, job_id), f"end of {job_id}", 60.0)  # type: ignore[misc]
    limits = system.call("GET", "/v1/job-limits", admin).json()["limits"]
    assert [limit["running"] for limit in limits if limit["type"] == "ping"] == [7]
    system.call("PUT", "/v1/job-limits/ping", admin, json={})


def _done(system: RunningSystem, job_id: str) -> bool:
    job = system.call("GET", f"/v1/jobs/{job_id}", system.stack.admin_key).json()
    return (job["state"], job["attempt"]) == ("done", 1)
