"""A worker as ECS starts it: its document in the environment, its task's id from the metadata."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
import time
from pathlib import Path

from redis.asyncio import Redis

from infra.launchers.ecs.request import run_task
from infra.local.servers import ValkeyServer
from infra.settings import EcsSettings
from infra.valkey.client import reply_of
from infra.worker_task import LaunchSpec
from tests.support.workers.task_metadata import TASK_ID, metadata_server
from worker_runtime.process.config import METADATA_VARIABLE
from worker_runtime.protocol import keys, launch_document
from worker_runtime.protocol.launch import WorkerConfig

KEY = os.urandom(64)
#: Seconds; far more than a start takes on a busy machine.
PATIENCE = 30.0


async def test_a_worker_becomes_ready_by_what_run_task_gives_it(
    tmp_path: Path, valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    config = WorkerConfig(
        worker_id="w-ecs",
        pool="default",
        valkey_url=valkey_server.url,
        launch_token=b"t" * 32,
        orchestrator_keys=(bytes(range(32)),),
    )
    place = EcsSettings(cluster="c", placement="none")
    request = run_task(place, LaunchSpec(config=config), "token-1", KEY)
    (override,) = request["overrides"]["containerOverrides"]
    key_file = tmp_path / "launch.key"
    key_file.write_bytes(base64.b64encode(KEY))
    with metadata_server() as base:
        environment = {
            **os.environ,
            **{variable["name"]: variable["value"] for variable in override["environment"]},
            launch_document.KEY_FILE: str(key_file),
            METADATA_VARIABLE: base,
        }
        with (tmp_path / "worker.log").open("wb") as log:
            worker = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "worker_runtime",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        try:
            deadline = time.monotonic() + PATIENCE
            while not await valkey_client.exists(keys.pool_worker("default", "w-ecs")):
                assert worker.returncode is None, (tmp_path / "worker.log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "worker.log").read_text()
                await asyncio.sleep(0.02)
            entry = await reply_of(valkey_client.hgetall(keys.pool_worker("default", "w-ecs")))
            assert entry[b"task"] == TASK_ID.encode()
        finally:
            worker.terminate()
            await asyncio.wait_for(worker.wait(), PATIENCE)
    assert worker.returncode == 0
    assert config.launch_token not in (tmp_path / "worker.log").read_bytes()
