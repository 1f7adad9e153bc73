"""`berth keys rotate` and `retire`: one step of a rotation,
and what to do next; `berth codec` uses a key."""

import asyncio
import json
import os
import pwd
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import typer
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from infra.cli.options import CommandAnswer, KeyName
from infra.database import api_keys, audit
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.workers import launches
from infra.jobs.applications import key_file_of, list_applications, write_application_keys
from infra.settings import Settings
from infra.valkey.client import connect_valkey, reply_of, text_of
from infra.valkey.failures import explain_failure
from infra.vault import message_secret, rotation
from infra.vault.key_pairs import OrchestratorKey, orchestrator_key_file
from infra.vault.rotation import Rotation
from infra.vault.secret_versions import BOUND_PAYLOADS, add_version, drop_before, load_versions
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError

#: Free workers of all pools. Only forged ones are more.
MAX_READY_WORKERS = 20_000
#: Seconds within which a new version is copied to all hosts.
COPY_TIME_S = 60.0
#: Seconds after the end of a worker for which the version that it used counts: its calls in the
#: windows of a day, its late events.
LINGER_S = 86_400.0

SessionWork = Callable[[AsyncSession], Awaitable[None]]
_LAUNCHED = "the workers launched before, those that wait for a user too, have ended"
_KEPT_FOR = {
    KeyName.SIGNING: f"when {_LAUNCHED}",
    KeyName.LAUNCH: f"when {_LAUNCHED}",
    KeyName.BUDGET: f"a day after {_LAUNCHED}",
    KeyName.MESSAGE: f"a day after {_LAUNCHED}",
    KeyName.WEBHOOKS: "when the runners of the fleet were started again, and all receivers "
    "know the new key",
    KeyName.API: "when API keys and webhooks made before are replaced, or revoked",
}


def note_act(
    settings: Settings, action: str, subject: str, *, also: SessionWork | None = None, **data: Any
) -> None:
    """Writes an act that does not go through the REST API into the audit trail, before it is done.

    `also` is part of the transaction. Under the name of the account
    that runs this process. Raises `BerthError`: then it must not be done.
    """

    async def write() -> None:
        async with (
            Database(settings.database_url, pool_size=1) as database,
            database.session() as session,
        ):
            audit.append_entry(session, account_name(), action, subject, **data)
            if also is not None:
                await also(session)

    try:
        asyncio.run(write())
    except (SQLAlchemyError, DatabaseUnavailable) as error:
        reason = error.detail if isinstance(error, BerthError) else type(error).__name__
        raise BerthError(f"not done, since the audit trail cannot be written: {reason}") from None


def account_name() -> str:
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container has accounts without a name
        name = f"uid {os.getuid()}"
    if os.getuid() == 0 and (before := os.environ.get("SUDO_USER")):
        name = f"{before} by sudo"
    return f"{name} at {socket.gethostname()}"[:128]


def rotate(settings: Settings, key: KeyName, keep: int, *, local: bool) -> CommandAnswer:
    """Rotates a key; with `local`, one of a running `berth up`. Of Temporal's keys it keeps the
    newest `keep`; all if that is 0."""
    subject = f"secret:{key}"
    if key is KeyName.MASTER:
        note_act(settings, "key.rotation_requested", subject)
        return CommandAnswer(
            None, "\n".join(_next_steps(asyncio.run(_rotate(settings)), local=local))
        )
    path = _file_of(key, settings)
    held = load_versions(path)
    if key is KeyName.TEMPORAL:
        note_act(settings, "key.rotation_requested", subject, keep=keep or None)
        version = add_version(path, keep=keep or len(held) + 1, payload_format=BOUND_PAYLOADS)
        kept = load_versions(path)
        lines = [
            f"made key {version} in {path}; it holds {len(kept)}, down to key {kept[-1].version}"
        ]
        lines.append(
            "It encrypts from a minute on. Other hosts have to read it: copy the file until then."
        )
        if any(key.payload_format < BOUND_PAYLOADS for key in kept):
            lines.append(
                "It still holds a key of an earlier release, so payloads in clear and of other "
                "workflows are read. When the runs that began before now have closed, rotate with "
                "--keep."
            )
        return CommandAnswer(None, "\n".join(lines))
    if len(held) > 1:
        kept_version = held[1].version
        raise BerthError(
            f"{path} still holds version {kept_version}: `berth keys retire {key}` comes first"
        )
    note_act(settings, "key.rotation_requested", subject)
    version = add_version(path, keep=3)  # even if two run at the same time, nothing goes
    _derive_fleet_keys(settings, key)
    lines = [f"made version {version} in {path.absolute()}, and kept version {version - 1}"]
    if not local and key is not KeyName.WEBHOOKS:
        lines.append(
            "Processes on this file use it within a second. Copy it to the other hosts at once."
        )
    lines.append(
        f"Next: {_KEPT_FOR[key]}, run `berth keys retire {key}`: it says whether they have."
    )
    return CommandAnswer(None, "\n".join(lines))


