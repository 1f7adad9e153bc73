"""While Valkey's memory is short: new orders are refused with a code, and what is under way goes
on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from redis.asyncio import Redis

from tests.support.api.orders import start_working_order
from tests.support.systems.api import ServedApi, StartWorker, an_order
from tests.support.workflows.user_worker_stub import LifecycleStub


@asynccontextmanager
async def short_of_memory(client: Redis) -> AsyncIterator[None]:
    """While this holds, 90 % of the server's memory are in use."""
    before = (await client.config_get("maxmemory"))["maxmemory"] or 0
    await client.config_set("maxmemory", int((await client.info("memory"))["used_memory"] / 0.9))
    try:
        yield
    finally:
        await client.config_set("maxmemory", before)


async def test_a_new_order_is_refused_with_a_code_and_a_cancel_passes(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, valkey_client: Redis
) -> None:
    _, resting_order = await start_working_order(api, user, start_worker)
    orders = f"/users/{api.user}/orders"
    async with short_of_memory(valkey_client):
        refused = await user.post(orders, json=an_order(2))
        problem = refused.json()
        assert (refused.status_code, problem["code"]) == (503, "MEMORY_SHORT"), refused.text
        assert problem["retryable"] is True
        assert refused.headers["Retry-After"] == "5"
        assert (problem["order"]["state"], problem["order"]["final"]) == ("rejected", True)
        answer = await user.post(f"/orders/{resting_order}/cancel", json={"request_id": "x"})
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled"), answer.text
        shown = (await user.get(f"/orders/{problem['order']['id']}")).json()
        assert (shown["state"], shown["code"]) == ("rejected", "MEMORY_SHORT")
    assert (await user.post(orders, json=an_order(3))).status_code == 201


async def test_a_user_without_a_worker_learns_why_none_comes(
    whole_api: ServedApi, lifecycle: LifecycleStub
) -> None:
    lifecycle.failures = ["MEMORY_SHORT"]
    async with whole_api.client(whole_api.admin_key) as admin:
        refused = await admin.post(f"/users/{whole_api.user}/worker/start?wait=20")
        assert (refused.status_code, refused.json()["code"]) == (503, "MEMORY_SHORT"), refused.text
        assert refused.headers["Retry-After"] == "5"


async def test_operators_see_how_full_the_memory_is(
    whole_api: ServedApi, valkey_client: Redis
) -> None:
    async with whole_api.client(whole_api.admin_key) as admin, short_of_memory(valkey_client):
        [line] = [
            line
            for line in (await admin.get("/metrics")).text.splitlines()
            if line.startswith("berth_valkey_memory_used_ratio")
        ]
        assert 0.85 < float(line.split()[-1]) <= 1.0
