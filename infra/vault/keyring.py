"""Key files that a system needs before it starts, and its administrator's first API key."""

import asyncio
import os
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import api_keys, audit
from infra.database.engine import Database
from infra.database.locks import wait_for_turn
from infra.database.models import ApiKey
from infra.settings import EcsSettings, Settings
from infra.vault import key_file, key_pairs, message_secret, secret_versions
from infra.vault.api_tokens import ApiTokens
from infra.vault.key_file import KeyFileMissing

#: Label of the key that `berth up` keeps.
LOCAL_LABEL = "administrator of berth up"


def create_missing_keys(settings: Settings) -> list[Path]:
    """Creates missing key files without replacing any; returns those it created.

    Raises `KeyFileMissing` if one half of the master key is missing: a new pair would hide that
    stored credentials can no longer be read.
    """
    made = [] if settings.master_kms_key else _create_master_key(settings)
    made += key_pairs.create_orchestrator_keys(settings.orchestrator_key_dir)
    codec = Path(settings.temporal_codec_key_file) if settings.temporal_codec_key_file else None
    if codec and not codec.exists():
        secret_versions.create_versions(codec, payload_format=secret_versions.BOUND_PAYLOADS)
        made.append(codec)
    optional = [Path(settings.webhook_key_file)] if settings.webhook_key_file else []
    for path in (settings.message_key_file, settings.api_secret_file, *optional):
        if not path.exists():
            secret_versions.create_versions(path)
            made.append(path)
    if settings.jobs_key_file:  # derived again each time: it follows the message secret
        fleet = Path(settings.jobs_key_file)
        made += [fleet] if message_secret.write_fleet_keys(fleet, settings.message_key_file) else []
    if settings.launcher == "ecs" and not (launch_key := EcsSettings().launch_key_file).exists():
        key_file.write_key_file(launch_key, b64encode(os.urandom(64)), private=True)
        made.append(launch_key)
    return made


def _create_master_key(settings: Settings) -> list[Path]:
    made: list[Path] = []
    private, public = settings.master_key_file, settings.master_public_file
    # The private half has another name until the public half is written, so that after a kill in
    # between the pair can be completed.
    fresh = private.with_name(f"{private.name}.new")
    if private.exists() and not public.exists():
        raise KeyFileMissing(
            f"{public} is missing but {private} is there: restore it from a backup"
        )
    if not private.exists():
        if public.exists() and not fresh.exists():
            raise KeyFileMissing(
                f"{private} is missing but {public} is there: restore it from a backup, or remove "
                "both (stored credentials are lost then)"
            )
        if not public.exists():
            key_pairs.create_master_key(fresh, public)
        fresh.rename(private)
        made += [private, public]
    return made


def ensure_admin_key(path: Path, settings: Settings) -> str:
    """Returns the administrator's API key of `berth up` from `path` (mode 0600), or a new one if it
    does not work. A new one is in the audit trail."""
    return asyncio.run(_local_admin_key(_kept_token(path), path, settings))


def ensure_bootstrap_key(path: Path, settings: Settings) -> str | None:
    """Returns the API key with which somebody makes the first administrator's, from `path` (mode
    0600); None if an administrator has a key, when a dead one is removed from `path`.

    It lives for a day (`api_keys.BOOTSTRAP_LIFETIME`) and ends with the first key of an
    administrator. So one that was revoked does not come back while an administrator has another. A
    new one is in the audit trail.
    """
    token = asyncio.run(_bootstrap_key(_kept_token(path), path, settings))
    if token is None:
        path.unlink(missing_ok=True)
    return token or None


def _kept_token(path: Path) -> str:
    return key_file.read_key_file(path, private=True).decode().strip() if path.exists() else ""


async def _local_admin_key(kept: str, path: Path, settings: Settings) -> str:
    tokens = ApiTokens(settings.api_secret_file)
    async with (
        Database(settings.database_url, pool_size=1) as database,
        database.session() as session,
    ):
        if tokens.is_genuine(kept) and await api_keys.find_api_key(session, kept) is not None:
            return kept
        token = tokens.make()
        key = await api_keys.create_api_key(session, token, "admin", label=LOCAL_LABEL)
        _note_issued(session, "berth up", key)
        # Written before the commit, so that no valid key can be lost.
        key_file.write_key_file(path, f"{token}\n".encode(), private=True)
        return token


async def _bootstrap_key(kept: str, path: Path, settings: Settings) -> str | None:
    tokens = ApiTokens(settings.api_secret_file)
    async with (
        Database(settings.database_url, pool_size=1) as database,
        database.session() as session,
    ):
        await wait_for_turn(session, "bootstrap key")
        stored = await api_keys.find_api_key(session, kept) if tokens.is_genuine(kept) else None
        if stored is not None and stored.role == "admin":
            return kept
        if await api_keys.has_administrator(session, made_after=tokens.valid_since):
            return None if stored is None else ""  # somebody put an operator's key there
        token = tokens.make()
        ends = datetime.now(UTC) + api_keys.BOOTSTRAP_LIFETIME
        key = await api_keys.create_api_key(
            session, token, "admin", label=api_keys.BOOTSTRAP_LABEL, expires_at=ends
        )
        _note_issued(session, "berth prepare", key)
        key_file.write_key_file(path, f"{token}\n".encode(), private=True)
        return token


def _note_issued(session: AsyncSession, actor: str, key: ApiKey) -> None:
    expires_at = key.expires_at.isoformat() if key.expires_at else None
    audit.append_entry(
        session,
        actor,
        "api_key.created",
        f"key:{key.id}",
        role="admin",
        label=key.label,
        expires_at=expires_at,
    )
