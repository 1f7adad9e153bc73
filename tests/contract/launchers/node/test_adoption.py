"""The node may be restarted or killed at any moment: no worker notices, and nothing is
forgotten."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from infra import processes
from infra.launchers.process import ProcessLauncher
from infra.local.process import free_port
from tests.support.launchers.exits import read_exits
from tests.support.launchers.node_process import STAND_IN, NodeProcess
from tests.support.launchers.worker_specs import spec
from tests.support.waiting import until

BOTH_ENDS = pytest.mark.parametrize(
    "how", [signal.SIGTERM, signal.SIGKILL], ids=["restart", "crash"]
)


def alter(node: NodeProcess, *statements: str | tuple[str, int]) -> None:
    """Puts the register of a node that does not run into a state which takes luck to reach."""
    register = sqlite3.connect(node.state / "register.db")
    with register:
        for statement in statements:
            text, *values = (statement,) if isinstance(statement, str) else statement
            register.execute(text, values)
    register.close()


def session_leader(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, start_new_session=True
    )


@BOTH_ENDS
async def test_workers_outlive_their_node_and_are_found_by_the_next(
    node: NodeProcess, how: signal.Signals
) -> None:
    launcher = ProcessLauncher(node.socket)
    tasks = [await launcher.launch(spec(f"w-{n}"), f"token-{n}") for n in (1, 2)]
    pids = [node.pid_of(task.task_id) for task in tasks]
    await node.restart(how)
    assert await launcher.list() == tasks
    assert [node.pid_of(task.task_id) for task in tasks] == pids


@BOTH_ENDS
async def test_a_token_gives_the_same_task_after_a_restart_of_the_node(
    node: NodeProcess, how: signal.Signals
) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1"), "token-1")
    await node.restart(how)
    assert await launcher.launch(spec("w-1"), "token-1") == task
    assert await launcher.list() == [task]


async def test_the_end_of_an_adopted_worker_is_seen_without_its_exit_code(
    node: NodeProcess,
) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1"), "token-1")
    await node.restart()
    os.kill(node.pid_of(task.task_id), signal.SIGKILL)
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.task_id, end.exit_code, end.reason) == (task.task_id, None, "exited")


async def test_a_stubborn_adopted_worker_is_stopped_with_all_its_processes(
    node: NodeProcess,
) -> None:
    launcher = ProcessLauncher(node.socket, grace=0.2)
    task = await launcher.launch(spec("w-1", "parent"), "token-1")
    child = int((await node.until_ready("w-1")).split()[1])
    await node.restart()
    await launcher.stop(task.task_id, "test")
    orphan = processes.read_process(child)
    assert orphan is None or not orphan.alive
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.reason, end.detail["forced"]) == ("stopped", "true")


async def test_an_exit_while_no_node_ran_is_reported_by_the_next(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1", "parent"), "token-1")
    child = int((await node.until_ready("w-1")).split()[1])
    pid = node.pid_of(task.task_id)
    node.end(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    await until(
        lambda: (now := processes.read_process(pid)) is None or not now.alive,
        "the worker has ended",
    )
    await node.start()
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.task_id, end.exit_code, end.reason) == (task.task_id, None, "lost")
    assert await launcher.list() == []
    orphan = processes.read_process(child)
    # What the worker left behind was ended before its exit was reported.
    assert orphan is None or not orphan.alive


async def test_exits_from_before_a_crash_of_the_node_are_still_reported(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1", "exits:7"), "token-1")
    await until(lambda: "node.ended" in node.log.read_text(), "the end is recorded")
    await node.restart()
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.task_id, end.exit_code) == (task.task_id, 7)


async def test_a_stop_that_a_crash_cut_off_is_finished_by_the_next_node(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket)
    await launcher.launch(spec("w-1", "stubborn"), "token-1")
    await node.until_ready("w-1")
    node.end(signal.SIGKILL)
    alter(node, "UPDATE workers SET stop_reason = 'cut off', grace = 0.1")
    await node.start()
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.reason, end.detail["stop_reason"]) == ("stopped", "cut off")


async def test_a_process_that_never_got_its_config_is_ended_and_its_token_is_free(
    node: NodeProcess,
) -> None:
    """A node killed between the start of a process and its record: the process waits for a
    config."""
    launcher = ProcessLauncher(node.socket)
    node.end(signal.SIGKILL)
    alter(
        node,
        "INSERT INTO workers (task_id, token, worker_id, pool, version, launched_at, grace, state)"
        " VALUES ('task-cut-off', 'token-1', 'w-1', 'default', 'plain', 1, 1, 'intended')",
    )
    with session_leader(str(STAND_IN), "w-1", "task-cut-off") as waiting:
        await node.start()
        assert await launcher.list() == []
        assert waiting.wait(20) == -signal.SIGKILL
    task = await launcher.launch(spec("w-1"), "token-1")
    assert task.task_id != "task-cut-off"
    assert await launcher.list() == [task]


async def test_a_stranger_with_a_recycled_pid_is_not_adopted_and_not_harmed(
    node: NodeProcess,
) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1"), "token-1")
    pid = node.pid_of(task.task_id)
    node.end(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    with session_leader("-c", "input()") as stranger:
        alter(node, ("UPDATE workers SET pid = ?", stranger.pid))
        await node.start()
        (end,) = await read_exits(launcher.exits(), 1)
        assert (end.task_id, end.reason) == (task.task_id, "lost")
        assert stranger.poll() is None
        stranger.communicate(b"\n", timeout=20)
        assert stranger.returncode == 0


async def test_workers_of_an_earlier_boot_are_reported_as_lost_with_their_host(
    node: NodeProcess,
) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1"), "token-1")
    pid = node.pid_of(task.task_id)
    node.end(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    await until(
        lambda: (now := processes.read_process(pid)) is None or not now.alive,
        "the worker has ended",
    )
    alter(node, "UPDATE workers SET state = 'running', boot_id = 'another'", "DELETE FROM ends")
    await node.start()
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.task_id, end.reason) == (task.task_id, "host_restarted")


async def test_a_damaged_register_is_refused_and_left_as_it_is(short_directory: Path) -> None:
    node = NodeProcess(short_directory)
    node.state.mkdir()
    (node.state / "register.db").write_bytes(b"no database at all" * 100)
    refused = node.spawn()
    assert refused.wait(20) == 1
    assert "NODE_STATE_UNREADABLE" in node.log.read_text()
    assert (node.state / "register.db").read_bytes() == b"no database at all" * 100


async def test_a_node_shows_its_workers_to_prometheus_also_those_that_it_adopted(
    node: NodeProcess,
) -> None:
    launcher, address = ProcessLauncher(node.socket), f"127.0.0.1:{free_port()}"
    await launcher.launch(spec("w-1"), "token-1")
    node.end()
    await node.start("--metrics", address)
    await launcher.launch(spec("w-2"), "token-2")
    async with httpx.AsyncClient(trust_env=False) as http:
        page = (await http.get(f"http://{address}/metrics")).text
    assert "berth_node_workers 2.0" in page.splitlines()
