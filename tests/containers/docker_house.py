"""A Docker daemon of the tests' own with the worker's image, started once in each test process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.lab import docker, worker_image
from infra.lab.docker import DockerDaemon
from infra.node.cgroup import MemoryGroup

#: The real worker, without a broker's SDK: the paper broker needs none.
WORKER_IMAGE = "berth-worker:test"
#: `stand_in.py` of the launchers' contract in the worker's place.
STAND_IN_IMAGE = "berth-stand-in:test"
#: The real worker with a broker that eats memory when told so (`hungry_worker.py`).
HUNGRY_IMAGE = "berth-hungry:test"

_STAND_IN = Path(__file__).parents[1] / "contract" / "launchers" / "stand_in.py"
_HUNGRY = Path(__file__).with_name("hungry_worker.py")


def why_not() -> str:
    """Why there can be no real containers here; empty when there can."""
    return docker.why_no_docker() or worker_image.why_not_buildable()


class DockerHouse:
    def __init__(self, daemon: DockerDaemon) -> None:
        self.daemon = daemon

    @property
    def socket(self) -> Path:
        return self.daemon.socket

    def prepare(self) -> None:
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
            self.docker("build", "--quiet", "--tag", tag, folder)

    def docker(self, *words: str) -> str:
        """The output of a `docker …` command."""
        done = subprocess.run(
            [shutil.which("docker") or "docker", *words],
            env={**os.environ, "DOCKER_HOST": self.daemon.host, "DOCKER_BUILDKIT": "0"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"
        return done.stdout

    def inspect(self, task_id: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", task_id))
        return found[0]

    def pid_of(self, task_id: str) -> int:
        """The container's first process, on the host."""
        state = self.inspect(task_id)["State"]
        assert state["Pid"] > 0, f"{task_id[:12]} does not run: {state}"  # a signal to 0 would reach us all
        return int(state["Pid"])

    @staticmethod
    def memory_group(task_id: str) -> MemoryGroup:
        """The cgroup that holds the container's memory limit (v1 or v2, with systemd or without)."""
        for folder in Path("/sys/fs/cgroup").glob(f"**/*{task_id}*"):
            if (folder / "memory.max").exists() or (folder / "memory.limit_in_bytes").exists():
                return MemoryGroup(folder)
        raise AssertionError(f"no memory cgroup of {task_id}")

    def remove_all(self, fleet: str = "") -> None:
        label = f"label=berth.fleet={fleet}" if fleet else "label=berth.fleet"
        ids = self.docker("ps", "--all", "--quiet", "--no-trunc", "--filter", label).split()
        if ids:
            self.docker("rm", "--force", "--volumes", *ids)


@contextmanager
def open_docker_house() -> Iterator[DockerHouse]:
    """Its folder has a short path: containerd's sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="berth-docker-"))
    try:
        with DockerDaemon(folder) as daemon:
            house = DockerHouse(daemon)
            try:
                house.prepare()
                yield house
            finally:
                if daemon.running:
                    house.remove_all()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
