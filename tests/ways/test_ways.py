"""The ways of an order, a claim and a job pass the files that the documents list."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.stack import LocalStack
from tests.support.call_tracing import Tracer, files_of, tracing
from tests.support.systems.local import RunningSystem

pytestmark = [pytest.mark.drill, pytest.mark.timeout(300)]

MANY = 60
#: Claims are fewer: each takes a worker.
CLAIMS = 20


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[RunningSystem, Tracer]]:
    folder = Path(tempfile.mkdtemp(prefix="berth-ways-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user than root
    try:
        with (
            tracing(folder) as tracer,
            LocalStack(folder / "stack", pool_target=2, api_processes=1) as stack,
        ):
            system = RunningSystem(stack)
            yield system, tracer
            system.threads.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_an_order_passes_the_listed_files(traced: tuple[RunningSystem, Tracer]) -> None:
    system, tracer = traced
    trader = system.trader()
    system.start_until_active(trader)
    system.order(trader)

    def act() -> None:
        for _ in range(MANY):
            assert system.order(trader).json()["state"] == "filled"

    files = tracer.files(act, times=MANY, of=("api", "worker_runtime"))
    way, shared = files_of("order-way.md")
    assert files.only_by_it <= way | shared
    assert way <= files.met


def test_a_claim_passes_each_listed_file(traced: tuple[RunningSystem, Tracer]) -> None:
    system, tracer = traced
    traders = [system.trader() for _ in range(CLAIMS)]

    def act() -> None:
        for trader in traders:
            system.start_until_active(trader)

    files = tracer.files(act, times=CLAIMS, of=("api", "activities", "worker_runtime"))
    way, _ = files_of("claim-way.md")
    only_types = {"workflows/user_worker/messages.py"}
    # More files run at the same time: the pool is refilled, the session is built, what happened is
    # recorded.
    assert {file for file in way if file.endswith(".py")} - only_types <= files.met


def test_a_job_passes_the_listed_files(traced: tuple[RunningSystem, Tracer]) -> None:
    system, tracer = traced
    key = system.stack.admin_key

    def act() -> None:
        for number in range(MANY):
            job_id = f"way-{number}"
            body = {"job": {"type": "ping", "text": "hello", "job_id": job_id}}
            assert system.call("POST", "/v1/jobs", key, json=body).status_code == 202
            answer = system.call("GET", f"/v1/jobs/{job_id}", key, params={"wait": 20})
            assert answer.json()["state"] == "done", answer.text

    files = tracer.files(act, times=MANY, of=("api", "worker_runtime.jobs"))
    way, shared = files_of("job-way.md")
    assert files.only_by_it <= way | shared
    assert way <= files.met
