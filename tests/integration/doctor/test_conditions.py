"""`berth doctor` finds what will go wrong, at real servers: eviction, disks, clocks, limits,
dates."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from redis.asyncio import Redis
from sqlalchemy import make_url, text

from infra.database.engine import Database, open_engine
from infra.database.trading import instrument_loads
from infra.database.trading.models import InstrumentLoad
from infra.doctor import checks, measures
from infra.doctor.servers import Check, CheckResult, run_check
from infra.local.folder import DataFolder
from infra.local.servers import ValkeyServer
from infra.local.stack import running_settings
from infra.market.calendar import HOME_ZONE, Calendar, load_calendar
from infra.metrics import MetricsPage, write_valkey, write_valkey_memory
from infra.settings import LocalSettings, Settings
from infra.valkey.client import connect_valkey, reply_of
from infra.valkey.memory import MemoryUse


@pytest.fixture(scope="module")
def own_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """One whose configuration a test may spoil."""
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
async def admin(own_valkey: ValkeyServer) -> AsyncIterator[Redis]:
    defaults = {
        "maxmemory": "1gb",
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "maxclients": "10000",
    }
    async with connect_valkey(own_valkey.url) as client:
        yield client
        for name, value in defaults.items():
            await reply_of(client.config_set(name, value))


@pytest.fixture
def settings(tmp_path: Path, own_valkey: ValkeyServer, migrated_database: str) -> Settings:
    return Settings(data_dir=tmp_path, valkey_url=own_valkey.url, database_url=migrated_database)


async def check_with(check: Check, settings: Settings, **changes: object) -> CheckResult:
    return await run_check(check, settings.model_copy(update=changes), timeout=20.0)


HEALTHY = (
    checks.VALKEY_EVICTION,
    checks.VALKEY_PERSISTENCE,
    checks.VALKEY_MEMORY,
    checks.CLOCKS,
    checks.DISKS,
    checks.LIMITS,
    checks.CERTIFICATES,
)


async def test_servers_as_berth_up_starts_them_are_healthy(settings: Settings) -> None:
    for check in HEALTHY:
        assert (await check_with(check, settings)).problem == "", check.name


async def test_a_valkey_that_evicts(settings: Settings, admin: Redis) -> None:
    await reply_of(admin.config_set("maxmemory-policy", "allkeys-lru"))
    result = await check_with(checks.VALKEY_EVICTION, settings)
    assert (result.wrong, "is allkeys-lru" in result.problem) == (True, True)
    assert "CONFIG SET maxmemory-policy noeviction" in result.problem


async def test_a_valkey_that_keeps_nothing(settings: Settings, admin: Redis) -> None:
    await reply_of(admin.config_set("appendonly", "no"))
    result = await check_with(checks.VALKEY_PERSISTENCE, settings)
    assert (result.wrong, "neither an append-only file nor a replica" in result.problem) == (
        True,
        True,
    )


async def test_a_valkey_that_is_almost_full(settings: Settings, admin: Redis) -> None:
    used = (await admin.info("memory"))["used_memory"]
    await reply_of(admin.config_set("maxmemory", str(int(used * 1.1))))
    result = await check_with(checks.VALKEY_MEMORY, settings)
    assert "new orders and workers are refused" in result.problem


async def test_a_valkey_without_a_limit_is_measured_by_its_hosts_memory_as_by_the_doctor(
    settings: Settings, admin: Redis
) -> None:
    await reply_of(admin.config_set("maxmemory", "0"))
    page = MetricsPage()
    await write_valkey(page, admin)
    await write_valkey_memory(page, admin)
    assert page.samples("berth_valkey_unlimited") == [({}, 1)]
    [(_, ratio)] = page.samples("berth_valkey_memory_used_ratio")
    assert 0 < ratio < 1
    result = await check_with(checks.VALKEY_MEMORY, settings)
    assert "it has no maxmemory" in result.problem
    info = {"used_memory": 15 * 2**30, "maxmemory": 0, "total_system_memory": 16 * 2**30}
    assert measures.ValkeyState.of(info).memory.share == MemoryUse.of(info).share == 15 / 16


def test_a_valkey_whose_writes_failed() -> None:
    state = measures.ValkeyState.of(
        {"aof_last_write_status": "err", "rdb_last_bgsave_status": "ok"}
    )
    assert state.failed_saves == ("append-only file",)


async def test_few_connections_are_left(settings: Settings, admin: Redis) -> None:
    await reply_of(admin.config_set("maxclients", "2"))
    result = await check_with(checks.LIMITS, settings)
    assert re.search(r"100% of the connections of Valkey are in use", result.problem), result


async def test_a_clock_that_is_off(settings: Settings) -> None:
    name = make_url(settings.database_url).database
    ahead = (
        "create schema ahead",
        "create function ahead.clock_timestamp() returns timestamptz language sql as "
        "$$ select pg_catalog.clock_timestamp() + interval '5 s' $$",
        f'alter database "{name}" set search_path = ahead, pg_catalog, public',
    )
    async with (
        open_engine(settings.database_url, pool_size=1) as engine,
        engine.begin() as connection,
    ):
        for statement in ahead:
            await connection.execute(text(statement))
    result = await check_with(checks.CLOCKS, settings)
    assert "PostgreSQL's by 5.0 s" in result.problem
    assert "Valkey" not in result.problem


async def test_a_slow_answer_is_no_clock_that_is_off() -> None:
    async def read() -> float:
        return datetime.now(UTC).timestamp()

    assert await measures.clock_offset(read) == 0.0


def test_each_disk_is_measured_once(settings: Settings) -> None:
    (settings.data_dir / "valkey").mkdir()
    [disk] = measures.read_disks(
        settings.model_copy(update={"orchestrator_key_dir": settings.data_dir})
    )
    assert disk.folder == settings.data_dir
    assert not disk.is_low
    assert measures.DiskSpace(disk.folder, 10, 1.0).is_low
    assert measures.DiskSpace(disk.folder, 2**40, 0.001).is_low


def test_the_calendar_ends_after_its_last_day_or_that_of_an_operator(tmp_path: Path) -> None:
    table = load_calendar()
    day = datetime.fromtimestamp(measures.calendar_end(table), UTC) + timedelta(hours=8)
    assert day.date() == table.last + timedelta(days=1)
    later = table.last + timedelta(days=90)
    longer = Calendar(holidays=table.holidays, last=table.last, changed={later: None})
    assert longer.known_until == later


async def test_a_calendar_that_ends_soon(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    last = load_calendar().last
    now = datetime.combine(last - timedelta(days=59), datetime.min.time(), UTC).timestamp()
    monkeypatch.setattr("time.time", lambda: now)
    result = await check_with(checks.CALENDAR, settings)
    assert f"known until {last}" in result.problem
    assert "BERTH_CALENDAR_FILE" in result.problem
    changes = tmp_path / "changes.json"
    changes.write_text(f'{{"{last + timedelta(days=90)}": "closed"}}')
    assert not (await check_with(checks.CALENDAR, settings, calendar_file=str(changes))).problem


def certificate(path: Path, days: int) -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "berth")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=30))
        .not_valid_after(now + timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(made.public_bytes(Encoding.PEM))
    return str(path)


async def test_certificates_that_settings_and_urls_name(settings: Settings, tmp_path: Path) -> None:
    late, good = certificate(tmp_path / "late.pem", 3), certificate(tmp_path / "good.pem", 300)
    assert not (await check_with(checks.CERTIFICATES, settings, temporal_ca_file=good)).problem
    url = f"rediss://127.0.0.1:1/0?ssl_ca_certs={late}"
    result = await check_with(checks.CERTIFICATES, settings, temporal_ca_file=good, valkey_url=url)
    ends = date.today() + timedelta(days=3)
    assert (
        result.wrong,
        "of BERTH_VALKEY_URL (ssl_ca_certs) ends on" in result.problem,
        f"{ends:%Y-%m}" in result.problem,
    ) == (True,) * 3
    url = f"{settings.database_url}?sslmode=verify-full&sslrootcert={tmp_path}/none.pem"
    result = await check_with(checks.CERTIFICATES, settings, database_url=url)
    assert "BERTH_DATABASE_URL (sslrootcert) cannot be read" in result.problem


def test_the_doctor_finds_the_running_local_system_unless_settings_name_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VALKEY_URL", "DATABASE_URL", "TEMPORAL_ADDRESS"):
        monkeypatch.delenv(f"BERTH_{name}", raising=False)
    monkeypatch.setenv("BERTH_DATA_DIR", str(tmp_path / "data"))
    settings, said = running_settings()
    assert f"no `berth up` is ready in {tmp_path}/data" in said
    folder = DataFolder(tmp_path / "data", min_free=0).open()
    try:
        folder.record_api_url(
            "http://127.0.0.1:1", LocalSettings(valkey_port=17777).model_dump_json()
        )
        settings, said = running_settings()
        assert said == f"looking at the `berth up` of {tmp_path}/data"
        assert ":17777/" in settings.valkey_url
        monkeypatch.setenv("BERTH_VALKEY_URL", "redis://valkey:6379/0")
        settings, said = running_settings()
        assert (settings.valkey_url, "that the settings" in said) == ("redis://valkey:6379/0", True)
    finally:
        folder.close()


async def test_a_list_of_instruments_that_is_old_or_missing(
    settings: Settings, migrated_database: str
) -> None:
    assert "no account lists" in (await check_with(checks.INSTRUMENTS, settings)).note
    database = Database(migrated_database)
    today = datetime.now(HOME_ZONE).date()
    async with database.session() as session:
        await session.execute(text("insert into users (id) values ('lists')"))
        await session.execute(
            text(
                "insert into broker_accounts (user_id, account_id, broker, broker_type, simulation)"
                " values ('lists', 'main', 'paper', 'stock', true)"
            )
        )
        await instrument_loads.set_source(session, "paper", "lists", "main", actor="op")
    problem = (await check_with(checks.INSTRUMENTS, settings)).problem
    assert "no list of paper, market stock, was loaded" in problem
    for day, is_old in ((today, False), (today - timedelta(days=20), True)):
        async with database.session() as session:
            await session.execute(text("delete from instrument_loads"))
            session.add(
                InstrumentLoad(
                    broker="paper",
                    market="stock",
                    markets=["stock"],
                    user_id="lists",
                    account_id="main",
                    trading_day=day,
                    state="loaded",
                )
            )
        result = await check_with(checks.INSTRUMENTS, settings)
        assert (f"the list of paper, market stock, is of {day}" in result.problem) == is_old
        assert (result.problem == "") != is_old
    async with database.session() as session:
        await session.execute(text("delete from broker_accounts"))
    problem = (await check_with(checks.INSTRUMENTS, settings)).problem
    assert "account main of lists, which lists paper, market stock, was removed" in problem
    assert f"the list of paper, market stock, is of {today - timedelta(days=20)}" in problem
    await database.close()
