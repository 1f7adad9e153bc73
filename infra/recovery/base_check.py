"""Checks a base backup as it passes by, against the manifest at its end (`pg_basebackup --format=tar`).

PostgreSQL's own `pg_verifybackup` wants files, which would be there in clear. It looks at them when a backup
is unpacked.
"""

import hashlib
import json
import os
import tarfile
import threading
from contextlib import suppress
from typing import IO, Any

from infra.recovery.encryption import BackupFailed, Readable
from infra.recovery.log_follower import SEGMENT

_MANIFEST, _LOG = "backup_manifest", "pg_wal/"
_CHUNK = 1024 * 1024


class BaseCheck:
    """Passes the bytes of `source` on, and reads the same ones as an archive.

    Call `finish` after the last one.
    """

    def __init__(self, source: Readable) -> None:
        self._source = source
        reader, writer = os.pipe()
        self._writer: IO[bytes] = os.fdopen(writer, "wb")
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._look, args=(os.fdopen(reader, "rb"),), daemon=True)
        self._thread.start()

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size)
        with suppress(BrokenPipeError):  # the look has ended with an error, which `finish` raises
            self._writer.write(data)
        return data

    def abandon(self) -> None:
        """Ends the look, whatever it has found."""
        with suppress(BrokenPipeError):
            self._writer.close()
        self._thread.join()

    def finish(self) -> None:
        """Raises `BackupFailed` if what passed is no whole base backup."""
        self.abandon()
        if self._error is not None:
            raise BackupFailed(f"the base backup is not whole: {self._error}") from None

    def _look(self, stream: IO[bytes]) -> None:
        with stream:
            try:
                check_base(stream)
            except (tarfile.TarError, ValueError, KeyError, OSError) as error:
                self._error = error


def check_base(stream: IO[bytes]) -> None:
    """Reads an archive to its end. Raises ValueError, KeyError or `tarfile.TarError` if it is not whole."""
    files: dict[str, tuple[int, str]] = {}
    segments: dict[str, int] = {}
    text = b""
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK) as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            content = archive.extractfile(member) if member.isfile() else None
            if content is None:
                continue
            if name == _MANIFEST:
                text = content.read()
                continue
            if SEGMENT.fullmatch(name.removeprefix(_LOG)):
                segments[name.removeprefix(_LOG)] = member.size
            files[name] = member.size, _digest(content)
    while stream.read(_CHUNK):  # what follows the end of an archive
        pass
    if not text:
        raise ValueError("it ends before its manifest")
    _compare(text, files, segments)


def _digest(content: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while data := content.read(_CHUNK):
        digest.update(data)
    return digest.hexdigest()


def _compare(text: bytes, files: dict[str, tuple[int, str]], segments: dict[str, int]) -> None:
    manifest: dict[str, Any] = json.loads(text)
    signed = text[: text.rindex(b'"Manifest-Checksum"')]
    if hashlib.sha256(signed).hexdigest() != manifest["Manifest-Checksum"]:
        raise ValueError("its manifest is damaged")
    for entry in manifest["Files"]:
        name = entry["Path"] if "Path" in entry else bytes.fromhex(entry["Encoded-Path"]).decode("latin-1")
        if files.get(name) != (entry["Size"], entry["Checksum"]):
            raise ValueError(f"{name} is missing or damaged")
    size = max(segments.values(), default=0)
    for needed in manifest["WAL-Ranges"]:
        for name in _segments(needed, size):
            if name not in segments:
                raise ValueError(f"{name} of the log is missing")


def _segments(needed: dict[str, Any], size: int) -> list[str]:
    """Return the names of the files of the log that a backup needs."""
    if not size:
        raise ValueError("it has no log")
    first, last = (_position(needed[name]) // size for name in ("Start-LSN", "End-LSN"))
    of_one = 2**32 // size
    return [
        f"{needed['Timeline']:08X}{number // of_one:08X}{number % of_one:08X}"
        for number in range(first, last + 1)
    ]


def _position(text: str) -> int:
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) + int(low, 16)
