"""The node's socket: whatever comes in, the node continues, and says what was wrong."""

from __future__ import annotations

import asyncio
import signal
import socket
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.launchers.process import ProcessLauncher
from infra.node.address import listen, reachable
from infra.node.protocol import (
    MAX_LINE_BYTES,
    ListTasks,
    NodeRefused,
    NodeReply,
    NodeRequest,
    TaskList,
)
from infra.node.server import SocketServer
from infra.worker_task import LauncherUnreachable, Task
from tests.support.launchers.node_process import NodeProcess
from tests.support.launchers.worker_specs import spec
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.messages import decode


async def say(path: Path, data: bytes) -> bytes:
    """Sends raw bytes and returns all that comes back."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(data)
        await writer.drain()
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\n",
        b"\n",
        b"\xff\xfe\x00\n",
        b'{"op": "format_disk"}\n',
        b'{"op": "launch"}\n',
        b'{"op": "stop", "task_id": 7, "reason": null}\n',
        b"[" * 5000 + b"\n",
        b"GET / HTTP/1.1\n",
        b'{"op": "ping"}',  # without a newline: a request that was cut off
        b"x" * (MAX_LINE_BYTES + 100) + b"\n",
    ],
)
async def test_garbage_gets_a_clear_refusal_and_the_node_continues(
    node: NodeProcess, garbage: bytes
) -> None:
    answers = (await say(node.socket, garbage)).splitlines()
    assert answers
    for answer in answers:
        refused: NodeRefused = decode(answer, NodeReply)
        assert refused.code == "MALFORMED_MESSAGE"
        assert refused.detail
    assert (await ProcessLauncher(node.socket).ping()).workers == 0


async def test_a_refusal_does_not_repeat_what_was_sent(node: NodeProcess) -> None:
    answer = await say(
        node.socket, b'{"op": "launch", "token": "t", "config": {"launch_token": 4711}}\n'
    )
    assert b"4711" not in answer
    assert b"4711" not in node.log.read_bytes()


async def test_requests_after_garbage_on_one_connection_are_served(node: NodeProcess) -> None:
    answers = (await say(node.socket, b'nonsense\n{"op": "list"}\n{"op": "ping"}\n')).splitlines()
    assert [b"refused" in answers[0], b"tasks" in answers[1], b"pong" in answers[2]] == [True] * 3


async def test_random_bytes_never_end_the_node(node: NodeProcess) -> None:
    loop = asyncio.get_running_loop()

    def send(data: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(20)
            link.connect(str(node.socket))
            link.sendall(data + b"\n")
            link.shutdown(socket.SHUT_WR)
            while link.recv(65536):
                pass

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=2000))
    def storm(data: bytes) -> None:
        send(data)

    await loop.run_in_executor(None, storm)
    assert (await ProcessLauncher(node.socket).ping()).workers == 0


async def test_clients_that_say_nothing_or_vanish_do_not_disturb_others(node: NodeProcess) -> None:
    silent = [await asyncio.open_unix_connection(str(node.socket)) for _ in range(50)]
    for _, writer in silent[:25]:
        writer.write(b'{"op": "watch"}\n')
        writer.close()
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1"), "token-1")
    assert await launcher.list() == [task]
    for _, writer in silent:
        writer.close()


async def test_the_socket_is_its_owner_s_only(node: NodeProcess) -> None:
    assert stat.S_IMODE(node.socket.stat().st_mode) == 0o600


async def test_a_second_node_on_the_same_socket_refuses_to_start(node: NodeProcess) -> None:
    second = NodeProcess(node.socket.parent)
    second.state = node.socket.parent / "other-state"
    second.log = node.socket.parent / "second.log"
    refused = second.spawn()
    assert refused.wait(20) == 1
    assert "NODE_BUSY" in second.log.read_text()
    assert str(node.socket) in second.log.read_text()
    assert (await ProcessLauncher(node.socket).ping()).workers == 0


async def test_a_second_node_on_the_same_state_folder_refuses_to_start(node: NodeProcess) -> None:
    second = NodeProcess(node.socket.parent)
    second.socket = node.socket.with_name("other.sock")
    second.log = node.socket.parent / "second.log"
    refused = second.spawn()
    assert refused.wait(20) == 1
    assert "NODE_BUSY" in second.log.read_text()


async def test_a_socket_left_by_a_killed_node_is_replaced(node: NodeProcess) -> None:
    node.end(signal.SIGKILL)
    assert node.socket.exists()
    with pytest.raises(LauncherUnreachable):
        await ProcessLauncher(node.socket).ping()
    assert (await node.start()).workers == 0


async def test_a_file_that_is_no_socket_is_never_replaced(short_directory: Path) -> None:
    node = NodeProcess(short_directory)
    node.socket.write_text("somebody's file")
    assert node.spawn().wait(20) == 1
    assert "NODE_SOCKET_INVALID" in node.log.read_text()
    assert node.socket.read_text() == "somebody's file"


async def test_a_socket_path_longer_than_the_kernel_s_limit_works(short_directory: Path) -> None:
    deep = short_directory / ("d" * 120)
    deep.mkdir()
    node = NodeProcess(deep)
    assert (await node.start()).workers == 0
    with reachable(node.socket) as short:
        assert len(short) <= 107
    await node.close()
    assert not node.socket.exists()


class NodeOfBefore(SocketServer):
    """Knows the requests of 0.1 only."""

    def __init__(self, tasks: list[Task]) -> None:
        super().__init__()
        self._tasks = tasks

    async def reply_to(self, request: NodeRequest) -> NodeReply:
        if isinstance(request, ListTasks):
            return TaskList(tasks=self._tasks)
        raise MalformedMessage("Invalid value 'find' - at `$.op`")


async def test_a_node_of_the_release_before_answers_questions_by_id_with_its_list(
    short_directory: Path,
) -> None:
    task, other = (
        Task(task_id=f"task-{name}", worker_id=name, pool="default", version="0", launched_at=1.0)
        for name in ("w-1", "w-2")
    )
    server = NodeOfBefore([task, other])
    await server.start(listen(short_directory / "node.sock"))
    launcher = ProcessLauncher(short_directory / "node.sock")
    try:
        assert await launcher.is_running("task-w-1") is True
        assert await launcher.is_running("task-w-3") is False
        assert list(await launcher.find_tasks("w-2")) == [other]
    finally:
        await server.close()
