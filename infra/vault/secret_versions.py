"""Secrets with versions, in one file:
the present one and earlier ones, so that a rotation needs no restart.

A process reads the file again within a second after it was replaced.
"""

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from infra.vault import key_file
from infra.vault.key_file import KeyFileCorrupt
from worker_runtime.protocol.authentication import KEY_BYTES
from worker_runtime.protocol.errors import BerthError

#: Seconds between two looks at the file.
CHECK_INTERVAL_S = 1.0
#: The payload format of keys under which Temporal's payloads name the workflow they were made for.
BOUND_PAYLOADS = 2

log = structlog.get_logger()


class SecretVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A version of a secret."""

    version: int
    secret: bytes
    #: Unix seconds.
    made_at: int
    #: The format of keys of Temporal's payloads: `BOUND_PAYLOADS`; 1 for those of releases before
    #: 0.2.
    payload_format: int = 1

    def __repr__(self) -> str:
        return f"SecretVersion({self.version}, …)"


class SecretVersionFile:
    """The versions in a file, which is read again when it was replaced;
    one that went bad changes nothing."""

    def __init__(self, path: Path, *, check_period: float = CHECK_INTERVAL_S) -> None:
        """Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`."""
        self._path = path
        self._check_period = check_period
        self._seen = _identity(path)
        self._checked = time.monotonic()
        self._versions = load_versions(path)

    def present(self, *, now: bool = False) -> tuple[SecretVersion, ...]:
        """Returns the versions, newest first. With `now`, looks at the file even if it was looked
        at a moment ago."""
        if now or time.monotonic() - self._checked > self._check_period:
            self._read_if_replaced()
        return self._versions

    def _read_if_replaced(self) -> None:
        self._checked = time.monotonic()
        identity = _identity(self._path)
        if identity == self._seen:
            return
        try:
            self._versions = load_versions(self._path)
        except (BerthError, OSError) as error:
            log.error("secret_file_not_read", path=str(self._path), reason=str(error))
            # An unchanged malformed file stays unreadable; a new mode is a change, too.
            if isinstance(error, OSError):
                return
        self._seen = identity


def _identity(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def load_versions(path: Path) -> tuple[SecretVersion, ...]:
    """Returns the versions in a file, newest first. Raises `KeyFileMissing`, `KeyFileExposed` or
    `KeyFileCorrupt`."""
    data = key_file.read_key_file(path, private=True)
    try:
        versions = msgspec.json.decode(data, type=tuple[SecretVersion, ...])
    except ValueError:  # msgspec's errors are ValueErrors; none may show a secret
        raise KeyFileCorrupt(f"{path} is not a file of secret versions") from None
    numbers = [secret.version for secret in versions]
    descending = sorted(set(numbers), reverse=True)
    if (
        not versions
        or numbers != descending
        or any(len(secret.secret) != KEY_BYTES for secret in versions)
    ):
        raise KeyFileCorrupt(f"{path} is not a file of secret versions")
    return versions


def create_versions(path: Path, *, payload_format: int = 1) -> None:
    """Creates the file with version 1, or replaces it."""
    _write(path, [new_version(1, payload_format)])


def add_version(path: Path, *, keep: int, payload_format: int = 1) -> int:
    """Adds a version, keeps the newest `keep`; returns its number. Raises what `load_versions`
    does."""
    load_versions(path)  # says what is missing, before there is a folder to lock
    with key_file.locked(path.parent):
        versions = load_versions(path)
        fresh = new_version(versions[0].version + 1, payload_format)
        _write(path, [fresh, *versions][:keep])
    return fresh.version


def drop_before(path: Path, version: int) -> None:
    """Keeps this version and later ones. Raises what `load_versions` does."""
    with key_file.locked(path.parent):
        _write(path, [secret for secret in load_versions(path) if secret.version >= version])


def new_version(number: int, payload_format: int = 1) -> SecretVersion:
    return SecretVersion(number, secrets.token_bytes(KEY_BYTES), int(time.time()), payload_format)


def _write(path: Path, versions: Sequence[SecretVersion]) -> None:
    key_file.write_key_file(path, msgspec.json.encode(versions), private=True)
