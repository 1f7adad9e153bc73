"""The naive design: an asyncio task in the session's
own loop renews the mark, and a broker call blocks it.

`python -m infra.lab.bench.starvation.naive_heartbeat`,
with a JSON `NaiveHeartbeat` as one line on standard input.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
from redis.exceptions import RedisError

from infra.valkey import client as valkey
from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import RENEW_MARK


class NaiveHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Durations are seconds."""

    url: str
    user_id: str
    worker_id: str
    epoch: int
    mark_period: float
    mark_ttl: float
    #: Seconds that a broker call blocks, and of the pause before each.
    block: float
    pause: float


async def _renew(naive: NaiveHeartbeat) -> None:
    client = valkey.connect_valkey(naive.url)
    user = naive.user_id
    names = [keys.owner(user), keys.mark(user), keys.metadata(user)]
    while True:
        try:
            await valkey.run_script(
                client,
                RENEW_MARK,
                names,
                [naive.epoch, naive.worker_id, int(naive.mark_ttl * 1000)],
            )
        except (RedisError, OSError):
            await asyncio.sleep(1.0)
        else:
            await asyncio.sleep(naive.mark_period)


async def _call_broker(naive: NaiveHeartbeat) -> None:
    while True:
        await asyncio.sleep(naive.pause)
        time.sleep(naive.block)  # noqa: ASYNC251 — a broker SDK that blocks, called where it should not be


async def _session(naive: NaiveHeartbeat) -> None:
    await asyncio.gather(_renew(naive), _call_broker(naive))


if __name__ == "__main__":
    asyncio.run(_session(msgspec.json.decode(sys.stdin.readline(), type=NaiveHeartbeat)))
