"""Receivers that are slow on purpose take a share of a runner's slots, for one deadline each;
others pass."""

from __future__ import annotations

import time

import msgspec

from tests.support.jobs.queue import KEYS
from tests.support.jobs.runners import RunnerFleet
from tests.support.receivers.slow import dripping
from tests.support.receivers.webhooks import receiving
from tests.support.waiting import eventually
from worker_runtime.jobs.config import WebhookOutlet
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol.messages import JobStatus

#: Seconds that a delivery may take.
TIMEOUT = 2.0
SLOTS = 8


def enqueue(fleet: RunnerFleet, job_id: str, url: str) -> None:
    work = catalog.DeliverWebhook(url=url, recipient="alice", event="e", body=msgspec.Raw(b"{}"))
    job = catalog.make_job(job_id, work, attempts=1)
    assert fleet.harness.call(job_calls.enqueue(job, KEYS))[0] == "queued"


def test_a_receiver_that_drips_bytes_holds_up_no_delivery_to_others(fleet: RunnerFleet) -> None:
    outlet = WebhookOutlet(keys=(b"k" * 32,), allow_private=True, timeout=TIMEOUT)
    fleet.start(real=True, webhook=outlet, slots=SLOTS, queues=("webhook",))
    with dripping(b"", b"H") as slow, receiving() as quick:
        for number in range(20):
            enqueue(fleet, f"slow-{number}", f"http://127.0.0.1:{slow.port}/")
        eventually(lambda: slow.connections >= SLOTS // 4, "deliveries to the slow receiver")
        began = time.monotonic()
        for number in range(10):
            enqueue(fleet, f"quick-{number}", quick.url)

        results = [fleet.result(f"quick-{number}") for number in range(10)]

        assert {result.status for result in results} == {JobStatus.DONE}
        assert time.monotonic() - began < 3 * TIMEOUT  # the slow ones take 20 s in all
        assert slow.most_at_once == SLOTS // 4
        failed = fleet.result("slow-0")
        assert failed.failure is not None
        assert failed.failure.code == "WEBHOOK_UNREACHABLE"
