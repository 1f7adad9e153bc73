"""Starts a fleet of runners from the settings: `python -m infra.jobs.fleet`.

A runner gets its configuration on standard input, because others can read arguments and
environment. A fleet of one replaces this process, so nothing of the servers stays in its memory.
"""

import asyncio
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from infra.environment import forget_library_variables
from infra.log import configure_log
from infra.processes import forbid_core_files
from infra.setting_names import log_unread_variables
from infra.settings import Settings, read_settings
from infra.valkey.job_login import job_fleet_url
from infra.vault import key_file
from infra.vault.message_secret import MessageSecretFile, load_fleet_keys
from infra.vault.secret_versions import load_versions
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.catalog import WAITING_QUEUES
from worker_runtime.process.cgroup import leave_room_for_groups
from worker_runtime.protocol.authentication import MessageKey
from worker_runtime.protocol.errors import BerthError

#: Bytes that fit into a pipe without a reader; a configuration has about 1,000.
_PIPE_BYTES = 64 * 1024


#: Jobs at once of a runner whose jobs wait for servers of others: two slow receivers leave half of
#: them free. A waiting job takes about 12 MiB.
WAITING_SLOTS = 8


class JobSecretRefused(BerthError, code="JOB_SECRET_REFUSED"):
    """A secret for jobs of an application cannot be used: it is a text in UTF-8, in a file of its
    name."""


class ProviderKeyUnreadable(BerthError, code="PROVIDER_KEY_UNREADABLE"):
    """This file is no key of a service account: a JSON object with project_id, client_email,
    private_key…"""


#: A secret's name, as a job type names it.
_SECRET_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def default_slots(queues: Sequence[str]) -> int:
    """Returns how many jobs a runner of these queues runs at once unless the settings say it."""
    return WAITING_SLOTS if WAITING_QUEUES & set(queues) or "*" in queues else 1


def fleet_tag(settings: Settings) -> str:
    """Return the tag of the jobs that a fleet with these settings runs."""
    application = settings.jobs_application
    return job_keys.application_tag(application) if application else job_keys.FLEET_TAG


def own_types(settings: Settings) -> dict[str, Any]:
    """Return the part of a runner's configuration that is about an application's job types.

    The files with keys are out of the jobs' reach. Raises `KeyFileMissing`, `KeyFileExposed`,
    `JobSecretRefused`.
    """
    secrets_dir = Path(settings.jobs_secrets_dir) if settings.jobs_secrets_dir else None
    if secrets_dir is not None and not secrets_dir.is_dir():
        raise JobSecretRefused(f"there is no folder {secrets_dir}")
    secrets: dict[str, str] = {}
    for file in sorted(secrets_dir.iterdir()) if secrets_dir is not None else ():
        if not _SECRET_NAME.fullmatch(file.name):
            continue  # an editor's or the platform's own file
        try:
            secrets[file.name] = _secret(str(file)).decode()
        except UnicodeDecodeError:
            raise JobSecretRefused(f"{file} is not UTF-8") from None
    files = [
        settings.jobs_key_file,
        settings.jobs_secrets_dir,
        str(settings.message_key_file.parent),
    ]
    return {
        "application": settings.jobs_application,
        "modules": settings.jobs_modules,
        "path": [str(Path(folder).resolve()) for folder in settings.jobs_path],
        "key_files": [str(Path(file).resolve()) for file in files if file and Path(file).exists()],
        "secrets": secrets,
        "defaults": msgspec.to_builtins(settings.job_defaults),
    }