def retire(settings: Settings, key: KeyName, *, force: bool) -> CommandAnswer:
    """Drops the version before the present one, if nothing needs it or by `force`."""
    path = _file_of(key, settings)
    held = load_versions(path)
    only = f"{path.absolute()} holds version {held[0].version} only"
    if len(held) == 1:
        return CommandAnswer(None, f"{only}: nothing to retire")
    users, needed = "API keys and webhooks" if key is KeyName.API else "workers", 0
    if not force and key is not KeyName.WEBHOOKS:
        needed = asyncio.run(_needed_by(settings, key, held[0].made_at))
    if needed:
        raise BerthError(
            f"{needed} {users} may still need version {held[1].version}, which may go "
            f"{_KEPT_FOR[key]}"
        )
    note_act(
        settings, "key.retirement_requested", f"secret:{key}", version=held[1].version, force=force
    )
    drop_before(path, held[0].version)
    _derive_fleet_keys(settings, key)
    return CommandAnswer(None, only)


def _derive_fleet_keys(settings: Settings, key: KeyName) -> None:
    """Renews the file of the job runners, where they have one instead of the message secret."""
    if key is KeyName.MESSAGE and settings.jobs_key_file:
        message_secret.write_fleet_keys(Path(settings.jobs_key_file), settings.message_key_file)
    if key is KeyName.MESSAGE:
        asyncio.run(_derive_application_keys(settings))


async def _derive_application_keys(settings: Settings) -> None:
    """Renews the files of applications' keys that are on this host."""
    async with Database(settings.database_url, pool_size=1) as database:
        for application in await database.fetch(list_applications):
            if key_file_of(settings, application.name).exists():
                write_application_keys(settings, application)


def _file_of(key: KeyName, settings: Settings) -> Path:
    if key is KeyName.TEMPORAL:
        if not settings.temporal_codec_key_file:
            raise BerthError("BERTH_TEMPORAL_CODEC_KEY_FILE is not set: payloads are not encrypted")
        return Path(settings.temporal_codec_key_file)
    if key is KeyName.WEBHOOKS:
        if not settings.webhook_key_file:
            raise BerthError("BERTH_WEBHOOK_KEY_FILE is not set: no webhooks are sent")
        return Path(settings.webhook_key_file)
    if key is KeyName.MESSAGE:
        return settings.message_key_file
    if key is KeyName.API:
        return settings.api_secret_file
    return orchestrator_key_file(settings.orchestrator_key_dir, OrchestratorKey(key))


async def _needed_by(settings: Settings, key: KeyName, made_at: int) -> int:
    """Counts what needs the version before: what was made before the present one was, or was on all
    hosts."""
    async with (
        Database(settings.database_url, pool_size=1) as database,
        database.session(autocommit=True) as session,
    ):
        if key is KeyName.API:
            return await api_keys.count_made_before(session, made_at + COPY_TIME_S)
        ready: list[str] = []
        try:
            async with connect_valkey(settings.valkey_url, max_connections=1) as client:
                for pool in await launches.pools_launched_for(session):
                    ready += map(
                        text_of,
                        await reply_of(client.zrange(keys.pool_ready(pool), 0, MAX_READY_WORKERS)),
                    )
                    if len(ready) > MAX_READY_WORKERS:
                        raise BerthError(
                            "too many free workers: the pool removes what is none; try again then"
                        )
        except RedisError as error:
            raise BerthError(f"{explain_failure(error)} It knows the workers that wait.") from None
        linger = LINGER_S if key in (KeyName.BUDGET, KeyName.MESSAGE) else 0.0
        return await launches.count_launched_before(
            session, made_at + COPY_TIME_S, ready=ready, linger=linger
        )


async def _rotate(settings: Settings) -> Rotation:
    async with Database(settings.database_url, pool_size=1) as database:
        if settings.master_kms_key:
            return await rotation.move_to_kms(settings, database)
        return await rotation.rotate_master_key(
            settings.master_key_file,
            settings.master_public_file,
            database,
            retired=settings.master_key_retired,
        )


def serve_codec(settings: Settings, host: str, port: int, origins: list[str]) -> None:
    """Serves decoded payloads until Ctrl-C."""
    from infra.processes import forbid_core_files
    from infra.temporal import codec_server

    _file_of(KeyName.TEMPORAL, settings)
    forbid_core_files()
    typer.echo(f"codec endpoint  {codec_server.address(settings, '127.0.0.1', port)}")
    codec_server.serve(settings, host=host, port=port, origins=origins)


def _next_steps(done: Rotation, *, local: bool) -> list[str]:
    files = [str(path.absolute()) for path in done.kept]
    lines = [
        f"{'made a new master key' if done.started else 'the master key is'} {done.key_id}",
        f"rewrapped {done.rewrapped} stored credentials; "
        f"{done.under_old_keys} are still under an old key",
    ]
    if not files:
        return lines
    lines += ["", f"The old key is kept in {', '.join(files)}. Next:"]
    if local:
        lines.append("1. Nothing to restart; a later `berth up` finds the old key by itself.")
    else:
        lines += [
            "1. Until the old key goes, start every orchestrator with",
            f"     BERTH_MASTER_KEY_RETIRED='{json.dumps(files)}'",
        ]
    lines += [
        "2. Run `berth keys rotate` again: it makes no other key, and rewraps what was stored "
        "then.",
        "3. When 0 credentials are under an old key, remove the old file"
        + (" and restart." if local else ", and BERTH_MASTER_KEY_RETIRED at the next restart."),
        "   Keep a copy with the database backups made before: they need it.",
    ]
    return lines
