"""`berth backup`: a base backup of PostgreSQL with the key files, and its log as it is written.

All of it is encrypted to recipients (`encryption.py`). By PostgreSQL's own programs: of the package
that `berth up` uses, or else of this machine. They must not be older than the server.
"""

import asyncio
import io
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

from pyrage import x25519
from sqlalchemy import make_url, text

from infra.alerts.errors import send_errors
from infra.database.engine import Database
from infra.local.process import ServerFailed
from infra.local.servers import PostgresServer
from infra.log import configure_log
from infra.recovery.base_check import BaseCheck
from infra.recovery.encryption import SUFFIX, BackupFailed, encrypt_stream, read_recipients
from infra.recovery.log_follower import LogFollower
from infra.settings import Settings
from infra.valkey.client import connect_valkey
from infra.vault.key_file import write_key_file
from infra.vault.key_pairs import OrchestratorKey, orchestrator_key_file
from infra.vault.rotation import kept_files

#: The folder of the log in a folder of backups.
LOG = "wal"
#: In a backup: tar archives, encrypted.
ENCRYPTED_KEYS, ENCRYPTED_BASE = f"keys.tar{SUFFIX}", f"base.tar{SUFFIX}"


def find_program(name: str) -> str:
    """Return the path of one of PostgreSQL's programs, or its name."""
    try:
        return PostgresServer.program(name)
    except ServerFailed:  # production images come without the package
        return shutil.which(name) or name


def explain_errors(output: str, command: str) -> str:
    """Return what a program of PostgreSQL says of its failure."""
    lines = [line for line in output.splitlines() if "error:" in line or "DETAIL:" in line]
    return "; ".join(lines[:2]) or f"{command} failed"


