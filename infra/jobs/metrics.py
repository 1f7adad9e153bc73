"""Metrics of jobs: those that wait for the fleet now, and what the runners have counted."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from infra.jobs.registry import TypeRegistry, count_waiting
from infra.metrics import MetricsPage
from infra.valkey import client as valkey
from infra.valkey.client import replies_of
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.jobs.protocol.calls import reply_text
from worker_runtime.jobs.protocol.manifest import queued_type
from worker_runtime.jobs.protocol.telemetry import CounterKind

#: Jobs of a subqueue whose priority and age are read: 1,000 take Valkey a few ms.
MAX_JOBS_SCANNED = 1000
#: Limits of what a user's worker may have counted in a minute, and of the number of series of all
#: users together.
_FIELD, _NUMBER = re.compile(rb"[a-z]+(\|[\w.-]{0,64}){0,3}"), re.compile(rb"[0-9]{1,12}")
MAX_FIELDS, MAX_SERIES = 200, 2000
#: Users whose counts are collected in one round trip.
_USERS_PER_ROUND_TRIP = 500


async def write_job_metrics(page: MetricsPage, client: Redis) -> None:
    """Writes the metrics as they are now. Raises `RedisError` when Valkey is down."""
    scan = await valkey.run_script(
        client, job_scripts.SCAN, [job_keys.meta(job_keys.FLEET_TAG)], [MAX_JOBS_SCANNED]
    )
    _write_waiting(page, scan)
    for prefix, key in (
        ("berth_jobs", job_keys.totals(job_keys.FLEET_TAG)),
        ("berth_user_jobs", job_keys.user_totals()),
    ):
        totals = await valkey.reply_of(client.hgetall(key))
        _write_counted(page, prefix, {reply_text(name): int(n) for name, n in totals.items()})


async def write_application_metrics(
    page: MetricsPage, client: Redis, registry: TypeRegistry
) -> None:
    """Writes the metrics of applications' jobs: those that wait, and those of types that no live
    runner takes. Raises `RedisError`, `DatabaseUnavailable`."""
    types = await registry.types()
    runners = {
        queued_type(version.kind.name, version.kind.version): version.runners
        for versions in types.values()
        for version in versions
    }
    for application in await registry.applications.load():
        try:
            waiting = await count_waiting(client, application)
        except ResponseError:  # its own login may write anything under its keys
            continue
        page.add("berth_application_jobs_waiting", sum(waiting.values()), application)
        for kind, jobs in sorted(waiting.items())[:MAX_SERIES]:
            if runners.get(kind, 0) == 0:
                page.add("berth_jobs_without_runner", jobs, application, kind)


async def collect_user_counts(client: Redis, users: Sequence[str]) -> None:
    """Moves what the runners of these users have counted to the totals of all users, without what
    cannot be a count: a user's worker may write anything there. Raises `RedisError`; then some
    counts may be lost."""
    counts: Counter[str] = Counter()
    for start in range(0, len(users), _USERS_PER_ROUND_TRIP):
        async with client.pipeline(transaction=True) as pipe:
            for user in users[start : start + _USERS_PER_ROUND_TRIP]:
                key = job_keys.totals(job_keys.user_tag(user))
                pipe.hrandfield(key, MAX_FIELDS, withvalues=True)
                pipe.delete(key)
            replies = await replies_of(pipe)
        for name, number in (pair for pairs in replies[::2] for pair in pairs or ()):
            if _FIELD.fullmatch(name) and _NUMBER.fullmatch(number):
                counts[name.decode()] += int(number)
    known = (
        {reply_text(name) for name in await client.hkeys(job_keys.user_totals())}
        if counts
        else set()
    )
    async with client.pipeline(transaction=False) as pipe:
        for field, count in counts.items():
            if field in known or len(known) < MAX_SERIES:
                known.add(field)
                pipe.hincrby(job_keys.user_totals(), field, count)
        await pipe.execute()


def _write_waiting(page: MetricsPage, scan: list[Any]) -> None:
    delayed, failed, runners, *entries = scan
    for raw_queue, raw_priority, jobs, ms in entries:
        queue, priority = reply_text(raw_queue), reply_text(raw_priority)
        page.add("berth_jobs_waiting", jobs, queue, priority)
        if priority:
            page.add("berth_jobs_oldest_seconds", max(0, ms) / 1000, queue, priority)
    page.add("berth_jobs_delayed", delayed)
    page.add("berth_jobs_failed", failed)
    page.add("berth_jobs_runners", runners)


def _write_counted(page: MetricsPage, prefix: str, totals: Mapping[str, int]) -> None:
    for labels, numbers in _grouped(CounterKind.WAIT, 2, totals):
        page.add_histogram(f"{prefix}_wait_seconds", numbers, *labels)
    for labels, numbers in _grouped(CounterKind.RUN, 1, totals):
        page.add_histogram(f"{prefix}_run_seconds", numbers, *labels)
    for labels, numbers in _grouped(CounterKind.ENDED, 3, totals):
        page.add(f"{prefix}_runs_total", numbers.get("", 0), *labels)
    for labels, numbers in _grouped(CounterKind.REAPED, 1, totals):
        page.add(f"{prefix}_reaped_total", numbers.get("", 0), *labels)
    page.add(f"{prefix}_late_renewals_total", totals.get(CounterKind.LATE.value, 0))


def _grouped(
    counted: CounterKind, labels: int, totals: Mapping[str, int]
) -> Iterable[tuple[tuple[str, ...], dict[str, int]]]:
    """Groups the totals of one kind, by their first `labels`; the rest of a field is the bucket."""
    groups: dict[tuple[str, ...], dict[str, int]] = {}
    for name, value in totals.items():
        kind, *parts = name.split("|")
        if kind == counted and len(parts) >= labels:
            groups.setdefault(tuple(parts[:labels]), {})["|".join(parts[labels:])] = value
    return sorted(groups.items())
