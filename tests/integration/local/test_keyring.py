from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from infra.database.migrate import migrate
from infra.settings import Settings
from infra.vault import key_pairs, keyring
from infra.vault.key_file import KeyFileMissing
from infra.vault.secret_versions import add_version


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
def test_a_lost_half_of_the_master_key_is_reported_and_not_replaced(settings: Settings, lost: str) -> None:
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
