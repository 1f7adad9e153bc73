from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import text

from infra.database import api_keys
from infra.database.engine import Database
from infra.database.migrate import migrate
from infra.settings import Settings
from infra.vault import key_file, key_pairs, keyring
from infra.vault.api_tokens import ApiTokens
from infra.vault.key_file import KeyFileMissing
from infra.vault.secret_versions import add_version, drop_before


@pytest.fixture
def settings(folder: Path) -> Settings:
    return Settings(
        master_key_file=folder / "master.key",
        master_public_file=folder / "master.pub",
        orchestrator_key_dir=folder,
        message_key_file=folder / "message.key",
        api_secret_file=folder / "api.key",
    )


def test_keys_are_made_once_and_never_replaced(settings: Settings) -> None:
    made = keyring.create_missing_keys(settings)
    assert {path.name for path in made} == {
        "master.key",
        "master.pub",
        "signing.key",
        "launch.key",
        "budget.key",
        "message.key",
        "api.key",
    }
    assert settings.master_key_file.stat().st_mode & 0o777 == 0o600
    assert (settings.orchestrator_key_dir / "signing.key").stat().st_mode & 0o777 == 0o600
    before = [path.read_bytes() for path in made]
    assert keyring.create_missing_keys(settings) == []
    assert [path.read_bytes() for path in made] == before


@pytest.mark.parametrize("public_written", [False, True])
async def test_a_pair_whose_making_was_cut_short_is_completed(
    settings: Settings, public_written: bool
) -> None:
    fresh = settings.master_key_file.with_name("master.key.new")
    key_pairs.create_master_key(fresh, settings.master_public_file)
    if not public_written:
        settings.master_public_file.unlink()
    keyring.create_missing_keys(settings)
    ring = key_pairs.load_ring(settings.master_key_file)
    public = key_pairs.load_public(settings.master_public_file)
    wrapped = await public.wrap(b"k" * 32, b"context")
    assert await ring.unwrap(wrapped, b"context", public.key_id) == b"k" * 32


@pytest.mark.parametrize("lost", ["master.key", "master.pub"])
def test_a_lost_half_of_the_master_key_is_reported_and_not_replaced(
    settings: Settings, lost: str
) -> None:
    keyring.create_missing_keys(settings)
    path = settings.master_key_file.with_name(lost)
    path.unlink()
    with pytest.raises(KeyFileMissing, match=lost):
        keyring.create_missing_keys(settings)
    assert not path.exists()


def test_the_admin_key_is_kept_and_replaced_only_when_it_no_longer_works(
    folder: Path, settings: Settings, empty_database: str
) -> None:
    asyncio.run(migrate(empty_database))
    settings = settings.model_copy(update={"database_url": empty_database})
    keyring.create_missing_keys(settings)
    path = folder / "admin.key"
    first = keyring.ensure_admin_key(path, settings)
    assert path.read_text().strip() == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert keyring.ensure_admin_key(path, settings) == first
    path.write_text("berth_unknown\n")
    assert keyring.ensure_admin_key(path, settings) not in (first, "berth_unknown")
    second = path.read_text().strip()
    add_version(settings.api_secret_file, keep=1)  # what was made before counts no more
    assert keyring.ensure_admin_key(path, settings) not in (first, second)


async def all_keys(url: str) -> list[tuple[str, str, bool, bool]]:
    """Label, role, whether it ends by itself, and whether it was revoked, of each key, in order."""
    async with Database(url, pool_size=1) as database, database.session() as session:
        rows = await api_keys.list_api_keys(session, revoked=True)
        return [
            (row.label, row.role, row.expires_at is not None, row.revoked_at is not None)
            for row in reversed(rows)
        ]


async def audited(url: str) -> list[tuple[str, str]]:
    async with Database(url, pool_size=1) as database, database.session() as session:
        rows = await session.execute(text("select actor, action from audit_trail order by id"))
        return [(row.actor, row.action) for row in rows]


async def an_administrator(url: str, tokens: ApiTokens) -> None:
    async with Database(url, pool_size=1) as database, database.session() as session:
        await api_keys.create_api_key(session, tokens.make(), "admin", label="Erika's laptop")


async def execute(url: str, statement: str) -> None:
    async with Database(url, pool_size=1) as database, database.session() as session:
        await session.execute(text(statement))


@pytest.fixture
def migrated(settings: Settings, empty_database: str) -> Settings:
    """The settings of a system with keys and tables."""
    asyncio.run(migrate(empty_database))
    settings = settings.model_copy(update={"database_url": empty_database})
    keyring.create_missing_keys(settings)
    return settings


