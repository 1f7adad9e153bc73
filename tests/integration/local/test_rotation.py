"""`berth keys rotate` on a real PostgreSQL, with servers that still hold the old halves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.database import accounts, users
from infra.database.engine import Database
from infra.database.migrate import migrate
from infra.local.stack import LocalStack
from infra.settings import Settings
from infra.vault import key_file, key_pairs, keyring, rotation, vault
from infra.vault.key_pairs import KeyUnwrapper, MasterKeyFiles, PublicMasterKey, UnknownMasterKey
from worker_runtime.protocol.messages import Credentials

BERTH = str(Path(sys.executable).with_name("berth"))


@pytest.fixture
def settings(folder: Path, empty_database: str) -> Settings:
    settings = Settings(
        master_key_file=folder / "keys" / "master.key",
        master_public_file=folder / "public" / "master.pub",
        orchestrator_key_file=folder / "keys" / "orchestrator.key",
        database_url=empty_database,
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
        found = await accounts.accounts_of_user(session, "42")
    return [
        (
            await vault.decrypt_credentials(a.encrypted, unwrapper, user_id="42", account_id=a.account_id)
        ).api_key
        for a in found
    ]


async def rotate(settings: Settings, database: Database) -> rotation.Rotation:
    return await rotation.rotate_master_key(settings.master_key_file, settings.master_public_file, database)


def berth_rotate(settings: Settings, **more: str) -> subprocess.CompletedProcess[str]:
    places = {
        "BERTH_MASTER_KEY_FILE": str(settings.master_key_file),
        "BERTH_MASTER_PUBLIC_FILE": str(settings.master_public_file),
        "BERTH_DATABASE_URL": settings.database_url,
    }
    return subprocess.run(
        [BERTH, "keys", "rotate"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"} | places | more,
    )


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
    assert (ended.started, ended.rewrapped, ended.left) == (False, 1, 0)
    assert ended.key_id == new.key_id
    assert key_pairs.load_public(settings.master_public_file) == new
    assert not waiting.exists()
    assert len(ended.kept) == 1
    assert await read_all(database, key_pairs.load_ring(private)) == ["a"]


async def test_no_new_key_is_made_while_the_database_is_away(settings: Settings) -> None:
    before = settings.master_key_file.read_bytes()
    refused = berth_rotate(settings, BERTH_DATABASE_URL="postgresql+asyncpg://berth@127.0.0.1:1/berth")
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
