"""A launcher that launches no faster than the platform allows, and serves the pools in turn.

The rate is a token bucket: a burst after a rest, and a number a second in the long run (Fargate:
100 and 20, https://docs.aws.amazon.com/AmazonECS/latest/developerguide/throttling.html). Valkey
counts it for all orchestrators together.

When the rate is used up, the pools take turns. A user who waits for a worker takes turns with the
refill of the pool.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra import tasks
from infra.launchers.port import Launcher
from infra.process_metrics import LAUNCH_SECONDS
from infra.valkey import client as valkey
from infra.worker_task import LaunchFailed, LaunchSpec, Task
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.errors import BerthError

#: Seconds until Valkey, which did not answer, is asked again.
VALKEY_RETRY_INTERVAL_S = 1.0

log = structlog.get_logger()


class LaunchRate(Protocol):
    """Says how fast workers may be launched."""

    async def take(self) -> float:
        """Counts a launch and returns 0.0, or returns the seconds after which to ask again."""


class SharedRate:
    """The rate of all orchestrators at one Valkey. Nothing is launched while Valkey is away: no
    worker could be ready without it."""

    def __init__(self, client: Redis, rate: float, burst: int) -> None:
        """Limits launches to `rate` a second, and to `burst` at once after a rest. The caller
        closes the client."""
        self._client = client
        self._interval_us = max(round(1e6 / rate), 1)
        self._burst = burst

    async def take(self) -> float:
        try:
            wait_us = await valkey.run_script(
                self._client, scripts.TAKE_LAUNCH, [keys.LAUNCHES], [self._interval_us, self._burst]
            )
        except (RedisError, OSError) as error:
            log.warning("launch_waits_for_valkey", reason=type(error).__name__)
            return VALKEY_RETRY_INTERVAL_S
        return int(wait_us) / 1e6


#: Seconds that a launch waits for its turn.
#: After that nothing was launched, and it may be tried again.
LAUNCH_TURN_TIMEOUT_S = 25.0


class LaunchLimited(LaunchFailed, code="LAUNCH_LIMITED"):
    """Too many workers are launched at once; this one was not, and may be tried again."""


class LaunchTurns:
    """The launches that wait, and whose turn is next."""

    def __init__(
        self, rate: LaunchRate, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._rate = rate
        self._sleep = sleep
        #: Waiting launches by group; the first group is served next.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._serving: asyncio.Task[None] | None = None

    async def wait_turn(self, group: str) -> None:
        """Returns when a launch of this group may begin."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append(turn)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        await turn

    async def close(self) -> None:
        if self._serving is not None:
            await tasks.cancel_tasks(self._serving)

    async def _serve(self) -> None:
        while self._waiting:
            wait = await self._rate.take()
            if wait > 0.0:
                await self._sleep(wait)
                continue
            while self._waiting and not self._grant_next():
                pass  # that launch gave up meanwhile

    def _grant_next(self) -> bool:
        """Grants the first launch of the first group its turn; False when it no longer waits."""
        group = next(iter(self._waiting))
        queue = self._waiting.pop(group)
        turn = queue.popleft()
        if queue:
            self._waiting[group] = queue  # behind the other groups
        if turn.done():
            return False
        turn.set_result(None)
        return True


class LimitedLauncher:
    """Implements `Launcher` by another launcher, whose launches wait for their turn."""

    def __init__(
        self, launcher: Launcher, turns: LaunchTurns, *, patience: float = LAUNCH_TURN_TIMEOUT_S
    ) -> None:
        """Lets a launch wait `patience` seconds for its turn. Closes `launcher` with itself."""
        self._launcher = launcher
        self._turns = turns
        self._patience = patience
        self.stop, self.is_running = launcher.stop, launcher.is_running
        self.find_tasks, self.list, self.exits = launcher.find_tasks, launcher.list, launcher.exits

    async def launch(self, spec: LaunchSpec, token: str) -> Task:
        """Raises `LaunchLimited` too, when this call launched nothing."""
        group = f"{'user' if spec.config.reserved_claim else 'pool'}:{spec.config.pool}"
        began, outcome = time.monotonic(), BerthError.code
        try:
            await asyncio.wait_for(self._turns.wait_turn(group), self._patience)
            task = await self._launcher.launch(spec, token)
            outcome = "launched"
            return task
        except BerthError as error:
            outcome = error.code
            raise
        except TimeoutError:
            outcome = LaunchLimited.code
            raise LaunchLimited from None
        finally:
            LAUNCH_SECONDS.labels(outcome).observe(time.monotonic() - began)

    async def close(self) -> None:
        await self._turns.close()
        await self._launcher.close()
