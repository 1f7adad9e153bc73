"""So many launches a second, for one process or for all orchestrators together.

A token bucket: so many at once after a rest, so many a second in the long run (Fargate: 100 and 20,
https://docs.aws.amazon.com/AmazonECS/latest/developerguide/throttling.html).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra import valkey
from worker_runtime.protocol import keys, scripts

#: Of a launch: what sums of floating-point numbers lack is not waited for.
ROUNDING = 1e-9

log = structlog.get_logger()


class LaunchRate(Protocol):
    async def take(self) -> float:
        """0: a launch may begin, and is counted; else the seconds after which to ask again. Never raises."""
        ...


class OwnRate:
    """Of one process, which knows of no other's launches."""

    def __init__(self, rate: float, burst: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`rate`: launches a second; `burst`: launches at once, after a rest. `clock` is in seconds."""
        self._rate = rate
        self._burst = float(burst)
        self._clock = clock
        self._tokens, self._at = self._burst, clock()

    async def take(self) -> float:
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._at) * self._rate, self._burst)
        self._at = now
        missing = 1.0 - self._tokens
        if missing > ROUNDING:
            return missing / self._rate
        self._tokens -= 1.0
        return 0.0


class SharedRate:
    """Of all orchestrators at one Valkey. While that is away, each counts by itself."""

    def __init__(self, client: Redis, rate: float, burst: int) -> None:
        """As `OwnRate`. The caller closes the client."""
        self._client = client
        self._interval_us = max(round(1e6 / rate), 1)
        self._burst = burst
        self._own = OwnRate(rate, burst)
        #: The last question had no answer, and that was told.
        self._alone = False

    async def take(self) -> float:
        try:
            wait_us = await valkey.run(
                self._client, scripts.TURN, [keys.LAUNCHES], [self._interval_us, self._burst]
            )
        except (RedisError, OSError) as error:
            if not self._alone:
                log.warning("launches_counted_alone", reason=type(error).__name__)
            self._alone = True
            return await self._own.take()
        self._alone = False
        return int(wait_us) / 1e6
