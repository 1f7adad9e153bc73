"""The node's server and supervisor in this process: very many workers, and tasks that are hard to
end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from infra.alerts.errors import collector
from infra.launchers.process import ProcessLauncher
from infra.local.components import NodeComponent
from infra.node.protocol import MAX_LINE_BYTES, StopTask, TaskList
from infra.node.register import NodeRegister
from infra.node.server import NodeServer
from infra.node.supervisor import NodeSupervisor
from infra.settings import Settings
from infra.worker_task import LauncherUnreachable, Task
from worker_runtime.protocol.messages import MAX_MESSAGE_BYTES, encode

MANY = [
    Task(
        task_id=f"task-{number:032}",
        worker_id=f"w-{number:032}",
        pool="default",
        version="1",
        launched_at=1.5,
    )
    for number in range(5000)
]


async def _swallow_one_cancellation(begun: asyncio.Event) -> None:
    """Swallows a cancellation, as `asyncio.wait_for` of Python 3.11 may."""
    with contextlib.suppress(asyncio.CancelledError):
        begun.set()
        await asyncio.Event().wait()
    await asyncio.Event().wait()


class CrowdedSupervisor(NodeSupervisor):
    """Keeps five thousand workers, and never finishes stopping one."""

    def __init__(self, folder: Path, register: NodeRegister) -> None:
        super().__init__(folder, register, None, ["false"])
        self.begun = asyncio.Event()

    def tasks(self) -> list[Task]:
        return MANY

    async def stop(self, task_id: str, reason: str, grace: float | None = None) -> int:
        await _swallow_one_cancellation(self.begun)
        return 0

    def work_in_the_background(self) -> None:
        self._in_background(_swallow_one_cancellation(self.begun))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, node_socket=tmp_path / "node.sock")


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[CrowdedSupervisor, NodeServer]]:
    register = NodeRegister(settings.data_dir / "state.db")
    supervisor = CrowdedSupervisor(settings.data_dir, register)
    server = NodeServer(supervisor, register, limits="none")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(settings.node_socket))
        listening.listen()
        await server.start(listening)
        try:
            yield supervisor, server
        finally:
            await server.close()
            register.close()


async def test_a_list_of_five_thousand_workers_arrives_whole(settings: Settings) -> None:
    assert len(encode(TaskList(tasks=MANY))) > max(MAX_LINE_BYTES, MAX_MESSAGE_BYTES)
    async with serving(settings):
        assert await ProcessLauncher(settings.node_socket).list() == MANY
        node = NodeComponent(settings.data_dir, settings)
        assert await asyncio.to_thread(node.tasks) == MANY


async def test_a_request_that_swallows_a_cancellation_does_not_hold_up_the_node_s_end(
    settings: Settings,
) -> None:
    async with serving(settings) as (supervisor, server):
        _, writer = await asyncio.open_unix_connection(str(settings.node_socket))
        writer.write(encode(StopTask(task_id="t", reason="test")) + b"\n")
        await supervisor.begun.wait()
        await asyncio.wait_for(server.close(), 10)
        writer.close()


async def test_background_work_that_swallows_a_cancellation_does_not_hold_up_the_node_s_end(
    settings: Settings,
) -> None:
    async with serving(settings) as (supervisor, _):
        supervisor.work_in_the_background()
        await supervisor.begun.wait()
        await asyncio.wait_for(supervisor.close(), 10)


async def test_errors_of_the_node_reach_the_log_of_one_orchestrator(settings: Settings) -> None:
    collector.take()
    async with serving(settings):
        collector.put({("node|node.stop_failed", "node.stop_failed in node on here"): 3})
        with capture_logs() as logged:
            first, second = (ProcessLauncher(settings.node_socket, silence=1.0) for _ in range(2))
            for launcher in (first, second):
                with pytest.raises(LauncherUnreachable):  # it has only one beat to say
                    await anext(launcher.exits())
    [line] = [line for line in logged if line["event"] == "node_error"]
    assert (line["log_level"], line["count"]) == ("error", 3)
    assert line["detail"] == "node.stop_failed in node on here"
