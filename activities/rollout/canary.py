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
    """The version that a rollout tries out in one pool."""

    version: str
    #: The pool's release before the rollout.
    before: Release = field(default_factory=Release)
    #: When its rollout began (Unix seconds). Another rollout of the same version is another canary.
    since: float = 0.0
    #: It failed: nobody gets a worker of it any more.
    condemned: bool = False


class CanaryRegistry:
    """Reads and writes the canary of each pool in Valkey."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def find(self, pool: str) -> CanaryRelease | None:
        return _read(await reply_of(self._client.hgetall(keys.pool_canary(pool))))

    async def find_to_avoid(self, pool: str, failed: tuple[str, ...]) -> CanaryRelease | None:
        """Returns the canary if this start must get no worker of it: because one of its workers
        failed this start (`failed` has their versions), or because it is condemned."""
        canary = await self.find(pool)
        return canary if canary and (canary.condemned or canary.version in failed) else None

    async def begin(self, pool: str, canary: CanaryRelease) -> tuple[int, int]:
        """Writes the canary. Returns how many users it served, and how many it has failed since it
        last served one. A new canary begins at zero."""
        key, faults = keys.pool_canary(pool), keys.pool_faults(pool)
        known = _read(await reply_of(self._client.hgetall(key)))
        async with self._client.pipeline(transaction=True) as pipe:
            if known is None or (known.version, known.since) != (canary.version, canary.since):
                pipe.delete(key, faults)
            pipe.hset(key, mapping=_fields_of(canary))
            pipe.expire(key, CANARY_TTL_S)
            pipe.hget(key, "served")
            pipe.scard(faults)
            *_, served, failed = await pipe.execute()
        return int(served or 0), int(failed)

    async def count_failed(self, pool: str, version: str, user_id: str) -> None:
        """Counts that a worker of this version did not serve the user. One user counts once."""
        if await self._is_canary(pool, version):
            faults = keys.pool_faults(pool)
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.sadd(faults, user_id)
                pipe.expire(faults, CANARY_TTL_S)
                await pipe.execute()

    async def count_served(self, pool: str, version: str) -> None:
        """Counts that a worker of this version connected its user, and forgets earlier failures."""
        if await self._is_canary(pool, version):
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hincrby(keys.pool_canary(pool), "served", 1)
                pipe.expire(keys.pool_canary(pool), CANARY_TTL_S)
                pipe.delete(keys.pool_faults(pool))
                await pipe.execute()

    async def _is_canary(self, pool: str, version: str) -> bool:
        canary = await self.find(pool)
        return canary is not None and canary.version == version


def _fields_of(canary: CanaryRelease) -> dict[Any, Any]:
    return {
        "version": canary.version,
        "before_version": canary.before.version,
        "before_image": canary.before.image,
        "since": repr(canary.since),
        "condemned": int(canary.condemned),
    }


def _read(entry: dict[bytes, bytes]) -> CanaryRelease | None:
    """Returns None if there is no canary. A hash that holds only a count is none."""
    fields = {text_of(name): text_of(value) for name, value in entry.items()}
    if not fields.get("version"):
        return None
    return CanaryRelease(
        version=fields["version"],
        before=Release(
            version=fields.get("before_version", ""), image=fields.get("before_image", "")
        ),
        since=float(fields.get("since", 0.0)),
        condemned=fields.get("condemned") == "1",
    )
