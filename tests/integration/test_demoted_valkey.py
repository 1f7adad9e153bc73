"""A failover that leaves the old primary running: connections that stay on it are of no use any
more."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.local.process import free_port
from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from worker_runtime.process.valkey import Valkey, ValkeyRefused
from worker_runtime.protocol.scripts import Script

SOURCE = "return redis.call('SET', KEYS[1], ARGV[1])"
WRITE = Script("write", SOURCE, sha1(SOURCE.encode(), usedforsecurity=False).hexdigest())
Write = Callable[[Redis], Awaitable[Any]]


@dataclass
class ValkeyPair:
    """Two servers, of which the second takes the place of the first."""

    first: ValkeyServer
    second: ValkeyServer

    async def fail_over(self) -> None:
        """As a managed Valkey does it: the address leads to the new primary, open connections to
        the old."""
        async with Redis.from_url(self.first.url) as old, Redis.from_url(self.second.url) as new:
            await reply_of(old.replicaof("127.0.0.1", str(self.second.port)))
            await reply_of(old.config_set("port", free_port()))
            await reply_of(new.config_set("port", self.first.port))


@pytest.fixture
async def pair(short_directory: Path) -> AsyncIterator[ValkeyPair]:
    servers = [ValkeyServer(short_directory / name, durable=False) for name in ("one", "two")]
    async with AsyncExitStack() as stack:
        for server in servers:
            # A replica without its primary takes 6 s to end.
            stack.callback(server.stop, signal.SIGKILL)
            await asyncio.to_thread(server.start)
        yield ValkeyPair(*servers)


async def in_a_pipeline(client: Redis) -> None:
    async with client.pipeline(transaction=False) as pipe:
        pipe.get("k")
        pipe.set("k", "v")
        await pipe.execute()


async def in_a_transaction(client: Redis) -> None:
    async with client.pipeline(transaction=True) as pipe:
        pipe.set("k", "v")
        await pipe.execute()


@pytest.mark.parametrize(
    "write",
    [
        lambda client: client.set("k", "v"),
        lambda client: valkey.run_script(client, WRITE, ["k"], ["v"]),
        lambda client: client.blpop("l", 1),
        in_a_pipeline,
        in_a_transaction,
    ],
    ids=["command", "script", "blocking", "pipeline", "transaction"],
)
async def test_the_servers_client_leaves_a_demoted_primary(pair: ValkeyPair, write: Write) -> None:
    async with valkey.connect_valkey(pair.first.url) as client:
        await write(client)
        await pair.fail_over()
        with pytest.raises(RedisError):
            await write(client)
        await write(client)


async def test_a_workers_client_leaves_a_demoted_primary(pair: ValkeyPair) -> None:
    client = Valkey(pair.first.url)
    client.execute("SET", "k", "v")
    before = client.server()
    await pair.fail_over()
    with pytest.raises(ValkeyRefused, match="READONLY"):
        client.execute("SET", "k", "v")
    assert client.execute("SET", "k", "v") == b"OK"
    assert client.server() != before
    client.close()


async def test_what_a_pipeline_read_before_is_not_lost(pair: ValkeyPair) -> None:
    client = Valkey(pair.first.url)
    client.execute("SET", "k", "v")
    await pair.fail_over()
    replies = client.pipeline([("GET", "k"), ("SET", "k", "w"), ("GET", "k")])
    assert [replies[0], replies[2]] == [b"v", b"v"]
    assert client.pipeline([("SET", "k", "w"), ("GET", "k")])[1] == b"w"
    client.close()
