"""The local system's key files and its first API key, created once in `<data>/keys`."""

import asyncio
import os
from base64 import b64encode
from pathlib import Path

from infra.database import api_keys
from infra.database.engine import Database
from infra.settings import EcsSettings, Settings
from infra.vault import key_file, key_pairs, secret_versions
from infra.vault.api_tokens import ApiTokens
from infra.vault.key_file import KeyFileMissing


def create_missing_keys(settings: Settings) -> list[Path]:
    """Creates missing key files without replacing any; returns those it created.

    Raises `KeyFileMissing` if one half of the master key is missing: a new pair would hide that stored
    credentials can no longer be read.
    """
    made = [] if settings.master_kms_key else _create_master_key(settings)
    made += key_pairs.create_orchestrator_keys(settings.orchestrator_key_dir)
    codec = Path(settings.temporal_codec_key_file) if settings.temporal_codec_key_file else None
    if codec and not codec.exists():
        secret_versions.create_versions(codec, payload_format=secret_versions.BOUND_PAYLOADS)
        made.append(codec)
    wanted = [Path(settings.webhook_key_file)] if settings.webhook_key_file else []
    for path in (settings.message_key_file, settings.api_secret_file, *wanted):
        if not path.exists():
            secret_versions.create_versions(path)
            made.append(path)
    if settings.launcher == "ecs" and not (launch_key := EcsSettings().launch_key_file).exists():
        key_file.write_key_file(launch_key, b64encode(os.urandom(64)), private=True)
        made.append(launch_key)
    return made


def _create_master_key(settings: Settings) -> list[Path]:
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
    return made


def ensure_admin_key(path: Path, settings: Settings) -> str:
    """Returns the administrator's API key from `path` (mode 0600), or a new one if it does not work."""
    kept = key_file.read_key_file(path, private=True).decode().strip() if path.exists() else ""
    return asyncio.run(_admin_key(kept, path, settings))


async def _admin_key(kept: str, path: Path, settings: Settings) -> str:
    tokens = ApiTokens(settings.api_secret_file)
    async with Database(settings.database_url, pool_size=1) as database, database.session() as session:
        if tokens.is_genuine(kept) and await api_keys.find_api_key(session, kept) is not None:
            return kept
        token = tokens.make()
        await api_keys.create_api_key(session, token, "admin", label="administrator of berth up")
        # Written before the commit, so that no valid key can be lost.
        key_file.write_key_file(path, f"{token}\n".encode(), private=True)
        return token
