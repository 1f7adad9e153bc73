"""Starts the whole system on this machine, with its workers in real containers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.stack import LocalStack
from tests.support.systems.docker import HUNGRY_IMAGE, POOL, DockerEnvironment
from tests.support.systems.local import RunningSystem


@pytest.fixture(scope="package")
def container_system(docker_environment: DockerEnvironment) -> Iterator[RunningSystem]:
    folder = Path(tempfile.mkdtemp(prefix="berth-containers-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user than root
    try:
        with LocalStack(
            folder,
            pool_target=POOL,
            launcher="docker",
            docker_socket=docker_environment.socket,
            docker_image=HUNGRY_IMAGE,
            connect_timeout=10.0,
            api_processes=1,
        ) as stack:
            system = RunningSystem(stack)
            yield system
            system.threads.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def system(container_system: RunningSystem) -> RunningSystem:
    """The running system with a full pool, whatever the test before did to it."""
    for server in container_system.stack.servers:
        if not server.running:
            server.start()
    container_system.stack.wait_pool(POOL)
    return container_system
