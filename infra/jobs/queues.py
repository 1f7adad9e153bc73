"""Weights of queues: how many turns a queue gets for each turn of a queue with weight 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from redis.asyncio import Redis

from infra.database.engine import Database
from infra.database.kept_jobs import keep_settings
from infra.valkey import client as valkey
from infra.valkey.client import reply_of, text_of
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys


@dataclass(frozen=True, kw_only=True)
class QueueSummary:
    """Describes a queue."""

    queue: str
    weight: float = 1.0
    #: No runner takes jobs of it.
    suspended: bool = False
    #: Jobs that could run now.
    waiting: int = 0


async def read_queues(client: Redis, tag: str, known: Iterable[str] = ()) -> list[QueueSummary]:
    """Return the queues of a tag that have work, a weight or a suspension, and those in `known`.

    Raises `RedisError`.
    """
    stored = await reply_of(client.hgetall(job_keys.meta(tag)))
    settings = {text_of(name): text_of(value) for name, value in stored.items()}
    ready = [text_of(queue) for queue in await reply_of(client.zrange(job_keys.ready(tag), 0, -1))]
    named = [name.partition(":") for name in settings]
    queues = {queue for setting, _, queue in named if setting in ("weight", "halt_queue")}
    names = sorted(queues | {*ready, *known})
    waiting = await _count_waiting(client, tag, ready)
    return [
        QueueSummary(
            queue=queue,
            weight=float(settings.get(job_calls.weight_field(queue), 1)),
            suspended="halt" in settings or job_calls.halt_field(queue, "") in settings,
            waiting=waiting.get(queue, 0),
        )
        for queue in names
    ]


async def put_weight(
    database: Database,
    client: Redis,
    queue: str,
    weight: float | None,
    tag: str = job_keys.FLEET_TAG,
) -> None:
    """Set the weight of a queue from the next claim on; None: 1.

    Raises `RedisError`, `DatabaseUnavailable`.
    """
    fields = {job_calls.weight_field(queue): None if weight is None else repr(weight)}
    async with database.session() as session:
        await keep_settings(session, job_keys.application_of_tag(tag) and tag, fields)
    await valkey.run_script(client, *job_calls.configure(fields, tag))


async def _count_waiting(client: Redis, tag: str, queues: list[str]) -> dict[str, int]:
    async with client.pipeline(transaction=False) as pipe:
        for queue in queues:
            pipe.zrange(job_keys.subqueues(tag, queue), 0, -1)
        types = await pipe.execute() if queues else []
        pairs = [
            (queue, text_of(name))
            for queue, names in zip(queues, types, strict=True)
            for name in names
        ]
        for queue, name in pairs:
            pipe.zcard(job_keys.subqueue(tag, queue, name))
        numbers = await pipe.execute() if pairs else []
    waiting: dict[str, int] = {}
    for (queue, _), number in zip(pairs, numbers, strict=True):
        waiting[queue] = waiting.get(queue, 0) + int(number)
    return waiting
