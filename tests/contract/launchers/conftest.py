"""Makes the harness of each launcher for the contract suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.launchers.ecs_environment import EcsHarness, on_moto
from tests.support.launchers.harnesses import (
    DockerLauncherHarness,
    FakeLauncherHarness,
    LauncherHarness,
    ProcessLauncherHarness,
    ServedLauncherHarness,
)
from tests.support.launchers.node_process import NodeProcess
from tests.support.systems.docker import DockerEnvironment


@pytest.fixture
async def docker_harness(
    docker_environment: DockerEnvironment,
) -> AsyncIterator[DockerLauncherHarness]:
    made = DockerLauncherHarness(docker_environment)
    yield made
    await made.close()


@pytest.fixture
async def node(short_directory: Path) -> AsyncIterator[NodeProcess]:
    """A running node whose workers are stand-ins."""
    made = NodeProcess(short_directory)
    await made.start()
    yield made
    await made.close()


@pytest.fixture(params=["fake", "process", "served", "ecs", "docker"])
async def harness(
    request: pytest.FixtureRequest, short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LauncherHarness]:
    if request.param == "fake":
        yield FakeLauncherHarness()
        return
    if request.param == "served":
        async with ServedLauncherHarness(short_directory) as served:
            yield served
        return
    if request.param == "ecs":
        async with on_moto(monkeypatch) as on_ecs:
            yield on_ecs
        return
    if request.param == "docker":
        on_docker = DockerLauncherHarness(request.getfixturevalue("docker_environment"))
        yield on_docker
        await on_docker.close()
        return
    made = NodeProcess(short_directory)
    await made.start()
    yield ProcessLauncherHarness(made)
    await made.close()


@pytest.fixture
async def ecs_harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EcsHarness]:
    async with on_moto(monkeypatch) as made:
        yield made
