"""Where Shioaji keeps its log, its tokens and its contracts: in memory, for this process's user alone.

A worker's processes end without `atexit`, and some by SIGKILL. So the folder is emptied when the last session
is closed, and what a killed session left is removed by its successor.
"""

import atexit
import os
import shutil
import tempfile
import threading
from functools import cache
from pathlib import Path

#: Memory-backed: what is written there never reaches a disk.
MEMORY = Path("/dev/shm")  # noqa: S108


def private_folder() -> str:
    """A new folder that only this process's user can read, in memory where there is some."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    return tempfile.mkdtemp(prefix=f"{_folder_prefix()}{os.getpid()}-", dir=place)


def remove_stale_folders(place: Path = MEMORY) -> None:
    """Removes the folders of dead processes that had our parent: the zygote, which forks one session after
    the other. Never raises."""
    try:
        left = [entry.path for entry in os.scandir(place) if _is_stale(entry)]
    except OSError:
        return
    for path in left:
        shutil.rmtree(path, ignore_errors=True)


def _folder_prefix() -> str:
    return f"berth-sj-{os.getppid()}-"


def _is_stale(entry: os.DirEntry[str]) -> bool:
    if not entry.name.startswith(_folder_prefix()) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
        return False
    pid = entry.name.removeprefix(_folder_prefix()).partition("-")[0]
    return pid.isdigit() and not os.path.exists(f"/proc/{pid}")


class SessionFiles:
    """One folder a process, because the SDK learns of it from the environment."""

    def __init__(self) -> None:
        self.folder = private_folder()
        self._lock = threading.Lock()
        self._sessions = 0

    def session_opened(self) -> None:
        with self._lock:
            self._sessions += 1

    def session_closed(self) -> None:
        """Empties the folder after the last session."""
        with self._lock:
            self._sessions -= 1
            if self._sessions > 0:
                return
            for entry in os.scandir(self.folder):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


_making = threading.Lock()


def session_files() -> SessionFiles:
    """This process's folder, made known to the SDK. Logins of several accounts may ask at once."""
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
