"""Hosts in memory, with the platform's delays, for tests and to see the plan without AWS.

They behave as ECS with managed scaling and managed termination protection: a new host takes its
time, a draining one takes no worker, and none goes before its last worker has.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from infra.hosts.scaling import WORKERS_PER_HOST, Host, HostPlan, HostsUnreachable

#: Seconds until a new host takes workers, from and to.
COLD = (48.0, 63.0)


@dataclass
class _Machine:
    host_id: str
    ready_at: float
    workers: int = 0
    draining: bool = False


class SimulatedHosts:
    """Implements `HostScaler`."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, seed: int | None = None
    ) -> None:
        #: While True, every call raises `HostsUnreachable`.
        self.unreachable = False
        #: Hosts started in all.
        self.started = 0
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311 — delays, not secrets
        self._machines: dict[str, _Machine] = {}
        self._numbers = itertools.count(1)

    async def hosts(self) -> list[Host]:
        self._check()
        return [
            Host(
                host_id=machine.host_id,
                workers=machine.workers,
                ready=machine.ready_at <= self._clock(),
                draining=machine.draining,
            )
            for machine in self._machines.values()
        ]

    async def scale(self, plan: HostPlan) -> bool:
        self._check()
        serving = [machine for machine in self._machines.values() if not machine.draining]
        for _ in range(plan.wanted - len(serving)):
            self._start()
        # Only hosts without a worker go (managed termination protection), the last one first.
        empty = [machine for machine in serving if not machine.workers]
        for machine in empty[::-1][: max(len(serving) - plan.wanted, 0)]:
            del self._machines[machine.host_id]
        return plan.wanted != len(serving)

    async def close(self) -> None:
        """Nothing to close."""

    def _start(self) -> None:
        host_id = f"host-{next(self._numbers)}"
        self._machines[host_id] = _Machine(host_id, self._clock() + self._random.uniform(*COLD))
        self.started += 1

    def _check(self) -> None:
        if self.unreachable:
            raise HostsUnreachable

    # --- what happens on the hosts ----------------------------------------------------------------

    def place(self) -> str | None:
        """Puts one worker on the fullest host with room (binpack); None: no host takes it now."""
        now = self._clock()
        room = [
            machine
            for machine in self._machines.values()
            if machine.ready_at <= now
            and not machine.draining
            and machine.workers < WORKERS_PER_HOST
        ]
        if not room:
            return None
        chosen = max(room, key=lambda machine: machine.workers)
        chosen.workers += 1
        return chosen.host_id

    def leave(self, host_id: str) -> None:
        """One worker of this host has ended; the last one of a draining host takes it along."""
        machine = self._machines[host_id]
        machine.workers -= 1
        if machine.draining and not machine.workers:
            del self._machines[host_id]

    def drain(self, host_id: str) -> None:
        """The host takes no more workers: it is to be replaced, or the platform wants it back."""
        machine = self._machines[host_id]
        machine.draining = True
        if not machine.workers:
            del self._machines[host_id]


class HostClock:
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
