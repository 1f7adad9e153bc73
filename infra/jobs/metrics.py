"""Metrics of jobs: those that wait for the fleet now, and what the runners have counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from redis.asyncio import Redis

from infra.metrics import MetricsPage
from infra.valkey import client as valkey
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.calls import reply_text
from worker_runtime.jobs.protocol.telemetry import CounterKind

#: Jobs of a subqueue whose priority and age are read: 1,000 take Valkey a few ms.
SCANNED_JOBS = 1000


async def write_job_metrics(page: MetricsPage, client: Redis) -> None:
    """The metrics now. Raises `RedisError` when Valkey is down."""
    scan = await valkey.run_script(
        client, job_scripts.SCAN, [job_keys.meta(job_keys.FLEET_TAG)], [SCANNED_JOBS]
    )
    _write_waiting(page, scan)
    for prefix, whose, key in (
        ("berth_jobs", "", job_keys.totals(job_keys.FLEET_TAG)),
        ("berth_user_jobs", "Users' own jobs: ", job_keys.user_totals()),
    ):
        totals = await client.hgetall(key)
        counted = {reply_text(name): int(value) for name, value in totals.items()}
        _write_counted(page, prefix, whose, counted)


def _write_waiting(page: MetricsPage, scan: list[Any]) -> None:
    delayed, failed, runners, *entries = scan
    queues = [(reply_text(queue), reply_text(priority), jobs, ms) for queue, priority, jobs, ms in entries]
    page.family("berth_jobs_waiting", "gauge", "Jobs that could run now; without a priority: only counted.")
    for queue, priority, jobs, _ in queues:
        page.sample("berth_jobs_waiting", (("queue", queue), ("priority", priority)), jobs)
    page.family("berth_jobs_oldest_seconds", "gauge", "How long the oldest of them has waited.")
    for queue, priority, _, ms in queues:
        if priority:
            labels = (("queue", queue), ("priority", priority))
            page.sample("berth_jobs_oldest_seconds", labels, max(0, ms) / 1000)
    for name, value, about in (
        ("berth_jobs_delayed", delayed, "Jobs that wait for their time, retries with them."),
        ("berth_jobs_failed", failed, "Failed jobs that are kept."),
        ("berth_jobs_runners", runners, "Registered runners."),
    ):
        page.family(name, "gauge", about)
        page.sample(name, (), value)


def _write_counted(page: MetricsPage, prefix: str, whose: str, totals: Mapping[str, int]) -> None:
    """`whose` begins each description; empty for the fleet's."""
    name = f"{prefix}_wait_seconds"
    page.family(name, "histogram", f"{whose}From when a job could run to its start.")
    for (queue, priority), numbers in _grouped(CounterKind.WAIT, 2, totals):
        page.histogram(name, (("queue", queue), ("priority", priority)), numbers)
    name = f"{prefix}_run_seconds"
    page.family(name, "histogram", f"{whose}From a job's start to its end.")
    for (job,), numbers in _grouped(CounterKind.RUN, 1, totals):
        page.histogram(name, (("job", job),), numbers)
    name = f"{prefix}_runs_total"
    page.family(name, "counter", f"{whose}Runs by how they ended: done, failed, retry or cancelled.")
    for (queue, job, outcome), numbers in _grouped(CounterKind.ENDED, 3, totals):
        page.sample(name, (("queue", queue), ("job", job), ("outcome", outcome)), numbers[""])
    name = f"{prefix}_reaped_total"
    page.family(name, "counter", f"{whose}Jobs of dead runners, by what became of them.")
    for (outcome,), numbers in _grouped(CounterKind.REAPED, 1, totals):
        page.sample(name, (("outcome", outcome),), numbers[""])
    name = f"{prefix}_late_renewals_total"
    page.family(name, "counter", f"{whose}Leases renewed more than a third of a lease after their time.")
    page.sample(name, (), totals.get(CounterKind.LATE.value, 0))


def _grouped(
    what: CounterKind, labels: int, totals: Mapping[str, int]
) -> Iterable[tuple[tuple[str, ...], dict[str, int]]]:
    """The totals of one kind, by their first `labels`; the rest of a field is the bucket."""
    groups: dict[tuple[str, ...], dict[str, int]] = {}
    for name, value in totals.items():
        kind, *parts = name.split("|")
        if kind == what and len(parts) >= labels:
            groups.setdefault(tuple(parts[:labels]), {})["|".join(parts[labels:])] = value
    return sorted(groups.items())
