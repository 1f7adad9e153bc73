"""Checks a base backup as it passes by, against the manifest at its end (`pg_basebackup
--format=tar`).

PostgreSQL's own `pg_verifybackup` wants files, which would be there in clear. It looks at them when
a backup is unpacked.
"""

import hashlib
import json
import tarfile
import threading
from queue import Queue
from typing import IO, Any, cast

from infra.recovery.encryption import BackupFailed, Readable
from infra.recovery.log_follower import SEGMENT

_MANIFEST, _LOG = "backup_manifest", "pg_wal/"
_CHUNK_BYTES = 1024 * 1024


class BaseCheck:
    """Passes the bytes of `source` on, and reads the same ones as an archive.

    Call `finish` after the last one, or `abandon`.
    """

    def __init__(self, source: Readable) -> None:
        self._source = source
        #: The bytes that were read and not yet passed on.
        self._rest = memoryview(b"")
        self._feed = _Feed()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes. In large pieces to the look:
        each costs a switch between threads."""
        if not self._rest:
            data = self._source.read(_CHUNK_BYTES)
            if data:
                self._feed.put(data)
            self._rest = memoryview(data)
        end = len(self._rest) if size < 0 else size
        passed, self._rest = bytes(self._rest[:end]), self._rest[end:]
        return passed

    def abandon(self) -> None:
        """Ends the look, whatever it has found."""
        self._feed.put(b"")
        self._thread.join()

    def finish(self) -> None:
        """Raises `BackupFailed` if what passed is no whole base backup."""
        self.abandon()
        if self._error is not None:
            raise BackupFailed(f"the base backup is not whole: {self._error}") from None

    def _look(self) -> None:
        try:
            check_base(self._feed)
        except (tarfile.TarError, ValueError, KeyError, OSError) as error:
            self._error = error
        self._feed.drain()


class _Feed:
    """A stream from one thread to another, of a few pieces at once."""

    def __init__(self) -> None:
        self._pieces: Queue[bytes] = Queue(maxsize=4)
        self._rest = b""
        self._over = False

    def put(self, data: bytes) -> None:
        """Adds a piece; an empty one ends the stream."""
        self._pieces.put(data)

    def read(self, size: int = -1, /) -> bytes:
        """Return `size` bytes, and fewer at the end."""
        while not self._over and (size < 0 or len(self._rest) < size):
            piece = self._pieces.get()
            self._over = not piece
            self._rest += piece
        end = len(self._rest) if size < 0 else size
        data, self._rest = self._rest[:end], self._rest[end:]
        return data

    def drain(self) -> None:
        """Takes what comes until the end."""
        while not self._over:
            self._over = not self._pieces.get()


def check_base(stream: Readable) -> None:
    """Reads an archive to its end. Raises ValueError,
    KeyError or `tarfile.TarError` if it is not whole."""
    files: dict[str, tuple[int, str]] = {}
    segments: dict[str, int] = {}
    text = b""
    with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|", bufsize=_CHUNK_BYTES) as archive:
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
    while stream.read(_CHUNK_BYTES):  # what follows the end of an archive
        pass
    if not text:
        raise ValueError("it ends before its manifest")
    _compare(text, files, segments)


def _digest(content: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while data := content.read(_CHUNK_BYTES):
        digest.update(data)
    return digest.hexdigest()


def _compare(text: bytes, files: dict[str, tuple[int, str]], segments: dict[str, int]) -> None:
    manifest: dict[str, Any] = json.loads(text)
    signed = text[: text.rindex(b'"Manifest-Checksum"')]
    if hashlib.sha256(signed).hexdigest() != manifest["Manifest-Checksum"]:
        raise ValueError("its manifest is damaged")
    for entry in manifest["Files"]:
        name = (
            entry["Path"]
            if "Path" in entry
            else bytes.fromhex(entry["Encoded-Path"]).decode("latin-1")
        )
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
