"""The Valkey client (redis-py) of API and orchestrator, and the identity of the Valkey server.

It never retries: by default redis-py repeats a command whose reply was lost, which would write
twice. Callers repeat what has an id.
"""

import asyncio
import math
import time
from collections.abc import Awaitable
from typing import Any, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import structlog
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    MasterDownError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from infra.process_metrics import VALKEY_WAIT
from worker_runtime.protocol import bounds, keys
from worker_runtime.protocol.messages import MAX_MESSAGE_BYTES
from worker_runtime.protocol.scripts import READ_BOUNDED, Script
from worker_runtime.protocol.sockets import KEEPALIVE_OPTIONS

#: The `second_repl_offset` of a server that was never promoted.
_NEVER_PROMOTED = -1


#: Seconds without use after which a connection is asked
#: before it is used, and within which it answers.
IDLE_BEFORE_CHECK_S, CHECK_TIMEOUT_S = 1.0, 0.5

log = structlog.get_logger()


class CheckedPool(ConnectionPool):
    """Measures how long callers wait for a connection, and gives out none that has died silently.

    A connection that was idle for a while is asked before it is used. One that does not answer
    makes all that are as old suspect: they are replaced, not waited for.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Connections that were used last before this instant
        #: on `time.monotonic` are closed before a use.
        self._suspect_before = 0.0
        self._used_at: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    def suspect_all(self) -> None:
        """Has all present connections replaced: one of them has died silently. Ends those in use,
        so that their callers get an error at once."""
        self._suspect_before = time.monotonic()
        for connection in list(self._in_use_connections):
            writer = getattr(connection, "_writer", None)
            if writer is not None:
                writer.transport.abort()

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        with VALKEY_WAIT.time():
            return await super().get_connection(*args, **options)  # type: ignore[no-untyped-call]

    async def ensure_connection(self, connection: Any) -> None:
        used_at = self._used_at.get(connection)
        if (
            used_at is not None
            and connection.is_connected
            and not await self._is_fit(connection, used_at)
        ):
            await connection.disconnect(nowait=True)
        await super().ensure_connection(connection)

    async def release(self, connection: Any) -> None:
        self._used_at[connection] = time.monotonic()
        await super().release(connection)

    async def _is_fit(self, connection: Any, used_at: float) -> bool:
        asked = time.monotonic()
        if used_at < self._suspect_before:
            return False
        if asked - used_at <= IDLE_BEFORE_CHECK_S:
            return True
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await connection.send_command("PING", check_health=False)
                await connection.read_response()
        except (RedisError, OSError) as error:
            if asked > self._suspect_before:
                log.warning("valkey_connections_dead", reason=type(error).__name__)
                self._suspect_before = asked
            return False
        return True


def pool_of(client: Redis) -> CheckedPool:
    """Returns the pool of a client that `connect_valkey` made."""
    pool = client.connection_pool
    assert isinstance(pool, CheckedPool)  # noqa: S101 - made below
    return pool


def connect_valkey(url: str, *, socket_timeout: float = 5.0, max_connections: int = 64) -> Redis:
    """Creates a client with a bounded pool. No blocking call may last `socket_timeout` seconds."""
    local = urlsplit(url).scheme == "unix"
    pool = CheckedPool.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        # They drop the connection, and retry nothing: after a failover another connection leads
        # to another server.
        retry_on_error=[ReadOnlyError, MasterDownError],
        socket_timeout=socket_timeout,
        socket_connect_timeout=socket_timeout,
        max_connections=max_connections,
        health_check_interval=0,
        protocol=3,
        **(
            {}
            if local
            else {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE_OPTIONS}
        ),
    )
    return Redis.from_pool(pool)


async def reply_of(command: Awaitable[Any] | Any) -> Any:
    """Returns the reply to a command, which redis-py types as `Awaitable[T] | T`; of our client it
    is awaitable."""
    return await cast("Awaitable[Any]", command)


def text_of(value: Any) -> str:
    """Returns a value of Valkey as text; '' for a missing one."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def number_of(value: Any) -> int:
    """Returns a value of Valkey as a number; 0 for a missing one, and for what is none."""
    text = text_of(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0


def seconds_of(milliseconds: Any) -> float:
    """Returns a time of Valkey in Unix seconds, which a `datetime` can hold; 0 for a missing
    one."""
    return min(number_of(milliseconds), bounds.LATEST_MS) / 1000


async def replies_of(pipe: Pipeline) -> list[Any]:
    """Returns the replies of a pipeline that reads what workers write; None for a key of another
    kind than was asked for. Whoever may write a key may change its kind, too, and must not fail the
    reads of all others."""
    replies = await pipe.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, ResponseError) and not str(reply).startswith("WRONGTYPE"):
            raise reply
    return [None if isinstance(reply, ResponseError) else reply for reply in replies]


async def run_script(client: Redis, script: Script, key_names: list[str], args: list[Any]) -> Any:
    """Runs a script; sends its source only to a server that does not have it."""
    try:
        return await client.evalsha(script.sha, len(key_names), *key_names, *args)
    except NoScriptError:  # the server has run nothing, so this is no retry
        return await client.eval(script.source, len(key_names), *key_names, *args)


async def read_strings(client: Redis, names: list[str]) -> list[bytes | None]:
    """Returns the first 256 bytes of strings that workers write."""
    values: list[bytes | None] = await run_script(client, READ_BOUNDED, names, ["string"])
    return values


