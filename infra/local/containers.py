"""The containers of a local stack whose workers Docker runs, for callers without an event loop."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from infra.launchers.port import Task
from infra.settings import Settings

if TYPE_CHECKING:
    from infra.launchers.docker import DockerLauncher

R = TypeVar("R")


def fleet_of(folder: Path) -> str:
    """One folder, one fleet: stacks on the same daemon leave each other's workers alone."""
    return f"berth-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12]}"


class Containers:
    """Raises `LauncherUnreachable` while the daemon is away."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def tasks(self) -> list[Task]:
        """The workers that run now."""
        return self._ask(lambda launcher: launcher.list())

    def stop_all(self, reason: str) -> int:
        """Ends all workers, each within its grace period; returns how many there were."""
        return self._ask(lambda launcher: launcher.stop_all(reason))

    def _ask(self, question: Callable[[DockerLauncher], Awaitable[R]]) -> R:
        own = self._settings

        from infra.launchers.docker import DockerLauncher  # loads aiohttp, which other stacks do without

        async def asked() -> R:
            launcher = DockerLauncher(
                own.docker_socket, image=own.docker_image, network=own.docker_network, fleet=own.docker_fleet
            )
            try:
                return await question(launcher)
            finally:
                await launcher.close()

        return asyncio.run(asked())
