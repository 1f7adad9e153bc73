"""Operators begin, watch and take back a rollout, and run maintenance; both workflows are the real
ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from temporalio.client import Client
from temporalio.service import RPCError

from infra.database.engine import Database
from infra.database.models import AuditEntry
from infra.local.servers import TemporalServer
from infra.settings import Settings
from infra.temporal import schedules
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, operator, running_api
from tests.support.workflows.bulk_fakes import FakeMaintenance, FakeRollout
from tests.support.workflows.fakes import FakePool, serving
from workflows import names
from workflows.maintenance.messages import Scanned
from workflows.worker_pool.messages import PoolInput
from workflows.worker_pool.policy import PoolPolicy
from workflows.worker_pool.workflow import WorkerPoolWorkflow

POOL = "rolled"


@pytest.fixture
async def temporal(temporal_server: TemporalServer) -> Client:
    return await Client.connect(temporal_server.address)


@pytest.fixture
async def rollout(temporal: Client) -> AsyncIterator[FakeRollout]:
    """A pool with a free worker of version 1 and two users; its rollouts are served."""
    fake = FakeRollout(1, users=2)
    async with serving(temporal, FakePool().activities()), fake.worker(temporal):
        pool = await temporal.start_workflow(
            WorkerPoolWorkflow.run,
            PoolInput(pool=POOL, policy=PoolPolicy(target=0)),
            id=names.worker_pool_id(POOL),
            task_queue=names.LIFECYCLE_QUEUE,
        )
        yield fake
        await pool.terminate()
        with suppress(RPCError):  # it has ended by itself
            await temporal.get_workflow_handle(names.rollout_id(POOL)).terminate()


@pytest.fixture
async def api(settings: Settings, temporal_server: TemporalServer) -> AsyncIterator[ServedApi]:
    changed = settings.model_copy(update={"temporal_address": temporal_server.address})
    async with running_api(changed) as api:
        yield api


async def until(admin: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The rollout once it shows this."""
    while True:
        answer = await admin.get(f"/pools/{POOL}/rollout")
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        if all(shown[name] == value for name, value in fields.items()):
            return shown
        await asyncio.sleep(0.05)


async def test_an_operator_begins_a_rollout_and_takes_it_back(
    api: ServedApi, rollout: FakeRollout
) -> None:
    rollout.quiet.clear()
    path = f"/pools/{POOL}/rollout"
    async with api.client(api.admin_key) as admin:
        nothing = await admin.get(path)
        assert (nothing.status_code, nothing.json()["code"]) == (404, "NO_ROLLOUT")
        assert (await admin.put("/images", json={"image": "w:2"})).status_code == 200
        answer = await admin.post(path, json={"version": "2", "image": "w:2", "reason": "a test"})
        assert answer.status_code == 202, answer.text
        assert answer.json()["release"] == {"version": "2", "image": "w:2"}
        second = await admin.post(path, json={"version": "3"})
        assert (second.status_code, second.json()["code"]) == (409, "ROLLOUT_UNDER_WAY")

        moving = await until(admin, phase="moving", users=2)
        assert (moving["new"], moving["old"], moving["before"]["version"]) == (1, 0, "1")
        assert (await admin.post(f"{path}/abort", json={"reason": "not today"})).status_code == 202
        while "is rolled back" not in rollout.recorded:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        rollout.may_tell.clear()  # it has ended, and its workflow runs until that is reported
        rollout.quiet.set()
        ended = await until(admin, ended=True)
        assert (ended["phase"], ended["reason"]) == ("rolled_back", "not today")
        over = await admin.post(f"{path}/abort")
        assert (over.status_code, over.json()["code"]) == (404, "NO_ROLLOUT")
        rollout.may_tell.set()
        while "ends: rolled_back" not in rollout.recorded:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    database = Database(api.settings.database_url)
    async with database.session() as session:
        query = (
            select(AuditEntry).where(AuditEntry.subject == f"pool:{POOL}").order_by(AuditEntry.id)
        )
        trail = list(await session.scalars(query))
    await database.close()
    requested = ["pool.rollout_requested"] * 2 + ["pool.rollout_abort_requested"] * 2
    assert [entry.action for entry in trail] == requested  # who is refused has asked, too
    assert (trail[0].data["version"], trail[0].data["reason"]) == ("2", "a test")
    assert rollout.recorded == ["begins", "is rolled back", "ends: rolled_back"]


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        ({"version": "", "image": "w:2"}, 422, "ROLLOUT_INVALID"),
        ({"version": "two words"}, 422, "INVALID_REQUEST"),
        ({"version": "2", "batch": 0}, 422, "INVALID_REQUEST"),
        ({}, 422, "INVALID_REQUEST"),
    ],
)
async def test_a_rollout_that_makes_no_sense_is_refused(
    api: ServedApi, rollout: FakeRollout, asked: dict[str, Any], status: int, code: str
) -> None:
    async with api.client(api.admin_key) as admin:
        answer = await admin.post(f"/pools/{POOL}/rollout", json=asked)
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
        unknown = await admin.post("/pools/nobodys/rollout", json={"version": "2"})
        assert (unknown.status_code, unknown.json()["code"]) == (404, "NO_POOL")
    async with api.client(api.key) as user:
        for refused in (
            await user.get(f"/pools/{POOL}/rollout"),
            await user.post("/fleet/maintenance"),
        ):
            assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")
    assert not rollout.recorded


