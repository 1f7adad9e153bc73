"""Limits of requests at the API: over processes, without Valkey, and during a flood."""

from __future__ import annotations

import asyncio

import httpx
from redis.asyncio import Redis

from infra.settings import Settings
from tests.support.api.operators import read_metrics
from tests.support.systems.api import ServedApi, running_api
from tests.support.waiting import until


async def statuses(client: httpx.AsyncClient, count: int, path: str = "/switches") -> list[int]:
    return [
        answer.status_code
        for answer in await asyncio.gather(*(client.get(path) for _ in range(count)))
    ]


async def test_a_refused_request_says_when_to_come_back(settings: Settings) -> None:
    changed = settings.model_copy(update={"limit_key": 2.0})
    async with running_api(changed) as api, api.client(api.key) as client:
        await client.get("/switches")
        answer = await client.get("/switches")
        assert answer.headers["ratelimit-policy"] == '"key";q=10;w=5'
        assert answer.headers["ratelimit"].startswith('"key";r=')
        codes = await statuses(client, 20)
        assert 429 in codes
        refused = await client.get("/switches")
        assert refused.status_code == 429
        assert refused.json()["code"] == "TOO_MANY_REQUESTS"
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["ratelimit"].startswith('"key";r=0;t=')
        # Valkey counts from when it hears of them, so the window may end a part of a second after
        # this process's.
        assert refused.headers["ratelimit"][-1] in "56"
        async with api.client(api.admin_key) as other:
            assert await statuses(other, 5) == [200] * 5


async def test_a_limit_holds_over_all_processes(settings: Settings) -> None:
    changed = settings.model_copy(update={"limit_address": 2.0})
    async with running_api(changed) as first, running_api(changed) as second:
        async with first.client("berth_made-up") as client:
            assert (await statuses(client, 20)).count(401) == 10
        async with second.client("berth_made-up-too") as client:
            # Settled, it brings what the others let through.
            assert await statuses(client, 1) == [401]
            async with asyncio.timeout(2):
                while await statuses(client, 1) != [429]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        async with second.client(second.key) as user:  # the same address, with a genuine key
            assert await statuses(user, 5) == [200] * 5


async def test_without_valkey_each_process_has_the_limit(settings: Settings) -> None:
    changed = settings.model_copy(update={"limit_key": 2.0, "valkey_url": "redis://127.0.0.1:1/0"})
    async with running_api(changed) as api, api.client(api.admin_key) as client:
        assert (await statuses(client, 20, "/images")).count(200) <= 10
        await asyncio.sleep(0.5)
        assert await statuses(client, 1, "/images") == [200]


async def test_what_was_let_through_is_settled_once(api: ServedApi, valkey_client: Redis) -> None:
    limits = api.services.limits
    for _ in range(40):
        limits.charge("address", "192.0.2.1")
    await until(lambda: not any(limit.unsettled for limit in limits._limits.values()))
    kept = await valkey_client.keys("berth:limit:*192.0.2.1")
    assert len(kept) == 1
    ttl_ms = await valkey_client.pttl(kept[0])
    assert 1000 < ttl_ms <= 2001  # 40 requests of 20 a second
    await limits.settle()
    assert await valkey_client.pttl(kept[0]) <= ttl_ms


async def test_a_flood_without_keys_asks_postgresql_nothing_and_valkey_little(
    api: ServedApi, valkey_client: Redis
) -> None:
    await asyncio.sleep(0.5)  # until what the fixture did is settled
    before = (await valkey_client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    async with api.client("berth_made-up") as client:
        codes = [status for _ in range(10) for status in await statuses(client, 100)]
    assert codes.count(401) <= 100 + 20 * 5
    assert set(codes) == {401, 429}
    told = await read_metrics(api)
    assert told['berth_requests_limited_total{limit="address"}'] >= codes.count(429)
    after = (await valkey_client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    assert after - before <= 50
