"""Limits of job types: how many run at once, and how often for each rate key."""

from collections.abc import Mapping
from dataclasses import dataclass

from redis.asyncio import Redis

from infra.database.engine import Database
from infra.database.kept_jobs import keep_settings
from infra.valkey import client as valkey
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.calls import reply_text


@dataclass(frozen=True, kw_only=True)
class JobLimits:
    """The limits of one type of job of the fleet; None: no limit."""

    #: Jobs that may run at once: everywhere, and on each node.
    running: int | None = None
    per_node: int | None = None
    #: Jobs a second with the same rate key, in the long run;
    #: and how many may come at once after a rest (1).
    per_second: float | None = None
    burst: int | None = None


async def read_limits(client: Redis, tag: str = job_keys.FLEET_TAG) -> dict[str, JobLimits]:
    """Returns the limits of all types that have any, by type. Raises `RedisError`."""
    stored = await client.hgetall(job_keys.meta(tag))
    fields = {reply_text(name): reply_text(value) for name, value in stored.items()}
    kinds = [name.partition(":") for name in fields]
    names = {
        name for kind, _, name in kinds if kind in ("limit", "node_limit", "rate", "rate_burst")
    }
    return {name: _limits(name, fields) for name in sorted(names)}


async def count_running(client: Redis, name: str, tag: str = job_keys.FLEET_TAG) -> int:
    """Counts the jobs of this type that run now. Raises `RedisError`."""
    return sum(map(int, await client.hvals(job_keys.running(tag, name))))


async def put_limits(
    database: Database, client: Redis, name: str, limits: JobLimits, tag: str = job_keys.FLEET_TAG
) -> None:
    """Sets all limits of a type, from the next claim on. Raises `RedisError`,
    `DatabaseUnavailable`."""
    numbers = {
        job_calls.limit_field(name): limits.running,
        job_calls.node_limit_field(name): limits.per_node,
        job_calls.rate_field(name): None
        if limits.per_second is None
        else 1000.0 / limits.per_second,
        job_calls.rate_burst_field(name): limits.burst,
    }
    fields = {field: None if number is None else repr(number) for field, number in numbers.items()}
    async with database.session() as session:
        await keep_settings(session, job_keys.application_of_tag(tag) and tag, fields)
    await valkey.run_script(client, *job_calls.configure(fields, tag))


def _limits(name: str, fields: Mapping[str, str]) -> JobLimits:
    interval = fields.get(job_calls.rate_field(name))
    return JobLimits(
        running=_number(fields.get(job_calls.limit_field(name))),
        per_node=_number(fields.get(job_calls.node_limit_field(name))),
        per_second=round(1000.0 / float(interval), 6) if interval and float(interval) > 0 else None,
        burst=_number(fields.get(job_calls.rate_burst_field(name))),
    )


def _number(text: str | None) -> int | None:
    return None if text is None else int(float(text))
