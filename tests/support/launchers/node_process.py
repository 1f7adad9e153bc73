"""A real node with stand-in workers, as a child process of the tests."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra import processes
from infra.launchers.process import ProcessLauncher
from infra.node.protocol import NodeStatus
from infra.worker_task import LauncherUnreachable
from tests.support.waiting import until

STAND_IN = Path(__file__).with_name("stand_in_worker.py")
#: Seconds; far more than anything here takes on a busy machine.
PATIENCE = 20.0


def cgroups_named(name: str) -> list[Path]:
    """Folders of this name, anywhere in the hierarchies of this host."""
    return list(Path("/sys/fs/cgroup").glob(f"**/{name}"))


class NodeProcess:
    def __init__(
        self,
        folder: Path,
        command: str | None = None,
        *,
        before: Sequence[str] = (),
        uids: str = "",
    ) -> None:
        """`before`: a program that runs the node, with its arguments. `uids`: user ids for
        workers."""
        self.socket = folder / "node.sock"
        self.state = folder / "state"
        self.log = folder / "node.log"
        self.command = command or shlex.join([sys.executable, "-I", "-S", str(STAND_IN)])
        self.before = tuple(before)
        self.uids = uids
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(
        self, *options: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A node on this socket and state folder, not waited for."""
        words = [*self.before, sys.executable, "-m", "infra.node"]
        words += ["--socket", str(self.socket), "--state", str(self.state)]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*words, "--command", self.command, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "BERTH_NODE_UIDS": self.uids, **(environment or {})},
            )

    async def start(
        self, *options: str, environment: Mapping[str, str] | None = None
    ) -> NodeStatus:
        self.process = self.spawn(*options, environment=environment)
        launcher = ProcessLauncher(self.socket)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return await launcher.ping()
            except LauncherUnreachable:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                await asyncio.sleep(0.01)

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Ends the node, not its workers; returns its exit code."""
        if self.process is None:
            return 0
        self.process.send_signal(how)
        return self.process.wait(PATIENCE)

    async def restart(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.end(how)
        await self.start()

    async def close(self) -> None:
        """Ends the workers, then the node."""
        if self.process is None:
            return
        if self.process.poll() is not None:
            await self.start()
        self.process.send_signal(signal.SIGCONT)
        await ProcessLauncher(self.socket, grace=0).stop_all("the test is over")
        assert self.end() == 0, self.log.read_text()

    # --- workers ----------------------------------------------------------------------------------

    @staticmethod
    def pid_of(task_id: str) -> int:
        """The main process of a task: the leader of its session.

        It is waited for: the kernel tells the parent that a program has begun shortly before it
        shows the program's arguments.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            pids = [
                process.pid
                for process in processes.find_by_argument(task_id)
                if process.pid == process.session
            ]
            if pids or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        assert len(pids) == 1, pids
        return pids[0]

    def output_of(self, worker_id: str) -> str:
        path = self.state / "logs" / f"{worker_id}.log"
        return path.read_text() if path.exists() else ""

    async def until_ready(self, worker_id: str) -> str:
        """Waits until the stand-in has its config and its signal handlers; returns what it said."""
        await until(lambda: "ready" in self.output_of(worker_id), f"{worker_id} is ready")
        return self.output_of(worker_id)
