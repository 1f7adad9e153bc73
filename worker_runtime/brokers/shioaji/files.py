"""Where Shioaji keeps its log, its tokens and its contracts:
in memory, for this process's user alone.

A worker's processes end without `atexit`, and some by SIGKILL. So the folder is emptied when the
last session is closed; what a killed session left is removed by its successor, and what a worker
left by its node.
"""

import atexit
import os
import shutil
import stat
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from worker_runtime.protocol.launch import MEMORY, memory_prefix


def private_folder() -> str:
    """Makes a folder that only this process's user can read, in memory where there is some."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    return tempfile.mkdtemp(prefix=f"{memory_prefix(os.getppid())}{os.getpid()}-", dir=place)


def remove_stale_folders(place: Path = MEMORY) -> None:
    """Removes the folders of dead processes that had our parent: the zygote, which forks one
    session after the other. Never raises."""
    family = memory_prefix(os.getppid())
    for folder in place.glob(f"{family}*"):
        pid = folder.name.removeprefix(family).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(folder, ignore_errors=True)


class SessionFiles:
    """Holds the only folder of a process: the SDK learns of it from the environment."""

    def __init__(self) -> None:
        self.folder = private_folder()
        self._lock = threading.Lock()
        self._sessions = 0

    def session_opened(self) -> None:
        """Counts a session; makes the folder again
        if somebody has cleaned it away. Raises `OSError`."""
        with self._lock:
            self._restore()
            self._sessions += 1

    def _restore(self) -> None:
        """Makes the folder again. The place is open to all, so a folder that another user has put
        there is refused."""
        try:
            os.mkdir(self.folder, 0o700)
        except FileExistsError:
            status = os.lstat(self.folder)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise

    def session_closed(self) -> None:
        """Empties the folder after the last session."""
        with self._lock:
            self._sessions -= 1
            if self._sessions > 0:
                return
            with suppress(FileNotFoundError):
                for entry in os.scandir(self.folder):
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)


_making = threading.Lock()


def session_files() -> SessionFiles:
    """Returns this process's folder, and makes it known to the SDK. Logins of several accounts may
    ask at once."""
    with _making:  # `cache` alone would make two
        return _make_files()


@cache
def _make_files() -> SessionFiles:
    remove_stale_folders()
    made = SessionFiles()
    atexit.register(shutil.rmtree, made.folder, ignore_errors=True)
    os.environ["SJ_LOG_PATH"] = f"{made.folder}/shioaji.log"
    os.environ["SJ_HOME_PATH"] = made.folder
    os.environ["SJ_CONTRACTS_PATH"] = made.folder
    return made
