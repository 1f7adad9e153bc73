"""What `berth backup` and `berth restore` refuse, and that a refusal changes nothing."""

from pathlib import Path

import pytest
from redis import Redis
from sqlalchemy import text

from infra.database import audit, users
from infra.database.engine import Database
from infra.database.trading import switches
from infra.local.process import free_port
from infra.local.servers import ValkeyServer
from tests.commands import CommandForker
from worker_runtime.protocol import keys

pytestmark = pytest.mark.timeout(60)

NO_VALKEY = "redis://127.0.0.1:1/0"


def environment(database: str, valkey: str, folder: Path) -> dict[str, str]:
    return {
        "BERTH_DATABASE_URL": database,
        "BERTH_VALKEY_URL": valkey,
        "BERTH_NODE_SOCKET": str(folder / "nobody.sock"),
        "BERTH_MASTER_KEY_FILE": str(folder / "master.key"),
    }


async def test_a_backup_holds_the_data_and_the_keys_and_only_we_may_read_it(
    migrated_database: str, tmp_path: Path, commands: CommandForker
) -> None:
    (tmp_path / "master.key").write_text("secret")
    (tmp_path / "master-0123.key").write_text("old secret")  # of a rotation that is not done
    (own := tmp_path / "orchestrator").mkdir()
    (own / "master.key").write_text("another one, which no setting names")
    (own / "signing.key").write_text("theirs")
    named = environment(migrated_database, NO_VALKEY, tmp_path) | {"BERTH_ORCHESTRATOR_KEY_DIR": str(own)}
    for _ in range(2):
        done = commands.run("backup", str(tmp_path / "b"), **named)
        assert done.code == 0, done.err
    first, second = sorted((tmp_path / "b").iterdir())
    assert done.out.strip() == f"made {second}"
    assert (first / "base" / "PG_VERSION").exists()
    assert (second / "keys" / "master.key").read_text() == "secret"
    assert (second / "keys" / "master-0123.key").read_text() == "old secret"
    assert (second / "keys" / "signing.key").read_text() == "theirs"
    assert (second / "keys" / "master.key").stat().st_mode & 0o077 == 0
    assert second.stat().st_mode & 0o077 == 0
    database = Database(migrated_database)
    async with database.session() as session:
        entries = await audit.list_entries(session, action="database.backup_requested", limit=5)
        assert [entry.data["folder"] for entry in entries] == [str(tmp_path / "b")] * 2
    await database.close()


def test_two_keys_of_one_name_are_refused_before_anything_is_backed_up(
    migrated_database: str, tmp_path: Path, commands: CommandForker
) -> None:
    (other := tmp_path / "other").mkdir()
    for folder in (tmp_path, other):
        (folder / "master.key").write_text(folder.name)
    named = environment(migrated_database, NO_VALKEY, tmp_path)
    done = commands.run(
        "backup", str(tmp_path / "b"), **named, BERTH_MESSAGE_KEY_FILE=str(other / "master.key")
    )
    assert done.code == 1
    assert "have one name" in done.err
    assert not (tmp_path / "b").exists()


def test_a_backup_that_was_not_made_does_not_look_like_one(
    services_database: str, tmp_path: Path, commands: CommandForker
) -> None:
    """The role of the services may not replicate; a server may be away."""
    away = f"postgresql+asyncpg://berth@127.0.0.1:{free_port()}/berth"
    for url, reason in ((services_database, "REPLICATION"), (away, "audit trail")):
        done = commands.run("backup", str(tmp_path / "b"), **environment(url, NO_VALKEY, tmp_path))
        assert done.code == 1
        assert reason in done.err
    assert {path.suffix for path in (tmp_path / "b").iterdir()} == {".partial"}
    (tmp_path / "file").touch()
    done = commands.run(
        "backup", str(tmp_path / "file"), **environment(services_database, NO_VALKEY, tmp_path)
    )
    assert (done.code, "exists" in done.err) == (1, True)


async def test_a_restore_begins_only_where_it_can_go_on(
    migrated_database: str,
    empty_database: str,
    valkey_server: ValkeyServer,
    tmp_path: Path,
    commands: CommandForker,
) -> None:
    database = Database(migrated_database)
    async with database.session() as session:
        await users.create_user(session, "alice")

    def refused(url: str, valkey: str = valkey_server.url) -> str:
        done = commands.run("restore", "--reason", "x", **environment(url, valkey, tmp_path))
        assert done.code == 1
        return str(done.err)

    assert "stop the API and the orchestrators first" in refused(migrated_database)  # we are connected
    await database.close()
    assert "berth migrate" in refused(empty_database)
    assert "PostgreSQL" in refused(f"postgresql+asyncpg://berth@127.0.0.1:{free_port()}/berth")
    assert "run it again" in refused(migrated_database, f"redis://127.0.0.1:{free_port()}/0")
    database = Database(migrated_database)
    async with database.session() as session:
        assert await switches.list_switches(session) == []
    await database.close()


@pytest.mark.usefixtures("valkey_client")
async def test_a_restore_that_cannot_stop_the_workers_halts_trading_and_moves_nothing(
    migrated_database: str, valkey_server: ValkeyServer, tmp_path: Path, commands: CommandForker
) -> None:
    with Redis.from_url(valkey_server.url) as client:
        client.set(keys.GENERATION, "before")
    done = commands.run(
        "restore", "--reason", "x", **environment(migrated_database, valkey_server.url, tmp_path)
    )
    assert done.code == 1
    assert "node" in done.err
    with Redis.from_url(valkey_server.url) as client:
        assert client.get(keys.GENERATION) == b"before"
    database = Database(migrated_database)
    async with database.session() as session:
        (halted,) = await switches.list_switches(session)
        assert (halted.scope, halted.state, halted.reason) == ("all", "halted", "x")
        assert await session.scalar(text("select last_value from epoch_floor")) == 0
        assert (
            await session.scalar(text("select count(*) from audit_trail where action = 'database.restored'"))
            == 0
        )
    await database.close()
