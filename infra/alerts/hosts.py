"""Collects what each API process measures of its host, in a hash in Valkey.

One process looks for alerts at a time, and each of them may be on another host. So all write what
they measure, and the one that looks reads all of it.
"""

from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from infra.valkey.client import read_clock, reply_of, text_of
from worker_runtime.protocol import keys

#: Seconds for which a report counts. A process writes one every 10 s.
VALID_S: Final = 35.0
_KEY_LIFE_S: Final = 60


class HostSample(msgspec.Struct, frozen=True):
    metric: str
    labels: dict[str, str]
    value: float


class HostReport(msgspec.Struct, frozen=True):
    host: str
    #: Unix seconds by Valkey's clock: the host's own may be wrong.
    at: float
    samples: list[HostSample]


async def write_report(client: Redis, process: str, host: str, samples: list[HostSample]) -> None:
    """Writes what a process measured of its host, in place of its last report. Raises
    `RedisError`."""
    report = HostReport(host, await read_clock(client) / 1000, samples)
    async with client.pipeline(transaction=True) as pipe:
        pipe.hset(keys.HOST_REPORTS, process, msgspec.json.encode(report))
        pipe.expire(keys.HOST_REPORTS, _KEY_LIFE_S)
        await pipe.execute()


async def read_reports(client: Redis, now: float) -> list[HostReport]:
    """Returns the reports that count at `now`, by Valkey's clock, and deletes all others. Raises
    `RedisError`."""
    stored: dict[bytes, Any] = await reply_of(client.hgetall(keys.HOST_REPORTS))
    reports, old = [], []
    for process, body in stored.items():
        try:
            report = msgspec.json.decode(body, type=HostReport)
        except ValueError:
            report = None
        if report is not None and now - report.at < VALID_S:
            reports.append(report)
        else:
            old.append(text_of(process))
    if old:
        await reply_of(client.hdel(keys.HOST_REPORTS, *old))
    return reports