def runner_config(settings: Settings) -> bytes:
    """Returns the configuration of a runner. Raises `KeyFileMissing`, `KeyFileExposed`,
    `ProviderKeyUnreadable`."""
    config: dict[str, Any] = {
        "name": settings.jobs_runner,
        "node": socket.gethostname(),
        "valkey_url": settings.valkey_url,
        "message_keys": fleet_keys(settings),
        "tag": fleet_tag(settings),
        "queues": settings.jobs_queues,
        "slots": settings.jobs_slots or default_slots(settings.jobs_queues),
        "recycle": settings.jobs_recycle,
        "lease": settings.jobs_lease,
        "runner_ttl": settings.jobs_runner_ttl,
        "timeout_margin": settings.jobs_timeout_margin,
        "failed_ttl": settings.dead_letter_days * 86_400,
        "report_errors": settings.sends_alerts,
        "version": settings.worker_version,
        "log_level": settings.log_level,
    }
    if settings.jobs_application:
        config["own"] = own_types(settings)
        return msgspec.json.encode(config)
    if settings.webhook_key_file:
        config["webhook"] = {
            "keys": [version.secret for version in load_versions(Path(settings.webhook_key_file))],
            "allow_private": settings.webhook_allow_private,
        }
    if settings.mail_host:
        config["mail"] = {
            "host": settings.mail_host,
            "port": settings.mail_port,
            "security": settings.mail_security,
            "sender": settings.mail_sender,
            "username": settings.mail_username,
            "password": _secret(settings.mail_password_file).decode()
            if settings.mail_username
            else "",
        }
    if settings.messaging_account:
        config["messaging"] = {
            "url": settings.messaging_url,
            "account": settings.messaging_account,
            "token": _secret(settings.messaging_token_file).decode(),
            "sms_sender": settings.messaging_sms_sender,
            "whatsapp_sender": settings.messaging_whatsapp_sender,
            "allow_private": True,
        }
    if settings.push_key_file:
        config["push"] = {
            **_service_account(settings),
            "url": settings.push_url,
            "allow_private": True,
        }
    return msgspec.json.encode(config)


def with_own_login(settings: Settings) -> Settings:
    """Return the settings with the fleet's own login at Valkey, if fleets have one
    (`valkey_users`).

    Raises `KeyFileMissing`, `KeyFileExposed`, `KeyFileCorrupt`.
    """
    if not settings.valkey_users:
        return settings
    url = job_fleet_url(settings.valkey_url, fleet_tag(settings), fleet_keys(settings))
    return settings.model_copy(update={"valkey_url": url})


def exec_runner(config: bytes) -> NoReturn:
    """Replaces this process by a runner."""
    if len(config) > _PIPE_BYTES:
        raise ValueError("a runner's configuration is at most 64 KiB")
    reader, writer = os.pipe()
    os.write(writer, config)
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)
    # -P: do not search the current folder, which may hold a stray module.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "worker_runtime.jobs"])  # noqa: S606


def fleet_keys(settings: Settings) -> tuple[MessageKey, ...]:
    """Return the keys of the jobs that a fleet with these settings runs, newest first.

    Raises `KeyFileMissing`, `KeyFileExposed`, `KeyFileCorrupt`.
    """
    if settings.jobs_key_file:
        return load_fleet_keys(Path(settings.jobs_key_file))
    if settings.jobs_application:
        from infra.jobs.applications import key_file_of  # loads the database's client

        return load_fleet_keys(key_file_of(settings, settings.jobs_application))
    return MessageSecretFile(settings.message_key_file).job_keys(job_keys.FLEET_TAG)


def _secret(path: str) -> bytes:
    return key_file.read_key_file(Path(path), private=True).strip()


def _service_account(settings: Settings) -> dict[str, Any]:
    """Reads the key of a service account, as Google's console gives it. Raises
    `ProviderKeyUnreadable`."""
    try:
        account = msgspec.json.decode(_secret(settings.push_key_file), type=dict[str, Any])
        return {
            name: account[name]
            for name in ("project_id", "client_email", "private_key", "token_uri")
        }
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        raise ProviderKeyUnreadable(settings.push_key_file) from None


if __name__ == "__main__":
    forbid_core_files()
    forget_library_variables()
    settings = with_own_login(read_settings(Settings))
    configure_log(settings.log_level)
    log_unread_variables()
    if settings.mail_host or settings.sends_alerts:
        from infra.doctor.checks import DELIVERY
        from infra.doctor.servers import log_problems

        asyncio.run(log_problems(settings, DELIVERY))
    if settings.runner_bounds != (1, 1):
        from infra.jobs.scaling import ScaledFleet

        if settings.jobs_application:
            leave_room_for_groups()  # each runner limits the memory of its children
        sys.exit(ScaledFleet(settings, runner_config(settings)).run())
    exec_runner(runner_config(settings))
