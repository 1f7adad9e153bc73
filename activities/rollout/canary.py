"""What a rollout tries out: the version on trial, what the pool had before, and how users fared with it.

Readiness proves little: a worker may announce itself and freeze when it is claimed. So a start whose worker
failed is not given another one of that version, and the rollout hears of it. Kept in Valkey, where claims
look anyway; lost data costs a count, and the next look of the rollout writes the rest again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from infra.valkey.client import reply_of
from worker_runtime.protocol import keys
from workflows.rollout.messages import Release

#: Seconds that a trial is known after the last look of its rollout: a version may go bad once it is alone.
KEPT = 3600
#: Seconds that an answer is believed: claims ask, and there are many.
FRESH = 1.0


@dataclass(frozen=True, kw_only=True)
class CanaryRelease:
    #: What workers of it report.
    version: str
    #: What the pool had before.
    before: Release = field(default_factory=Release)
    #: When its rollout began (Unix seconds): another rollout is another trial.
    since: float = 0.0
    #: It failed and goes: nobody gets a worker of it any more.
    condemned: bool = False


class CanaryRegistry:
    """The trials of pools, as one process knows them."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        #: Pool → its trial, and when that was read (monotonic seconds).
        self._known: dict[str, tuple[CanaryRelease | None, float]] = {}

    async def of(self, pool: str) -> CanaryRelease | None:
        trial, at = self._known.get(pool, (None, float("-inf")))
        if time.monotonic() - at < FRESH:
            return trial
        trial = _read(await reply_of(self._client.hgetall(keys.pool_canary(pool))))
        self._known[pool] = (trial, time.monotonic())
        return trial

    async def to_avoid(self, pool: str, failed: tuple[str, ...]) -> CanaryRelease | None:
        """The trial, if a start gets no worker of its version: one of them failed it, or all of them go."""
        trial = await self.of(pool)
        return trial if trial and (trial.condemned or trial.version in failed) else None

    async def begin(self, pool: str, trial: CanaryRelease) -> tuple[int, int]:
        """Writes it; returns how many users were served since its rollout began, and how many were failed in
        a row since the last of them."""
        key, faults = keys.pool_canary(pool), keys.pool_faults(pool)
        known = _read(await reply_of(self._client.hgetall(key)))
        async with self._client.pipeline(transaction=True) as pipe:
            if known is None or (known.version, known.since) != (trial.version, trial.since):
                pipe.delete(key, faults)
            pipe.hset(key, mapping=_words(trial))
            pipe.expire(key, KEPT)
            pipe.hget(key, "served")
            pipe.scard(faults)
            *_, served, failed = await pipe.execute()
        return int(served or 0), int(failed)

    async def failed(self, pool: str, version: str, user_id: str) -> None:
        """A worker of this version did not serve the user. One user counts once."""
        trial = await self.of(pool)
        if trial is not None and trial.version == version:
            faults = keys.pool_faults(pool)
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.sadd(faults, user_id)
                pipe.expire(faults, KEPT)
                await pipe.execute()

    async def served(self, pool: str, version: str) -> None:
        """A worker of this version connected its user."""
        trial = await self.of(pool)
        if trial is not None and trial.version == version:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hincrby(keys.pool_canary(pool), "served", 1)
                pipe.expire(keys.pool_canary(pool), KEPT)
                pipe.delete(keys.pool_faults(pool))
                await pipe.execute()


def _words(trial: CanaryRelease) -> dict[Any, Any]:
    return {
        "version": trial.version,
        "before_version": trial.before.version,
        "before_image": trial.before.image,
        "since": repr(trial.since),
        "condemned": int(trial.condemned),
    }


def _read(entry: dict[bytes, bytes]) -> CanaryRelease | None:
    """None also for what a count alone has left behind."""
    words = {name.decode(): value.decode() for name, value in entry.items()}
    if not words.get("version"):
        return None
    return CanaryRelease(
        version=words["version"],
        before=Release(version=words.get("before_version", ""), image=words.get("before_image", "")),
        since=float(words.get("since", 0.0)),
        condemned=words.get("condemned") == "1",
    )
