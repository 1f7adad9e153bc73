"""Connections that die without a word: bytes vanish, and nothing is closed. New connections
work."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import httpx
import pytest
from sqlalchemy import text

from infra.database.engine import Database
from infra.local.servers import TemporalServer, ValkeyServer
from infra.settings import Settings
from tests.support.proxies.silent import SilentProxy
from tests.support.systems.api import ServedApi, StartWorker, an_order, running_api
from tests.support.workers.api_worker import ScriptedWorker
from tests.support.workflows.user_worker_stub import LifecycleStub

#: Seconds that an order may take after all connections to one server have died, and what the other
#: tests of a suite add on a machine of two cores. Without the watch it took 12 s and ended in 503.
AFTER_A_DROP_S, LOAD_S = 2.0, 3.0
#: Orders at once.
PARALLEL = 20
#: Orders at once that need a claim.
CLAIMS = 10
#: Seconds without traffic, after which connections are asked before use.
IDLE_S = 1.2


@dataclass
class Lines:
    """An API whose ways to its servers lead through proxies."""

    api: ServedApi
    worker: ScriptedWorker
    postgres: SilentProxy
    valkey: SilentProxy
    temporal: SilentProxy

    async def place(self, user: str, key: str, number: int = 1) -> tuple[httpx.Response, float]:
        async with self.api.client(key) as client:
            began = time.perf_counter()
            response = await client.post(
                f"/users/{user}/orders", json=an_order(number), params={"wait": 20}, timeout=60
            )
            return response, time.perf_counter() - began

    async def orders(self, first: int) -> list[tuple[httpx.Response, float]]:
        numbers = range(first, first + PARALLEL)
        orders = (self.place(self.api.user, self.api.key, number) for number in numbers)
        return list(await asyncio.gather(*orders))


async def new_user(api: ServedApi, user: str) -> tuple[str, str]:
    """A user with an account and without a worker; the id and the key."""
    async with api.client(api.admin_key) as admin:
        made = await admin.post("/users", json={"user_id": user})
        assert made.status_code == 201, made.text
    key = made.json()["api_key"]
    async with api.client(key) as client:
        body = {"broker": "paper", "api_key": "key", "secret_key": "secret"}
        stored = await client.put(f"/users/{user}/accounts/main/credentials", json=body)
        assert stored.status_code == 200, stored.text
    return user, key


@pytest.fixture
def proxies() -> Iterator[tuple[SilentProxy, SilentProxy, SilentProxy]]:
    with SilentProxy() as postgres, SilentProxy() as valkey, SilentProxy() as temporal:
        yield postgres, valkey, temporal


@pytest.fixture
async def lines(
    settings: Settings,
    proxies: tuple[SilentProxy, SilentProxy, SilentProxy],
    valkey_server: ValkeyServer,
    temporal_server: TemporalServer,
    lifecycle: LifecycleStub,
    start_worker: StartWorker,
) -> AsyncIterator[Lines]:
    postgres, valkey, temporal = proxies
    port = re.search(r":(\d+)/", settings.database_url.rpartition("@")[2])
    assert port is not None
    postgres.target, valkey.target, temporal.target = (
        int(port[1]),
        valkey_server.port,
        temporal_server.port,
    )
    changed = settings.model_copy(
        update={
            "database_url": settings.database_url.replace(f":{port[1]}/", f":{postgres.port}/"),
            "valkey_url": settings.valkey_url.replace(f":{valkey_server.port}", f":{valkey.port}"),
            "temporal_address": temporal.address,
            "database_pool_wait": 10.0,
            "check_duplicate_window": 0.0,
            "check_max_quantity": 1000,
        }
    )
    async with running_api(changed) as api:
        worker = await start_worker(api.user)
        proxied = Lines(api, worker, postgres, valkey, temporal)
        for response, _ in await proxied.orders(1):  # all connections are there, and in use
            assert response.status_code == 201, response.text
        yield proxied


def check_in_time(answered: list[tuple[httpx.Response, float]], *, claims: float = 0.0) -> None:
    """`claims`: seconds that as many claims at once take by themselves."""
    slowest = max(seconds for _, seconds in answered)
    print(f"slowest of {len(answered)}: {slowest:.2f} s, claims {claims:.2f} s")  # noqa: T201 - to be reported
    assert {response.status_code for response, _ in answered} == {201}, [
        r.text for r, _ in answered
    ]
    assert all(response.json()["state"] == "filled" for response, _ in answered)
    assert slowest < AFTER_A_DROP_S + LOAD_S + claims


@pytest.mark.parametrize("idle", [IDLE_S, 0.0], ids=["idle", "in-use"])
async def test_orders_that_need_a_claim_after_all_connections_to_temporal_died(
    lines: Lines, lifecycle: LifecycleStub, idle: float
) -> None:
    others = [
        await new_user(lines.api, f"{lines.api.user}-{number}") for number in range(2 * CLAIMS)
    ]
    before = await asyncio.gather(*(lines.place(*other) for other in others[:CLAIMS]))
    await asyncio.sleep(idle)
    assert lines.temporal.silence() > 0

    answered = await asyncio.gather(*(lines.place(*other) for other in others[CLAIMS:]))

    check_in_time(answered, claims=max(seconds for _, seconds in before))


@pytest.mark.parametrize("idle", [IDLE_S, 0.0], ids=["idle", "in-use"])
@pytest.mark.parametrize("server", ["postgres", "valkey"])
async def test_orders_after_all_connections_died_take_at_most_two_seconds(
    lines: Lines, server: str, idle: float
) -> None:
    await asyncio.sleep(idle)
    proxy: SilentProxy = getattr(lines, server)
    assert proxy.silence() > 0

    answered = await lines.orders(101)

    check_in_time(answered)
    assert len({response.json()["id"] for response, _ in answered}) == PARALLEL
    assert len({order.order_id for order in lines.worker.popped}) == 2 * PARALLEL
    assert len(lines.worker.popped) == 2 * PARALLEL  # submit-once


async def test_an_order_whose_acceptance_was_not_confirmed_is_accepted_once(lines: Lines) -> None:
    assert lines.postgres.silence(replies_only=True) > 0

    answered = await lines.orders(101)

    check_in_time(answered)
    assert len(lines.worker.popped) == 2 * PARALLEL
    assert await stored_orders(lines, 101) == PARALLEL


async def test_what_a_client_is_told_while_postgresql_cannot_be_reached_is_what_happens(
    lines: Lines,
) -> None:
    """Some statements were carried out and their answers lost, others never left the API."""
    assert lines.postgres.silence(new=True, replies_only=True) > 0
    answered = await lines.orders(101)
    lines.postgres.heal()

    codes = {number: r.json()["code"] for number, (r, _) in enumerate(answered, 101)}
    assert {response.status_code for response, _ in answered} == {503}
    assert set(codes.values()) <= {"DATABASE_OUTCOME_UNKNOWN", "DATABASE_UNAVAILABLE"}
    assert "DATABASE_OUTCOME_UNKNOWN" in codes.values()
    stored = {number for number in codes if await stored_orders(lines, number, count=1)}
    assert stored  # they are carried out by the sweeper, and nobody was told otherwise
    assert {codes[number] for number in stored} == {"DATABASE_OUTCOME_UNKNOWN"}

    again = await lines.orders(101)

    assert {response.status_code for response, _ in again} <= {200, 201}
    assert {number for number, (r, _) in enumerate(again, 101) if r.status_code == 200} == stored
    assert await stored_orders(lines, 101) == PARALLEL


async def stored_orders(lines: Lines, first: int, *, count: int = PARALLEL) -> int:
    """How many of these orders are in PostgreSQL, by a connection of its own."""
    url = lines.api.settings.database_url.replace(
        f":{lines.postgres.port}/", f":{lines.postgres.target}/"
    )
    names = [an_order(number)["client_order_id"] for number in range(first, first + count)]
    async with Database(url, pool_size=1) as database, database.session() as session:
        stored = await session.scalar(
            text(
                "select count(*) from orders where user_id = :user and client_order_id = "
                "any(:names)"
            ),
            {"user": lines.api.user, "names": names},
        )
    return int(stored or 0)
