"""A Docker daemon of the tests' own with the worker's image, started once in each test process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from docker.errors import NotFound
from docker.models.containers import Container

from infra.lab import worker_image
from infra.lab.docker import DockerDaemon
from worker_runtime.process.cgroup import MemoryGroup

# testcontainers reads this when it is imported: no container of its own cleans up after the tests.
os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"

from testcontainers.core.config import testcontainers_config
from testcontainers.core.docker_client import DockerClient
from testcontainers.core.image import DockerImage
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

#: The real worker, without a broker's SDK: the paper broker needs none.
WORKER_IMAGE = "berth-worker:test"
#: Workers in the pool of a system in containers.
POOL = 2
#: `stand_in_worker.py` of the launchers' contract in the worker's place.
STAND_IN_IMAGE = "berth-stand-in:test"
#: The real worker with a broker that eats memory on request (`workers/hungry_program.py`).
HUNGRY_IMAGE = "berth-hungry:test"

_STAND_IN = Path(__file__).parents[1] / "launchers" / "stand_in_worker.py"
_HUNGRY = Path(__file__).parents[1] / "workers" / "hungry_program.py"


class LaunchedContainer:
    """A container that a launcher made, as testcontainers' wait strategies ask for one.

    It has the host's network, so it has no address of its own.
    """

    def __init__(self, container: Container) -> None:
        self._container = container

    def get_container_host_ip(self) -> str:
        return "127.0.0.1"

    def get_exposed_port(self, port: int) -> int:
        return port

    def get_wrapped_container(self) -> Container:
        return self._container

    def get_logs(self) -> tuple[bytes, bytes]:
        return self._container.logs(stderr=False), self._container.logs(stdout=False)

    def reload(self) -> None:
        self._container.reload()

    @property
    def status(self) -> str:
        return str(self._container.status)


class DockerEnvironment:
    """The daemon, its images and a client. The launchers under test have clients of their own."""

    def __init__(self, daemon: DockerDaemon) -> None:
        """`DOCKER_HOST` names the daemon: testcontainers takes it from there."""
        # Its image cannot be pulled, and the daemon ends with us.
        assert testcontainers_config.ryuk_disabled
        self.daemon = daemon
        self.client = DockerClient()

    @property
    def socket(self) -> Path:
        return self.daemon.socket

    def prepare(self) -> None:
        """Builds the images, or loads them from the cache."""
        worker_image.ImageBuilder(self.daemon.host).provide(WORKER_IMAGE)
        self._derive(STAND_IN_IMAGE, _STAND_IN, "-I", "-S")
        self._derive(HUNGRY_IMAGE, _HUNGRY, "-P")

    def _derive(self, tag: str, script: Path, *options: str) -> None:
        with tempfile.TemporaryDirectory(prefix="berth-image-") as folder:
            shutil.copy(script, folder)
            entry = json.dumps(["python", *options, f"/{script.name}"])
            text = f"FROM {WORKER_IMAGE}\nCOPY {script.name} /\nENTRYPOINT {entry}\n"
            (Path(folder) / "Dockerfile").write_text(text)
            (Path(folder) / script.name).chmod(0o644)
            with DockerImage(folder, tag=tag, clean_up=False):
                pass

    def container(self, task_id: str) -> Container:
        """A container as it is now."""
        return self.client.client.containers.get(task_id)

    def inspect(self, task_id: str) -> dict[str, Any]:
        """What `docker inspect` shows of a container."""
        attributes: dict[str, Any] = self.container(task_id).attrs
        return attributes

    def logs(self, task_id: str) -> str:
        """What `docker logs` shows of a container: both streams."""
        logs: bytes = self.container(task_id).logs()
        return logs.decode()

    async def wait_ready(self, task_id: str) -> str:
        """Waits until a stand-in has read its config and has its signal handlers; returns its
        logs."""
        launched = LaunchedContainer(self.container(task_id))
        strategy = LogMessageWaitStrategy("ready").with_poll_interval(0.02)
        await asyncio.to_thread(strategy.wait_until_ready, launched)
        return self.logs(task_id)

    def pid_of(self, task_id: str) -> int:
        """The container's first process, on the host."""
        state = self.inspect(task_id)["State"]
        # A signal to 0 would reach us all.
        assert state["Pid"] > 0, f"{task_id[:12]} does not run: {state}"
        return int(state["Pid"])

    @staticmethod
    def memory_group(task_id: str) -> MemoryGroup:
        """The cgroup that holds the container's memory limit (v1 or v2, with systemd or
        without)."""
        for folder in Path("/sys/fs/cgroup").glob(f"**/*{task_id}*"):
            if (folder / "memory.max").exists() or (folder / "memory.limit_in_bytes").exists():
                return MemoryGroup(folder)
        raise AssertionError(f"no memory cgroup of {task_id}")

    def ids(self, fleet: str = "") -> list[str]:
        """Ids of all containers of a fleet, or of all fleets. Ended ones are among them."""
        label = f"berth.fleet={fleet}" if fleet else "berth.fleet"
        containers = self.client.client.api.containers(all=True, filters={"label": label})
        return [str(container["Id"]) for container in containers]

    def remove_all(self, fleet: str = "") -> None:
        for task_id in self.ids(fleet):
            with contextlib.suppress(NotFound):
                self.container(task_id).remove(force=True, v=True)


@contextmanager
def open_docker_environment() -> Iterator[DockerEnvironment]:
    """Its folder has a short path, for containerd's sockets, and is on disk, for images of hundreds
    of MB."""
    folder = Path(tempfile.mkdtemp(prefix="berth-docker-", dir="/tmp"))
    try:
        with DockerDaemon(folder) as daemon, pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", daemon.host)
            environment = DockerEnvironment(daemon)
            try:
                environment.prepare()
                yield environment
            finally:
                if daemon.running:
                    environment.remove_all()
                environment.client.client.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
