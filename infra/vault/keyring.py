"""The local system's key files and its first API key, created once in `<data>/keys`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from infra.database import users
from infra.database.engine import Database
from infra.settings import Settings
from infra.vault import key_file, key_pairs
from infra.vault.key_file import KeyFileMissing


def create_missing_keys(settings: Settings) -> list[Path]:
    """Creates missing key files without replacing any; returns those it created.

    Raises `KeyFileMissing` if one half of the master key is missing: a new pair would hide that stored
    credentials can no longer be read.
    """
    made: list[Path] = []
    private, public = settings.master_key_file, settings.master_public_file
    # The private half has another name until the public half is written, so that after a kill in between
    # the pair can be completed.
    fresh = private.with_name(f"{private.name}.new")
    if private.exists() and not public.exists():
        raise KeyFileMissing(f"{public} is missing but {private} is there: restore it from a backup")
    if not private.exists():
        if public.exists() and not fresh.exists():
            raise KeyFileMissing(
                f"{private} is missing but {public} is there: restore it from a backup, or remove both "
                "(stored credentials are lost then)"
            )
        if not public.exists():
            key_pairs.create_master_key(fresh, public)
        fresh.rename(private)
        made += [private, public]
    if not settings.orchestrator_key_file.exists():
        key_pairs.create_orchestrator_keys(settings.orchestrator_key_file)
        made.append(settings.orchestrator_key_file)
    return made


def ensure_admin_key(path: Path, database_url: str) -> str:
    """Returns the administrator's API key from `path` (mode 0600), or a new one if it does not work."""
    kept = key_file.read_key_file(path, private=True).decode().strip() if path.exists() else ""
    return asyncio.run(_admin_key(kept, path, database_url))


async def _admin_key(kept: str, path: Path, database_url: str) -> str:
    database = Database(database_url, pool_size=1)
    try:
        async with database.session() as session:
            if kept and await users.find_api_key(session, kept) is not None:
                return kept
            token = (await users.create_api_key(session, "admin")).token
            # Written before the commit, so that no valid key can be lost.
            key_file.write_key_file(path, f"{token}\n".encode(), private=True)
        return token
    finally:
        await database.close()
