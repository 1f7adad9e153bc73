"""What `berth backup` and `berth restore` refuse, and that a refusal changes nothing."""

from pathlib import Path

import pytest
from redis import Redis
from sqlalchemy import text

from infra.database import api_keys, audit, users
from infra.database.engine import Database
from infra.database.trading import switches
from infra.local.process import free_port
from infra.local.servers import ValkeyServer
from infra.recovery.restore import end_api_access
from infra.vault.api_tokens import ApiTokens
from infra.vault.secret_versions import create_versions
from tests.support.commands import CommandForker
from worker_runtime.protocol import keys

pytestmark = pytest.mark.timeout(120)

NO_VALKEY = "redis://127.0.0.1:1/0"


def environment(database: str, valkey: str, folder: Path) -> dict[str, str]:
    return {
        "BERTH_DATABASE_URL": database,
        "BERTH_VALKEY_URL": valkey,
        "BERTH_NODE_SOCKET": str(folder / "nobody.sock"),
        "BERTH_MASTER_KEY_FILE": str(folder / "master.key"),
    }


async def test_a_backup_opens_with_the_identity_that_is_elsewhere_only(
    migrated_database: str, tmp_path: Path, commands: CommandForker
) -> None:
    (tmp_path / "master.key").write_text("canary of the master key")
    named = environment(migrated_database, NO_VALKEY, tmp_path)
    refused = commands.run("backup", str(tmp_path / "b"), **named)
    assert (refused.code, "BERTH_BACKUP_RECIPIENTS" in refused.err) == (1, True)
    assert not (tmp_path / "b").exists()
    made = [
        commands.run("keys", "backup-identity", str(tmp_path / name)) for name in ("mine", "other")
    ]
    recipient = made[0].out.strip()
    assert recipient.startswith("age1")
    assert commands.run("keys", "backup-identity", str(tmp_path / "mine")).code == 1
    done = commands.run(
        "backup", str(tmp_path / "b"), **named, BERTH_BACKUP_RECIPIENTS=f'["{recipient}"]'
    )
    assert done.code == 0, done.err
    [backup] = (tmp_path / "b").iterdir()
    assert {path.name for path in backup.iterdir()} == {"base.tar.age", "keys.tar.age"}
    for path in backup.iterdir():
        assert path.read_bytes().startswith(b"age-encryption.org/v1")
        assert path.stat().st_mode & 0o077 == 0
    assert b"canary" not in (backup / "keys.tar.age").read_bytes()

    def unpack(identity: str) -> int:
        words = ("--identity", str(tmp_path / identity), "--to", str(tmp_path / "found"))
        return int(commands.run("keys", "unpack", str(backup), *words).code)

    assert unpack("other") == 1
    assert unpack("mine") == 0
    unpacked = tmp_path / "found" / "master.key"
    assert (unpacked.read_text(), unpacked.stat().st_mode & 0o777) == (
        "canary of the master key",
        0o600,
    )
    assert unpack("mine") == 1, "the folder is not empty"
    words = ("--identity", str(tmp_path / "other"), "--to", str(tmp_path / "none"))
    refused = commands.run("unpack", str(backup), *words)
    assert (refused.code, "does not open" in refused.err) == (1, True)


async def test_after_a_restore_no_key_counts_that_was_revoked_since(
    migrated_database: str, tmp_path: Path
) -> None:
    secret = tmp_path / "api.key"
    create_versions(secret)
    tokens = ApiTokens(secret)
    token, hook = tokens.make(), tokens.make("hook_")
    database = Database(migrated_database)
    async with database.session() as session:
        await api_keys.create_api_key(session, token, "admin")  # as the backup has it: valid
    async with database.session() as session:
        assert await end_api_access(session, secret) >= 1
    fresh = ApiTokens(secret)
    assert [fresh.is_genuine(credential) for credential in (token, hook)] == [False, False]
    async with database.session() as session:
        assert await api_keys.find_api_key(session, token) is None
        assert await end_api_access(session, secret) == 0, "safe to repeat"
    await database.close()


async def test_a_backup_holds_the_data_and_the_keys_and_only_we_may_read_it(
    migrated_database: str, tmp_path: Path, commands: CommandForker
) -> None:
    (tmp_path / "master.key").write_text("secret")
    (tmp_path / "master-0123.key").write_text("old secret")  # of a rotation that is not done
    (own := tmp_path / "orchestrator").mkdir()
    (own / "master.key").write_text("another one, which no setting names")
    (own / "signing.key").write_text("theirs")
    named = environment(migrated_database, NO_VALKEY, tmp_path) | {
        "BERTH_ORCHESTRATOR_KEY_DIR": str(own)
    }
    for _ in range(2):
        done = commands.run("backup", str(tmp_path / "b"), "--plain", **named)
        assert done.code == 0, done.err
        assert "not encrypted" in done.err
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
        "backup",
        str(tmp_path / "b"),
        "--plain",
        **named,
        BERTH_MESSAGE_KEY_FILE=str(other / "master.key"),
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
        done = commands.run(
            "backup", str(tmp_path / "b"), "--plain", **environment(url, NO_VALKEY, tmp_path)
        )
        assert done.code == 1
        assert reason in done.err
    assert {path.suffix for path in (tmp_path / "b").iterdir()} == {".partial"}
    (tmp_path / "file").touch()
    done = commands.run(
        "backup",
        str(tmp_path / "file"),
        "--plain",
        **environment(services_database, NO_VALKEY, tmp_path),
    )
    assert (done.code, "exists" in done.err) == (1, True)


async def test_a_restore_begins_only_where_it_can_finish(
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

    # We are connected.
    assert "stop the API and the orchestrators first" in refused(migrated_database)
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
            await session.scalar(
                text("select count(*) from audit_trail where action = 'database.restored'")
            )
            == 0
        )
    await database.close()
