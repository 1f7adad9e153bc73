"""What Prometheus is told of workers, claims, orders and maintenance."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from infra.database.models import Order, WorkerSession
from infra.database.workers import passes
from tests.integration.api.conftest import ServedApi
from worker_runtime.protocol import keys


async def samples(api: ServedApi) -> dict[str, float]:
    async with api.client(api.admin_key) as admin:
        answer = await admin.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    lines = [line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


async def test_an_empty_house_has_metrics(api: ServedApi) -> None:
    told = await samples(api)
    assert told['berth_pool_ready{pool="default"}'] == 0
    assert told['berth_orders_unsettled{state="unknown"}'] == 0
    assert not any(name.startswith("berth_maintenance") for name in told)


async def test_only_operators_see_them(api: ServedApi) -> None:
    async with api.client(api.key) as user:
        assert (await user.get("/metrics")).status_code == 403


async def test_claims_are_told_apart_by_warm_and_cold(api: ServedApi) -> None:
    now = datetime.now(UTC)
    async with api.services.database.session() as session:
        for epoch, (warm, seconds, age) in enumerate(
            [(True, 0.04, 10), (True, 0.06, 20), (False, 2.5, 30), (True, 9.0, 3600)], start=1
        ):
            claimed = now - timedelta(seconds=age)
            session.add(
                WorkerSession(
                    claim_id=f"c{epoch}",
                    user_id=api.user,
                    epoch=epoch,
                    pool="default",
                    worker_id=f"w{epoch}",
                    warm=warm,
                    assigned_at=claimed - timedelta(seconds=seconds),
                    claimed_at=claimed,
                    connected_at=claimed,
                    ended_at=None if epoch == 2 else now,
                )
            )
    told = await samples(api)
    recent = "berth_claims_recent"
    assert told[f'{recent}{{pool="default",kind="warm"}}'] == 2
    assert told[f'{recent}{{pool="default",kind="cold"}}'] == 1
    median = told['berth_claim_recent_seconds{pool="default",kind="warm",quantile="0.5"}']
    assert median == pytest.approx(0.05)
    assert told['berth_workers_in_use{pool="default"}'] == 1


async def test_free_workers_unsettled_orders_and_the_last_maintenance_are_told(api: ServedApi) -> None:
    await api.services.valkey.zadd(keys.pool_ready("default"), {"w1": 1, "w2": 2})
    odd = passes.Suspect(kind="orphan_task", why="w", worker_id="w9")
    async with api.services.database.session() as session:
        session.add(
            Order(
                id=uuid.uuid4(),
                user_id=api.user,
                account_id="main",
                client_order_id="c-1",
                fingerprint="f",
                symbol="2330",
                side="buy",
                quantity=1,
                price_type="MKT",
                time_in_force="IOC",
                tag="000001",
                trading_day=datetime.now(UTC).date(),
                state="unknown",
                generation="g",
                deadline_at=datetime.now(UTC),
                origin="api",
            )
        )
        number = await passes.begin_pass(
            session,
            place=passes.PassBasis(),
            boot="b",
            boottime=1.0,
            scanned=7,
            scan_seconds=0.25,
            guarded="",
            suspects=[odd],
            confirmed=[odd],
        )
        await passes.finish_pass(session, number, {"stopped": 1})
    told = await samples(api)
    assert told['berth_pool_ready{pool="default"}'] == 2
    assert told['berth_orders_unsettled{state="unknown"}'] == 1
    assert told["berth_maintenance_workers"] == 7
    assert told["berth_maintenance_guarded"] == 0
    assert told["berth_maintenance_seconds"] >= told["berth_maintenance_scan_seconds"] == 0.25
    assert told['berth_maintenance_found{anomaly="orphan_task"}'] == 1
    assert told['berth_maintenance_outcomes{outcome="stopped"}'] == 1
    assert 0 <= told["berth_maintenance_age_seconds"] < 60
