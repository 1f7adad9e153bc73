"""Makes an orchestrator's version the current one, when it is newer or nobody else serves.

Decided once, at the start. Nothing here undoes an operator's choice later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

import structlog
from temporalio.service import RPCError

from activities import build
from activities.deployment import Deployment, Seen

#: Seconds between two looks, while our own workers' first poll has not reached the server (it took 0.1 s).
LOOK = 0.05
#: Seconds between two tries after Temporal refused or failed.
RETRY = 0.5
#: Seconds between two log lines about the same trouble.
TELL = 5.0

log = structlog.get_logger()


class Promotion:
    """`decided` is set when the question is settled for this process, one way or the other."""

    def __init__(self, deployment: Deployment, *, wanted: bool, queues: Collection[str]) -> None:
        self._deployment = deployment
        self._wanted = wanted
        #: The versioned queues that this process polls.
        self._queues = queues
        self._told = 0.0
        self.decided = asyncio.Event()

    async def run(self) -> None:
        """Returns when it is decided. Our workers must poll already: that registers the version."""
        while not self.decided.is_set():
            try:
                pause = await self._try()
            except RPCError as error:
                self._tell("promotion_failed", reason=str(error)[:200])
                pause = RETRY
            if pause:
                await asyncio.sleep(pause)
            else:
                self.decided.set()

    async def _try(self) -> float:
        """Seconds until the next try; 0: decided."""
        own = self._deployment.build
        seen = await self._deployment.look()
        if seen is None or own not in seen.versions or not await self._deployment.serves(self._queues):
            self._tell("version_not_registered", build=own)
            return LOOK
        if seen.current == own:
            return 0.0
        if not self._wanted:
            log.info("not_promoted", build=own, current=seen.current, reason="an operator promotes")
        elif newer(seen, own) or not await self._current_is_served(seen):
            await self._deployment.make_current(seen)
            log.info("promoted", build=own, before=seen.current)
        else:
            log.info("not_promoted", build=own, current=seen.current, reason="the current version is newer")
        return 0.0

    async def _current_is_served(self, seen: Seen) -> bool:
        return await self._deployment.served(await self._deployment.running(build=seen.current, limit=20))

    def _tell(self, event: str, **fields: str) -> None:
        """Once in a while: the first look comes before the first poll as a rule, which is no trouble."""
        now = time.monotonic()
        if not self._told:
            self._told = now
        elif now - self._told >= TELL:
            self._told = now
            log.warning(event, **fields)


def newer(seen: Seen, own: str) -> bool:
    """By release; between builds of one release, which a hash cannot order, the one that came first is older.

    So a restart of an old build beside a newer one changes nothing, and a developer's last edit wins.
    """
    if seen.current not in seen.versions:
        return True
    ours, theirs = build.release(own), build.release(seen.current)
    if ours is not None and theirs is not None and ours != theirs:
        return ours > theirs
    return seen.versions[own] > seen.versions[seen.current]
