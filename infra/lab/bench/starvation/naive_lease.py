"""The two designs that our runner avoids:
the busy process renews its lease, by a thread or in its loop.

`python -m infra.lab.bench.starvation.naive_lease`, with a JSON `NaiveLease` as one line on standard
input; it ends when that
is closed. It renews once before anything is busy: its connection is not measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
import threading
import time

import msgspec
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError

#: The script of a renewal: the same write that our runner's is, with less around it.
RENEW = "return redis.call('HINCRBY', KEYS[1], ARGV[1], 1)"
#: Seconds of CPU between two turns of the busy loop.
_TURN_CPU_S = 0.05
#: Bytes of one hash; hashlib releases the GIL for more than 2,047 of them.
_CHUNK_BYTES = 1 << 20


class NaiveLease(msgspec.Struct, frozen=True, kw_only=True):
    """`period` in seconds. `load`: 'processes',
    of which this is one, or 'threads' of this process."""

    url: str
    key: str
    period: float
    #: 'thread' or 'asyncio'.
    design: str
    load: str
    count: int


def _spin(cpu: float) -> None:
    until = time.thread_time() + cpu
    while time.thread_time() < until:
        pass


def _load(naive: NaiveLease) -> None:
    """Starts everything that is busy in addition to this process's main thread."""
    if naive.load == "threads":
        for _ in range(naive.count):
            threading.Thread(target=_hash, daemon=True).start()
        return
    parent = os.getpid()
    for _ in range(naive.count - 1):
        if os.fork() == 0:
            while os.getppid() == parent:
                _spin(_TURN_CPU_S)
            os._exit(0)


def _hash() -> None:
    data = bytes(_CHUNK_BYTES)
    while True:
        hashlib.sha256(data).digest()


def _renew(naive: NaiveLease) -> None:
    """Renews once, makes everything busy, and continues renewing in a thread."""
    client = Redis.from_url(naive.url, socket_timeout=60.0)
    client.eval(RENEW, 1, naive.key, naive.design)

    def renew_on() -> None:
        while True:
            time.sleep(naive.period)
            with contextlib.suppress(RedisError):
                client.eval(RENEW, 1, naive.key, naive.design)

    _load(naive)
    threading.Thread(target=renew_on, daemon=True).start()
    while True:
        _spin(_TURN_CPU_S)


async def _renew_in_loop(naive: NaiveLease) -> None:
    client = AsyncRedis.from_url(naive.url, socket_timeout=60.0)
    await client.eval(RENEW, 1, naive.key, naive.design)

    async def renew_on() -> None:
        while True:
            await asyncio.sleep(naive.period)
            with contextlib.suppress(RedisError):
                await client.eval(RENEW, 1, naive.key, naive.design)

    async def work() -> None:
        while True:
            _spin(_TURN_CPU_S)
            await asyncio.sleep(0)

    _load(naive)
    await asyncio.gather(renew_on(), work())


def _end() -> None:
    sys.stdin.read()
    os._exit(0)  # at once: what is busy never ends by itself


def main() -> None:
    naive = msgspec.json.decode(sys.stdin.readline(), type=NaiveLease)
    threading.Thread(target=_end, daemon=True).start()
    if naive.design == "asyncio":
        asyncio.run(_renew_in_loop(naive))
    _renew(naive)


if __name__ == "__main__":
    main()