def _connection(settings: Settings) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments and environment of a program; the password is in no argument."""
    url = make_url(settings.session_database_url)
    words = [
        "--host",
        url.host or "",
        "--port",
        str(url.port or 5432),
        "--username",
        url.username or "",
    ]
    tls = {
        f"PG{name.upper()}": str(value)
        for name, value in url.query.items()
        if name.startswith("ssl")
    }
    if "PGSSLROOTCERT" in tls:
        tls["PGSSLMODE"] = "verify-full"  # as our servers take it
    return words, {**os.environ, **tls, "PGPASSWORD": str(url.password or "")}


def make_backup(settings: Settings, folder: Path, *, plain: bool = False) -> Path:
    """Makes a base backup, checked, with the key files, both encrypted to `backup_recipients`;
    returns its folder (mode 0700).

    `plain`: encrypts nothing. Raises `BackupFailed`, `DatabaseUnavailable`, OSError.
    """
    key_files = _key_files(settings)
    recipients = [] if plain else read_recipients(settings.backup_recipients)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
    partial = made.with_name(f"{made.name}.partial")
    partial.mkdir(mode=0o700)
    if plain:
        _copy_base(settings, partial / "base")
        (partial / "keys").mkdir(mode=0o700)
        for name, path in key_files.items():
            write_key_file(partial / "keys" / name, path.read_bytes(), private=True)
    else:
        asyncio.run(_encrypt_base(settings, partial / ENCRYPTED_BASE, recipients))
        encrypt_stream(io.BytesIO(_archive(key_files)), partial / ENCRYPTED_KEYS, recipients)
    partial.rename(made)
    return made


def _copy_base(settings: Settings, folder: Path) -> None:
    words, environment = _connection(settings)
    for command in (
        [*_base_backup(words), "--pgdata", str(folder)],
        [find_program("pg_verifybackup"), "--quiet", str(folder)],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BackupFailed(explain_errors(done.stderr, command[0]))


async def _encrypt_base(
    settings: Settings, path: Path, recipients: Sequence[x25519.Recipient]
) -> None:
    """Encrypts the base backup. Nothing of it lies on the disk in clear.

    The log that the backup needs comes at its end, so the server has to keep it until then: a
    replication slot of this connection sees to that.
    """
    async with (
        Database(settings.session_database_url, pool_size=1, command_timeout=None) as database,
        database.session(autocommit=True) as session,
    ):
        if not await session.scalar(_MAY_REPLICATE):
            raise BackupFailed("the database's role needs REPLICATION")
        await session.execute(_HOLD_LOG, {"name": f"berth_backup_{uuid4().hex}"})
        await asyncio.to_thread(_stream_base, settings, path, recipients)


_MAY_REPLICATE = text(
    "select rolreplication or rolsuper from pg_roles where rolname = current_user"
)
_HOLD_LOG = text("select pg_create_physical_replication_slot(:name, true, true)")


def _stream_base(settings: Settings, path: Path, recipients: Sequence[x25519.Recipient]) -> None:
    words, environment = _connection(settings)
    command = [
        *_base_backup(words),
        "--format=tar",
        "--wal-method=fetch",
        "--manifest-checksums=SHA256",
    ]
    with subprocess.Popen(
        [*command, "--pgdata=-"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None and program.stderr is not None  # noqa: S101, PT018 - pipes
        check = BaseCheck(program.stdout)
        try:
            encrypt_stream(check, path, recipients)
        except BaseException:
            program.kill()
            check.abandon()
            raise
        errors = program.stderr.read().decode(errors="replace")  # it says a line or two
    if program.returncode:
        check.abandon()
        raise BackupFailed(explain_errors(errors, command[0]))
    check.finish()


def _base_backup(connection: Sequence[str]) -> list[str]:
    return [find_program("pg_basebackup"), *connection, "--checkpoint=fast", "--no-password"]


def _archive(key_files: Mapping[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, path in sorted(key_files.items()):
            data = path.read_bytes()
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o600
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _key_files(settings: Settings) -> dict[str, Path]:
    """Returns the key files here, by name; AWS keeps its own. Raises `BackupFailed`."""
    folder, master = settings.orchestrator_key_dir, settings.master_key_file
    named = {
        master,
        settings.master_public_file,
        settings.message_key_file,
        settings.api_secret_file,
    }
    # Those of a rotation that is not done, too.
    named |= {*settings.master_key_retired, *kept_files(master)}
    named |= set(
        map(Path, filter(None, (settings.temporal_codec_key_file, settings.webhook_key_file)))
    )
    named |= {orchestrator_key_file(folder, name) for name in OrchestratorKey}
    # The folder may have others of the same names:
    # the last one wins, which is one that a setting names.
    files = {path.name: path for path in (*folder.glob("*.key"), *named) if path.is_file()}
    for path in named:
        if path.is_file() and not path.samefile(files[path.name]):
            raise BackupFailed(
                f"{path} and {files[path.name]} have one name: a backup keeps one of each"
            )
    return files


def follow_log(settings: Settings, folder: Path, *, plain: bool = False) -> None:
    """Writes the log to `folder/wal`, encrypted to `backup_recipients`, until SIGTERM or SIGINT.

    `plain`: does not encrypt it, and becomes the program that writes it.
    Raises `BackupFailed`, OSError.
    """
    log_folder = folder / LOG
    words, environment = _connection(settings)
    command = [find_program("pg_receivewal"), *words]
    if plain:
        log_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        options = ["--directory", str(log_folder), "--synchronous", "--no-password"]
        os.execve(command[0], [*command, *options], environment)  # noqa: S606
    recipients = read_recipients(settings.backup_recipients)
    named = blake2b(str(folder.absolute()).encode(), digest_size=8).hexdigest()
    spool = settings.data_dir / "backup-log" / named
    follower = LogFollower(
        log_folder, spool, recipients, max_spool_bytes=settings.backup_spool_bytes
    )
    configure_log(settings.log_level)
    threading.Thread(target=_report_errors, args=(settings,), daemon=True).start()
    follower.run(command, environment)


def _report_errors(settings: Settings) -> None:
    """Sends errors of this process to the operators' alerts while Valkey is within reach."""

    async def send() -> None:
        async with connect_valkey(settings.valkey_url, max_connections=1) as client:
            await send_errors(client, "backup")

    asyncio.run(send())
