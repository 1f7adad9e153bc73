"""What stands before a launcher in a container of its own, and what a node in a container does at
its end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from infra.launchers.process import ProcessLauncher
from infra.node.protocol import BEAT_INTERVAL_S, NodeStatus
from infra.worker_task import LauncherUnreachable, LaunchFailed
from tests.support.launchers.exits import read_exits
from tests.support.launchers.harnesses import ServedLauncherHarness
from tests.support.launchers.node_process import NodeProcess
from tests.support.launchers.worker_specs import spec
from tests.support.waiting import until


@pytest.fixture
async def served(short_directory: Path) -> AsyncIterator[ServedLauncherHarness]:
    async with ServedLauncherHarness(short_directory) as made:
        yield made


async def test_only_another_image_of_the_workers_name_is_launched_and_only_by_its_digest(
    served: ServedLauncherHarness,
) -> None:
    client, digest = served.client(), f"sha256:{'0' * 64}"
    others = (f"debian@{digest}", f"evil/berth-worker@{digest}", f"berth-worker-2@{digest}", digest)
    for image in (
        *others,
        "berth-worker:2",
        "berth-worker",
        f"berth-worker@{digest}\n",
        "berth-worker@sha256:1",
    ):
        with pytest.raises(LaunchFailed, match="berth-worker"):
            await client.launch(replace(spec("w-1"), image=image), "token-1")
    await client.launch(replace(spec("w-1"), image=f"berth-worker@{digest}"), "token-1")
    assert [launched_spec.image for launched_spec in served.launcher.launched] == [
        f"berth-worker@{digest}"
    ]


async def test_limits_and_share_of_a_launch_arrive(served: ServedLauncherHarness) -> None:
    described = replace(spec("w-1"), memory_soft=3, memory_hard=4, cpu_units=5)
    await served.client().launch(described, "token-1")
    (arrived,) = served.launcher.launched
    assert arrived.config == described.config
    assert (arrived.memory_soft, arrived.memory_hard, arrived.cpu_units) == (3, 4, 5)


async def test_an_engine_that_is_away_is_reported_as_such_and_the_socket_continues(
    served: ServedLauncherHarness,
) -> None:
    client = ProcessLauncher(served.socket)
    served.launcher.unreachable = True
    with pytest.raises(LauncherUnreachable):
        await client.list()
    with pytest.raises(LauncherUnreachable):
        await read_exits(client.exits(), 1)
    served.launcher.unreachable = False
    assert await client.ping() == NodeStatus(
        pid=os.getpid(), log="", workers=0, limits="containers"
    )


async def test_all_are_stopped_by_one_request(served: ServedLauncherHarness) -> None:
    client = ProcessLauncher(served.socket)
    for number in range(3):
        await client.launch(spec(f"w-{number}"), f"token-{number}")
    assert await client.stop_all("the end") == 3
    assert await client.list() == []


async def test_it_knows_at_once_when_the_last_orchestrator_has_gone(
    served: ServedLauncherHarness,
) -> None:
    await served.client().list()
    await until(lambda: not served.server.has_clients, "that a call is over")
    watching = asyncio.create_task(read_exits(served.client().exits(), 1))
    await until(lambda: served.server.has_clients, "a watch")
    watching.cancel()
    began = time.monotonic()
    await until(lambda: not served.server.has_clients, "the end of the watch")
    assert time.monotonic() - began < BEAT_INTERVAL_S  # it need not write to find out


async def test_a_node_in_a_container_ends_its_workers_gracefully_before_itself(
    node: NodeProcess,
) -> None:
    assert node.end() == 0
    await node.start("--contained")
    launcher = ProcessLauncher(node.socket)
    await launcher.launch(spec("w-1"), "token-1")
    await node.until_ready("w-1")
    assert node.end(signal.SIGTERM) == 0
    await node.start()
    (end,) = await read_exits(launcher.exits(), 1)
    assert (end.exit_code, end.reason, end.detail["stop_reason"]) == (
        0,
        "stopped",
        "the node's container stops",
    )


async def test_a_node_in_a_container_without_limits_does_not_start_and_says_why(
    node: NodeProcess, tmp_path: Path
) -> None:
    assert node.end() == 0
    process = node.spawn("--contained", "--cgroup", str(tmp_path))
    assert process.wait(20) == 1
    assert "LIMITS_UNAVAILABLE" in node.log.read_text()
    assert str(tmp_path) in node.log.read_text()
