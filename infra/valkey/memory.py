"""Tells how full Valkey is, and what is done about it.

Above `ALERT_ABOVE_SHARE` operators are alerted. Above `REFUSED_ABOVE_PERMILLE` the scripts refuse
new orders and new claims (`MemoryShort`), so that what is under way can end: leases, cancels,
answers and switches pass.
"""

from typing import Any, Final, NamedTuple

from redis.asyncio import Redis

#: Share of `MemoryUse.available`; the rules of `infra/monitoring/rules.yaml` name the same.
ALERT_ABOVE_SHARE: Final = 0.7
#: Thousandths of `maxmemory`, as the scripts take it.
REFUSED_ABOVE_PERMILLE: Final = 850


class MemoryUse(NamedTuple):
    """Bytes that a server uses, may use, and that its host has; `limit` is 0 if it has none."""

    used: int
    limit: int
    host: int = 0

    @classmethod
    def of(cls, info: dict[str, Any]) -> "MemoryUse":
        """Reads the memory use from the reply to INFO memory."""
        names = "used_memory", "maxmemory", "total_system_memory"
        return cls(*(int(info.get(name, 0)) for name in names))

    @property
    def available(self) -> int:
        """Return the server's limit; without one, its host's memory: the kernel ends it there."""
        return self.limit or self.host

    @property
    def share(self) -> float:
        return self.used / self.available if self.available else 0.0


async def read_memory(client: Redis) -> MemoryUse:
    """Raises `RedisError`."""
    return MemoryUse.of(await client.info("memory"))
