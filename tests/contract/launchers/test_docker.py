"""What the Docker launcher promises beyond the port, with real containers."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import pytest
from testcontainers.core.container import DockerContainer

from infra.launchers.docker import container
from infra.worker_task import (
    MEMORY_HARD_BYTES,
    MEMORY_SOFT_BYTES,
    LauncherUnreachable,
    LaunchFailed,
)
from tests.support.launchers.exits import read_exits
from tests.support.launchers.harnesses import DockerLauncherHarness
from tests.support.launchers.node_process import PATIENCE
from tests.support.launchers.worker_specs import CANARY, spec
from tests.support.proxies.docker_line import DaemonLine
from tests.support.systems.docker import STAND_IN_IMAGE


def process_file(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


async def test_a_container_has_the_limits_of_a_worker_and_no_rights(
    docker_harness: DockerLauncherHarness,
) -> None:
    task = await docker_harness.client().launch(spec("w-1"), "token-1")
    await docker_harness.environment.wait_ready(task.task_id)
    inspected = docker_harness.environment.inspect(task.task_id)
    host = inspected["HostConfig"]
    assert (host["CpuShares"], host["MemoryReservation"], host["Memory"]) == (
        64,
        MEMORY_SOFT_BYTES,
        MEMORY_HARD_BYTES,
    )
    assert host["MemorySwap"] == MEMORY_HARD_BYTES
    assert host["ReadonlyRootfs"]
    assert not host["Privileged"]
    assert host["RestartPolicy"]["Name"] == "no"
    log = host["LogConfig"]["Config"]
    assert (log["max-size"], log["max-file"]) == ("4m", "2")
    assert log["mode"] == "non-blocking", (
        "a worker continues when the daemon does not take its lines"
    )
    pid = inspected["State"]["Pid"]
    lines = process_file(pid, "status").splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert set(status["Uid"].split()) == {"10002"}
    assert (int(status["CapEff"], 16), int(status["CapBnd"], 16), status["NoNewPrivs"]) == (
        0,
        0,
        "1",
    )
    group = docker_harness.environment.memory_group(task.task_id).path
    hard = next(
        group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists()
    )
    assert int(hard.read_text()) == MEMORY_HARD_BYTES


async def test_no_secret_is_seen_from_outside(docker_harness: DockerLauncherHarness) -> None:
    task = await docker_harness.client().launch(spec("w-1"), "token-1")
    said = await docker_harness.environment.wait_ready(task.task_id)
    pid = docker_harness.environment.pid_of(task.task_id)
    seen = [
        json.dumps(docker_harness.environment.inspect(task.task_id)),
        said,
        process_file(pid, "environ"),
        process_file(pid, "cmdline"),
    ]
    for text in seen:
        assert CANARY.decode() not in text
        assert base64.b64encode(CANARY).decode() not in text


async def test_a_worker_past_its_hard_limit_dies_alone_and_the_reason_is_reported(
    docker_harness: DockerLauncherHarness,
) -> None:
    launcher = docker_harness.client()
    neighbour = await launcher.launch(spec("w-1"), "token-1")
    hog = await launcher.launch(spec("w-2", "hog", memory_hard=64 * 1024 * 1024), "token-2")
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.task_id, end.exit_code, end.reason) == (hog.task_id, -9, "oom_killed")
    assert (end.detail["oom_killed"], end.detail["signal"]) == ("true", "SIGKILL")
    assert await launcher.list() == [neighbour]


async def test_a_stubborn_worker_is_killed_after_its_grace(
    docker_harness: DockerLauncherHarness,
) -> None:
    launcher = docker_harness.client()
    task = await launcher.launch(spec("w-1", "parent"), "token-1")
    await docker_harness.environment.wait_ready(task.task_id)
    await launcher.stop(task.task_id, "test", grace=0.2)
    assert await launcher.list() == []
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.exit_code, end.reason, end.detail["forced"]) == (-9, "stopped", "true")


async def test_a_container_that_was_never_started_is_made_anew(
    docker_harness: DockerLauncherHarness,
) -> None:
    """As an orchestrator leaves it that was killed in the middle of a launch."""
    name = container.container_name(docker_harness.fleet, "token-1")
    labels = {container.FLEET: docker_harness.fleet}
    docker_harness.environment.client.create(STAND_IN_IMAGE, name=name, labels=labels)
    launcher = docker_harness.client(half_made=0.2)
    assert await launcher.list() == []
    task = await launcher.launch(spec("w-1"), "token-1")
    assert await launcher.list() == [task]
    await docker_harness.environment.wait_ready(task.task_id)


async def test_a_worker_whose_launch_was_cut_off_before_its_config_ends_by_itself(
    docker_harness: DockerLauncherHarness,
) -> None:
    """It reads an empty document: nothing can be done with it, and its token stays with it."""
    name = container.container_name(docker_harness.fleet, "token-1")
    labels = {container.FLEET: docker_harness.fleet}
    with DockerContainer(STAND_IN_IMAGE, name=name, labels=labels, network_mode="host") as cut_off:
        launcher = docker_harness.client()
        task = await launcher.launch(spec("w-1"), "token-1")
        assert task.task_id == cut_off.get_container_id()
        (end,) = await read_exits(launcher.exits(), 1)
    assert (end.task_id, end.exit_code, end.reason) == (task.task_id, 2, "exited")


async def test_a_new_orchestrator_finds_the_workers_and_the_ends_that_it_missed(
    docker_harness: DockerLauncherHarness,
) -> None:
    first = docker_harness.client()
    first_task, second_task, third_task = [
        await first.launch(spec(f"w-{n}"), f"token-{n}") for n in (1, 2, 3)
    ]
    await first.stop(first_task.task_id, "test")
    (reported,) = await read_exits(first.exits(), 1)
    await first.close()
    await docker_harness.crash(second_task)
    second = docker_harness.client()
    exits = second.exits(reported.detail["position"])
    (end,) = await read_exits(exits, 1)
    assert (end.task_id, end.exit_code, end.reason) == (second_task.task_id, -9, "killed")
    assert await second.list() == [third_task]
    assert await second.launch(spec("w-3"), "token-3") == third_task
    # A position of another launcher is ignored: all that is still known is reported.
    again = await read_exits(docker_harness.client().exits("log-of-a-node:7"), 2)
    assert [end.task_id for end in again] == [first_task.task_id, second_task.task_id]


async def test_what_others_do_with_docker_is_reported_as_well(
    docker_harness: DockerLauncherHarness,
) -> None:
    launcher = docker_harness.client()
    first_task, second_task = [await launcher.launch(spec(f"w-{n}"), f"token-{n}") for n in (1, 2)]
    await docker_harness.environment.wait_ready(first_task.task_id)
    exits = launcher.exits()
    first = asyncio.ensure_future(anext(exits))
    docker_harness.environment.container(first_task.task_id).stop()
    end = await asyncio.wait_for(first, PATIENCE)
    assert (end.task_id, end.exit_code, end.reason) == (first_task.task_id, 0, "stopped")
    assert "stop_reason" not in end.detail
    docker_harness.environment.container(second_task.task_id).remove(force=True)
    (end,) = await read_exits(exits, 1)
    assert (end.task_id, end.worker_id, end.reason) == (second_task.task_id, "w-2", "stopped")


async def test_the_daemon_s_absence_is_no_end_of_workers_and_missed_ends_come_after_it(
    docker_harness: DockerLauncherHarness, short_directory: Path
) -> None:
    line = DaemonLine(short_directory / "docker.sock", docker_harness.environment.socket)
    await line.open()
    launcher = docker_harness.client(socket=line.path)
    first_task, second_task = [await launcher.launch(spec(f"w-{n}"), f"token-{n}") for n in (1, 2)]
    for task in (first_task, second_task):
        # What the launcher has sent is still on this line until it is read.
        await docker_harness.environment.wait_ready(task.task_id)
    listening = asyncio.ensure_future(anext(launcher.exits()))
    await line.used(2)
    await line.cut()
    with pytest.raises(LauncherUnreachable):
        await asyncio.wait_for(listening, PATIENCE)
    for call in (
        launcher.list(),
        launcher.stop(first_task.task_id, "test"),
        launcher.launch(spec("w-3"), "t-3"),
    ):
        with pytest.raises(LauncherUnreachable):
            await call
    await docker_harness.crash(second_task)
    await line.open()
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.task_id, end.reason) == (second_task.task_id, "killed")
    assert await launcher.list() == [first_task]
    await line.cut()


async def test_where_no_daemon_is_nothing_is_known(
    docker_harness: DockerLauncherHarness, short_directory: Path
) -> None:
    launcher = docker_harness.client(socket=short_directory / "nobody.sock")
    with pytest.raises(LauncherUnreachable):
        await launcher.list()
    with pytest.raises(LauncherUnreachable):
        await anext(launcher.exits())


async def test_an_image_that_is_not_there_is_said(docker_harness: DockerLauncherHarness) -> None:
    launcher = docker_harness.client("berth-nobody:1")
    with pytest.raises(LaunchFailed, match="berth-nobody"):
        await launcher.launch(spec("w-1"), "token-1")
    assert docker_harness.ids() == []


async def test_ended_containers_go_once_their_end_was_handled(
    docker_harness: DockerLauncherHarness,
) -> None:
    launcher = docker_harness.client(kept=0.0, kept_count=1)
    tasks = [await launcher.launch(spec(f"w-{n}"), f"token-{n}") for n in (1, 2, 3)]
    for task in tasks:
        await launcher.stop(task.task_id, "test", grace=0)
    exits = launcher.exits()
    await read_exits(exits, 3)
    assert set(docker_harness.ids()) == {task.task_id for task in tasks}
    last = await launcher.launch(spec("w-4", "exits:3"), "token-4")
    (end,) = await read_exits(exits, 1)
    assert (end.task_id, end.exit_code) == (last.task_id, 3)
    # The first look for what can go came after the third was handled.
    assert set(docker_harness.ids()) == {tasks[2].task_id, last.task_id}