@pytest.mark.timeout(120)
async def test_the_command_begins_watches_and_takes_back(
    api: ServedApi, rollout: FakeRollout, commands: CommandForker, tmp_path: Path
) -> None:
    async with operator(api, commands, tmp_path) as berth:
        code, out, err = await berth(
            "pool", "rollout", "start", POOL, "--version", "2", "--watch", "--json"
        )
        assert (code, err) == (0, "")
        done = json.loads(out)
        assert (done["phase"], done["retired"], done["users"]) == ("done", 1, 0)
        code, out, _ = await berth("pool", "rollout", "status", POOL)
        assert code == 0
        assert "1 of 1 wanted, 0 of other versions left" in out

        rollout.blind = 1_000_000  # checks that fail: it cannot be done before it is taken back
        assert (await berth("pool", "rollout", "start", POOL, "--version", "3"))[0] == 0
        code, out, _ = await berth("pool", "rollout", "abort", POOL, "--reason", "not today")
        assert (code, out) == (0, f"the rollout of pool {POOL} is rolled back\n")
        rollout.blind = 0
        code, out, _ = await berth("pool", "rollout", "status", POOL, "--watch")
        assert code == 1
        assert "rolled back" in out
        assert "not today" in out
        code, _, err = await berth("pool", "rollout", "abort", POOL)
        assert (code, err) == (1, f"error: NO_ROLLOUT: no rollout of pool {POOL} is under way\n")


@pytest.mark.timeout(120)
async def test_maintenance_is_run_by_hand(
    api: ServedApi, temporal: Client, commands: CommandForker, tmp_path: Path
) -> None:
    fake = FakeMaintenance(Scanned(number=3, workers=12, found=2, confirmed=1))
    async with operator(api, commands, tmp_path) as berth:
        code, _, err = await berth("maintenance", "run")
        assert code == 1
        assert "NO_MAINTENANCE" in err
        await schedules.ensure_schedules(
            temporal, Settings(maintenance_period=86_400.0), names.MAINTENANCE_SCHEDULE
        )
        try:
            async with fake.worker(temporal):
                code, out, err = await berth("maintenance", "run", "--reason", "a test")
                assert (code, err) == (0, "")
                assert out == "12 workers, 2 anomalies, 1 of them seen before; done: 1 stopped\n"
                fake.scanned = Scanned(number=0, guarded="too soon after the last pass")
                code, out, _ = await berth("maintenance", "run")
                assert out.splitlines()[1] == "held still because: too soon after the last pass"
            assert len(fake.finished) == 1
        finally:
            await schedules.ensure_schedules(
                temporal, Settings(maintenance_period=0.0), names.MAINTENANCE_SCHEDULE
            )
