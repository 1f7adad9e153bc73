"""Makes the harness of each launcher for the contract suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.launchers.ecs_environment import EcsGround, on_moto
from tests.support.launchers.harnesses import (
    DockerGround,
    FakeGround,
    Ground,
    ProcessGround,
    ServedGround,
)
from tests.support.launchers.node_process import NodeProcess
from tests.support.systems.docker import DockerHouse


@pytest.fixture
async def docker_ground(docker_house: DockerHouse) -> AsyncIterator[DockerGround]:
    made = DockerGround(docker_house)
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
async def ground(
    request: pytest.FixtureRequest, short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Ground]:
    if request.param == "fake":
        yield FakeGround()
        return
    if request.param == "served":
        async with ServedGround(short_directory) as served:
            yield served
        return
    if request.param == "ecs":
        async with on_moto(monkeypatch) as on_ecs:
            yield on_ecs
        return
    if request.param == "docker":
        on_docker = DockerGround(request.getfixturevalue("docker_house"))
        yield on_docker
        await on_docker.close()
        return
    made = NodeProcess(short_directory)
    await made.start()
    yield ProcessGround(made)
    await made.close()


@pytest.fixture
async def ecs_ground(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EcsGround]:
    async with on_moto(monkeypatch) as made:
        yield made
