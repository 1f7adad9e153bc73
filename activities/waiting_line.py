"""The line of users who wait at a pool that may not grow: whoever came first is served first.

A place is kept by asking again within `PATIENCE`. It costs a claim nothing while nobody waits, and a user who
asks more often than others gets no better place by it.
"""

from __future__ import annotations

from redis.asyncio import Redis

from infra import valkey
from worker_runtime.protocol import keys, scripts

#: Seconds after which one who does not ask again has left; six times what `POOL_EXHAUSTED` tells him to wait.
PATIENCE = 30.0


async def place(client: Redis, pool: str, user_id: str) -> int:
    """The user's place, 0 for the first; he is put at the end if he has none."""
    found = await valkey.run(
        client,
        scripts.LINE,
        [keys.pool_line(pool), keys.pool_asked(pool)],
        [user_id, int(PATIENCE * 1000)],
    )
    return int(found)


async def leave(client: Redis, pool: str, user_id: str) -> None:
    """He has what he waited for."""
    async with client.pipeline(transaction=True) as pipe:
        pipe.zrem(keys.pool_line(pool), user_id)
        pipe.zrem(keys.pool_asked(pool), user_id)
        await pipe.execute()
