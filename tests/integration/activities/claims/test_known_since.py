"""Since when a server of Valkey is known: what was queued before may have gone further than it
knows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from infra.local.process import free_port
from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from tests.support.activities.harness import ActivityHarness
from worker_runtime.protocol import keys


async def test_a_promoted_replica_is_known_since_the_first_check_of_it_however_long_it_ran(
    short_directory: Path,
) -> None:
    server = ValkeyServer(short_directory, durable=False)
    server.start()
    try:
        async with valkey.connect_valkey(server.url) as client:
            await reply_of(client.hset(keys.SERVER_SINCE, "server", "the one before"))
            while (await client.info("server"))["uptime_in_seconds"] < 2:  # noqa: ASYNC110 — no event for it
                await asyncio.sleep(0.05)
            await client.replicaof("127.0.0.1", str(free_port()))
            await client.replicaof("NO", "ONE")
            looked = (await client.time())[0]
            await valkey.note_server(client, await valkey.read_server_id(client))
            assert await valkey.server_known_since(client) >= looked
    finally:
        server.stop()


@pytest.mark.parametrize("creates", [valkey.ensure_generation, valkey.read_generation_and_server])
async def test_a_flushed_server_is_noted_by_the_process_that_gives_it_a_generation(
    harness: ActivityHarness, creates: Callable[..., Awaitable[object]]
) -> None:
    """Else a copy of it that is promoted later would pass for the first server of all."""
    await harness.client.flushall()
    await creates(harness.client, "g")
    assert (
        await reply_of(harness.client.hget(keys.SERVER_SINCE, "server"))
        == (await valkey.read_server_id(harness.client)).encode()
    )
    assert await valkey.server_known_since(harness.client) == 0.0
    await reply_of(harness.client.hset(keys.SERVER_SINCE, "server", "the one before"))
    await creates(harness.client, "h")  # there is one: that is a copy
    assert await valkey.server_known_since(harness.client) == math.inf


async def test_a_server_without_a_record_is_no_first_one(harness: ActivityHarness) -> None:
    """Who gave it its generation may have died before the record was written, as releases that
    wrote both one after the other allowed."""
    await valkey.ensure_generation(harness.client, "g")
    await harness.client.delete(keys.SERVER_SINCE)
    began = (await harness.client.time())[0] - (await harness.client.info("server"))[
        "uptime_in_seconds"
    ]
    await valkey.note_server(harness.client, await valkey.read_server_id(harness.client))
    assert abs(await valkey.server_known_since(harness.client) - began) <= 1
