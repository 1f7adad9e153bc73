"""A Valkey that answers, but refuses to write, is not called unreachable: its reason is said
everywhere."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, RedisError

from infra.doctor import servers
from infra.doctor.servers import run_check
from infra.local.servers import ValkeyServer
from infra.settings import Settings
from infra.valkey.client import connect_valkey, reply_of
from infra.valkey.failures import UNREACHABLE, code_of
from tests.support.systems.api import ServedApi, an_order, running_api
from tests.support.workers.api_worker import ScriptedWorker

Fault = Callable[[Redis, ValkeyServer], Awaitable[None]]


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A Valkey that a test may spoil; it writes nothing to its disk by itself."""
    with ValkeyServer(tmp_path / "valkey", durable=False) as server:
        yield server


@pytest.fixture
async def admin(own_valkey: ValkeyServer) -> AsyncIterator[Redis]:
    async with connect_valkey(own_valkey.url) as client:
        yield client


@pytest.fixture
async def api(settings: Settings, own_valkey: ValkeyServer) -> AsyncIterator[ServedApi]:
    async with running_api(settings.model_copy(update={"valkey_url": own_valkey.url})) as api:
        yield api


async def fill(admin: Redis, _server: ValkeyServer) -> None:
    # A tenth of one byte for all clients would end their connections, too.
    await reply_of(admin.config_set("maxmemory-clients", "0"))
    await reply_of(admin.config_set("maxmemory", "1"))


async def empty(admin: Redis, _server: ValkeyServer) -> None:
    await reply_of(admin.config_set("maxmemory", "0"))


async def take_disk(admin: Redis, server: ValkeyServer) -> None:
    """Its folder is gone, so the next snapshot fails."""
    await reply_of(admin.config_set("save", "3600 1"))
    shutil.rmtree(server.directory)
    await reply_of(admin.execute_command("BGSAVE"))  # type: ignore[no-untyped-call]
    async with asyncio.timeout(10):
        while (await admin.info("persistence"))["rdb_last_bgsave_status"] != "err":  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def give_disk(admin: Redis, _server: ValkeyServer) -> None:
    await reply_of(admin.config_set("stop-writes-on-bgsave-error", "no"))
    await reply_of(admin.config_set("save", ""))  # else its end would wait for a snapshot


@pytest.mark.parametrize(
    ("spoil", "mend", "placing", "code", "remedy"),
    [
        (fill, empty, "MEMORY_SHORT", "OOM", "raise its maxmemory"),
        (take_disk, give_disk, "VALKEY_UNAVAILABLE", "MISCONF", "free space"),
    ],
)
async def test_its_answer_is_said_by_orders_readiness_metrics_and_the_doctor(
    api: ServedApi,
    own_valkey: ValkeyServer,
    admin: Redis,
    spoil: Fault,
    mend: Fault,
    placing: str,
    code: str,
    remedy: str,
) -> None:
    worker = ScriptedWorker(own_valkey.url, api.user)
    await worker.start()
    async with api.client(api.key) as user:
        orders = f"/users/{api.user}/orders"
        assert (await user.post(orders, json=an_order(1))).status_code == 201
        await spoil(admin, own_valkey)

        refused = await user.post(orders, json=an_order(2))
        assert (refused.status_code, refused.json()["code"]) == (503, placing)
        assert UNREACHABLE not in refused.text
        refused = await user.get(f"/users/{api.user}/accounts/main/positions")
        problem = refused.json()
        assert (refused.status_code, problem["code"]) == (503, "VALKEY_UNAVAILABLE")
        assert f"({code})" in problem["detail"]
        assert remedy in problem["detail"]
        assert UNREACHABLE not in refused.text

        ready = await user.get("/readyz")
        shown = ready.json()["dependencies"]["valkey"]
        assert (ready.status_code, shown["state"]) == (503, "down")
        assert f"({code})" in shown["reason"]

        settings = api.services.settings
        result = await run_check(servers.VALKEY, settings)
        assert f"({code})" in result.problem

        await mend(admin, own_valkey)
        assert (await user.get("/readyz")).json()["dependencies"]["valkey"]["state"] == "up"
        placed = await user.post(orders, json=an_order(3))
        assert placed.status_code == 201, placed.text
    await worker.stop()


async def test_an_api_that_starts_at_a_full_valkey_says_so(
    settings: Settings, own_valkey: ValkeyServer, admin: Redis
) -> None:
    await fill(admin, own_valkey)
    async with running_api(settings.model_copy(update={"valkey_url": own_valkey.url})) as api:
        async with api.client(api.key) as user:
            refused = await user.post(f"/users/{api.user}/orders", json=an_order(1))
        assert refused.status_code == 503
        assert "(OOM)" in refused.json()["detail"]


async def test_the_code_of_a_reply_is_found_in_a_pipeline_and_a_script(admin: Redis) -> None:
    await reply_of(admin.config_set("maxmemory", "1"))
    for transaction in (True, False):
        async with admin.pipeline(transaction=transaction) as pipe:
            pipe.set("MISCONF", "caused error: MISCONF")
            with pytest.raises(RedisError) as raised:
                await pipe.execute()
        assert code_of(raised.value) == "OOM"
    with pytest.raises(RedisError) as raised:
        await reply_of(admin.eval("return redis.call('set', KEYS[1], 'x')", 1, "key"))
    assert code_of(raised.value) == "OOM"
    assert (
        code_of(ConnectionError("Error 111 connecting to 127.0.0.1:1. Connection refused.")) == ""
    )
    assert code_of(ConnectionError("LOADING Valkey is loading the dataset in memory")) == "LOADING"
    assert code_of(OSError()) == ""
