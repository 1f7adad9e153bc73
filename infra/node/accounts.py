"""User ids of their own for workers, so that none reads files or memory of another.

Only root can give them. A user id is free while no process has it, and they are taken in turn, so
that a worker seldom gets one whose last holder left files in `/tmp`. Nodes of one host need ranges
of their own.
"""

import compileall
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import psutil

from infra.node.worker import clean_environment
from infra.worker_task import LaunchFailed
from worker_runtime.protocol.errors import BerthError

#: What a worker must be able to do: import its code, and use its own folder.
_TRIAL = "import os, worker_runtime.protocol.launch; os.listdir(os.environ['HOME'])"
#: Seconds; it takes 0.1.
_TRIAL_TIMEOUT_S = 30.0


class AccountsUnavailable(BerthError, code="ACCOUNTS_UNAVAILABLE"):
    """This host cannot give workers user ids of their own."""


class UserIds:
    """The user ids from `first` to `last`; a worker's group has the same number."""

    def __init__(self, first: int, last: int) -> None:
        self._range = range(first, last + 1)
        self._next = 0

    def take(self) -> int:
        """Takes a user id that no process has. Raises `LaunchFailed` when all are in use."""
        used = _used()
        for step in range(len(self._range)):
            number = self._range[(self._next + step) % len(self._range)]
            if number not in used:
                self._next += step + 1
                return number
        raise LaunchFailed(
            f"all {len(self._range)} user ids for workers are in use; widen BERTH_NODE_UIDS; while "
            "it is empty, workers share the node's user"
        )


def _used() -> set[int]:
    """Returns the user ids of all live processes. A zombie has neither memory nor files left."""
    processes = [process.info for process in psutil.process_iter(["uids", "status"])]
    living = [info["uids"] for info in processes if info["status"] != psutil.STATUS_ZOMBIE]
    return {number for uids in living if uids is not None for number in uids}


def find_user_ids(text: str, state: Path, runs: Path) -> UserIds:
    """Returns the range `first-last`, once a worker was tried with it. Raises
    `AccountsUnavailable`.

    Others may then pass through `state` and `runs`, in which workers have their folders.
    """
    if not text:
        raise AccountsUnavailable("BERTH_NODE_UIDS is empty")
    if os.geteuid() != 0:
        raise AccountsUnavailable("the node does not run as root")
    first, last = (int(number) for number in text.split("-"))
    for folder in (state, runs):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o711)
    code = find_spec("worker_runtime")
    if code is not None and code.origin is not None:
        # Workers cannot store what they compile, and would compile it at every launch.
        compileall.compile_dir(Path(code.origin).parent, quiet=2)
    ids = UserIds(first, last)
    try:
        number = ids.take()  # a worker with the same one could kill the trial
    except LaunchFailed:  # all run workers, so it works
        return ids
    home = Path(tempfile.mkdtemp(prefix="trial-", dir=runs))
    try:
        _try_account(number, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return ids


def _try_account(number: int, home: Path) -> None:
    os.chown(home, number, number)
    try:
        tried = subprocess.run(
            [sys.executable, "-P", "-c", _TRIAL],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TRIAL_TIMEOUT_S,
            cwd=home,
            env=clean_environment(os.environ, home),
            user=number,
            group=number,
            extra_groups=[],
        )
        if tried.returncode == 0:
            return
        reason = tried.stderr.strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    raise AccountsUnavailable(
        f"user {number} cannot run a worker ({reason}); other users must be able to read "
        f"{sys.prefix}, the interpreter {Path(sys.executable).resolve()} and the code, and to pass "
        f"the folders above them and above {home.parent}"
    )