def test_the_local_administrators_key_is_in_the_audit_trail(
    folder: Path, migrated: Settings
) -> None:
    keyring.ensure_admin_key(folder / "admin.key", migrated)
    keyring.ensure_admin_key(folder / "admin.key", migrated)
    url = migrated.database_url
    assert asyncio.run(all_keys(url)) == [(keyring.LOCAL_LABEL, "admin", False, False)]
    assert asyncio.run(audited(url)) == [("berth up", "api_key.created")]


def test_the_bootstrap_key_lives_a_day_and_ends_with_the_first_administrators_key(
    folder: Path, migrated: Settings
) -> None:
    path, url, tokens = (
        folder / "admin.key",
        migrated.database_url,
        ApiTokens(migrated.api_secret_file),
    )
    # Given a system without an administrator
    first = keyring.ensure_bootstrap_key(path, migrated)
    assert first == path.read_text().strip() == keyring.ensure_bootstrap_key(path, migrated)
    assert asyncio.run(all_keys(url)) == [("bootstrap", "admin", True, False)]
    lifetime = "select extract(epoch from max(expires_at - created_at)) from api_keys"
    assert asyncio.run(scalar(url, lifetime)) == pytest.approx(86_400, abs=60)
    # When it is not used for a day, another one is made
    asyncio.run(execute(url, "update api_keys set expires_at = now()"))
    second = keyring.ensure_bootstrap_key(path, migrated)
    assert second not in (None, first)
    # When an administrator gets a key of their own, it ends
    asyncio.run(an_administrator(url, tokens))
    assert asyncio.run(all_keys(url))[1:] == [
        ("bootstrap", "admin", True, True),
        ("Erika's laptop", "admin", False, False),
    ]
    assert keyring.ensure_bootstrap_key(path, migrated) is None
    assert not path.exists()
    assert asyncio.run(audited(url)) == [
        *[("berth prepare", "api_key.created")] * 2,
        ("berth", "api_key.revoked"),
    ]
    # When no administrator is left, there is one again
    asyncio.run(
        execute(url, "update api_keys set revoked_at = now() where label = 'Erika''s laptop'")
    )
    assert keyring.ensure_bootstrap_key(path, migrated) not in (None, first, second)


def test_a_revoked_bootstrap_key_does_not_come_back_while_an_administrator_has_one(
    folder: Path, migrated: Settings
) -> None:
    path, url, tokens = (
        folder / "admin.key",
        migrated.database_url,
        ApiTokens(migrated.api_secret_file),
    )
    asyncio.run(an_administrator(url, tokens))
    assert keyring.ensure_bootstrap_key(path, migrated) is None
    assert [label for label, *_ in asyncio.run(all_keys(url))] == ["Erika's laptop"]
    # A key under a secret that was given up opens nothing, so it is no administrator's.
    asyncio.run(execute(url, "update api_keys set created_at = now() - interval '1 hour'"))
    drop_before(migrated.api_secret_file, add_version(migrated.api_secret_file, keep=2))
    assert keyring.ensure_bootstrap_key(path, migrated) is not None


def test_a_key_that_an_earlier_release_made_is_kept(folder: Path, migrated: Settings) -> None:
    path = folder / "admin.key"
    kept = keyring.ensure_admin_key(path, migrated)  # as 0.1.0 did in compose
    assert keyring.ensure_bootstrap_key(path, migrated) == kept
    assert asyncio.run(all_keys(migrated.database_url)) == [
        (keyring.LOCAL_LABEL, "admin", False, False)
    ]


def test_an_operators_key_that_somebody_put_in_its_place_is_left_there(
    folder: Path, migrated: Settings
) -> None:
    path, url, tokens = (
        folder / "admin.key",
        migrated.database_url,
        ApiTokens(migrated.api_secret_file),
    )
    asyncio.run(an_administrator(url, tokens))
    token = tokens.make()
    asyncio.run(an_administrator(url, tokens))
    asyncio.run(an_operator(url, token))
    key_file.write_key_file(path, token.encode(), private=True)
    assert keyring.ensure_bootstrap_key(path, migrated) is None
    assert path.read_text() == token


async def an_operator(url: str, token: str) -> None:
    async with Database(url, pool_size=1) as database, database.session() as session:
        await api_keys.create_api_key(session, token, "operator", label="the container's")


async def scalar(url: str, statement: str) -> float:
    async with Database(url, pool_size=1) as database, database.session() as session:
        return float((await session.execute(text(statement))).scalar_one())
