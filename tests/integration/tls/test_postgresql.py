"""PostgreSQL behind TLS: all three ways in which we connect to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import Integer, bindparam, make_url, select, text

from api.http.notifications import NotificationListener
from infra.database.engine import (
    Database,
    DatabaseUnavailable,
    DatabaseUrlRefused,
    SingleStatement,
    parse_url,
)
from infra.local.servers import PostgresServer
from tests.support.proxies.tls import TlsFront

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def listening(url: str) -> AsyncIterator[NotificationListener]:
    listener = NotificationListener(url, ("berth_test",))
    task = asyncio.create_task(listener.run())
    yield listener
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def through(front: TlsFront, url: str, **query: str) -> str:
    made = make_url(url).set(host="localhost", port=front.port).update_query_dict(query)
    return made.render_as_string(hide_password=False)


async def test_sessions_single_statements_and_notices_come_through(
    postgres_server: PostgresServer, migrated_database: str, tmp_path: Path
) -> None:
    with TlsFront(postgres_server.port, tmp_path, postgres=True) as front:
        url = through(
            front, migrated_database, sslmode="verify-full", sslrootcert=str(front.authority)
        )
        database = Database(url)
        async with database.session() as session:
            assert await session.scalar(text("select 1")) == 1
        row = await database.row(
            SingleStatement(select(bindparam("n", 7, Integer).label("seven"))), {"n": 7}
        )
        assert row is not None and row.seven == 7  # noqa: PT018
        async with listening(url) as listener:
            await asyncio.wait_for(listener.listening.wait(), 10)
            with listener.expect("berth_test", "key") as heard:
                heard.clear()
                async with database.session() as session:
                    await session.execute(text("select pg_notify('berth_test', 'key')"))
                await asyncio.wait_for(heard.wait(), 10)
        await database.close()
        assert front.secured == 3


async def test_a_server_that_cannot_prove_its_name_is_not_trusted(
    postgres_server: PostgresServer, migrated_database: str, tmp_path: Path
) -> None:
    with TlsFront(postgres_server.port, tmp_path, postgres=True, name="elsewhere.example") as front:
        for authorities in (str(front.authority), "system"):
            database = Database(through(front, migrated_database, sslrootcert=authorities))
            with pytest.raises(DatabaseUnavailable, match=r"CertificateError|CertVerification"):
                async with database.session():
                    pass
            await database.close()


async def test_a_server_without_tls_gets_no_password(postgres_server: PostgresServer) -> None:
    url = make_url(postgres_server.url("postgres")).update_query_dict({"sslrootcert": "system"})
    database = Database(url.render_as_string(hide_password=False))
    with pytest.raises(DatabaseUnavailable):
        async with database.session():
            pass
    await database.close()


@pytest.mark.parametrize(
    "query",
    ["sslmode=require&sslrootcert=system", "sslrootcert=/nowhere/ca.pem"],
    ids=["weaker", "missing"],
)
def test_tls_that_would_check_less_is_refused(query: str) -> None:
    with pytest.raises(DatabaseUrlRefused):
        parse_url(f"postgresql+asyncpg://berth@db/berth?{query}")


def test_the_other_parameters_stay() -> None:
    url, tls = parse_url(
        "postgresql+asyncpg://u:p@db:5433/berth?sslmode=require&target_session_attrs=read-write"
    )
    assert tls == {"ssl": "require"}
    assert dict(url.query) == {"target_session_attrs": "read-write"}
