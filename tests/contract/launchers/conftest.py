"""The launchers under contract: each gives the same suite the same means to make and end workers."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from infra.launchers.fake import FakeLauncher
from infra.launchers.port import Launcher, Task
from infra.launchers.process import ProcessLauncher
from tests.contract.launchers.node_process import NodeProcess


class Ground(Protocol):
    """A launcher's surroundings in the contract suite."""

    def client(self) -> Launcher:
        """A launcher object; several of them see the same workers."""
        ...

    async def crash(self, task: Task) -> None:
        """Kills one worker as a crash would."""
        ...


class FakeGround:
    def __init__(self) -> None:
        self.launcher = FakeLauncher()

    def client(self) -> Launcher:
        return self.launcher

    async def crash(self, task: Task) -> None:
        self.launcher.end(task.task_id)


class ProcessGround:
    def __init__(self, node: NodeProcess) -> None:
        self.node = node

    def client(self) -> Launcher:
        return ProcessLauncher(self.node.socket)

    async def crash(self, task: Task) -> None:
        os.kill(self.node.pid_of(task.task_id), signal.SIGKILL)


@pytest.fixture
async def node(short_directory: Path) -> AsyncIterator[NodeProcess]:
    """A running node whose workers are stand-ins."""
    made = NodeProcess(short_directory)
    await made.start()
    yield made
    await made.close()


@pytest.fixture(params=["fake", "process"])
async def ground(request: pytest.FixtureRequest, short_directory: Path) -> AsyncIterator[Ground]:
    if request.param == "fake":
        yield FakeGround()
        return
    made = NodeProcess(short_directory)
    await made.start()
    yield ProcessGround(made)
    await made.close()
