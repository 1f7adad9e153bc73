"""The processes of one worker, and ways to kill them as accidents do."""

from __future__ import annotations

import contextlib
import os
import signal
from enum import StrEnum

import psutil


class Kill(StrEnum):
    """What of a worker is killed at once."""

    #: Every process of the worker: the kernel's OOM killer with `memory.oom.group`, or a lost host.
    TREE = "tree"
    #: The first process alone, the parent of session and supervisor; its children follow by PDEATHSIG.
    ZYGOTE = "zygote"
    #: The session process alone: the worker stays, and replaces it in place.
    SESSION = "session"
    #: The session process is stopped (SIGSTOP): the supervisor sees no pulse, kills it, and it is replaced.
    FROZEN = "frozen"

    @property
    def in_place(self) -> bool:
        """Whether the worker survives it, with its epoch."""
        return self in (Kill.SESSION, Kill.FROZEN)


def kill(pid: int, session: int, what: Kill) -> None:
    """Harms the worker whose first process is `pid` and whose session process is `session`."""
    if what.in_place:
        os.kill(session, signal.SIGSTOP if what is Kill.FROZEN else signal.SIGKILL)
        return
    if what is Kill.ZYGOTE:
        os.kill(pid, signal.SIGKILL)
        return
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    os.killpg(pid, signal.SIGKILL)  # one call for all that stayed in the worker's process group
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
