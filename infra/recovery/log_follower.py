"""`berth backup --follow`: PostgreSQL's log, encrypted as it is written.

PostgreSQL's `pg_receivewal` writes it into a private folder of this machine (the *spool*). Each
file that is complete is encrypted into the folder of backups and leaves the spool; the one that is
being written is encrypted again about once a second. So a moment can be restored up to then.

While the folder of backups is away or full, the spool grows up to a bound; then nothing more is
received. PostgreSQL does not wait for the follower: it recycles its log as if there were none, so
that its disk does not fill. What it has recycled meanwhile is lost to the backup. The follower's
log, an alert to operators and `berth unpack` say so.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import structlog
from pyrage import x25519

from infra.processes import end_with_parent
from infra.recovery.encryption import SUFFIX, BackupFailed, encrypt_stream

#: Seconds between two looks at the spool.
CHECK_INTERVAL_S = 1.0
#: Seconds that `pg_receivewal` gets to end.
STOP_TIMEOUT_S = 10.0
#: Bytes of the spool's disk that stay free while the folder of backups is away.
MIN_FREE_BYTES = 1024**3
#: Timeline, and place in the log.
SEGMENT = re.compile(r"[0-9A-F]{24}")
_HISTORY = re.compile(r"[0-9A-F]{8}\.history")
_PARTIAL = ".partial"
#: The line of `pg_receivewal` when the server has no longer what it asks for; the server's own
#: words depend on its language.
_RECYCLED = re.compile(r"unexpected termination of replication stream: .*(?<!/)\b([0-9A-F]{24})\b")

log = structlog.get_logger()


class LogReceiver:
    """Runs `pg_receivewal` into a folder, and reads what it says."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Runs `command`, which is `pg_receivewal` with the arguments of its connection and its
        folder."""
        self._command = command
        self._environment = {**environment, "LC_ALL": "C"}
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        #: The file that the server has recycled before it was received.
        self.recycled = ""

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        self.recycled = ""
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C ends it by us
            preexec_fn=end_with_parent(os.getpid()),
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def check(self) -> None:
        """Raises `BackupFailed` if the program has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise BackupFailed(f"pg_receivewal ended with code {self._process.returncode}")

    def stop(self) -> None:
        if self._process is None or self._reader is None:
            return
        self._process.terminate()
        self._process.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        self._process = None

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None  # noqa: S101 - a pipe
        with process.stderr as lines:
            for line in lines:
                sys.stderr.write(line)
                if named := _RECYCLED.search(line):
                    self.recycled = named[1]


class LogFollower:
    """Follows the log of one server into one folder."""

    def __init__(
        self,
        folder: Path,
        spool: Path,
        recipients: Sequence[x25519.Recipient],
        *,
        max_spool_bytes: int,
    ) -> None:
        """Encrypts the log into `folder`, from the private `spool` on this machine."""
        self._folder = folder
        self._spool = spool
        self._recipients = recipients
        self._max_spool_bytes = max_spool_bytes
        #: The file that was being written, and when it was changed last.
        self._partial: tuple[str, int] = ("", 0)
        self._is_failing = False
        #: The first file that is lost, until its successors are received.
        self._lost_from = ""
        self._stop = threading.Event()

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Follows until SIGTERM or SIGINT. Raises `BackupFailed`, OSError.

        `command`: `pg_receivewal` with the arguments of its connection.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        # A spool shows that a follower ran before and has made the folder: then it is on a medium
        # that is away, and must not be made anew on the disk below its mount point.
        if not self._spool.exists():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._spool, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BackupFailed(f"another `berth backup --follow` uses {self._spool}") from None
            if self._folder.is_dir():
                self.continue_after_last()
            receiver = LogReceiver(
                [*command, "--directory", str(self._spool), "--synchronous", "--no-password"],
                environment,
            )
            receiver.start()
            try:
                while not self._stop.wait(CHECK_INTERVAL_S):
                    self._look(receiver)
            finally:
                receiver.stop()
            self.encrypt_new()
        finally:
            os.close(lock)

    def _look(self, receiver: LogReceiver) -> None:
        """Encrypts what came, and receives as long as there is room. Raises `BackupFailed`."""
        receiver.check()
        try:
            self.encrypt_new()
        except OSError as error:  # such as a full or absent medium: the spool keeps what is new
            if not self._is_failing:
                log.error("log_not_encrypted", folder=str(self._folder), reason=str(error))
            self._is_failing = True
            if receiver.is_running and not self._has_room():
                receiver.stop()
                log.error(
                    "log_spool_full",
                    spool=str(self._spool),
                    reason=f"no more of PostgreSQL's log is received until {self._folder} takes "
                    "it; what PostgreSQL recycles until then is lost to the backup",
                )
            return
        if self._is_failing:
            log.info("log_encrypted_again", folder=str(self._folder))
            self._is_failing = False
        if not receiver.is_running:
            receiver.start()
        elif receiver.recycled:
            self._begin_after_gap(receiver)
        elif self._lost_from and (received := self._received()):
            log.info("log_received_again", lost_from=self._lost_from, received_from=received)
            self._lost_from = ""

    def _has_room(self) -> bool:
        used = sum(_bytes_on_disk(path) for path in self._spool.iterdir())
        return used < self._max_spool_bytes and shutil.disk_usage(self._spool).free > MIN_FREE_BYTES

    def _begin_after_gap(self, receiver: LogReceiver) -> None:
        """Receives from the server's present place on; all that was received is encrypted."""
        if receiver.recycled != self._lost_from:
            self._lost_from = receiver.recycled
            log.error(
                "log_lost",
                first_lost=self._lost_from,
                reason=f"PostgreSQL has recycled its log from {self._lost_from} on: make a base "
                "backup now",
                detail=f"moments since cannot be restored from earlier backups in {self._folder}",
            )
        receiver.stop()
        for path in self._spool.iterdir():  # with an empty folder it begins at the present
            path.unlink()
        receiver.start()

    def _received(self) -> str:
        """Return the name of the first file in the spool; empty if there is none yet."""
        names = [path.name.removesuffix(_PARTIAL) for path in self._spool.iterdir()]
        return min(filter(SEGMENT.fullmatch, names), key=_place, default="")

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
        """Encrypts a partial file without the zeros that fill the file up; `unpack` adds them
        again."""
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
        """Replaces a file by one without a block on the disk."""
        fresh = self._spool / f".{name}"
        with fresh.open("wb") as file:
            file.truncate(size)
        fresh.rename(self._spool / name)


def _bytes_on_disk(path: Path) -> int:
    """Returns 0 for a file that `pg_receivewal` has renamed since it was listed."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _place(name: str) -> tuple[str, str]:
    """Orders the files of the log as `pg_receivewal` does: by place, then by timeline."""
    return name[8:], name[:8]


def _segment_size(encrypted: Path) -> int:
    """Returns the size of a segment, a power of two from 1 MiB on; what age adds is far less than
    half of it."""
    return 1 << (encrypted.stat().st_size.bit_length() - 1)
