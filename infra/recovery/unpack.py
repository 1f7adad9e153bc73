"""`berth unpack` and `berth keys unpack`:
decrypt a backup with the identity that is kept elsewhere."""

import io
import os
import re
import subprocess
import tarfile
import threading
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

from pyrage import x25519

from infra.recovery.backup import ENCRYPTED_BASE, ENCRYPTED_KEYS, LOG, explain_errors, find_program
from infra.recovery.encryption import SUFFIX, BackupFailed, decrypt_stream, read_identity
from infra.recovery.log_follower import SEGMENT
from infra.vault.key_file import write_key_file

_PARTIAL = ".partial"
#: A file of the log, perhaps encrypted, perhaps not complete; or a timeline's history.
_LOG_FILE = re.compile(
    r"[0-9A-F]{8}([0-9A-F]{16})(?:\.partial)?(?:\.age)?|[0-9A-F]{8}\.history(?:\.age)?"
)
_CHUNK_BYTES = 1024 * 1024


class UnpackedBackup(NamedTuple):
    """Describes what `unpack_backup` has made."""

    #: The folder of PostgreSQL's data.
    base: Path
    #: Files of the log.
    log_files: int
    #: The first and the last name of each row of files that the log lacks: only moments before the
    #: first one can be restored.
    missing: list[tuple[str, str]]


def unpack_backup(backup: Path, identity_file: Path, folder: Path) -> UnpackedBackup:
    """Decrypts a backup into a folder that must be empty:
    `base`, PostgreSQL's data; `wal`, the log since; `keys`.

    PostgreSQL's own program checks the data. All is private (mode 0700, 0600) to who runs this.
    Raises `BackupFailed`, `KeyFileMissing`, `KeyFileExposed`, OSError.
    """
    identity = read_identity(identity_file)
    source = backup / ENCRYPTED_BASE
    if not source.exists():
        raise BackupFailed(
            f"{backup} has no {ENCRYPTED_BASE}: it is not encrypted, use it as it is"
        )
    _make_empty(folder)
    base = folder / "base"
    before = os.umask(0o077)
    try:
        base.mkdir(mode=0o700)
        _extract(source, base, identity)
        command = [find_program("pg_verifybackup"), "--quiet", str(base)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BackupFailed(explain_errors(done.stderr, command[0]))
        count, missing = _unpack_log(backup.parent / LOG, folder / LOG, base, identity)
    finally:
        os.umask(before)
    unpack_keys(backup, identity_file, folder / "keys")
    return UnpackedBackup(base, count, missing)


def unpack_keys(backup: Path, identity_file: Path, folder: Path) -> list[str]:
    """Decrypts the key files of a backup into a folder (mode 0700),
    which must be empty; returns their names.

    Raises `BackupFailed`, `KeyFileMissing`, `KeyFileExposed`, OSError.
    """
    archive = io.BytesIO()
    decrypt_stream(backup / ENCRYPTED_KEYS, archive, read_identity(identity_file))
    archive.seek(0)
    _make_empty(folder)
    with tarfile.open(fileobj=archive) as tar:
        for member in tar.getmembers():
            content = tar.extractfile(member)
            if content is None or Path(member.name).name != member.name:
                raise BackupFailed(f"{backup / ENCRYPTED_KEYS} was not made by `berth backup`")
            write_key_file(folder / member.name, content.read(), private=True)
        return tar.getnames()


def _make_empty(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BackupFailed(f"{folder} is not empty")


def _extract(source: Path, folder: Path, identity: x25519.Identity) -> None:
    reader, writer = os.pipe()
    errors: list[Exception] = []

    def extract(stream: IO[bytes]) -> None:
        with stream:
            try:
                with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK_BYTES) as archive:
                    archive.extractall(folder, filter="data")
            except (tarfile.TarError, OSError) as error:
                errors.append(error)
            while stream.read(_CHUNK_BYTES):  # what follows the archive, or an error
                pass

    thread = threading.Thread(target=extract, args=(os.fdopen(reader, "rb"),))
    thread.start()
    try:
        with os.fdopen(writer, "wb") as target:
            decrypt_stream(source, target, identity)
    finally:
        thread.join()
    if errors:
        raise BackupFailed(f"{source} was not unpacked: {errors[0]}")


def _unpack_log(
    source: Path, folder: Path, base: Path, identity: x25519.Identity
) -> tuple[int, list[tuple[str, str]]]:
    """Decrypts the log from the backup's beginning on; copies what is in clear. Returns how many
    files, and what is missing among them."""
    folder.mkdir(mode=0o700)
    label = (base / "backup_label").read_text(encoding="utf-8", errors="replace")
    begin = re.search(r"^START WAL LOCATION: \S+ \(file ([0-9A-F]{24})\)", label, re.MULTILINE)
    if begin is None:
        raise BackupFailed(f"{base / 'backup_label'} does not say where the backup begins")
    size = max(path.stat().st_size for path in (base / "pg_wal").iterdir() if path.is_file())
    count = 0
    for path in sorted(source.iterdir()) if source.exists() else ():
        named = _LOG_FILE.fullmatch(path.name)
        if named is None or (named[1] and named[1] < begin[1][8:]):
            continue
        target = folder / path.name.removesuffix(SUFFIX)
        with target.open("wb") as file:
            if path.suffix == SUFFIX:
                decrypt_stream(path, file, identity)
            else:
                with path.open("rb") as plain:
                    while data := plain.read(_CHUNK_BYTES):
                        file.write(data)
        if target.suffix == _PARTIAL:
            os.truncate(target, size)  # the zeros at its end are not stored
        count += 1
    files = (*folder.iterdir(), *(base / "pg_wal").iterdir())
    return count, find_gaps([path.name for path in files], size)


def find_gaps(names: Iterable[str], segment_size: int) -> list[tuple[str, str]]:
    """Return the first and the last file of each gap among these files of the log.

    A file that is not complete counts as missing if a later one is there.
    """
    whole = sorted((name for name in names if SEGMENT.fullmatch(name)), key=lambda name: name[8:])
    per_log = 2**32 // segment_size  # as PostgreSQL numbers them
    gaps = []
    for before, after in pairwise(whole):
        numbers = [int(name[8:16], 16) * per_log + int(name[16:], 16) for name in (before, after)]
        if numbers[1] - numbers[0] > 1:
            first, last = (
                f"{before[:8]}{number // per_log:08X}{number % per_log:08X}"
                for number in (numbers[0] + 1, numbers[1] - 1)
            )
            gaps.append((first, last))
    return gaps
