"""A Docker daemon of our own, with all it keeps in one folder:
for tests and benchmarks with real containers.

Its containers use the machine's network (no bridge, no firewall rules: the machine's own stay as
they are). A `BridgedDockerDaemon` has bridges and rules in a network namespace of its own, which
ends with it.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.local.process import Server

#: From <sched.h>.
_CLONE_NEWNET = 0x4000_0000
#: The CPU controller of control groups version 1, where there is one.
_CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
#: The group of all containers of our daemons, and its share of the CPUs. Docker's own group has
#: 1024, as much as one process outside of all groups: next to a test suite, twenty containers got a
#: tenth of a CPU, and an API took more than 90 s to start. Version 2 shares between services and
#: sessions: nothing to do.
_GROUP = "berth-lab"
_GROUP_SHARES = 4 * 1024
_DOCKER_PROGRAMS = ("dockerd", "containerd", "runc", "docker")


def why_no_docker() -> str:
    """Returns why no daemon can be started here; empty when one can."""
    missing = [name for name in _DOCKER_PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "a Docker daemon needs root"


class _Pinger(http.client.HTTPConnection):
    """HTTP over a Unix socket, for one question."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=5.0)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def docker_answers(path: Path) -> bool:
    """Returns True if a Docker daemon answers at this socket."""
    link = _Pinger(path)
    try:
        link.request("GET", "/_ping")
        return link.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        link.close()


class DockerDaemon(Server):
    """Its containers end with it. Keep its folder's path short:
    sockets lie in it, which take 107 bytes."""

    name = "docker"
    network: tuple[str, ...] = ("--bridge=none", "--iptables=false", "--ip6tables=false")

    @property
    def socket(self) -> Path:
        return self.directory / "docker.sock"

    @property
    def host(self) -> str:
        """Returns the address as DOCKER_HOST takes it."""
        return f"unix://{self.socket}"

    def ports(self) -> list[tuple[int, str]]:
        return []

    def prepare(self) -> None:
        super().prepare()
        # The machine's own settings are not for us.
        (self.directory / "daemon.json").write_text("{}")
        if self._has_own_group():
            group = _CPU_GROUPS / _GROUP
            group.mkdir(exist_ok=True)
            (group / "cpu.shares").write_text(str(_GROUP_SHARES))

    @staticmethod
    def _has_own_group() -> bool:
        return (_CPU_GROUPS / "cpu.shares").exists() and os.access(_CPU_GROUPS, os.W_OK)

    def command(self) -> Sequence[str]:
        folder = self.directory
        return [
            "dockerd",
            "--data-root",
            str(folder / "data"),
            "--exec-root",
            str(folder / "exec"),
            "--pidfile",
            str(folder / "docker.pid"),
            "--config-file",
            str(folder / "daemon.json"),
            "--host",
            self.host,
            "--log-level",
            "warn",
            *self._group_options(),
            *self.network,
        ]

    def _group_options(self) -> Sequence[str]:
        if not self._has_own_group():
            return ()
        return ("--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", f"/{_GROUP}")

    def answers(self) -> bool:
        return docker_answers(self.socket)

    def __exit__(self, *how: Any) -> None:
        """Stops it and unmounts what it leaves mounted, so that its folder can be removed."""
        super().__exit__(*how)
        below = f"{self.directory}/"
        mounts = [line.split(" ")[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for path in sorted((path for path in mounts if path.startswith(below)), reverse=True):
            subprocess.run([shutil.which("umount") or "umount", "--lazy", path], check=False)


class BridgedDockerDaemon(DockerDaemon):
    """With networks as compose makes them.
    What it publishes is reached by threads that `enter_network`."""

    network = ()

    def command(self) -> Sequence[str]:
        return [
            "unshare",
            "--net",
            "--",
            "sh",
            "-c",
            'ip link set lo up && exec "$@"',
            "sh",
            *super().command(),
        ]

    def enter_network(self) -> None:
        """Lets the calling thread's new connections go out where the daemon is. Raises OSError."""
        library = ctypes.CDLL(None, use_errno=True)
        with Path(f"/proc/{self.pid}/ns/net").open() as namespace:
            if library.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
