"""Operators see and resize a pool, over REST and with the command; the pool's workflow is the real
one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from temporalio.client import Client

from api.page.charts import PoolHistory
from infra.database.engine import Database
from infra.database.models import AuditEntry
from infra.local.servers import TemporalServer
from infra.settings import Settings
from tests.support.api.pages import logged_in_browser
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, operator, running_api
from tests.support.workflows.fakes import FakePool, serving
from workflows import names
from workflows.worker_pool.messages import PoolInput
from workflows.worker_pool.policy import PoolPolicy
from workflows.worker_pool.workflow import WorkerPoolWorkflow

POOL = "steered"
WINDOW = {"name": "morning", "target": 5, "begins": "08:00", "ends": "09:30", "calendar": "trading"}


@pytest.fixture
async def pool(temporal_server: TemporalServer) -> AsyncIterator[FakePool]:
    """The workflow of the pool `steered`, whose workers are made up."""
    fake = FakePool()
    client = await Client.connect(temporal_server.address)
    async with serving(client, fake.activities()):
        handle = await client.start_workflow(
            WorkerPoolWorkflow.run,
            PoolInput(pool=POOL, policy=PoolPolicy(target=2)),
            id=names.worker_pool_id(POOL),
            task_queue=names.LIFECYCLE_QUEUE,
        )
        yield fake
        await handle.terminate()


@pytest.fixture
async def pool_api(settings: Settings, temporal_server: TemporalServer) -> AsyncIterator[ServedApi]:
    """An API with all its servers; nobody serves users."""
    changed = settings.model_copy(update={"temporal_address": temporal_server.address})
    async with running_api(changed) as api:
        yield api


async def seen(admin: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The pool once it shows this."""
    while True:
        answer = await admin.get(f"/pools/{POOL}")
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        if all(shown[name] == value for name, value in fields.items()):
            return shown
        await asyncio.sleep(0.02)


