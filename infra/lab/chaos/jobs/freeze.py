"""A spell in which a runner stands still, as on a suspended host or one without CPU, and then goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

#: Leases that a spell takes: too short for others to notice, and long enough that they take its jobs.
_SHORT, _LONG = (0.1, 0.8), (1.4, 2.5)
#: Leases that a runner lives on after it.
_LIFE = (0.3, 1.5)
#: Seconds until a stopped process has really come to a stop.
_STOP = 5.0


@dataclass(frozen=True)
class FreezePlan:
    """What is in store for a runner."""

    seconds: float
    #: Its children stand still with it; else they go on without it, and end their jobs while nobody hears.
    children: bool
    #: Seconds that it lives on.
    life: float


def plan_freeze(chance: random.Random, lease: float) -> FreezePlan:
    """`lease` in seconds."""
    shares = _LONG if chance.random() < 0.6 else _SHORT
    return FreezePlan(
        seconds=chance.uniform(*shares) * lease,
        children=chance.random() < 0.5,
        life=chance.uniform(*_LIFE) * lease,
    )


class FrozenProcess:
    """A process under SIGSTOP and, if wanted, its children. Known by descriptors: by the time they go on, a
    number may belong to another process."""

    def __init__(self, pid: int, pidfd: int) -> None:
        """`pidfd` stays its owner's."""
        self._pid = pid
        self._pidfd = os.dup(pidfd)
        self._children: list[int] = []

    async def begin(self, children: bool) -> None:
        """Comes back when it stands still, or has ended."""
        _send(self._pidfd, signal.SIGSTOP)
        until = time.monotonic() + _STOP
        # The kernel tells only its parent.
        while _state(self._pid) not in ("T", "Z", "X", "") and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if children:
            # It stands still, so it neither forks nor reaps: their numbers are their own.
            for child in _children(self._pid):
                with contextlib.suppress(ProcessLookupError):
                    self._children.append(os.pidfd_open(child))
            for pidfd in self._children:
                _send(pidfd, signal.SIGSTOP)

    def end(self) -> None:
        """The children go on first: what they end then is late. To be called once."""
        for pidfd in (*self._children, self._pidfd):
            _send(pidfd, signal.SIGCONT)
            os.close(pidfd)


def _send(pidfd: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def _state(pid: int) -> str:
    """As `ps` tells it; '' for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
