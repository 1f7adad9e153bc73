"""PostgreSQL behind a real PgBouncer in transaction mode, as docs/how-to/pgbouncer.md configures
it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncConnection

from api.http.notifications import NotificationListener
from infra.database.engine import (
    Database,
    DatabaseUrlRefused,
    SingleStatement,
    is_pooled,
    open_engine,
)
from infra.database.locks import lead
from infra.database.migrate import migrate
from infra.doctor import checks, servers
from infra.doctor.servers import Check, CheckResult, run_check
from infra.local.process import accepts, free_port
from infra.local.servers import PostgresServer
from infra.settings import Settings
from tests.support.needs import server_program
from tests.support.systems.api import ServedApi, an_order, running_api
from tests.support.workers.api_worker import ScriptedWorker

pytestmark = [pytest.mark.needs("pgbouncer"), pytest.mark.timeout(120)]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "pgbouncer.md"


def configuration(folder: Path, port: int, postgres: PostgresServer, **settings: str) -> str:
    """The page's configuration for these ports; these servers have no passwords."""
    [example] = re.findall(
        r"^```ini\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    text: str = example
    for pattern, other in (
        (r"^berth = .*$", f"* = host=127.0.0.1 port={postgres.port} user={postgres.user}"),
        (r"^listen_addr = .*$", "listen_addr = 127.0.0.1"),
        (r"^listen_port = .*$", f"listen_port = {port}"),
        (r"^auth_type = .*$", "auth_type = any"),
        (r"^auth_file = .*$", f"unix_socket_dir =\nlogfile = {folder}/log\npidfile = {folder}/pid"),
        *((rf"^{name} = .*$", f"{name} = {value}") for name, value in settings.items()),
    ):
        text, count = re.subn(pattern, other, text, flags=re.MULTILINE)
        assert count == 1, pattern
    return text


@contextmanager
def started(
    folder: Path, postgres: PostgresServer, extra: str = "", **settings: str
) -> Iterator[int]:
    port = free_port()
    file = folder / "pgbouncer.ini"
    file.write_text(configuration(folder, port, postgres, **settings) + extra)
    file.chmod(0o644)
    identity = {}
    if os.geteuid() == 0:  # it refuses to run as root
        folder.chmod(0o777)
        identity = {"user": 65534, "group": 65534, "extra_groups": []}
    program = server_program("pgbouncer")
    assert program
    process = subprocess.Popen([program, "-q", str(file)], cwd=folder, **identity)  # type: ignore[call-overload]
    try:
        for _ in range(500):
            if accepts(port):
                break
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def bouncer(short_directory: Path, postgres_server: PostgresServer) -> Iterator[int]:
    with started(short_directory, postgres_server) as port:
        yield port


def through(url: str, port: int, **query: str) -> str:
    return make_url(url).set(port=port, query=query).render_as_string(hide_password=False)


@pytest.fixture
def pooled(migrated_database: str, bouncer: int) -> str:
    return through(migrated_database, bouncer, pooler="transaction")


@asynccontextmanager
async def altered_role(url: str) -> AsyncIterator[None]:
    async def run(verb: str) -> None:
        async with open_engine(url, pool_size=1) as engine, engine.begin() as connection:
            name = make_url(url).database
            for setting, value in (
                ("jit", "off"),
                ("idle_in_transaction_session_timeout", "'20s'"),
            ):
                tail = f"set {setting} = {value}" if verb == "set" else f"reset {setting}"
                await connection.execute(
                    text(f'alter role current_user in database "{name}" {tail}')
                )

    await run("set")
    try:
        yield
    finally:
        await run("reset")


async def check(which: Check, settings: Settings, **changes: object) -> CheckResult:
    return await run_check(which, settings.model_copy(update=changes), timeout=20.0)


async def test_many_statements_at_once_never_meet_each_others(pooled: str) -> None:
    """Ten server connections serve forty statements of different types; one that was prepared on
    another connection would fail, or be another client's."""
    async with Database(pooled, pool_size=20) as database:

        async def by_session(number: int) -> None:
            async with database.session(autocommit=number % 2 == 0) as session:
                for _ in range(5):
                    said = await session.scalar(
                        text(f"select cast(:it as text) || '-{number}'"), {"it": "a"}
                    )
                    assert said == f"a-{number}"

        async def by_row(number: int) -> None:
            single = SingleStatement(text(f"select cast(:it as int) + {number} as total"))
            for _ in range(5):
                row = await database.row(single, {"it": 1})
                assert row is not None
                assert row.total == number + 1

        await asyncio.gather(*(run(number) for number in range(40) for run in (by_session, by_row)))


async def test_orders_are_placed_and_settled_through_it(
    settings: Settings, pooled: str, migrated_database: str
) -> None:
    ours = {"database_url": pooled, "database_direct_url": migrated_database}
    async with running_api(settings.model_copy(update=ours)) as api:
        await place_many(api, settings.valkey_url)


async def place_many(api: ServedApi, valkey_url: str) -> None:
    worker = ScriptedWorker(valkey_url, api.user)
    await worker.start()
    async with api.client(api.key) as user:
        orders = f"/users/{api.user}/orders"
        placed = await asyncio.gather(*(user.post(orders, json=an_order(n)) for n in range(1, 31)))
        assert {answer.status_code for answer in placed} == {201}
        listed = (await user.get(orders, params={"limit": 100})).json()
        assert len(listed["orders"]) == 30
        ready = (await user.get("/readyz")).json()
        assert ready["dependencies"]["postgresql"]["state"] == "up"
    async with asyncio.timeout(10):
        await api.services.notifications.listening.wait()
    await worker.stop()


async def test_the_doctor_knows_what_it_needs(
    settings: Settings, pooled: str, migrated_database: str
) -> None:
    ours = settings.model_copy(
        update={"database_url": pooled, "database_direct_url": migrated_database}
    )
    result = await check(checks.POOLER, ours)
    assert "ALTER ROLE" in result.problem
    assert "SET jit = 'off'" in result.problem


async def test_the_doctor_is_content_with_it(
    settings: Settings,
    short_directory: Path,
    postgres_server: PostgresServer,
    migrated_database: str,
) -> None:
    async with altered_role(migrated_database):
        with started(short_directory, postgres_server) as port:
            url = through(migrated_database, port, pooler="transaction")
            ours = settings.model_copy(
                update={"database_url": url, "database_direct_url": migrated_database}
            )
            result = await check(checks.POOLER, ours)
            assert (result.problem, result.note) == ("", "a pooler in transaction mode is between")
            other = through(migrated_database, port)
            result = await check(checks.POOLER, ours, database_direct_url=other)
            assert result.problem
            result = await check(
                checks.POOLER, ours, database_direct_url=postgres_server.url("postgres")
            )
            assert "another database" in result.problem


async def test_without_the_parameter_a_pooler_is_found(
    settings: Settings, bouncer: int, migrated_database: str
) -> None:
    url = through(migrated_database, bouncer)
    result = await check(servers.POSTGRESQL, settings, database_url=url)
    assert result.wrong
    assert "add pooler=transaction" in result.problem


async def test_a_pooler_that_ignores_parameters_is_found_by_its_mode(
    settings: Settings,
    short_directory: Path,
    postgres_server: PostgresServer,
    migrated_database: str,
) -> None:
    ignored = (
        "ignore_startup_parameters = jit,plan_cache_mode,idle_in_transaction_session_timeout\n"
    )
    for mode, problem in (("transaction", True), ("session", False)):
        with started(short_directory, postgres_server, ignored, pool_mode=mode) as port:
            result = await check(
                checks.POOLER, settings, database_url=through(migrated_database, port)
            )
        assert ("a pooler in transaction mode answers" in result.problem) is problem, result
        assert problem or result.note == "a pooler in session mode is between"


async def test_what_needs_a_session_refuses_the_pooler(pooled: str) -> None:
    async def work(_: AsyncConnection) -> None:
        raise AssertionError

    with pytest.raises(DatabaseUrlRefused, match="BERTH_DATABASE_DIRECT_URL"):
        await lead(pooled, 1, work)
    with pytest.raises(DatabaseUrlRefused):
        await migrate(pooled)
    with pytest.raises(DatabaseUrlRefused):
        NotificationListener(pooled, ())


def test_a_pooler_needs_a_direct_address() -> None:
    pooled = "postgresql+asyncpg://berth@127.0.0.1:6432/berth?pooler=transaction"
    direct = "postgresql+asyncpg://berth@127.0.0.1:5432/berth"
    with pytest.raises(ValidationError, match="PostgreSQL's own address is needed"):
        Settings(database_url=pooled)
    with pytest.raises(ValidationError, match="without pooler="):
        Settings(database_url=pooled, database_direct_url=pooled)
    settings = Settings(database_url=pooled, database_direct_url=direct)
    assert settings.session_database_url == direct
    assert is_pooled(pooled)
    with pytest.raises(DatabaseUrlRefused):
        is_pooled(direct + "?pooler=statement")
