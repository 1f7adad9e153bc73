"""What Prometheus reads of workers, claims, orders and maintenance."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from activities.events.stream import GROUPS
from infra import metrics
from infra.compose.temporal_tokens import SYSTEM_ADMIN, ensure_tokens
from infra.database.dead_letters import DeadLetter, DeadLetters
from infra.database.models import Order, PersonMatch
from infra.database.trading.models import Reconciliation
from infra.database.workers import passes
from infra.market.calendar import load_calendar
from infra.settings import Settings
from tests.support.api.operators import read_metrics
from tests.support.proxies.temporal_tls import CertificateAuthority
from tests.support.systems.api import ServedApi
from worker_runtime.protocol import keys


async def test_a_system_without_workers_has_metrics(api: ServedApi) -> None:
    told = await read_metrics(api)
    assert told['berth_pool_ready{pool="default"}'] == 0
    assert told['berth_orders_unsettled{state="unknown"}'] == 0
    assert not any(name.startswith("berth_maintenance") for name in told)


async def test_only_operators_see_them(api: ServedApi) -> None:
    async with api.client(api.key) as user:
        assert (await user.get("/metrics")).status_code == 403


async def test_metrics_have_free_workers_orders_differences_and_the_last_maintenance(
    api: ServedApi,
) -> None:
    await api.services.valkey.zadd(keys.pool_ready("default"), {"w1": 1, "w2": 2})
    await api.services.valkey.zadd(keys.pool_wait_queue("default"), {"u": 1})
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
                attention="look",
                generation="g",
                deadline_at=datetime.now(UTC),
                origin="api",
            )
        )
        session.add(
            Reconciliation(
                user_id=api.user, account_id="main", epoch=1, differences={}, blocks=True
            )
        )
        pair = {"first_user": api.user, "second_user": api.user}
        session.add(PersonMatch(broker="paper", persons=["1-hash"], **pair))
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
    letter = DeadLetter(kind="event", source="w1", user_id="u1", reason="why", message=b"mac x")
    await DeadLetters(api.services.database).put([letter])
    async with api.client(api.admin_key) as admin:
        listed = (await admin.get("/dead-letters")).json()["letters"]
    assert [(row["kind"], row["source"], row["text"], row["count"]) for row in listed] == [
        ("event", "w1", "x", 1),
        ("order", "", None, 1),
    ]
    told = await read_metrics(api)
    assert told['berth_dead_letters{kind="event"}'] == told['berth_dead_letters{kind="order"}'] == 1
    assert told['berth_pool_ready{pool="default"}'] == 2
    assert told['berth_pool_waiting{pool="default"}'] == 1
    assert told['berth_orders_unsettled{state="unknown"}'] == 1
    assert told['berth_orders_unsettled{state="needs_attention"}'] == 1
    assert told['berth_differences_open{blocks="true"}'] == 1
    assert told["berth_person_matches_open"] == 1
    assert told["berth_maintenance_workers"] == 7
    assert told["berth_maintenance_guarded"] == 0
    assert told["berth_maintenance_seconds"] >= told["berth_maintenance_scan_seconds"] == 0.25
    assert told['berth_maintenance_found{anomaly="orphan_task"}'] == 1
    assert told['berth_maintenance_outcomes{outcome="stopped"}'] == 1
    assert 0 <= told["berth_maintenance_age_seconds"] < 60


async def test_a_group_that_handles_no_events_falls_behind(api: ServedApi) -> None:
    valkey: Any = api.services.valkey
    old = f"{int(datetime.now(UTC).timestamp() * 1000) - 60_000}-1"
    for group, stream in GROUPS.items():
        await valkey.xadd(stream, {"e": "1"}, id=old)
        await valkey.xgroup_create(stream, group, id="0")
    await valkey.xreadgroup("recorder", "one", {keys.EVENTS: ">"})
    for group, stream in GROUPS.items():  # with and without an entry that was read and not handled
        await valkey.xadd(stream, {"e": "2"})
        told = await read_metrics(api)
        assert told[f'berth_event_stream_waiting{{group="{group}"}}'] == 2
        assert 59 < told[f'berth_event_stream_lag_seconds{{group="{group}"}}'] < 120
    await valkey.xreadgroup("relay", "one", {keys.CHANGES: ">"})
    await valkey.xack(keys.CHANGES, "relay", old)
    assert (await read_metrics(api))['berth_event_stream_lag_seconds{group="relay"}'] < 10


def test_the_metrics_have_the_end_of_each_certificate(tmp_path: Path) -> None:
    page = metrics.MetricsPage()
    authority = str(CertificateAuthority(tmp_path, "ca").certificate)
    ensure_tokens(tmp_path / "jwks.json", {tmp_path / "temporal.jwt": SYSTEM_ADMIN})
    settings = Settings(
        temporal_ca_file=authority,
        temporal_cert_file=str(tmp_path / "missing.pem"),
        temporal_api_key_file=str(tmp_path / "temporal.jwt"),
    )
    metrics.write_host(page, settings, load_calendar())
    [family] = [family for family in page.collect() if "certificate" in family.name]
    ends = {sample.labels["setting"]: sample.value for sample in family.samples}
    assert ends["BERTH_TEMPORAL_CA_FILE"] > datetime.now(UTC).timestamp()
    assert ends["BERTH_TEMPORAL_CERT_FILE"] == 0
    assert ends["BERTH_TEMPORAL_API_KEY_FILE"] > datetime.now(UTC).timestamp() + 86_400
    assert family.name == "berth_certificate_expires_timestamp_seconds"
