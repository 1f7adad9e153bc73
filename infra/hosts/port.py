"""The port to the platform that runs hosts. Adapters: ECS (`ecs.py`), and a simulated one for tests."""

from __future__ import annotations

from typing import Protocol

from infra.hosts.sizing import Host, HostPlan
from worker_runtime.protocol.errors import BerthError


class HostsUnreachable(BerthError):
    """The platform does not tell about its hosts, or does not take the number of them."""

    code = "HOSTS_UNREACHABLE"
    retryable = True


class HostScaler(Protocol):
    async def hosts(self) -> list[Host]:
        """All hosts, the starting and draining ones included. Raises `HostsUnreachable`."""
        ...

    async def scale(self, plan: HostPlan) -> bool:
        """Tells the platform how many hosts are wanted; safe to repeat. Whether anything was changed.

        No host with workers on it is ended. Raises `HostsUnreachable`.
        """
        ...

    async def close(self) -> None: ...
