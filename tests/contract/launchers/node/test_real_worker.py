"""One round with the real worker: launched by the node, ready in Valkey, stopped gracefully."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from infra import processes
from infra.launchers.process import ProcessLauncher
from infra.local.servers import ValkeyServer
from infra.worker_task import LaunchSpec
from tests.support.launchers.exits import read_exits
from tests.support.launchers.node_process import PATIENCE, NodeProcess
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import WorkerConfig


async def test_the_real_worker_becomes_ready_outlives_the_node_and_ends_with_code_zero(
    short_directory: Path, valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    node = NodeProcess(
        short_directory, command=shlex.join([sys.executable, "-P", "-m", "worker_runtime"])
    )
    await node.start()
    launcher = ProcessLauncher(node.socket)
    config = WorkerConfig(
        worker_id="w-real",
        pool="default",
        valkey_url=valkey_server.url,
        launch_token=b"t" * 32,
        orchestrator_keys=(bytes(range(32)),),
    )
    task = await launcher.launch(LaunchSpec(config=config), "token-1")
    deadline = time.monotonic() + PATIENCE
    while not await valkey_client.exists(keys.pool_worker("default", "w-real")):
        assert time.monotonic() < deadline, node.output_of("w-real")
        await asyncio.sleep(0.02)
    family = processes.live_members(node.pid_of(task.task_id))
    assert len(family) > 1
    await node.restart(signal.SIGTERM)
    assert await launcher.list() == [task]
    second = await launcher.launch(
        LaunchSpec(config=msgspec.structs.replace(config, worker_id="w-second")), "token-2"
    )
    deadline = time.monotonic() + PATIENCE
    while not await valkey_client.exists(keys.pool_worker("default", "w-second")):
        assert time.monotonic() < deadline, node.output_of("w-second")
        await asyncio.sleep(0.02)
    await launcher.stop(second.task_id, "test")
    os.kill(node.pid_of(task.task_id), signal.SIGKILL)
    stopped, killed = await read_exits(launcher.exits(), 2)
    assert (stopped.worker_id, stopped.exit_code, stopped.reason) == ("w-second", 0, "stopped")
    assert killed.worker_id == "w-real"
    assert not [pid for pid in family if (process := processes.read_process(pid)) and process.alive]
    await node.close()
