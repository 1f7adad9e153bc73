"""Key files: private ones have mode 0600; each is written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from worker_runtime.protocol.errors import BerthError


class KeyFileMissing(BerthError):
    """A key file is missing."""

    code = "KEY_FILE_MISSING"


class KeyFileExposed(BerthError):
    """A private key file can be read by others."""

    code = "KEY_FILE_EXPOSED"


class KeyFileCorrupt(BerthError):
    """A key file does not hold what it should."""

    code = "KEY_FILE_CORRUPT"


def read_key_file(path: Path, *, private: bool) -> bytes:
    """Raises `KeyFileMissing`, and `KeyFileExposed` for a private file with any bit for group or others."""
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except FileNotFoundError:
        raise KeyFileMissing(f"{path} is missing; `berth keys init` makes it") from None
    except PermissionError:
        raise KeyFileMissing(f"{path} cannot be read by this user") from None
    if private and stat.S_IMODE(mode) & 0o077:
        raise KeyFileExposed(f"{path} has mode {stat.S_IMODE(mode):04o}; it must be 0600")
    return data


def write_key_file(path: Path, data: bytes, *, private: bool) -> None:
    """Writes a key file; replaces an existing one atomically."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
