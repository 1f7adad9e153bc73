"""Starts the API in this process, on real servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis
from temporalio.client import Client
from temporalio.service import RPCError

from infra.local.process import free_port
from infra.local.servers import TemporalServer, ValkeyServer
from infra.settings import Settings
from infra.vault.key_pairs import create_master_key
from tests.support.message_signing import write_secret
from tests.support.systems.api import Serve, ServedApi, StartWorker, running_api
from tests.support.workers.api_worker import Script, ScriptedWorker, filled
from tests.support.workflows.user_worker_stub import LifecycleStub, orchestrator


@pytest.fixture
def settings(
    tmp_path: Path, valkey_server: ValkeyServer, valkey_client: Redis, services_database: str
) -> Settings:
    """Temporal is at an address where nobody listens."""
    create_master_key(tmp_path / "master.key", tmp_path / "master.pub")
    write_secret(tmp_path / "message.key")
    write_secret(tmp_path / "api.key")
    return Settings(
        data_dir=tmp_path,
        master_key_file=tmp_path / "master.key",
        master_public_file=tmp_path / "master.pub",
        message_key_file=tmp_path / "message.key",
        api_secret_file=tmp_path / "api.key",
        valkey_url=valkey_server.url,
        database_url=services_database,
        temporal_address="127.0.0.1:1",
        database_pool_wait=30.0,
    )


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[ServedApi]:
    """An API whose Temporal is down."""
    async with running_api(settings) as api:
        yield api


@pytest.fixture
async def user(api: ServedApi) -> AsyncIterator[httpx.AsyncClient]:
    """The test's user at an API whose Temporal is down."""
    async with api.client(api.key) as client:
        yield client


@pytest.fixture
async def lifecycle(
    temporal_server: TemporalServer, settings: Settings
) -> AsyncIterator[LifecycleStub]:
    """Serves the lifecycle queue as the test says."""
    lifecycle = LifecycleStub(settings.valkey_url)
    client = await Client.connect(temporal_server.address)
    async with orchestrator(client, lifecycle):
        yield lifecycle
        lifecycle.go.set()
        async for run in client.list_workflows("ExecutionStatus = 'Running'"):
            with suppress(RPCError):  # the list is a moment behind: it may have ended by itself
                await client.get_workflow_handle(run.id).terminate()
    await lifecycle.close()


@pytest.fixture
async def whole_api(
    settings: Settings, temporal_server: TemporalServer, lifecycle: LifecycleStub
) -> AsyncIterator[ServedApi]:
    """An API with all its servers, and an orchestrator that does what `lifecycle` says."""
    changed = settings.model_copy(update={"temporal_address": temporal_server.address})
    async with running_api(changed) as api:
        yield api


@pytest.fixture
async def start_worker(valkey_server: ValkeyServer) -> AsyncIterator[StartWorker]:
    """Starts scripted workers, and stops them at the end."""
    async with AsyncExitStack() as stack:

        async def start(
            user_id: str, script: Script = filled, *, announce: bool = True
        ) -> ScriptedWorker:
            worker = ScriptedWorker(valkey_server.url, user_id, script, announce=announce)
            stack.push_async_callback(worker.stop)
            await worker.start()
            return worker

        yield start


@pytest.fixture
def serve(settings: Settings, tmp_path: Path) -> Iterator[Serve]:
    """Starts `python -m api`, with two processes if not told otherwise; returns it and the URL.

    `output`: a descriptor for its log instead of `api.log`; `variables`: more of its environment.
    """
    started: list[subprocess.Popen[bytes]] = []
    port = free_port()

    def start(
        processes: int = 2, *, output: int | None = None, **variables: str
    ) -> tuple[subprocess.Popen[bytes], str]:
        environment = {
            **os.environ,
            "BERTH_DATA_DIR": str(settings.data_dir),
            "BERTH_MASTER_PUBLIC_FILE": str(settings.master_public_file),
            "BERTH_MESSAGE_KEY_FILE": str(settings.message_key_file),
            "BERTH_API_SECRET_FILE": str(settings.api_secret_file),
            "BERTH_VALKEY_URL": settings.valkey_url,
            "BERTH_DATABASE_URL": settings.database_url,
            "BERTH_TEMPORAL_ADDRESS": settings.temporal_address,
            "BERTH_API_PORT": str(port),
            "BERTH_API_PROCESSES": str(processes),
            **variables,
        }
        with (tmp_path / "api.log").open("ab") as log:
            log_file = log.fileno() if output is None else output
            process = subprocess.Popen(
                [sys.executable, "-m", "api"],
                env=environment,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )
        started.append(process)
        return process, f"http://127.0.0.1:{port}/v1"

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(30)


@pytest.fixture
async def staff(whole_api: ServedApi) -> AsyncIterator[httpx.AsyncClient]:
    async with whole_api.client(whole_api.admin_key) as client:
        yield client
