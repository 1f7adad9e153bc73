"""The local system's keys and its first API key, made once and kept in `<data>/keys`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from infra.database import users
from infra.database.engine import Database
from infra.settings import Settings
from infra.vault import key_file, key_pairs
from infra.vault import key_pairs as orchestrator_keys
from infra.vault.key_file import KeyFileMissing


def create_missing_keys(settings: Settings) -> list[Path]:
    """Makes the key files that are missing, never replaces one; returns those it made.

    Raises `KeyFileMissing` when only the public half of the master key is left: what it encrypted can no
    longer be read, and a new pair would hide that.
    """
    made: list[Path] = []
    private, public = settings.master_key_file, settings.master_public_file
    # The private half waits under another name until the public half is written, so that a kill in
    # between leaves a pair that can be completed.
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
        orchestrator_keys.create_orchestrator_keys(settings.orchestrator_key_file)
        made.append(settings.orchestrator_key_file)
    return made


def ensure_admin_key(path: Path, database_url: str) -> str:
    """The administrator's API key: the one in `path` (mode 0600) if it still works, else a new one."""
    kept = key_file.read_key_file(path, private=True).decode().strip() if path.exists() else ""
    return asyncio.run(_admin_key(kept, path, database_url))


async def _admin_key(kept: str, path: Path, database_url: str) -> str:
    database = Database(database_url, pool_size=1)
    try:
        async with database.session() as session:
            if kept and await users.find_api_key(session, kept) is not None:
                return kept
            token = (await users.create_api_key(session, "admin")).token
            # Before the commit: no key may work that nobody can find.
            key_file.write_key_file(path, f"{token}\n".encode(), private=True)
        return token
    finally:
        await database.close()
