"""The Valkey client (redis-py) of API and orchestrator, and the identity of the Valkey server.

It never retries: by default redis-py repeats a command whose reply was lost, which would write twice. Callers
repeat what has an id.
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

#: The `second_repl_offset` of a server that was never promoted.
_NEVER_PROMOTED = -1


def connect_valkey(url: str, *, socket_timeout: float = 5.0, max_connections: int = 64) -> Redis:
    """Creates a client with a bounded pool. No blocking call may last `socket_timeout` seconds."""
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


def text_of(value: Any) -> str:
    """A value of Valkey as text; '' for a missing one."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


async def run_script(client: Redis, script: Script, key_names: list[str], args: list[Any]) -> Any:
    """Runs a script; sends its source only to a server that does not have it."""
    try:
        return await client.evalsha(script.sha, len(key_names), *key_names, *args)
    except NoScriptError:  # the server has run nothing, so this is no retry
        return await client.eval(script.source, len(key_names), *key_names, *args)


async def read_server_id(client: Redis) -> str:
    """Returns the server's run id, which is new after a restart and differs on a promoted replica."""
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
    """Records since when the server with this run id is known (`keys.SERVER_SINCE`); safe to repeat.

    A promoted replica or a restarted server may hold an older copy of the data: a request that was queued
    before this time may have gone further than the copy shows. A server that was never promoted is known
    since its start.
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
                # A first or flushed server has no older data. The record is made together with the
                # generation, so that a later replica has it.
                at_ms = 0
            elif replication.get("second_repl_offset") == _NEVER_PROMOTED and running["run_id"] == server:
                at_ms -= int(running["uptime_in_seconds"]) * 1000
            pipe.hset(keys.SERVER_SINCE, mapping={"server": server, "at_ms": at_ms})
            await pipe.execute()


async def server_known_since(client: Redis) -> float:
    """Returns since when the server is known (`note_server`), in Unix seconds of its own clock.

    Returns 0 if no server was ever recorded, and infinity if the recorded one is another.
    """
    async with client.pipeline(transaction=False) as pipe:
        pipe.hmget(keys.SERVER_SINCE, "server", "at_ms")
        pipe.info("server")
        (noted, at_ms), found = await pipe.execute()
    if noted is None:
        return 0.0
    same = noted == str(found.get("run_id", "")).encode() and at_ms is not None
    return int(at_ms) / 1000 if same else math.inf


async def ensure_generation(client: Redis, fresh: str) -> str:
    """Returns the generation of the server; a new or flushed one gets `fresh`."""
    if await client.set(keys.GENERATION, fresh, nx=True):
        await note_server(client, await read_server_id(client))
    value = await client.get(keys.GENERATION)
    return value.decode() if isinstance(value, bytes) else str(value)