async def test_an_operator_resizes_pauses_and_drains_a_pool(
    pool_api: ServedApi, pool: FakePool
) -> None:
    async with pool_api.client(pool_api.admin_key) as admin:
        shown = await seen(admin, ready=2)
        assert (shown["mode"], shown["wanted"], shown["reasons"]) == ("running", 2, ["target: 2"])
        policy = {"target": 3, "maximum": 9, "buffer": "1", "windows": [WINDOW]}
        answer = await admin.put(
            f"/pools/{POOL}", json={**policy, "reason": "a test", "revision": 0}
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["policy"]["windows"] == [
            {**WINDOW, "days": "mon-sun", "zone": "Asia/Taipei"}
        ]
        await seen(admin, ready=4, revision=1)

        for asked, mode in (("pause", "paused"), ("drain", "draining")):
            answer = await admin.post(f"/pools/{POOL}/{asked}", json={"reason": "a test"})
            assert (answer.status_code, answer.json()["mode"]) == (200, mode)
        await seen(admin, ready=0, wanted=0)
        assert not pool.ready
        await admin.post(f"/pools/{POOL}/resume")
        await seen(admin, ready=4, mode="running")

    database = Database(pool_api.settings.database_url)
    async with database.session() as session:
        query = (
            select(AuditEntry).where(AuditEntry.subject == f"pool:{POOL}").order_by(AuditEntry.id)
        )
        trail = list(await session.scalars(query))
    await database.close()
    requested = [f"pool.{asked}_requested" for asked in ("policy", "pause", "drain", "resume")]
    assert [entry.action for entry in trail] == requested
    assert trail[0].data["reason"] == "a test"
    assert trail[0].data["policy"]["maximum"] == 9


async def test_a_pool_that_somebody_looked_at_has_a_chart(
    pool_api: ServedApi, pool: FakePool
) -> None:
    async with logged_in_browser(pool_api, pool_api.admin_key) as client:
        for name, shown in ((POOL, True), ("no-such-pool", False)):
            page = await client.get("/page/pools", params={"name": name})
            assert (page.status_code, '<svg class="chart"' in page.text) == (200, shown)
    pools = pool_api.services.pools
    history, full = (
        PoolHistory(pools, "default", max_pools=2),
        PoolHistory(pools, "default", max_pools=1),
    )
    assert [len(await pool_history.samples_of(POOL)) for pool_history in (history, full)] == [1, 0]
    sampling = asyncio.create_task(history.run())
    try:
        async with asyncio.timeout(20):
            while len(await history.samples_of(POOL)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        sampling.cancel()


@pytest.mark.parametrize(
    ("policy", "status", "code", "told"),
    [
        ({"target": 9, "maximum": 8}, 422, "POOL_POLICY_INVALID", "target 9 is above maximum 8"),
        ({"target": 1, "buffer": "lots"}, 422, "POOL_POLICY_INVALID", "neither a number like 3"),
        (
            {"target": 5, "windows": [{**WINDOW, "zone": "Asia/Tapei"}]},
            422,
            "ZONE_UNKNOWN",
            "Asia/Tapei",
        ),
        ({"target": 5, "windows": [{**WINDOW, "colour": "red"}]}, 422, "INVALID_REQUEST", "colour"),
        ({"target": 5, "revision": 7}, 409, "POOL_CHANGED", "it is revision 0, not 7"),
        ({}, 422, "INVALID_REQUEST", "target"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_policy_that_makes_no_sense_is_refused_in_words(
    pool_api: ServedApi, pool: FakePool, policy: dict[str, Any], status: int, code: str, told: str
) -> None:
    async with pool_api.client(pool_api.admin_key) as admin:
        answer = await admin.put(f"/pools/{POOL}", json=policy)
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
        assert told in answer.text
        assert (await seen(admin))["policy"]["target"] == 2


async def test_pools_are_for_operators_and_an_unknown_one_is_not_found(pool_api: ServedApi) -> None:
    async with pool_api.client(pool_api.key) as user:
        for answer in (await user.get(f"/pools/{POOL}"), await user.post(f"/pools/{POOL}/drain")):
            assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN")
    async with pool_api.client(pool_api.admin_key) as admin:
        answer = await admin.get("/pools/nobodys")
        assert (answer.status_code, answer.json()["code"]) == (404, "NO_POOL")


async def test_the_command_shows_explains_and_changes(
    pool_api: ServedApi, pool: FakePool, commands: CommandForker, tmp_path: Path
) -> None:
    windows = tmp_path / "windows.json"
    windows.write_text(json.dumps([WINDOW]))
    async with (
        operator(pool_api, commands, tmp_path) as berth,
        pool_api.client(pool_api.admin_key) as admin,
    ):
        await seen(admin, ready=2)
        code, out, err = await berth(
            "pool", "set", POOL, "--target", "3", "--windows", str(windows), "--json"
        )
        assert (code, err) == (0, "")
        assert json.loads(out)["policy"]["windows"][0]["name"] == "morning"
        await seen(admin, ready=3)
        assert (await berth("pool", "set", POOL, "--buffer", "2"))[0] == 0
        shown = await seen(admin, ready=5, starting=0)
        assert shown["policy"]["target"] == 3  # what is not named stays

        code, out, _ = await berth("pool", "status", POOL)
        assert code == 0
        assert "5 of 5 wanted, 0 starting" in out
        assert "morning" in out
        code, out, _ = await berth("pool", "explain", POOL)
        assert out.splitlines()[:3] == [
            f"pool {POOL} wants 5 free workers:",
            "  target: 3",
            "  buffer: 2 more, 5",
        ]
        assert (await berth("pool", "drain", POOL, "--reason", "a test"))[
            1
        ] == f"pool {POOL} is being drained\n"
        assert (await berth("pool", "resume", POOL))[1] == f"pool {POOL} is resumed\n"

        code, _, err = await berth("pool", "set", POOL, "--target", "3", "--maximum", "2")
        assert (code, err) == (
            1,
            "error: POOL_POLICY_INVALID: target 3 is above maximum 2; "
            "window 'morning': target 5 is above maximum 2\n",
        )
        assert (await berth("pool", "set", POOL))[0] == 2
        assert (await berth("pool", "status", "nobodys"))[0] == 1


async def test_a_pool_that_was_ended_by_hand_says_so_and_by_whom(
    pool_api: ServedApi, temporal_server: TemporalServer
) -> None:
    """Nobody ever served it: a query of it would find no completed task."""
    client = await Client.connect(temporal_server.address)
    handle = await client.start_workflow(
        WorkerPoolWorkflow.run,
        PoolInput(pool="ended", policy=PoolPolicy(target=2)),
        id=names.worker_pool_id("ended"),
        task_queue=names.LIFECYCLE_QUEUE,
    )
    await handle.terminate(reason="a test")
    async with pool_api.client(pool_api.admin_key) as admin:
        answers = [await admin.get("/pools/ended"), await admin.post("/pools/ended/pause")]
    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (503, "POOL_REBUILDING"), answer.text
        said = answer.json()["detail"]
        assert said.startswith("the workflow of pool ended was terminated by ")
        assert said.endswith(": a test; it is being rebuilt")
