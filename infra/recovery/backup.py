"""`berth backup`: a base backup of PostgreSQL with the key files beside it, and its log as it is written.

By PostgreSQL's own programs: of the package that `berth up` uses, or else of this machine. They must not be
older than the server.
"""

import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from sqlalchemy import make_url

from infra.local.process import ServerFailed
from infra.local.servers import PostgresServer
from infra.settings import Settings
from infra.vault.key_file import write_key_file
from infra.vault.key_pairs import OrchestratorKey, orchestrator_key_file
from infra.vault.rotation import kept_files
from worker_runtime.protocol.errors import BerthError

#: The folder of the log in a folder of backups.
LOG = "wal"


class BackupFailed(BerthError, code="BACKUP_FAILED"):
    """The backup was not made. What was begun has the ending `.partial` and counts for nothing."""


def _program(name: str) -> str:
    try:
        return PostgresServer.program(name)
    except ServerFailed:  # production images come without the package
        return shutil.which(name) or name


def _connection(settings: Settings) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a program; the password is in no argument."""
    url = make_url(settings.session_database_url)
    words = ["--host", url.host or "", "--port", str(url.port or 5432), "--username", url.username or ""]
    tls = {f"PG{name.upper()}": str(value) for name, value in url.query.items() if name.startswith("ssl")}
    if "PGSSLROOTCERT" in tls:
        tls["PGSSLMODE"] = "verify-full"  # as our servers take it
    return words, {**os.environ, **tls, "PGPASSWORD": str(url.password or "")}


def make_backup(settings: Settings, folder: Path) -> Path:
    """Makes a base backup, verified, with a copy of the key files; returns its folder (mode 0700).

    Raises `BackupFailed`, OSError.
    """
    key_files = _key_files(settings)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
    partial = made.with_name(f"{made.name}.partial")
    words, environment = _connection(settings)
    base = str(partial / "base")
    partial.mkdir(mode=0o700)
    for command in (
        [_program("pg_basebackup"), *words, "--pgdata", base, "--checkpoint=fast", "--no-password"],
        [_program("pg_verifybackup"), "--quiet", base],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "error:" in line or "DETAIL:" in line]
            raise BackupFailed("; ".join(said[:2]) or f"{command[0]} failed")
    (partial / "keys").mkdir(mode=0o700)
    for name, path in key_files.items():
        write_key_file(partial / "keys" / name, path.read_bytes(), private=True)
    partial.rename(made)
    return made


def _key_files(settings: Settings) -> dict[str, Path]:
    """Those that are files here, by name; AWS keeps its own. Raises `BackupFailed`."""
    folder, master = settings.orchestrator_key_dir, settings.master_key_file
    named = {master, settings.master_public_file, settings.message_key_file, settings.api_secret_file}
    named |= {*settings.master_key_retired, *kept_files(master)}  # those of a rotation that is not done, too
    named |= set(map(Path, filter(None, (settings.temporal_codec_key_file, settings.webhook_key_file))))
    named |= {orchestrator_key_file(folder, name) for name in OrchestratorKey}
    # The folder may have others of the same names: the last one wins, which is one that a setting names.
    found = {path.name: path for path in (*folder.glob("*.key"), *named) if path.is_file()}
    for path in named:
        if path.is_file() and not path.samefile(found[path.name]):
            raise BackupFailed(f"{path} and {found[path.name]} have one name: a backup keeps one of each")
    return found


def follow_log(settings: Settings, folder: Path) -> NoReturn:
    """Becomes the program that writes the log to `folder/wal` until it is stopped. Raises OSError."""
    (folder / LOG).mkdir(mode=0o700, parents=True, exist_ok=True)
    words, environment = _connection(settings)
    command = [_program("pg_receivewal"), *words, "--directory", str(folder / LOG), "--synchronous"]
    os.execve(command[0], [*command, "--no-password"], environment)  # noqa: S606
