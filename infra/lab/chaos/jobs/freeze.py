"""Freezes a runner for a while, as on a suspended host or one without CPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

#: Leases that a short freeze lasts (range): others do not notice it.
_SHORT_FREEZE_LEASES = (0.1, 0.8)
#: Leases that a long freeze lasts (range): others take the runner's jobs.
_LONG_FREEZE_LEASES = (1.4, 2.5)
#: Leases that a runner lives on afterwards (range).
_LIFE_AFTER_LEASES = (0.3, 1.5)
#: Seconds that a process may take to stop.
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class FreezePlan:
    """Says how long a runner is frozen, and how long it lives afterwards."""

    seconds: float
    #: Its children are frozen, too; otherwise they continue and end their jobs while nobody reads.
    children: bool
    #: Seconds that it lives on afterwards.
    life: float


def plan_freeze(chance: random.Random, lease: float) -> FreezePlan:
    """Plans a freeze; `lease` is in seconds."""
    shares = _LONG_FREEZE_LEASES if chance.random() < 0.6 else _SHORT_FREEZE_LEASES
    return FreezePlan(
        seconds=chance.uniform(*shares) * lease,
        children=chance.random() < 0.5,
        life=chance.uniform(*_LIFE_AFTER_LEASES) * lease,
    )


class FrozenProcess:
    """A process under SIGSTOP and, if wanted, its children. It keeps descriptors, because a process
    id may be another's by the time they continue."""

    def __init__(self, pid: int, pidfd: int) -> None:
        """Duplicates `pidfd`."""
        self._pid = pid
        self._pidfd = os.dup(pidfd)
        self._children: list[int] = []

    async def begin(self, children: bool) -> None:
        """Returns once the process has stopped or ended."""
        _send(self._pidfd, signal.SIGSTOP)
        until = time.monotonic() + _STOP_TIMEOUT_S
        # Only its parent gets a signal, so this polls.
        while _state(self._pid) not in ("T", "Z", "X", "") and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if children:
            # It has stopped, so it neither forks nor reaps,
            # and these process ids are its children's.
            for child in _children(self._pid):
                with contextlib.suppress(ProcessLookupError):
                    self._children.append(os.pidfd_open(child))
            for pidfd in self._children:
                _send(pidfd, signal.SIGSTOP)

    def end(self) -> None:
        """Ends the freeze. The children continue first, so that they end jobs late. To be called
        once."""
        for pidfd in (*self._children, self._pidfd):
            _send(pidfd, signal.SIGCONT)
            os.close(pidfd)


def _send(pidfd: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def _state(pid: int) -> str:
    """Returns the state letter that `ps` shows; '' for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []
