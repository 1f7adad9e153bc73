"""The servers' Valkey client (redis-py). A user's worker has a smaller one of its own.

No hidden retries: redis-py repeats a command whose reply was lost by default, and a repeated write is a
doubled write. What may be repeated is repeated by its caller, by an id.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError

from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import Script


def connect(url: str, *, socket_timeout: float = 5.0, max_connections: int = 64) -> Redis:
    """A client with a bounded pool. `socket_timeout` (seconds) must exceed the longest blocking call."""
    return Redis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=socket_timeout,
        socket_connect_timeout=2.0,
        max_connections=max_connections,
        health_check_interval=0,
        protocol=3,
    )


async def run(client: Redis, script: Script, key_names: list[str], args: list[Any]) -> Any:
    """Runs one script; sends its source only to a server that does not know it yet."""
    try:
        return await client.evalsha(script.sha, len(key_names), *key_names, *args)
    except NoScriptError:  # the server refused before running anything, so this is no retry
        return await client.eval(script.source, len(key_names), *key_names, *args)


async def ensure_generation(client: Redis, fresh: str) -> str:
    """The generation of this server; `fresh` becomes it on a new or flushed one."""
    await client.set(keys.GENERATION, fresh, nx=True)
    value = await client.get(keys.GENERATION)
    return value.decode() if isinstance(value, bytes) else str(value)
