"""Memory limits of real workers: the one past its limit dies, and nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.launchers.process import ProcessLauncher
from tests.support.launchers.exits import read_exits
from tests.support.launchers.node_process import NodeProcess, cgroups_named
from tests.support.launchers.worker_specs import spec
from tests.support.waiting import until

limited = pytest.mark.needs("memory limits")


@limited
@pytest.mark.parametrize("adopted", [False, True], ids=["own", "adopted"])
async def test_a_worker_past_its_hard_limit_dies_alone(node: NodeProcess, adopted: bool) -> None:
    launcher = ProcessLauncher(node.socket)
    neighbour = await launcher.launch(spec("w-1"), "token-1")
    await node.until_ready("w-1")
    if adopted:
        await node.restart()
    hog = await launcher.launch(spec("w-2", "hog", memory_hard=64 * 1024 * 1024), "token-2")
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.task_id, end.exit_code, end.reason) == (hog.task_id, -9, "oom_killed")
    assert end.detail["oom_killed"] == "true"
    assert await launcher.list() == [neighbour]


@limited
async def test_a_worker_s_cgroup_has_both_limits_and_goes_with_the_worker(
    node: NodeProcess,
) -> None:
    launcher = ProcessLauncher(node.socket)
    task = await launcher.launch(spec("w-1", memory_hard=256 * 1024 * 1024), "token-1")
    (folder,) = cgroups_named(task.task_id)
    hard = next(
        folder / name
        for name in ("memory.max", "memory.limit_in_bytes")
        if (folder / name).exists()
    )
    assert int(hard.read_text()) == 256 * 1024 * 1024
    assert int((folder / "cgroup.procs").read_text()) == node.pid_of(task.task_id)
    await launcher.stop(task.task_id, "test")
    await until(lambda: not folder.exists(), "the cgroup is removed")


async def test_a_host_without_limits_is_noted_once_and_workers_run_all_the_same(
    short_directory: Path,
) -> None:
    node = NodeProcess(short_directory)
    no_group = short_directory / "no-cgroup"
    pong = await node.start("--cgroup", str(no_group))
    assert pong.limits == "none"
    launcher = ProcessLauncher(node.socket)
    for number in (1, 2):
        await launcher.launch(spec(f"w-{number}"), f"token-{number}")
    assert len(await launcher.list()) == 2
    await node.close()
    assert node.log.read_text().count("node.no_memory_limits") == 1
