"""The data folder of the local system: its lock, keys, data, logs and process records."""

import json
import os
import secrets
import shutil
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Self

from infra.local import record
from infra.processes import try_lock
from infra.vault import key_file
from worker_runtime.protocol.errors import BerthError

#: Grows when a release can no longer read an earlier release's folder.
LAYOUT_VERSION = 2
#: Bytes. With less, PostgreSQL and Temporal soon fail with unclear messages.
MIN_FREE_BYTES = 500 * 1024 * 1024
#: The second line of the lock file while its holder stops.
_STOPPING = "stopping"
#: Files that a folder of ours may hold before its version file is written.
_EARLY = {"lock", "version", "version.new"}


class FolderUnusable(BerthError, code="FOLDER_UNUSABLE"):
    """The data folder cannot be used."""


class FolderBusy(FolderUnusable, code="FOLDER_BUSY"):
    """Another `berth up` uses this data folder."""


@dataclass(frozen=True)
class Passwords:
    """The passwords of the servers of one data folder."""

    postgres: str
    valkey: str


def make_private(path: Path, *, passable: bool = False) -> None:
    """Makes a folder that only this user enters.
    `passable`: others may reach what is theirs inside."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o711 if passable else 0o700)


def _private(path: str, flags: int) -> int:
    """Opens a file that only this user reads, whatever the umask is."""
    return os.open(path, flags, 0o600)


class DataFolder:
    """The data folder. One process at a time opens it: the kernel drops the lock with its
    holder.

    No other account reads anything in it. Under root others may pass through it: PostgreSQL and the
    workers run as users of their own.
    """

    def __init__(self, path: Path, *, min_free: int = MIN_FREE_BYTES) -> None:
        self.path = path.absolute()
        self._min_free = min_free
        self.records = self.path / "run"
        self.logs = self.path / "logs"
        self.keys = self.path / "keys"
        self._password_file = self.keys / "servers.json"
        #: New ones for a new folder; `open` stores them.
        self.passwords = self._stored_passwords() or Passwords(
            secrets.token_hex(24), secrets.token_hex(24)
        )
        self._lock: IO[str] | None = None

    def open(self) -> Self:
        """Locks and checks the folder. Raises `FolderUnusable`, which says what to do."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_ours()
            self.lock()
            self._check_space()
            self._mark()
            make_private(self.path, passable=os.geteuid() == 0)
            for folder in (self.records, self.logs, self.keys):
                make_private(folder)
            self._store_passwords()
            self._api_note.unlink(missing_ok=True)  # an earlier run may have had another port
        except FolderUnusable:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise FolderUnusable(
                f"the data folder {self.path} cannot be used: {error.strerror}; make it writable "
                "or choose another with --data or BERTH_DATA_DIR"
            ) from None
        return self

    def lock(self) -> Self:
        """Takes only the lock, to clean up even a damaged folder. Raises `FolderBusy`."""
        lock = open(self.path / "lock", "a+", encoding="ascii", opener=_private)  # noqa: SIM115 - kept open
        if not try_lock(lock):
            lock.seek(0)
            holder, _, state = lock.read().strip().partition("\n")
            lock.close()
            name = f"another `berth up` ({f'pid {holder}' if holder else 'pid unknown'})"
            if state == _STOPPING:
                raise FolderBusy(
                    f"{name} is stopping and still uses {self.path}; start again in a moment"
                )
            raise FolderBusy(
                f"{name} uses {self.path}; stop it with Ctrl-C or `berth down`, or choose another "
                "folder with --data"
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock
        return self

    def note_stop(self) -> None:
        """Notes in the lock file that the holder is stopping, for the next `berth up`."""
        if self._lock is not None:
            self._lock.write(f"\n{_STOPPING}")
            self._lock.flush()

    def holder(self) -> int | None:
        """Returns the pid of the process that has the folder open; None if nobody has."""
        try:
            lock = (self.path / "lock").open("r+", encoding="ascii")
        except OSError:
            return None
        with lock:
            text = "" if try_lock(lock) else lock.readline().strip()
            return int(text) if text.isdigit() else None

    @property
    def _api_note(self) -> Path:
        return self.records / "api.url"

    def record_api_url(self, url: str, ports: str = "") -> None:
        """Notes where the API listens, and the other ports as JSON,
        for the commands that talk to them."""
        key_file.write_key_file(self._api_note, f"{url}\n{ports}".encode(), private=True)

    def addresses(self) -> tuple[str, str]:
        """Returns the API's URL and the other ports of this folder's `berth up`; '' while none is
        ready."""
        try:
            text = self._api_note.read_text(encoding="utf-8") if self.holder() else ""
        except OSError:
            text = ""
        url, _, ports = text.partition("\n")
        return url, ports

    def _check_space(self) -> None:
        free = shutil.disk_usage(self.path).free
        if free < self._min_free:
            raise FolderUnusable(
                f"{free // 2**20} MiB are free at {self.path}; {self._min_free // 2**20} MiB "
                "are needed"
            )

    def _check_ours(self) -> None:
        """Refuses a folder that holds something else: `make clean` removes the whole folder."""
        marker = self.path / "version"
        if marker.exists():
            try:
                layout = int(json.loads(marker.read_text(encoding="utf-8"))["layout"])
            except (ValueError, KeyError, TypeError):
                raise FolderUnusable(
                    f"{marker} cannot be read: the folder was damaged; remove it with `make clean`"
                ) from None
            if layout != LAYOUT_VERSION:
                raise FolderUnusable(
                    f"{self.path} was made by a release with another layout ({layout}; this one: "
                    f"{LAYOUT_VERSION}); remove it with `make clean` or choose another folder with "
                    "--data"
                )
            return
        foreign = sorted({entry.name for entry in self.path.iterdir()} - _EARLY)
        if foreign:
            raise FolderUnusable(
                f"{self.path} holds other things ({', '.join(foreign[:3])}) and is no data folder "
                "of Berth; choose an empty or a new one with --data"
            )

    def _mark(self) -> None:
        marker = self.path / "version"
        if not marker.exists():
            new = self.path / "version.new"
            with open(new, "w", encoding="utf-8", opener=_private) as file:
                json.dump({"layout": LAYOUT_VERSION}, file)
            new.replace(marker)  # never half written, even when killed here

    def _stored_passwords(self) -> Passwords | None:
        """Returns the stored passwords, None if there are none, or the file cannot be read."""
        try:
            return Passwords(
                **json.loads(key_file.read_key_file(self._password_file, private=True))
            )
        except (BerthError, OSError, ValueError, TypeError):
            return None

    def _store_passwords(self) -> None:
        """Stores those of a new folder. Raises `FolderUnusable` if the file is damaged."""
        if not self._password_file.exists():
            key_file.write_key_file(
                self._password_file, json.dumps(asdict(self.passwords)).encode(), private=True
            )
        elif self._stored_passwords() != self.passwords:
            raise FolderUnusable(
                f"{self._password_file} cannot be read, must have mode 0600, or was made a moment "
                "ago by another `berth up`: try again; if it is damaged, remove the folder with "
                "`make clean`"
            )

    def end_leftovers(self) -> list[str]:
        """Ends what a killed `berth up` left running, except workers; returns the names."""
        ended = []
        for entry in reversed(record.read_records(self.records)):
            how = signal.SIGINT if entry.name == "postgres" else signal.SIGTERM
            if entry.end(how):
                ended.append(entry.name)
            record.forget_record(self.records, entry.name)
        return ended

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
