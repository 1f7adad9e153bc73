"""`berth backup --follow`: PostgreSQL's log, encrypted as it is written.

PostgreSQL's `pg_receivewal` writes it into a private folder of this machine (the *spool*). Each
file that is complete is encrypted into the folder of backups and leaves the spool; the one that is
being written is encrypted again about once a second. So a moment can be restored up to then.
"""

import fcntl
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import structlog
from pyrage import x25519

from infra.processes import end_with_parent
from infra.recovery.encryption import SUFFIX, BackupFailed, encrypt_stream

#: Seconds between two looks at the spool.
PERIOD_S = 1.0
#: Seconds that `pg_receivewal` gets to end.
STOP_TIMEOUT_S = 10.0
#: Timeline, and place in the log.
SEGMENT = re.compile(r"[0-9A-F]{24}")
_HISTORY = re.compile(r"[0-9A-F]{8}\.history")
_PARTIAL = ".partial"

log = structlog.get_logger()


class LogFollower:
    """Follows the log of one server into one folder."""

    def __init__(self, folder: Path, spool: Path, recipients: Sequence[x25519.Recipient]) -> None:
        """`folder`: of the encrypted log. `spool`: private, on this machine."""
        self._folder = folder
        self._spool = spool
        self._recipients = recipients
        #: The file that was being written, and when it was changed last.
        self._partial: tuple[str, int] = ("", 0)
        self._stop = threading.Event()

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Follows until SIGTERM or SIGINT. Raises `BackupFailed`, OSError.

        `command`: `pg_receivewal` with the arguments of its connection.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        for path in (self._folder, self._spool):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._spool, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BackupFailed(f"another `berth backup --follow` uses {self._spool}") from None
            self.continue_after_last()
            receiver = subprocess.Popen(
                [*command, "--directory", str(self._spool), "--synchronous", "--no-password"],
                env=environment,
                start_new_session=True,  # Ctrl-C ends it by us
                preexec_fn=end_with_parent(os.getpid()),
            )
            try:
                self._follow(receiver)
            finally:
                receiver.terminate()
                receiver.wait(STOP_TIMEOUT_S)
            self.encrypt_new()
        finally:
            os.close(lock)

    def _follow(self, receiver: subprocess.Popen[bytes]) -> None:
        failing = False
        while not self._stop.wait(PERIOD_S):
            if receiver.poll() is not None:
                raise BackupFailed(f"pg_receivewal ended with code {receiver.returncode}")
            try:
                self.encrypt_new()
                failing = False
            except OSError as error:  # such as a full or absent medium: the spool keeps what is new
                if not failing:
                    log.error("log_not_encrypted", folder=str(self._folder), reason=str(error))
                failing = True

    def continue_after_last(self) -> None:
        """Leaves an empty file of the last one's name and size, after which `pg_receivewal` begins.

        So nothing is missing if the spool was lost, as long as the server still has it.
        """
        here = [path.name for path in self._spool.iterdir() if SEGMENT.fullmatch(path.name)]
        there = [name for path in self._folder.iterdir() if SEGMENT.fullmatch(name := path.stem)]
        there = [name for name in there if (self._folder / f"{name}{SUFFIX}").exists()]
        last = max(there, key=_place, default="")
        if last and _place(last) > max(map(_place, here), default=("", "")):
            self._replace_by_empty(last, _segment_size(self._folder / f"{last}{SUFFIX}"))

    def encrypt_new(self) -> None:
        """Encrypts what is new in the spool. Safe to repeat. Raises OSError."""
        names = sorted(path.name for path in self._spool.iterdir())
        segments = sorted(filter(SEGMENT.fullmatch, names), key=_place)
        for name in (*filter(_HISTORY.fullmatch, names), *segments):
            source, target = self._spool / name, self._folder / f"{name}{SUFFIX}"
            # Without blocks: encrypted, and deleted since.
            if not target.exists() and source.stat().st_blocks:
                with source.open("rb") as file:
                    encrypt_stream(file, target, self._recipients)
            (self._folder / f"{name}{_PARTIAL}{SUFFIX}").unlink(missing_ok=True)
        for name in segments[:-1]:
            (self._spool / name).unlink()
        if segments:
            last = self._spool / segments[-1]
            if last.stat().st_blocks:
                self._replace_by_empty(last.name, last.stat().st_size)
        for name in names:
            if name.endswith(_PARTIAL) and SEGMENT.fullmatch(name.removesuffix(_PARTIAL)):
                self._encrypt_partial(name)

    def _encrypt_partial(self, name: str) -> None:
        """Without the zeros that fill the file up; `unpack` adds them again."""
        try:
            changed_at = (self._spool / name).stat().st_mtime_ns
            if self._partial == (name, changed_at):
                return
            data = (self._spool / name).read_bytes().rstrip(b"\0")
        except FileNotFoundError:  # complete since
            return
        encrypt_stream(BytesIO(data), self._folder / f"{name}{SUFFIX}", self._recipients)
        self._partial = name, changed_at

    def _replace_by_empty(self, name: str, size: int) -> None:
        """A file without a block on the disk."""
        fresh = self._spool / f".{name}"
        with fresh.open("wb") as file:
            file.truncate(size)
        fresh.rename(self._spool / name)


def _place(name: str) -> tuple[str, str]:
    """Orders the files of the log as `pg_receivewal` does: by place, then by timeline."""
    return name[8:], name[:8]


def _segment_size(encrypted: Path) -> int:
    """The size of a segment is a power of two from 1 MiB on; what age adds is far less than half of
    it."""
    return 1 << (encrypted.stat().st_size.bit_length() - 1)
