"""Metrics of the fleet: what waits, and what runners have counted."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from infra.jobs import metrics
from infra.jobs.client import JobClient
from infra.metrics import MetricsPage
from tests.support.jobs.queue import QueueHarness
from tests.support.jobs.runners import RunnerFleet, RunnerProcess
from tests.support.jobs.scripted_program import JobScript
from tests.support.message_signing import SECRETS
from tests.support.waiting import eventually
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.catalog import PingRunner
from worker_runtime.jobs.queue import JobQueue, RunnerIdentity


async def page(client: Redis) -> dict[str, float]:
    """The samples by their names and labels."""
    written = MetricsPage()
    await metrics.write_job_metrics(written, client)
    lines = written.text(CollectorRegistry()).splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")
    }


async def test_waiting_jobs_are_counted_by_queue_and_priority(
    harness: QueueHarness, valkey_client: Redis
) -> None:
    for number in range(3):
        harness.enqueue(f"a{number}", queue="a", priority=9)
    harness.enqueue("low", queue="a", priority=1, name="other")
    harness.enqueue("b", queue="b")
    harness.enqueue("later", delay=60.0)
    harness.client.execute("HINCRBY", job_keys.job(job_keys.FLEET_TAG, "low"), "due", -90_000)
    samples = await page(valkey_client)
    assert samples['berth_jobs_waiting{priority="9",queue="a"}'] == 3
    assert samples['berth_jobs_waiting{priority="1",queue="a"}'] == 1
    assert samples['berth_jobs_waiting{priority="5",queue="b"}'] == 1
    assert samples['berth_jobs_oldest_seconds{priority="1",queue="a"}'] >= 90
    assert samples['berth_jobs_oldest_seconds{priority="9",queue="a"}'] < 80
    assert (
        samples["berth_jobs_delayed"],
        samples["berth_jobs_failed"],
        samples["berth_jobs_runners"],
    ) == (1, 0, 0)


async def test_what_is_not_looked_at_is_counted_all_the_same(
    harness: QueueHarness, valkey_client: Redis
) -> None:
    for number in range(metrics.MAX_JOBS_SCANNED + 5):
        harness.enqueue(f"j{number}")
    samples = await page(valkey_client)
    assert samples['berth_jobs_waiting{priority="5",queue="default"}'] == metrics.MAX_JOBS_SCANNED
    assert samples['berth_jobs_waiting{priority="",queue="default"}'] == 5


async def test_what_is_no_count_of_a_user_is_not_added_up(valkey_client: Redis) -> None:
    totals = {
        user: job_keys.totals(job_keys.user_tag(user))
        for user in ("alice", "bob", "mallory", "eve")
    }
    for user in ("alice", "bob"):
        await valkey_client.hset(totals[user], "late", 2)
    await valkey_client.hset(totals["mallory"], "late", "-5")
    await valkey_client.hset(totals["mallory"], "ended|q|ping|x" + "y" * 100, 1)
    await valkey_client.set(totals["eve"], "x")
    for _ in range(2):  # each count is moved once
        await metrics.collect_user_counts(valkey_client, list(totals))
    assert (await page(valkey_client))["berth_user_jobs_late_renewals_total"] == 4
    assert await valkey_client.exists(*totals.values()) == 0
    for number in range(metrics.MAX_SERIES // metrics.MAX_FIELDS + 3):  # made up, minute by minute
        await valkey_client.hset(
            totals["mallory"], mapping={f"run|{number}-{n}|1": 1 for n in range(500)}
        )
        await metrics.collect_user_counts(valkey_client, ["mallory"])
    await valkey_client.hset(totals["alice"], "late", 1)
    await metrics.collect_user_counts(valkey_client, ["alice"])
    assert (await page(valkey_client))["berth_user_jobs_late_renewals_total"] == 5
    assert await valkey_client.hlen(job_keys.user_totals()) == metrics.MAX_SERIES


async def test_waits_runs_ends_and_reaped_jobs_are_counted_once(
    fleet: RunnerFleet, valkey_client: Redis
) -> None:
    first = fleet.start("one")
    fleet.add("good")
    fleet.add("bad", script=JobScript(fails="no"))
    fleet.add("again", script=JobScript(retries=1))
    for job in ("good", "bad", "again"):
        fleet.result(job)
    fleet.add("held", script=JobScript(until=fleet.gate()), idempotent=True)
    fleet.started("held")
    eventually(lambda: _started(fleet) == 5, "five starts")  # sent along with the next renewal
    first.close()
    second = fleet.start("two")
    fleet.open()
    fleet.result("held")
    second.process.terminate()  # what is left is sent at its end
    assert second.wait() == 0
    samples = await page(valkey_client)
    ends = 'berth_jobs_runs_total{job="scripted",outcome='
    assert samples[ends + '"done",queue="default"}'] == 3
    assert samples[ends + '"failed",queue="default"}'] == 1
    assert samples[ends + '"retry",queue="default"}'] == 1
    assert samples['berth_jobs_reaped_total{outcome="returned"}'] == 1
    assert samples['berth_jobs_wait_seconds_count{priority="5",queue="default"}'] == 6
    assert samples['berth_jobs_run_seconds_count{job="scripted"}'] == 5
    assert samples['berth_jobs_run_seconds_bucket{job="scripted",le="+Inf"}'] == 5
    assert samples['berth_jobs_run_seconds_sum{job="scripted"}'] > 0
    assert "berth_jobs_late_renewals_total" in samples


async def test_what_users_runners_count_is_added_up_over_all_users_and_once(
    harness: QueueHarness, valkey_client: Redis
) -> None:
    for user, number in (("alice", 2), ("bob", 3), ("bob", 3)):
        tag = job_keys.user_tag(user)
        runner = JobQueue(harness.client, RunnerIdentity(f"r-{user}", user, "n"), tag)
        runner.join()
        # The reply of the first may have been lost: the same number again.
        counts = json.dumps({"ended|default|ping|done": number, "reaped|returned": number}).encode()
        assert runner.renew("idle", (), counted=(1, counts)).registered
    await metrics.collect_user_counts(valkey_client, ["alice", "bob"])
    samples = await page(valkey_client)
    assert samples['berth_user_jobs_runs_total{job="ping",outcome="done",queue="default"}'] == 5
    assert samples['berth_user_jobs_reaped_total{outcome="returned"}'] == 5
    assert not [
        name for name in samples if "alice" in name or name.startswith("berth_jobs_runs_total")
    ]


async def test_a_runner_of_a_users_own_jobs_tells_what_it_did(
    harness: QueueHarness, short_directory: Path, valkey_client: Redis
) -> None:
    tag = job_keys.user_tag("alice")
    keys_of_alice = SECRETS.job_keys(tag)
    harness.call(
        job_calls.enqueue(catalog.make_job("p-1", PingRunner(text="hello")), keys_of_alice, tag)
    )
    config = RunnerConfig(
        name="alices", valkey_url=harness.url, tag=tag, lease=15.0, message_keys=keys_of_alice
    )
    runner = RunnerProcess(short_directory, config, "worker_runtime.jobs")
    try:
        done = job_keys.result(tag, "p-1")
        eventually(lambda: harness.client.execute("EXISTS", done), "the job's result")
        # Long before its next renewal: what it counted goes along at its end.
        runner.send(signal.SIGTERM)
        assert runner.wait() == 0
    finally:
        runner.close()
    await metrics.collect_user_counts(valkey_client, ["alice"])
    samples = await page(valkey_client)
    assert samples['berth_user_jobs_runs_total{job="ping",outcome="done",queue="default"}'] == 1
    assert samples['berth_user_jobs_run_seconds_count{job="ping"}'] == 1
    assert samples['berth_user_jobs_wait_seconds_count{priority="5",queue="default"}'] == 1


def _started(fleet: RunnerFleet) -> int:
    reply = fleet.harness.client.execute("HGETALL", job_keys.totals(job_keys.FLEET_TAG))
    totals = {
        name.decode(): int(value) for name, value in zip(reply[::2], reply[1::2], strict=True)
    }
    return sum(
        value for name, value in totals.items() if name.startswith("wait|") and name[-3:] != "sum"
    )


async def test_a_job_that_was_queued_is_reported_once_in_the_common_schema(
    valkey_client: Redis, capfd: pytest.CaptureFixture[str]
) -> None:
    client = JobClient(valkey_client, SECRETS)
    for _ in range(2):
        await client.enqueue(catalog.make_job("j-1", PingRunner(text="secret"), priority=7))
    [line] = capfd.readouterr().err.splitlines()
    told = json.loads(line)
    assert told["event"] == {"action": "job-queued", "kind": "event", "dataset": "berth.jobs"}
    assert told["labels"] == {
        "job_id": "j-1",
        "job": "ping",
        "queue": "default",
        "priority": 7,
        "tag": "jobs",
    }
    assert told["@timestamp"].endswith("Z")
    assert "secret" not in line
