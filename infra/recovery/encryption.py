"""Encrypts backups to recipients (age,
https://age-encryption.org), whose identity is kept elsewhere.

Whoever finds a backup can open nothing in it.
Streams are encrypted as they are read, in bounded memory.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import pyrage
from pyrage import x25519

from infra.vault.key_file import read_key_file, write_key_file
from worker_runtime.protocol.errors import BerthError

#: The suffix of an encrypted file.
SUFFIX = ".age"


class BackupFailed(BerthError, code="BACKUP_FAILED"):
    """The backup was not made or not opened. An interrupted backup keeps the suffix `.partial`.
    Delete it and start again."""


class Readable(Protocol):
    """A source that can be encrypted."""

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes; none at the end."""


def read_recipients(texts: Sequence[str]) -> list[x25519.Recipient]:
    """Raises `BackupFailed` for what is no recipient, and if there is none."""
    if not texts:
        raise BackupFailed(
            "nobody could open the backup. Make an identity with `berth keys backup-identity "
            "FILE`, keep that file away from the backups, and set BERTH_BACKUP_RECIPIENTS to what "
            "it prints. Or back up without encryption with --plain"
        )
    try:
        return [x25519.Recipient.from_str(text) for text in texts]
    except pyrage.RecipientError:
        raise BackupFailed(
            "BERTH_BACKUP_RECIPIENTS holds what is no recipient of age (age1…)"
        ) from None


def make_identity(path: Path) -> str:
    """Writes a new identity into a file (mode 0600) that must not exist; returns its recipient."""
    if path.exists():
        raise BackupFailed(f"{path} exists: backups may be encrypted to it")
    identity = x25519.Identity.generate()
    write_key_file(path, f"{identity}\n".encode(), private=True)
    return str(identity.to_public())


def read_identity(path: Path) -> x25519.Identity:
    """Raises `BackupFailed`, `KeyFileMissing`, `KeyFileExposed`, OSError."""
    text = read_key_file(
        path, private=True, made_by="`berth keys backup-identity` makes it"
    ).decode()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    try:
        [line] = lines
        return x25519.Identity.from_str(line)
    except (ValueError, pyrage.IdentityError):
        raise BackupFailed(f"{path} does not hold one identity of age") from None


def encrypt_stream(source: Readable, path: Path, recipients: Sequence[x25519.Recipient]) -> None:
    """Encrypts all of `source` into a new file (mode 0600),
    which is whole, and on the disk, or not there.

    Raises what `source` raises, and OSError.
    """
    fresh = path.with_name(f".{path.name}.new")
    reader = _Reader(source)
    try:
        with open(fresh, "wb", opener=_private) as file:
            writer = _Writer(file)
            try:
                pyrage.encrypt_io(reader, writer, recipients)
            except Exception as error:
                unknown = BackupFailed(f"{path} was not written: {error}")
                raise (reader.error or writer.error or unknown) from None
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def decrypt_stream(path: Path, target: BinaryIO, identity: x25519.Identity) -> None:
    """Decrypts a file into `target`. Raises `BackupFailed`,
    also after a part was written, and OSError."""
    with path.open("rb") as file:
        try:
            pyrage.decrypt_io(file, target, [identity])
        except (pyrage.DecryptError, pyrage.IdentityError, OSError) as error:
            # An error of the operating system is no damaged piece.
            if getattr(error, "errno", None) is not None:
                raise
            raise BackupFailed(
                f"the identity does not open {path}, or the file is damaged"
            ) from None


class _Reader:
    """Keeps the error of a source: the library would turn it into one of its own."""

    def __init__(self, source: Readable) -> None:
        self._source = source
        self.error: Exception | None = None

    def read(self, size: int = -1) -> bytes:
        try:
            return self._source.read(size)
        except Exception as error:
            self.error = error
            raise


class _Writer:
    """Keeps the error of a target, such as a full disk, for the same reason."""

    def __init__(self, target: BinaryIO) -> None:
        self._target = target
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._target.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._target.flush()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
