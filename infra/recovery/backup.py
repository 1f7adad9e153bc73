"""`berth backup`: a base backup of PostgreSQL with the key files beside it, and its log as it is written.

The key files are encrypted to recipients (age, https://age-encryption.org) whose identity is kept elsewhere:
whoever finds a backup has sealed credentials and nothing that opens them.

By PostgreSQL's own programs: of the package that `berth up` uses, or else of this machine. They must not be
older than the server.
"""

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import pyrage
from pyrage import x25519
from sqlalchemy import make_url

from infra.local.process import ServerFailed
from infra.local.servers import PostgresServer
from infra.settings import Settings
from infra.vault.key_file import read_key_file, write_key_file
from infra.vault.key_pairs import OrchestratorKey, orchestrator_key_file
from infra.vault.rotation import kept_files
from worker_runtime.protocol.errors import BerthError

#: The folder of the log in a folder of backups.
LOG = "wal"
#: The key files in a backup: a tar archive, encrypted.
ENCRYPTED_KEYS = "keys.tar.age"


class BackupFailed(BerthError, code="BACKUP_FAILED"):
    """The backup was not made or not opened. An interrupted backup keeps the suffix `.partial`. Delete it and
    start again."""


def _program(name: str) -> str:
    try:
        return PostgresServer.program(name)
    except ServerFailed:  # production images come without the package
        return shutil.which(name) or name


def _connection(settings: Settings) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a program; the password is in no argument."""
    url = make_url(settings.database_url)
    words = ["--host", url.host or "", "--port", str(url.port or 5432), "--username", url.username or ""]
    tls = {f"PG{name.upper()}": str(value) for name, value in url.query.items() if name.startswith("ssl")}
    if "PGSSLROOTCERT" in tls:
        tls["PGSSLMODE"] = "verify-full"  # as our servers take it
    return words, {**os.environ, **tls, "PGPASSWORD": str(url.password or "")}


def make_backup(settings: Settings, folder: Path, *, plain_keys: bool = False) -> Path:
    """Makes a base backup, verified, with the key files, encrypted to `backup_recipients`; returns its folder
    (mode 0700).

    `plain_keys`: copies the key files as they are. Raises `BackupFailed`, OSError.
    """
    key_files = _key_files(settings)
    recipients = [] if plain_keys else read_recipients(settings.backup_recipients)
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
    if plain_keys:
        (partial / "keys").mkdir(mode=0o700)
        for name, path in key_files.items():
            write_key_file(partial / "keys" / name, path.read_bytes(), private=True)
    else:
        sealed = pyrage.encrypt(_archive(key_files), recipients)
        write_key_file(partial / ENCRYPTED_KEYS, sealed, private=True)
    partial.rename(made)
    return made


def read_recipients(texts: Sequence[str]) -> list[x25519.Recipient]:
    """Raises `BackupFailed` for what is no recipient, and if there is none."""
    if not texts:
        raise BackupFailed(
            "nobody could open the keys. Make an identity with `berth keys backup-identity FILE`, keep that"
            " file away from the backups, and set BERTH_BACKUP_RECIPIENTS to what it prints. Or copy the keys"
            " as they are with --plain-keys"
        )
    try:
        return [x25519.Recipient.from_str(text) for text in texts]
    except pyrage.RecipientError:
        raise BackupFailed("BERTH_BACKUP_RECIPIENTS holds what is no recipient of age (age1…)") from None


def make_identity(path: Path) -> str:
    """Writes a new identity into a file (mode 0600) that must not exist; returns its recipient."""
    if path.exists():
        raise BackupFailed(f"{path} exists: backups may be encrypted to it")
    identity = x25519.Identity.generate()
    write_key_file(path, f"{identity}\n".encode(), private=True)
    return str(identity.to_public())


def unpack_keys(backup: Path, identity_file: Path, folder: Path) -> list[str]:
    """Decrypts the key files of a backup into a folder (mode 0700), which must be empty; returns their names.

    Raises `BackupFailed`, `KeyFileMissing`, `KeyFileExposed`, OSError.
    """
    text = read_key_file(
        identity_file, private=True, made_by="`berth keys backup-identity` makes it"
    ).decode()
    try:
        [line] = [line for line in text.splitlines() if line and not line.startswith("#")]
        archive = pyrage.decrypt((backup / ENCRYPTED_KEYS).read_bytes(), [x25519.Identity.from_str(line)])
    except ValueError:
        raise BackupFailed(f"{identity_file} does not hold one identity of age") from None
    except (pyrage.IdentityError, pyrage.DecryptError):
        raise BackupFailed(f"{identity_file} does not open the keys of {backup}") from None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BackupFailed(f"{folder} is not empty")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar.getmembers():
            content = tar.extractfile(member)
            if content is None or Path(member.name).name != member.name:
                raise BackupFailed(f"{backup / ENCRYPTED_KEYS} was not made by `berth backup`")
            write_key_file(folder / member.name, content.read(), private=True)
        return tar.getnames()


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
