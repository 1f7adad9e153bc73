"""Starts the whole system on this machine, with its workers in real containers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.stack import LocalStack
from tests.support.systems.docker import HUNGRY_IMAGE, POOL, DockerHouse
from tests.support.systems.local import House


@pytest.fixture(scope="package")
def container_house(docker_house: DockerHouse) -> Iterator[House]:
    folder = Path(tempfile.mkdtemp(prefix="berth-containers-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user than root
    try:
        with LocalStack(
            folder,
            pool_target=POOL,
            launcher="docker",
            docker_socket=docker_house.socket,
            docker_image=HUNGRY_IMAGE,
            connect_timeout=10.0,
            api_processes=1,
        ) as stack:
            house = House(stack)
            yield house
            house.threads.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def house(container_house: House) -> House:
    """The running house with a full pool, whatever the test before did to it."""
    for server in container_house.stack.servers:
        if not server.running:
            server.start()
    container_house.stack.wait_pool(POOL)
    return container_house
