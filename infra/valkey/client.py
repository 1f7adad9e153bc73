"""The servers' Valkey client (redis-py). A user's worker has a smaller one of its own.

No hidden retries: redis-py repeats a command whose reply was lost by default, and a repeated write is a
doubled write. What may be repeated is repeated by its caller, by an id.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError

from worker_runtime.protocol import keys
from worker_runtime.protocol.scripts import Script

#: What a server that was a master from its start says of the offset at which it was promoted.
_NEVER_PROMOTED = -1


def connect_valkey(url: str, *, socket_timeout: float = 5.0, max_connections: int = 64) -> Redis:
    """A client with a bounded pool. `socket_timeout` (seconds) must exceed the longest blocking call."""
    return Redis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=socket_timeout,
        socket_connect_timeout=socket_timeout,
        max_connections=max_connections,
        health_check_interval=0,
        protocol=3,
    )


async def reply_of(command: Awaitable[Any] | Any) -> Any:
    """The reply to a command, which redis-py types as `Awaitable[T] | T`; of our client it is awaitable."""
    return await cast("Awaitable[Any]", command)


async def run_script(client: Redis, script: Script, key_names: list[str], args: list[Any]) -> Any:
    """Runs one script; sends its source only to a server that does not know it yet."""
    try:
        return await client.evalsha(script.sha, len(key_names), *key_names, *args)
    except NoScriptError:  # the server refused before running anything, so this is no retry
        return await client.eval(script.source, len(key_names), *key_names, *args)


async def read_server_id(client: Redis) -> str:
    """The run id of the server: another one after each restart, and of a replica that was promoted."""
    found: dict[str, Any] = await client.info("server")
    return str(found.get("run_id", ""))


async def read_generation_and_server(client: Redis, fresh: str) -> tuple[str, str]:
    """`ensure_generation` and `read_server_id` in one round trip."""
    async with client.pipeline(transaction=False) as pipe:
        pipe.set(keys.GENERATION, fresh, nx=True)
        pipe.get(keys.GENERATION)
        pipe.info("server")
        created, generation, found = await pipe.execute()
    server = str(found.get("run_id", ""))
    if created:
        await note_server(client, server)
    return generation.decode(), server


async def note_server(client: Redis, server: str) -> None:
    """Notes since when the server with this run id is known (`keys.SINCE`), once; may be repeated.

    A replica that was promoted, or a server that was restarted, may hold an older copy of what the one before
    it knew. What was queued before this time may have gone further than the copy says. One that never was
    a replica is known since its start, however late it is looked at.
    """
    async with client.pipeline(transaction=False) as pipe:
        pipe.hget(keys.SERVER_SINCE, "server")
        pipe.time()
        pipe.info("server")
        pipe.info("replication")
        noted, (seconds, micros), running, replication = await pipe.execute()
        if noted != server.encode():
            at_ms = int(seconds) * 1000 + int(micros) // 1000
            if not noted:
                # The first of all has nothing from before; nor has a flushed one, of which the generation
                # tells (and a copy of it, which comes later, is to find this note: so it is made with the
                # generation).
                at_ms = 0
            elif replication.get("second_repl_offset") == _NEVER_PROMOTED and running["run_id"] == server:
                at_ms -= int(running["uptime_in_seconds"]) * 1000
            pipe.hset(keys.SERVER_SINCE, mapping={"server": server, "at_ms": at_ms})
            await pipe.execute()


async def server_known_since(client: Redis) -> float:
    """Unix seconds since which the server is known (`note_server`), by its own clock; 0 if nobody has ever
    noted any, infinity if the one that was noted is another."""
    async with client.pipeline(transaction=False) as pipe:
        pipe.hmget(keys.SERVER_SINCE, "server", "at_ms")
        pipe.info("server")
        (noted, at_ms), found = await pipe.execute()
    if noted is None:
        return 0.0
    same = noted == str(found.get("run_id", "")).encode() and at_ms is not None
    return int(at_ms) / 1000 if same else math.inf


async def ensure_generation(client: Redis, fresh: str) -> str:
    """The generation of this server; `fresh` becomes it on a new or flushed one."""
    if await client.set(keys.GENERATION, fresh, nx=True):
        await note_server(client, await read_server_id(client))
    value = await client.get(keys.GENERATION)
    return value.decode() if isinstance(value, bytes) else str(value)
