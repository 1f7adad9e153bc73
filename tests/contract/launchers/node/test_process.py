"""What the process launcher adds: real processes, and no trace of a secret."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import stat
import time
from base64 import b64encode
from functools import partial
from pathlib import Path

import pytest

from infra import processes
from infra.launchers.process import ProcessLauncher
from infra.worker_task import LauncherUnreachable, LaunchFailed, Task
from tests.support.launchers.exits import read_exits
from tests.support.launchers.node_process import PATIENCE, NodeProcess, cgroups_named
from tests.support.launchers.worker_specs import CANARY, spec
from tests.support.waiting import until
from worker_runtime.protocol.launch import MEMORY, memory_prefix


def contents(paths: list[Path]) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in paths}


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _leads(task: Task, pids: list[int]) -> bool:
    processes_of_worker = processes.find_by_argument(task.worker_id)
    return [
        process.pid for process in processes_of_worker if process.pid == process.session
    ] == pids


async def test_a_graceful_worker_ends_with_its_own_exit_code(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1"), "token-1")
    await node.until_ready("w-1")
    await launcher.stop(task.task_id, "test")
    (end,) = await read_exits(launcher.exits(), 1)
    assert end.exit_code == 0
    assert "forced" not in end.detail


async def test_a_worker_that_ignores_sigterm_is_killed_after_its_grace(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket, grace=0.2)
    task = await launcher.launch(spec("w-1", "stubborn"), "token-1")
    await node.until_ready("w-1")
    pid = node.pid_of(task.task_id)
    asked = time.monotonic()
    await launcher.stop(task.task_id, "test")
    assert time.monotonic() - asked >= 0.2
    assert processes.read_process(pid) is None
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.exit_code, end.reason, end.detail["forced"]) == (-9, "stopped", "true")


async def test_one_stop_may_give_less_time_than_the_workers_own(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1", "stubborn"), "token-1")
    await node.until_ready("w-1")
    await launcher.stop(task.task_id, "test", grace=0.2)
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.exit_code, end.reason, end.detail["forced"]) == (-9, "stopped", "true")


async def test_what_a_killed_worker_kept_in_memory_goes_with_it(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket, grace=0.2)
    task = await launcher.launch(spec("w-1", "stubborn"), "token-1")
    await node.until_ready("w-1")
    pid = node.pid_of(task.task_id)
    stale_folder = MEMORY / f"{memory_prefix(pid)}{pid + 1}-test"
    others = MEMORY / f"{memory_prefix(os.getpid())}{pid + 1}-test"
    for folder in (stale_folder, others):
        folder.mkdir()
        (folder / "token").write_text("secret")
    try:
        await launcher.stop(task.task_id, "test")
        assert [folder.exists() for folder in (stale_folder, others)] == [False, True]
    finally:
        for folder in (stale_folder, others):
            shutil.rmtree(folder, ignore_errors=True)


async def test_a_frozen_worker_is_woken_so_that_it_can_end_gracefully(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1"), "token-1")
    await node.until_ready("w-1")
    os.kill(node.pid_of(task.task_id), signal.SIGSTOP)
    await launcher.stop(task.task_id, "test")
    (end,) = await read_exits(launcher.exits(), 1)
    assert end.exit_code == 0


async def test_an_exit_is_reported_only_when_all_processes_of_the_worker_are_gone(
    node: NodeProcess,
) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1", "parent"), "token-1")
    child = int((await node.until_ready("w-1")).split()[1])
    assert processes.read_process(child) is not None
    os.kill(node.pid_of(task.task_id), signal.SIGKILL)
    await read_exits(launcher.exits(), 1)
    orphan = processes.read_process(child)
    assert orphan is None or not orphan.alive


async def test_a_killed_workers_daemon_in_a_session_of_its_own_ends_with_it(
    short_directory: Path,
) -> None:
    """It was forked twice, as programs do that want to outlive others; and no cgroup knows it."""
    node = NodeProcess(short_directory)
    await node.start("--cgroup", str(short_directory / "none"))
    try:
        launcher = ProcessLauncher(node.socket, grace=0.1)
        task = await launcher.launch(spec("w-1", "daemon"), "token-1")
        said = await node.until_ready("w-1")
        daemon = processes.read_process(int(said.split("daemon ")[1].split()[0]))
        assert daemon is not None
        assert daemon.session != node.pid_of(task.task_id), "it is in no group of the worker"
        await launcher.stop(task.task_id, "test")
        assert not processes.is_alive(daemon)
    finally:
        await node.close()


async def test_a_worker_that_ends_by_itself_is_reported_with_its_exit_code(
    node: NodeProcess,
) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1", "exits:7"), "token-1")
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.task_id, end.exit_code, end.reason) == (task.task_id, 7, "exited")


async def test_two_stops_of_one_worker_both_wait_for_its_end(node: NodeProcess) -> None:
    task = await ProcessLauncher(node.socket).launch(spec("w-1", "stubborn"), "token-1")
    await node.until_ready("w-1")
    patient, hasty = ProcessLauncher(node.socket, grace=60), ProcessLauncher(node.socket, grace=0.1)
    await asyncio.gather(patient.stop(task.task_id, "first"), hasty.stop(task.task_id, "second"))
    assert await patient.list() == []


async def test_a_client_that_goes_away_does_not_undo_its_stop(node: NodeProcess) -> None:
    impatient = ProcessLauncher(node.socket, grace=0.5)
    task = await impatient.launch(spec("w-1", "stubborn"), "token-1")
    await node.until_ready("w-1")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(impatient.stop(task.task_id, "test"), 0.1)
    (end,) = await read_exits(impatient.exits(), 1)
    assert (end.reason, end.detail["forced"]) == ("stopped", "true")


async def test_stop_all_ends_all_workers_at_once(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket, grace=0.3)
    for number in range(4):
        await launcher.launch(spec(f"w-{number}", "stubborn"), f"token-{number}")
        await node.until_ready(f"w-{number}")
    assert await launcher.stop_all("the stack stops") == 4
    assert await launcher.list() == []


async def test_no_secret_shows_in_a_worker_s_environment_or_arguments(
    short_directory: Path,
) -> None:
    node = NodeProcess(short_directory)
    await node.start(environment={"BERTH_SECRET": CANARY.decode(), "LANG": "C.UTF-8"})
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1"), "token-1")
    await node.until_ready("w-1")
    proc = Path(f"/proc/{node.pid_of(task.task_id)}")
    seen = contents([proc / "environ", proc / "cmdline"])
    assert b"w-1" in seen[proc / "cmdline"].split(b"\0")
    assert b"LANG=C.UTF-8" in seen[proc / "environ"].split(b"\0")
    await node.close()
    seen |= contents(files_below(short_directory))
    assert node.log in seen
    for where, content in seen.items():
        assert CANARY not in content, where
        assert b64encode(CANARY) not in content, where


async def test_a_worker_s_folder_and_log_are_its_owner_s_only(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1"), "token-1")
    await node.until_ready("w-1")
    home = Path(os.readlink(f"/proc/{node.pid_of(task.task_id)}/cwd"))
    assert home == node.state / "run" / task.task_id
    assert mode(home) == 0o700
    assert mode(node.state / "logs" / "w-1.log") == 0o600
    await launcher.stop(task.task_id, "test")
    await until(lambda: not home.exists(), "the worker's folder is removed")


@pytest.mark.parametrize("worker_id", ["", "../../etc/passwd", "a b", "x" * 101, "w\n"])
async def test_a_worker_id_that_is_no_name_is_refused(node: NodeProcess, worker_id: str) -> None:
    with pytest.raises(LaunchFailed):
        await ProcessLauncher(node.socket).launch(spec(worker_id), "token-1")


async def test_a_program_that_cannot_be_started_is_a_failed_launch_and_leaves_nothing(
    short_directory: Path,
) -> None:
    node = NodeProcess(short_directory, command="/does/not/exist")
    pong = await node.start()
    launcher = ProcessLauncher(node.socket)
    with pytest.raises(LaunchFailed):
        await launcher.launch(spec("w-1"), "token-1")
    assert await launcher.list() == []
    await node.close()
    assert not list((node.state / "run").glob("*"))
    assert cgroups_named(f"berth-{pong.log}") == []
    # The token is free again: the next attempt may find the program.
    repaired = NodeProcess(short_directory)
    await repaired.start()
    assert (
        await ProcessLauncher(repaired.socket).launch(spec("w-1"), "token-1")
    ).worker_id == "w-1"
    await repaired.close()


async def test_a_node_that_does_not_run_is_unreachable(short_directory: Path) -> None:
    launcher = ProcessLauncher(short_directory / "node.sock")
    with pytest.raises(LauncherUnreachable):
        await launcher.list()
    with pytest.raises(LauncherUnreachable):
        await anext(launcher.exits())


async def test_a_frozen_node_is_unreachable_and_comes_back_by_itself(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket, answer_timeout=0.3, silence=0.3)
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)
    with pytest.raises(LauncherUnreachable):
        await launcher.launch(spec("w-1"), "token-1")
    with pytest.raises(LauncherUnreachable):
        await anext(launcher.exits())
    node.process.send_signal(signal.SIGCONT)
    # The lost launch has happened meanwhile, or happens now: either way there is one worker.
    patient = ProcessLauncher(node.socket)
    task = await patient.launch(spec("w-1"), "token-1")
    assert await patient.list() == [task]


async def test_a_listener_learns_that_its_node_was_killed_and_misses_nothing(
    node: NodeProcess,
) -> None:
    launcher = ProcessLauncher(node.socket)
    tasks = [await launcher.launch(spec(f"w-{n}"), f"token-{n}") for n in (1, 2)]
    exits = launcher.exits()
    await launcher.stop(tasks[0].task_id, "test")
    assert [end.worker_id for end in await read_exits(exits, 1)] == ["w-1"]
    listening = asyncio.ensure_future(anext(exits))
    node.end(signal.SIGKILL)
    with pytest.raises(LauncherUnreachable):
        await asyncio.wait_for(listening, 20)
    await node.start()
    await launcher.stop(tasks[1].task_id, "test")
    assert [end.worker_id for end in await read_exits(launcher.exits(), 1)] == ["w-2"]


async def test_positions_outlive_the_listening_process(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket)
    for number in (1, 2):
        task = await launcher.launch(spec(f"w-{number}"), f"token-{number}")
        await launcher.stop(task.task_id, "test")
    first, _ = await read_exits(launcher.exits(), 2)
    (second,) = await read_exits(ProcessLauncher(node.socket).exits(first.detail["position"]), 1)
    assert second.worker_id == "w-2"
    # A position in the log of a node that lost its state folder says nothing: all exits are
    # reported.
    (end,) = await read_exits(ProcessLauncher(node.socket).exits("another-log:2"), 1)
    assert end.worker_id == "w-1"


async def test_the_node_keeps_nothing_open_for_workers_that_have_ended(node: NodeProcess) -> None:
    launcher = ProcessLauncher(node.socket, grace=5)
    assert node.process is not None
    open_files = f"/proc/{node.process.pid}/fd"
    before = len(os.listdir(open_files))
    for round_ in range(3):
        for number in range(5):
            await launcher.launch(spec(f"w-{round_}-{number}"), f"token-{round_}-{number}")
        assert await launcher.stop_all("test") == 5
    await until(lambda: len(os.listdir(open_files)) <= before, "all descriptors are closed")


async def test_a_launch_whose_answer_was_lost_to_a_crash_of_the_node_is_never_doubled(
    node: NodeProcess,
) -> None:
    """The node is killed at random moments while workers are launched; callers repeat until it
    works."""
    launcher = ProcessLauncher(node.socket)

    async def insist(number: int) -> Task:
        while True:
            try:
                return await launcher.launch(spec(f"w-{number}"), f"token-{number}")
            except LauncherUnreachable:
                await asyncio.sleep(0.005)

    choice = random.Random(4711)  # noqa: S311
    tasks: list[Task] = []
    for round_ in range(8):
        launching = [asyncio.ensure_future(insist(round_ * 4 + number)) for number in range(4)]
        await asyncio.sleep(choice.uniform(0, 0.02))  # the moment of the crash is what varies
        await node.restart(signal.SIGKILL)
        tasks += await asyncio.gather(*launching)
    # A node killed between its record and the config leaves a worker without a config: that worker
    # ends, and its exit is reported. The others say that they are ready.
    deadline = time.monotonic() + PATIENCE
    listed = {task.task_id for task in tasks}
    while any(
        task.task_id in listed and "ready" not in node.output_of(task.worker_id) for task in tasks
    ):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
        listed = {task.task_id for task in await launcher.list()}
    listed = {task.task_id for task in await launcher.list()}
    missing = {task.task_id for task in tasks} - listed
    assert {end.task_id for end in await read_exits(launcher.exits(), len(missing))} == missing
    for task in tasks:
        expected_pids = [] if task.task_id in missing else [node.pid_of(task.task_id)]
        # What the killed node had forked and given no config ends by itself, and can do nothing
        # until then.
        await until(partial(_leads, task, expected_pids), "one process leads each worker")
