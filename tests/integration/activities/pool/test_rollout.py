"""Rollouts under load: no claim fails, a bad version is put back, users move with their
sessions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select
from temporalio.client import Client

from activities.rollout.replacement import QUIET_WHEN_CLOSED_S, RolloutActivities
from infra import tasks
from infra.database.models import AuditEntry
from infra.local.servers import TemporalServer
from infra.market import calendar
from tests.support.activities.harness import ActivityHarness
from tests.support.activities.listener import ListenerWorkflow, listening
from tests.support.activities.pool import PoolHarness
from tests.support.workers.pool_worker import POOL
from workflows import names
from workflows.rollout.messages import AbortRollout, AskToMove, RolloutPhase
from workflows.rollout.workflow import RolloutWorkflow
from workflows.user_worker.messages import WorkerState

#: Free workers that the pool keeps.
READY = 4


@pytest.fixture
async def pool_harness(
    harness: ActivityHarness, temporal_server: TemporalServer
) -> AsyncIterator[PoolHarness]:
    harness.settings = harness.settings.model_copy(update={"worker_version": "1"})
    temporal = await Client.connect(temporal_server.address)
    made = PoolHarness(harness, temporal)
    async with made.serving():
        yield made


async def claims(
    pool_harness: PoolHarness, users: list[str], pause: float, failed: list[str]
) -> None:
    """One user after the other, at a steady rate; who fails is noted."""

    async def claim(user_id: str) -> None:
        try:
            await pool_harness.ensure(user_id)
        except Exception as error:  # every failure counts, whatever it is
            failed.append(f"{user_id}: {error!r}")

    under_way = []
    for user_id in users:
        under_way.append(asyncio.create_task(claim(user_id)))
        await asyncio.sleep(pause)
    await asyncio.gather(*under_way)


async def test_users_are_asked_in_turn_during_the_rollout_of_another_pool(
    harness: ActivityHarness, temporal_server: TemporalServer
) -> None:
    temporal = await Client.connect(temporal_server.address)
    moving = RolloutActivities(
        harness.client,
        harness.database,
        harness.launcher,
        temporal,
        calendar.MarketCalendars(),
        harness.settings,
    )
    ask = AskToMove(pool=POOL, version="2", deadline=0.0, quiet=60.0, most=1)
    async with AsyncExitStack() as stack:
        told = []
        for _ in range(2):
            user = await harness.user()
            worker = await harness.worker(f"p-of-{user}")
            claim = harness.claim(user, f"claim-{user}")
            await asyncio.gather(harness.run(harness.claiming.claim_worker, claim), worker.serve())
            told.append(
                await stack.enter_async_context(listening(temporal, names.user_worker_id(user)))
            )
        for asked in (1, 2):
            assert await harness.run(moving.ask_to_move, ask) == asked
            await harness.run(moving.ask_to_move, replace(ask, pool="another"))
        assert [len(await listener.query(ListenerWorkflow.heard)) for listener in told] == [1, 1]


async def test_a_user_of_another_brokers_stock_market_moves_when_that_market_is_closed(
    harness: ActivityHarness, temporal_server: TemporalServer, tmp_path: Path
) -> None:
    """Both accounts trade a market named `stock`; only one of the two is open."""
    days = tmp_path / "days.json"
    now = datetime.now(calendar.HOME_ZONE)
    near = [(now + timedelta(days=later)).date().isoformat() for later in (0, 1)]
    hours = {"paper": "00:00-23:59:59.999999", "shioaji": "closed"}
    days.write_text(json.dumps({name: dict.fromkeys(near, text) for name, text in hours.items()}))
    temporal = await Client.connect(temporal_server.address)
    moving = RolloutActivities(
        harness.client,
        harness.database,
        harness.launcher,
        temporal,
        calendar.MarketCalendars(days),
        harness.settings,
    )
    quiet = {}
    async with AsyncExitStack() as stack:
        told = {}
        for broker in hours:
            user = await harness.user(broker=broker)
            worker = await harness.worker(f"p-of-{user}")
            claim = harness.claim(user, f"claim-{user}")
            await asyncio.gather(harness.run(harness.claiming.claim_worker, claim), worker.serve())
            told[broker] = await stack.enter_async_context(
                listening(temporal, names.user_worker_id(user))
            )
        ask = AskToMove(pool=POOL, version="2", deadline=0.0, quiet=60.0, most=9)
        assert await harness.run(moving.ask_to_move, ask) == 2
        for broker, listener in told.items():
            [(_, message)] = await listener.query(ListenerWorkflow.heard)
            quiet[broker] = message["quiet"]
    assert quiet == {"paper": 60.0, "shioaji": QUIET_WHEN_CLOSED_S}


@pytest.mark.timeout(240)
async def test_no_claim_fails_while_a_pool_goes_to_another_version_and_its_users_move(
    pool_harness: PoolHarness,
) -> None:
    users = [await pool_harness.harness.user() for _ in range(30)]
    failed: list[str] = []
    await pool_harness.start_pool(READY)
    for user_id in users[:4]:
        await pool_harness.starter.ensure_active(user_id)
    loaded = asyncio.create_task(claims(pool_harness, users[4:], 0.15, failed))
    rollout = await pool_harness.start_rollout("2")
    result = await rollout.result()
    await loaded
    assert result.phase == RolloutPhase.DONE
    assert failed == []
    await pool_harness.until_ready({"2": READY})
    # The last one's old worker is gone when the rollout is done; the new one may still be on its
    # way.
    for user_id in users[:4]:
        await pool_harness.starter.ensure_active(user_id)
        view = await pool_harness.view(user_id)
        assert view.worker is not None
        assert view.worker.version == "2"


@pytest.mark.timeout(240)
async def test_free_workers_are_ended_as_new_ones_are_ready(pool_harness: PoolHarness) -> None:
    await pool_harness.start_pool(READY)
    rollout = await pool_harness.start_rollout("2")
    result = await rollout.result()
    assert (result.phase, result.retired) == (RolloutPhase.DONE, READY)
    await pool_harness.until_ready({"2": READY})
    assert {task.version for task in await pool_harness.harness.launcher.list()} == {"2"}


@pytest.mark.timeout(240)
async def test_a_version_that_never_becomes_ready_is_put_back_by_itself(
    pool_harness: PoolHarness,
) -> None:
    pool_harness.bad = {"2"}
    users = [await pool_harness.harness.user() for _ in range(6)]
    failed: list[str] = []
    pool = await pool_harness.start_pool(READY)
    loaded = asyncio.create_task(claims(pool_harness, users[:2], 0.2, failed))
    rollout = await pool_harness.start_rollout("2")
    result = await rollout.result()
    await loaded
    assert result.phase == RolloutPhase.ROLLED_BACK
    assert "no worker became ready" in result.reason
    assert failed == []
    assert (await pool.query("view"))["release"]["version"] == ""
    await pool_harness.until_ready({"1": READY})
    await claims(pool_harness, users[2:], 0.1, failed)
    assert failed == []
    async with pool_harness.harness.database.session() as session:
        told = (await session.scalars(select(AuditEntry).order_by(AuditEntry.id))).all()
    assert [entry.data["event"] for entry in told] == [
        "begins",
        "is rolled back",
        "ends: rolled_back",
    ]


@pytest.mark.timeout(240)
async def test_a_version_that_hangs_before_it_is_ready_goes_back_and_no_user_waits_for_it(
    pool_harness: PoolHarness,
) -> None:
    pool_harness.hanging = {"2"}
    users = [await pool_harness.harness.user() for _ in range(8)]
    failed: list[str] = []
    await pool_harness.start_pool(READY, launch_timeout=3.0)
    floor = asyncio.create_task(pool_harness.watch_floor(READY))
    rollout = await pool_harness.start_rollout("2")
    # More than were free: as a rule some are launched for their user.
    await claims(pool_harness, users, 0.4, failed)
    result = await rollout.result()
    await pool_harness.until_ready({"1": READY})
    await tasks.cancel_tasks(floor)
    assert (result.phase, result.retired) == (RolloutPhase.ROLLED_BACK, 0)
    assert "was not ready within 3 s" in result.reason
    assert failed == []
    assert pool_harness.shortage == 0
    cold = [
        spec.config for spec in pool_harness.harness.launcher.launched if spec.config.reserved_claim
    ]
    assert {config.version for config in cold} <= {"1"}


@pytest.mark.timeout(240)
async def test_a_version_that_freezes_when_it_is_claimed_goes_back_and_its_users_are_served(
    pool_harness: PoolHarness,
) -> None:
    pool_harness.frozen = {"2"}
    pool_harness.patience(5.0)
    users = [await pool_harness.harness.user() for _ in range(6)]
    failed: list[str] = []
    await pool_harness.start_pool(READY)
    floor = asyncio.create_task(pool_harness.watch_floor(READY))
    rollout = await pool_harness.start_rollout("2", proof=300.0)
    async with pool_harness.hearing_exits():
        await pool_harness.until_ready({"2": READY})  # all that is to be seen from outside is well
        await claims(pool_harness, users, 0.1, failed)
        result = await rollout.result()
        await pool_harness.until_ready({"1": READY})
    await tasks.cancel_tasks(floor)
    assert result.phase == RolloutPhase.ROLLED_BACK
    assert result.reason.endswith("users in a row got a worker that did not serve them")
    assert failed == []
    assert pool_harness.shortage == 0
    for user_id in users:
        worker = (await pool_harness.view(user_id)).worker
        assert worker is not None
        assert worker.version == "1"


@pytest.mark.timeout(240)
async def test_an_operator_takes_a_rollout_back_while_a_user_still_trades(
    pool_harness: PoolHarness,
) -> None:
    user_id = await pool_harness.harness.user()
    await pool_harness.start_pool(2)
    await pool_harness.starter.ensure_active(user_id)
    pool_harness.bad = {"2"}
    rollout = await pool_harness.start_rollout("2")
    await rollout.signal(RolloutWorkflow.abort, AbortRollout(reason="not today"))
    result = await rollout.result()
    assert (result.phase, result.reason) == (RolloutPhase.ROLLED_BACK, "not today")
    await pool_harness.until_ready({"1": 2})
    assert (await pool_harness.view(user_id)).state == WorkerState.ACTIVE
