"""Contains a harness for each launcher: how a test makes, ends and counts its workers."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from infra.launchers.docker.launcher import DockerLauncher
from infra.launchers.port import Launcher
from infra.launchers.process import ProcessLauncher
from infra.launchers.served import LauncherServer
from infra.node.address import listen
from infra.worker_task import Task
from tests.support.launchers.call_counts import Cost, CountedLauncher, counting_proxy
from tests.support.launchers.fake import FakeLauncher
from tests.support.launchers.node_process import NodeProcess
from tests.support.systems.docker import STAND_IN_IMAGE, DockerEnvironment


class LauncherHarness(Protocol):
    """A launcher's surroundings in the contract suite."""

    def client(self) -> Launcher:
        """A launcher object; several of them see the same workers."""
        ...

    async def crash(self, task: Task) -> None:
        """Kills one worker as a crash would."""
        ...

    def counted(self) -> AbstractAsyncContextManager[CountedLauncher]:
        """A launcher object whose calls to its platform are counted."""
        ...


class FakeLauncherHarness:
    def __init__(self) -> None:
        self.launcher = FakeLauncher()

    def client(self) -> Launcher:
        return self.launcher

    async def crash(self, task: Task) -> None:
        self.launcher.end(task.task_id)

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[CountedLauncher]:
        yield CountedLauncher(
            self.launcher, lambda: Cost(self.launcher.calls.total(), self.launcher.tasks_shown)
        )


class ServedLauncherHarness(FakeLauncherHarness):
    """A launcher in memory behind the container launcher's socket."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.socket = folder / "launcher.sock"
        self.server = LauncherServer(self.launcher, image="berth-worker:0.1.0")

    async def __aenter__(self) -> Self:
        await self.server.start(listen(self.socket))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def client(self) -> Launcher:
        return ProcessLauncher(self.socket)

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[CountedLauncher]:
        async with counting_proxy(self.socket, self.socket.with_name("counted.sock")) as proxy:
            yield CountedLauncher(
                ProcessLauncher(self.socket.with_name("counted.sock")), proxy.cost
            )


class ProcessLauncherHarness:
    def __init__(self, node: NodeProcess) -> None:
        self.node = node

    def client(self) -> Launcher:
        return ProcessLauncher(self.node.socket)

    async def crash(self, task: Task) -> None:
        os.kill(self.node.pid_of(task.task_id), signal.SIGKILL)

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[CountedLauncher]:
        socket = self.node.socket.with_name("counted.sock")
        async with counting_proxy(self.node.socket, socket) as proxy:
            yield CountedLauncher(ProcessLauncher(socket), proxy.cost)


class DockerLauncherHarness:
    """A fleet of its own on the session's daemon."""

    _fleets = itertools.count(1)

    def __init__(self, environment: DockerEnvironment) -> None:
        self.environment = environment
        self.fleet = f"contract-{os.getpid()}-{next(self._fleets)}"
        self._made: list[DockerLauncher] = []

    def client(
        self, image: str = STAND_IN_IMAGE, *, socket: Path | None = None, **options: Any
    ) -> DockerLauncher:
        made = DockerLauncher(
            socket or self.environment.socket,
            image=image,
            network="host",
            fleet=self.fleet,
            **options,
        )
        self._made.append(made)
        return made

    def ids(self) -> list[str]:
        """All containers of the fleet, also ended ones."""
        return self.environment.ids(self.fleet)

    async def crash(self, task: Task) -> None:
        os.kill(self.environment.pid_of(task.task_id), signal.SIGKILL)

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[CountedLauncher]:
        with tempfile.TemporaryDirectory(prefix="berth-") as folder:
            socket = Path(folder) / "docker.sock"
            async with counting_proxy(self.environment.socket, socket) as proxy:
                launcher = self.client(socket=socket)
                yield CountedLauncher(launcher, proxy.cost)
                await launcher.close()

    async def close(self) -> None:
        for launcher in self._made:
            await launcher.close()
        self.environment.remove_all(self.fleet)
