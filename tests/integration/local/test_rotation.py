"""`berth keys rotate` and `retire` on a real PostgreSQL, with servers that still hold the old
halves."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from sqlalchemy import text

from infra.database import accounts, api_keys, audit, users
from infra.database.engine import Database
from infra.database.migrate import migrate
from infra.database.workers import launches, sessions
from infra.local.servers import ValkeyServer
from infra.local.stack import LocalStack
from infra.settings import Settings
from infra.vault import key_file, key_pairs, keyring, rotation, vault
from infra.vault.api_tokens import ApiTokens
from infra.vault.key_pairs import KeyUnwrapper, MasterKeyFiles, PublicMasterKey, UnknownMasterKey
from infra.vault.secret_versions import SecretVersion, load_versions
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import Credentials

BERTH = str(Path(sys.executable).with_name("berth"))


@pytest.fixture
def settings(folder: Path, empty_database: str, valkey_server: ValkeyServer) -> Settings:
    settings = Settings(
        master_key_file=folder / "keys" / "master.key",
        master_public_file=folder / "public" / "master.pub",
        orchestrator_key_dir=folder / "keys",
        message_key_file=folder / "keys" / "message.key",
        api_secret_file=folder / "keys" / "api.key",
        database_url=empty_database,
        valkey_url=valkey_server.url,
    )
    keyring.create_missing_keys(settings)
    return settings


@pytest.fixture
async def database(settings: Settings) -> AsyncIterator[Database]:
    await migrate(settings.database_url)
    database = Database(settings.database_url)
    async with database.session() as session:
        await users.create_user(session, "42")
    yield database
    await database.close()


async def store(database: Database, public: PublicMasterKey, account_id: str) -> None:
    encrypted = await vault.encrypt_credentials(
        Credentials(api_key=account_id, secret_key="s"), public, user_id="42", account_id=account_id
    )
    async with database.session() as session:
        await accounts.put_account(
            session,
            user_id="42",
            account_id=account_id,
            broker="paper",
            broker_type="stock",
            simulation=True,
            encrypted=encrypted,
        )


async def read_all(database: Database, unwrapper: KeyUnwrapper) -> list[str]:
    async with database.session() as session:
        stored = await accounts.accounts_of_user(session, "42")
    return [
        (
            await vault.decrypt_credentials(
                account.encrypted, unwrapper, user_id="42", account_id=account.account_id
            )
        ).api_key
        for account in stored
    ]


async def rotate(settings: Settings, database: Database) -> rotation.Rotation:
    return await rotation.rotate_master_key(
        settings.master_key_file, settings.master_public_file, database
    )


def berth_keys(
    settings: Settings, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    places = {
        "BERTH_ORCHESTRATOR_KEY_DIR": str(settings.orchestrator_key_dir),
        "BERTH_MESSAGE_KEY_FILE": str(settings.message_key_file),
        "BERTH_API_SECRET_FILE": str(settings.api_secret_file),
        "BERTH_VALKEY_URL": settings.valkey_url,
        "BERTH_MASTER_KEY_FILE": str(settings.master_key_file),
        "BERTH_MASTER_PUBLIC_FILE": str(settings.master_public_file),
        "BERTH_DATABASE_URL": settings.database_url,
    }
    return subprocess.run(
        [BERTH, "keys", *words],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"} | places | environment,
    )


def berth_rotate(settings: Settings, **environment: str) -> subprocess.CompletedProcess[str]:
    return berth_keys(settings, "rotate", **environment)


async def test_credentials_are_readable_with_the_new_key_alone_after_a_rotation(
    settings: Settings, database: Database
) -> None:
    old = key_pairs.load_public(settings.master_public_file)
    running = MasterKeyFiles(settings.master_key_file)
    await store(database, old, "a")
    await store(database, old, "b")

    first = berth_rotate(settings)
    assert first.returncode == 0, first.stderr
    assert "rewrapped 2 stored credentials; 0 are still" in first.stdout
    [kept] = rotation.kept_files(settings.master_key_file)
    assert kept.stat().st_mode & 0o777 == 0o600
    assert json.dumps([str(kept)]) in first.stdout
    assert await read_all(database, running) == ["a", "b"]  # an orchestrator nobody has restarted

    await store(database, old, "late")  # an API process nobody has restarted
    assert await read_all(database, running) == ["a", "b", "late"]
    restarted = MasterKeyFiles(settings.master_key_file, kept)
    assert await read_all(database, restarted) == ["a", "b", "late"]

    second = berth_rotate(settings)
    assert "rewrapped 1 stored" in second.stdout
    assert rotation.kept_files(settings.master_key_file) == (kept,)

    kept.unlink()
    new = key_pairs.load_public(settings.master_public_file)
    assert new != old
    alone = key_pairs.load_ring(settings.master_key_file)
    assert alone.public == new
    assert await read_all(database, alone) == ["a", "b", "late"]
    assert (await rotate(settings, database)).started  # the next rotation may begin


@pytest.mark.parametrize("done", ["new key written", "old key kept", "private half replaced"])
async def test_a_rotation_that_was_killed_is_completed_by_the_next_run(
    settings: Settings, database: Database, done: str
) -> None:
    private = settings.master_key_file
    old = key_pairs.load_public(settings.master_public_file)
    await store(database, old, "a")
    waiting = private.with_name("master.key.next")
    new = key_pairs.create_private_key(waiting)
    if done != "new key written":
        name = f"master-{old.key_id.removeprefix('local:')}.key"
        key_file.write_key_file(private.with_name(name), private.read_bytes(), private=True)
    if done == "private half replaced":
        waiting.replace(private)

    ended = await rotate(settings, database)
    assert (ended.started, ended.rewrapped, ended.under_old_keys) == (False, 1, 0)
    assert ended.key_id == new.key_id
    assert key_pairs.load_public(settings.master_public_file) == new
    assert not waiting.exists()
    assert len(ended.kept) == 1
    assert await read_all(database, key_pairs.load_ring(private)) == ["a"]


async def test_no_new_key_is_made_while_the_database_is_away(settings: Settings) -> None:
    before = settings.master_key_file.read_bytes()
    refused = berth_rotate(
        settings, BERTH_DATABASE_URL="postgresql+asyncpg://berth@127.0.0.1:1/berth"
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")
    assert settings.master_key_file.read_bytes() == before
    assert rotation.kept_files(settings.master_key_file) == ()


async def test_credentials_under_a_missing_key_are_reported_and_left_alone(
    settings: Settings, database: Database, folder: Path
) -> None:
    await store(database, key_pairs.create_private_key(folder / "foreign.key"), "a")
    with pytest.raises(UnknownMasterKey):
        await rotate(settings, database)
    listed = json.dumps([str(folder / "foreign.key")])
    assert "rewrapped 1 stored" in berth_rotate(settings, BERTH_MASTER_KEY_RETIRED=listed).stdout


def test_the_local_system_hands_kept_keys_to_its_orchestrator(folder: Path) -> None:
    data = folder / "data"
    (data / "keys").mkdir(parents=True)
    kept = data / "keys" / "master-0123.key"
    kept.touch()
    stack = LocalStack(data)
    assert stack.settings.master_key_retired == (kept,)
    environment = stack.orchestrator.environment()
    assert environment["BERTH_MASTER_KEY_RETIRED"] == json.dumps([str(kept)])


SECRETS = ["signing", "launch", "budget", "message", "api"]


def secret_file(settings: Settings, key: str) -> Path:
    return settings.orchestrator_key_dir / f"{key}.key"


@pytest.mark.parametrize("key", SECRETS)
async def test_a_secret_is_rotated_once_and_then_not_before_the_kept_version_is_retired(
    settings: Settings, database: Database, key: str
) -> None:
    [first] = load_versions(secret_file(settings, key))
    done = berth_keys(settings, "rotate", key)
    assert done.returncode == 0, done.stderr
    assert "made version 2" in done.stdout
    assert load_versions(secret_file(settings, key))[1] == first
    again = berth_keys(settings, "rotate", key)
    assert again.returncode == 1
    assert "still holds version 1" in again.stderr
    for other in set(SECRETS) - {key}:
        assert len(load_versions(secret_file(settings, other))) == 1
    async with database.session() as session:
        [entry] = await audit.list_entries(session, limit=10)
    assert (entry.action, entry.subject) == ("key.rotation_requested", f"secret:{key}")
    assert entry.actor == f"{pwd.getpwuid(os.getuid()).pw_name} at {socket.gethostname()}"


def test_nothing_is_rotated_that_cannot_be_noted(settings: Settings) -> None:
    """Here the database has no tables."""
    refused = berth_keys(settings, "rotate", "message")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
    assert "not done, since the audit trail cannot be written" in refused.stderr
    assert len(load_versions(secret_file(settings, "message"))) == 1


@pytest.mark.parametrize(("key", "lingers"), [("signing", False), ("budget", True)])
async def test_a_version_is_retired_when_no_worker_from_before_needs_it(
    settings: Settings, database: Database, valkey_client: Redis, key: str, lingers: bool
) -> None:
    def made_ago(seconds: float) -> None:
        versions = [
            SecretVersion(number, b"s" * 32, int(time.time() - seconds)) for number in (2, 1)
        ]
        key_file.write_key_file(
            secret_file(settings, key), msgspec.json.encode(versions), private=True
        )

    def refused() -> bool:
        done = berth_keys(settings, "retire", key)
        assert ("1 workers may still need version 1" in done.stderr) == (done.returncode == 1), (
            done.stderr
        )
        return done.returncode == 1

    async with database.session() as session:
        await launches.record_launch(session, worker_id="w", pool="p", version="v", task_id="t")
    made_ago(0)
    assert refused()  # it was launched a moment ago and may not be ready yet

    async with database.session() as session:
        await session.execute(
            text("update worker_launches set launched_at = now() - interval '1 hour'")
        )
    made_ago(600)
    await valkey_client.zadd(keys.pool_ready("p"), {"w": 1})
    assert refused()
    await valkey_client.delete(keys.pool_ready("p"))
    async with database.session() as session:
        await sessions.assign_epoch(session, user_id="42", claim_id="c", pool="p")
        await sessions.assign_worker(session, claim_id="c", worker_id="w", warm=True)
    assert refused()
    async with database.session() as session:
        await sessions.end_session(session, claim_id="c", reason="done")
    assert refused() == lingers
    made_ago(7200)  # launched afterwards
    assert not refused()
    assert len(load_versions(secret_file(settings, key))) == 1
    assert "nothing to retire" in berth_keys(settings, "retire", key).stdout


async def test_the_api_secret_is_retired_when_no_key_from_before_counts(
    settings: Settings, database: Database
) -> None:
    versions = [SecretVersion(number, b"s" * 32, int(time.time()) + 60) for number in (2, 1)]
    path = settings.api_secret_file
    key_file.write_key_file(path, msgspec.json.encode(versions), private=True)
    async with database.session() as session:
        key = await api_keys.create_api_key(session, ApiTokens(path).make(), "admin")
    refused = berth_keys(settings, "retire", "api")
    assert "1 API keys and webhooks may still need version 1" in refused.stderr
    async with database.session() as session:
        await api_keys.revoke_api_key(session, key.id)
    assert berth_keys(settings, "retire", "api").returncode == 0
    assert len(load_versions(path)) == 1


async def test_a_version_that_leaked_is_retired_by_force(
    settings: Settings, database: Database
) -> None:
    nobody = "redis://127.0.0.1:1/0"
    assert berth_keys(settings, "rotate", "launch").returncode == 0
    async with database.session() as session:
        await launches.record_launch(session, worker_id="w", pool="p", version="v", task_id="t")
    assert berth_keys(settings, "retire", "launch", BERTH_VALKEY_URL=nobody).returncode == 1
    assert (
        berth_keys(settings, "retire", "launch", "--force", BERTH_VALKEY_URL=nobody).returncode == 0
    )
    assert [version.version for version in load_versions(secret_file(settings, "launch"))] == [2]
    assert berth_keys(settings, "retire", "master").returncode == 2
