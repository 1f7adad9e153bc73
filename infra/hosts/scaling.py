"""The plan of how many worker hosts are needed, and the port to the platform that runs them.

A cold host needs 48 to 63 s until its first worker is ready, so some spare hosts are kept warm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from worker_runtime.protocol.errors import BerthError

#: Seconds until a cold host takes workers: the longest measured.
COLD_START_S = 63.0
#: A host with 2 vCPU and 16 GiB takes 32 workers by CPU and 42 by soft memory (`worker_task.py`).
#: 30 leave room for the operating system and for workers above their reservation.
WORKERS_PER_HOST = 30


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host as the platform shows it."""

    host_id: str
    #: Workers that run on it.
    workers: int = 0
    #: False: it is still starting.
    ready: bool = True
    #: It takes no further workers, and ends after its last one.
    draining: bool = False


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """Says how many hosts are wanted, and why. Draining hosts do not count as wanted or ready."""

    #: Workers that run or should run.
    workers: int
    #: Hosts for the workers, and spare hosts that are kept warm.
    needed: int
    warm: int
    #: Present hosts that take workers, and that drain.
    ready: int = 0
    draining: int = 0

    @property
    def wanted(self) -> int:
        return self.needed + self.warm

    @property
    def target_capacity(self) -> int:
        """Returns the per cent of the hosts that should be in use (1 to 100), for a platform that
        scales by itself.

        Rounded down, so that the spare part is never too small.
        """
        if not self.needed:
            return 100 if not self.warm else 1
        return max(1, 100 * self.needed // self.wanted)

    @property
    def reason(self) -> str:
        text = (
            f"{self.needed} for {self.workers} workers, {WORKERS_PER_HOST} a host, and "
            f"{self.warm} warm"
        )
        if self.draining:
            text += f"; {self.draining} drain and take no more workers"
        return text


def warm_hosts(workers_a_second: float, *, least: int, cold_start: float = COLD_START_S) -> int:
    """Returns how many spare hosts, at least `least`, can take new workers at this rate until a
    cold host is ready."""
    return max(least, math.ceil(max(workers_a_second, 0.0) * cold_start / WORKERS_PER_HOST))


def plan_hosts(workers: int, hosts: Sequence[Host] = (), *, warm: int) -> HostPlan:
    """Plans the hosts for `workers`. Workers on draining hosts count, since they need a place
    elsewhere."""
    return HostPlan(
        workers=workers,
        needed=math.ceil(max(workers, 0) / WORKERS_PER_HOST),
        warm=warm,
        ready=sum(host.ready and not host.draining for host in hosts),
        draining=sum(host.draining for host in hosts),
    )


class HostsUnreachable(BerthError, code="HOSTS_UNREACHABLE", retryable=True):
    """The platform cannot list its hosts or set their number."""


class HostScaler(Protocol):
    """The platform that runs hosts."""

    async def hosts(self) -> list[Host]:
        """Returns all hosts, starting and draining ones too. Raises `HostsUnreachable`."""

    async def scale(self, plan: HostPlan) -> bool:
        """Sets the number of hosts; safe to repeat. Returns whether anything changed.

        Ends no host that has workers. Raises `HostsUnreachable`.
        """

    async def close(self) -> None: ...
