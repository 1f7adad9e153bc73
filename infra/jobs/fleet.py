"""Starts a runner of the fleet from the settings: `python -m infra.jobs.fleet`.

The runner gets its configuration on standard input, because others can read arguments and environment. It
replaces this process, so nothing of the servers stays in its memory.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any, NoReturn

from infra.settings import Settings
from infra.vault import key_file

#: Bytes that fit into a pipe without a reader; a configuration has about 1,000.
_PIPE = 64 * 1024


def runner_config(settings: Settings) -> bytes:
    """The configuration of a runner of the fleet. Raises `KeyFileMissing`, `KeyFileExposed`."""
    config: dict[str, Any] = {
        "name": settings.jobs_runner,
        "node": socket.gethostname(),
        "valkey_url": settings.valkey_url,
        "queues": settings.jobs_queues,
        "slots": settings.jobs_slots,
        "recycle": settings.jobs_recycle,
        "lease": settings.jobs_lease,
        "events_to": settings.jobs_events_to,
        "version": settings.worker_version,
        "log_level": settings.log_level,
    }
    if settings.webhook_key_files:
        config["webhook"] = {
            "keys": [b64encode(_secret(path)).decode() for path in settings.webhook_key_files],
            "allow_private": settings.webhook_allow_private,
        }
    if settings.mail_host:
        config["mail"] = {
            "host": settings.mail_host,
            "port": settings.mail_port,
            "security": settings.mail_security,
            "sender": settings.mail_sender,
            "username": settings.mail_username,
            "password": _secret(Path(settings.mail_password_file)).decode() if settings.mail_username else "",
        }
    return json.dumps(config).encode()


def exec_runner(config: bytes) -> NoReturn:
    """Replaces this process by a runner."""
    if len(config) > _PIPE:
        raise ValueError("a runner's configuration is at most 64 KiB")
    reader, writer = os.pipe()
    os.write(writer, config)
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)
    # -P: do not search the current folder, which may hold a stray module.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "worker_runtime.jobs"])  # noqa: S606


def _secret(path: Path) -> bytes:
    return key_file.read_key_file(path, private=True).strip()


if __name__ == "__main__":
    exec_runner(runner_config(Settings()))
