"""Key files: private ones have mode 0600; each is written whole or not at all."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker_runtime.protocol.errors import BerthError


class KeyFileMissing(BerthError, code="KEY_FILE_MISSING"):
    """A key file is missing."""


class KeyFileExposed(BerthError, code="KEY_FILE_EXPOSED"):
    """A private key file can be read by others."""


class KeyFileCorrupt(BerthError, code="KEY_FILE_CORRUPT"):
    """A key file does not hold what it should."""


def read_key_file(
    path: Path, *, private: bool, made_by: str = "`berth keys init` makes it"
) -> bytes:
    """Raises `KeyFileMissing`, and `KeyFileExposed`
    for a private file with any bit for group or others."""
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except FileNotFoundError:
        raise KeyFileMissing(f"{path} is missing; {made_by}") from None
    except PermissionError:
        raise KeyFileMissing(f"{path} cannot be read by this user") from None
    if private and stat.S_IMODE(mode) & 0o077:
        raise KeyFileExposed(f"{path} has mode {stat.S_IMODE(mode):04o}; it must be 0600")
    return data


def write_key_file(path: Path, data: bytes, *, private: bool) -> None:
    """Writes a key file; replaces an existing one atomically."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Of a new name each time: a process that was killed
    # may have left one, and in containers ids repeat.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    fresh = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600 if private else 0o644)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a file lock on the folder of key files; the kernel releases it when its holder dies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
