"""The canary of a rollout: the new version, the release before, and how many users it served or
failed.

Readiness proves little: a worker may announce itself and freeze when it is claimed. So a start
whose worker failed gets no other worker of that version, and the rollout counts it. Kept in Valkey;
lost data costs a count, and the next round of the rollout writes the rest again.
"""

from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from infra.valkey.client import reply_of, text_of
from worker_runtime.protocol import keys
from workflows.rollout.messages import Release

#: Seconds that a canary is kept after the last round of its rollout: a version may fail later.
CANARY_TTL_S = 3600


@dataclass(frozen=True, kw_only=True)
class CanaryRelease:
    version: str
    #: The pool's release before.
    before: Release = field(default_factory=Release)
    #: When its rollout began (Unix seconds): another rollout is another canary.
    since: float = 0.0
    #: It failed: nobody gets a worker of it any more.
    condemned: bool = False


class CanaryRegistry:
    def __init__(self, client: Redis) -> None:
        self._client = client

    async def of(self, pool: str) -> CanaryRelease | None:
        return _read(await reply_of(self._client.hgetall(keys.pool_canary(pool))))

    async def to_avoid(self, pool: str, failed: tuple[str, ...]) -> CanaryRelease | None:
        """The canary, if this start gets no worker of it: one failed this start, or it is
        condemned."""
        canary = await self.of(pool)
        return canary if canary and (canary.condemned or canary.version in failed) else None

    async def begin(self, pool: str, canary: CanaryRelease) -> tuple[int, int]:
        """Writes the canary; returns how many users it served, and how many it failed in a row
        since."""
        key, faults = keys.pool_canary(pool), keys.pool_faults(pool)
        known = _read(await reply_of(self._client.hgetall(key)))
        async with self._client.pipeline(transaction=True) as pipe:
            if known is None or (known.version, known.since) != (canary.version, canary.since):
                pipe.delete(key, faults)
            pipe.hset(key, mapping=_words(canary))
            pipe.expire(key, CANARY_TTL_S)
            pipe.hget(key, "served")
            pipe.scard(faults)
            *_, served, failed = await pipe.execute()
        return int(served or 0), int(failed)

    async def failed(self, pool: str, version: str, user_id: str) -> None:
        """A worker of this version did not serve the user. One user counts once."""
        if await self._tries(pool, version):
            faults = keys.pool_faults(pool)
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.sadd(faults, user_id)
                pipe.expire(faults, CANARY_TTL_S)
                await pipe.execute()

    async def served(self, pool: str, version: str) -> None:
        """A worker of this version connected its user."""
        if await self._tries(pool, version):
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hincrby(keys.pool_canary(pool), "served", 1)
                pipe.expire(keys.pool_canary(pool), CANARY_TTL_S)
                pipe.delete(keys.pool_faults(pool))
                await pipe.execute()

    async def _tries(self, pool: str, version: str) -> bool:
        canary = await self.of(pool)
        return canary is not None and canary.version == version


def _words(canary: CanaryRelease) -> dict[Any, Any]:
    return {
        "version": canary.version,
        "before_version": canary.before.version,
        "before_image": canary.before.image,
        "since": repr(canary.since),
        "condemned": int(canary.condemned),
    }


def _read(entry: dict[bytes, bytes]) -> CanaryRelease | None:
    """None also for what a count alone has left behind."""
    words = {text_of(name): text_of(value) for name, value in entry.items()}
    if not words.get("version"):
        return None
    return CanaryRelease(
        version=words["version"],
        before=Release(
            version=words.get("before_version", ""), image=words.get("before_image", "")
        ),
        since=float(words.get("since", 0.0)),
        condemned=words.get("condemned") == "1",
    )