async def read_hashes(client: Redis, names: list[str]) -> list[dict[bytes, bytes]]:
    """Hashes that workers write; empty for a missing one,
    and for one that is too large to be true."""
    hashes = await run_script(client, READ_BOUNDED, names, ["hash"])
    return [dict(zip(flat[::2], flat[1::2], strict=True)) if flat else {} for flat in hashes]


async def read_answer(client: Redis, user_id: str, request_id: str) -> bytes:
    """Returns the answer in a response key,
    cut where none of ours is as long; empty if there is none."""
    data: bytes = await reply_of(
        client.getrange(keys.response(user_id, request_id), 0, 2 * MAX_MESSAGE_BYTES)
    )
    return data


async def read_mark(client: Redis, user_id: str) -> tuple[bytes | None, dict[bytes, bytes], int]:
    """Returns a user's mark, the metadata next to it, and Valkey's clock (ms)."""
    [mark] = await read_strings(client, [keys.mark(user_id)])
    [fields] = await read_hashes(client, [keys.metadata(user_id)])
    return mark, fields, await read_clock(client)


async def read_clock(client: Redis) -> int:
    """Returns the server's time in Unix milliseconds."""
    seconds, micros = await client.time()
    return int(seconds) * 1000 + int(micros) // 1000


async def check_writable(client: Redis) -> None:
    """Writes a key that nobody reads. Raises `RedisError` if the server takes no writes.

    A PING says less: a server whose memory is full answers it.
    """
    await client.set(keys.WRITE_PROBE, 1, px=60_000)


async def read_server_id(client: Redis) -> str:
    """Returns the server's run id: new after a restart, another one on a promoted replica."""
    info: dict[str, Any] = await client.info("server")
    return str(info.get("run_id", ""))


async def read_generation_and_server(client: Redis, fresh: str) -> tuple[str, str]:
    """Combines `ensure_generation` and `read_server_id` in one round trip."""
    while True:
        async with client.pipeline(transaction=False) as pipe:
            pipe.get(keys.GENERATION)
            pipe.info("server")
            generation, info = await pipe.execute()
        server = str(info.get("run_id", ""))
        if generation is not None:
            return text_of(generation), server
        await _begin_generation(client, fresh, server)


async def _begin_generation(client: Redis, fresh: str, server: str) -> None:
    """Gives a first or flushed server a generation, and records that it has no older data.

    Both or none: a copy of this server that has the generation and not the record would pass for
    the first server of all when it is promoted later.
    """
    async with client.pipeline(transaction=True) as pipe:
        pipe.set(keys.GENERATION, fresh, nx=True)
        pipe.hsetnx(keys.SERVER_SINCE, "server", server)
        pipe.hsetnx(keys.SERVER_SINCE, "at_ms", "0")
        pipe.hsetnx(keys.SERVER_SINCE, "noted_ms", str(await read_clock(client)))
        await pipe.execute()


async def note_server(client: Redis, server: str) -> None:
    """Records since when the server with this run id
    is known (`keys.SERVER_SINCE`); safe to repeat.

    A promoted replica or a restarted server may hold an older copy of the data: a request that was
    queued before this time may have gone further than the copy shows. A server that was never
    promoted is known since its start.
    """
    async with client.pipeline(transaction=False) as pipe:
        pipe.hget(keys.SERVER_SINCE, "server")
        pipe.time()
        pipe.info("server")
        pipe.info("replication")
        noted, (seconds, micros), running, replication = await pipe.execute()
        if noted != server.encode():
            noted_ms = at_ms = int(seconds) * 1000 + int(micros) // 1000
            if (
                replication.get("second_repl_offset") == _NEVER_PROMOTED
                and running["run_id"] == server
            ):
                at_ms -= int(running["uptime_in_seconds"]) * 1000
            pipe.hset(
                keys.SERVER_SINCE, mapping={"server": server, "at_ms": at_ms, "noted_ms": noted_ms}
            )
            await pipe.execute()


async def server_known_since(client: Redis) -> float:
    """Returns since when the server is known (`note_server`), in Unix seconds of its own clock.

    Returns 0 if no server was ever recorded, and infinity if the recorded one is another.
    """
    async with client.pipeline(transaction=False) as pipe:
        pipe.hmget(keys.SERVER_SINCE, "server", "at_ms")
        pipe.info("server")
        (noted, at_ms), info = await pipe.execute()
    if noted is None:
        return 0.0
    same = noted == str(info.get("run_id", "")).encode() and at_ms is not None
    return number_of(at_ms) / 1000 if same else math.inf


async def has_lapsed(client: Redis, user_id: str, mark: str, seconds: float) -> bool:
    """Returns True if a mark, and with it its worker's lease, has run out: it is not there, and
    this server process has kept its data for at least `seconds`, so that no other one, and no
    flush, took it away."""
    async with client.pipeline(transaction=False) as pipe:
        pipe.get(keys.mark(user_id))
        pipe.hmget(keys.SERVER_SINCE, "server", "noted_ms")
        pipe.info("server")
        pipe.time()
        value, (noted, noted_ms), running, (now, _) = await replies_of(pipe)
    same = noted == str(running.get("run_id", "")).encode() and noted_ms is not None
    return bool(same and value != mark.encode() and now - number_of(noted_ms) / 1000 >= seconds)


async def ensure_generation(client: Redis, fresh: str) -> str:
    """Returns the generation of the server; a new or flushed one gets `fresh`."""
    return (await read_generation_and_server(client, fresh))[0]
