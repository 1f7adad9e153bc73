"""The API in this process, on real servers."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time as clock
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from redis.asyncio import Redis
from temporalio.client import Client
from temporalio.service import RPCError

from api.app import create_app
from api.container import Services
from infra.database import api_keys
from infra.database.engine import Database
from infra.local.process import free_port
from infra.local.servers import TemporalServer, ValkeyServer
from infra.market.calendar import HOME_ZONE
from infra.settings import Settings
from infra.vault.api_tokens import ApiTokens
from infra.vault.key_file import write_key_file
from infra.vault.key_pairs import create_master_key
from tests.support.commands import CommandForker, Finished
from tests.support.message_signing import write_secret
from tests.support.workers.api_worker import Script, ScriptedWorker, filled, until
from tests.support.workflows.user_worker_stub import LifecycleStub, orchestrator

_numbers = itertools.count(1)


@dataclass
class ServedApi:
    """A running application with a client of each role."""

    app: FastAPI
    settings: Settings
    #: A user of this test alone, with an account `main`.
    user: str
    key: str
    admin_key: str

    @property
    def services(self) -> Services:
        found: Services = self.app.state.services
        return found

    def client(self, key: str | None) -> httpx.AsyncClient:
        headers = {"X-API-Key": key} if key else {}
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(
            transport=transport, base_url="http://api/v1", headers=headers, timeout=40
        )


async def on_one_day() -> None:
    """Waits while a day in Taipei is about to end: what a test counts for a day is of one then."""
    now = datetime.now(HOME_ZONE)
    left = datetime.combine(now.date() + timedelta(days=1), time(), HOME_ZONE) - now
    if left < timedelta(seconds=25):
        await asyncio.sleep(left.total_seconds() + 0.1)


def an_order(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "client_order_id": f"order-{number}",
        "account_id": "main",
        "symbol": "2330",
        "side": "buy",
        "quantity": 1,
        "price_type": "LMT",
        "price": "1005.50",
        **changes,
    }


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


@asynccontextmanager
async def running_api(settings: Settings) -> AsyncIterator[ServedApi]:
    app = create_app(settings)
    number = next(_numbers)
    async with app.router.lifespan_context(app):
        admin_key = await make_key(settings, "admin")
        api = ServedApi(app, settings, f"user-{os.getpid()}-{number}", "", admin_key)
        # Its start does not wait for ever for the first look at the schema.
        await until(lambda: api.services.schema.ready)
        async with api.client(admin_key) as admin:
            made = await admin.post("/users", json={"user_id": api.user})
            assert made.status_code == 201, made.text
            api.key = made.json()["api_key"]
        async with api.client(api.key) as user:
            body = {"broker": "paper", "api_key": "canary-key", "secret_key": "canary-secret"}
            stored = await user.put(f"/users/{api.user}/accounts/main/credentials", json=body)
            assert stored.status_code == 200, stored.text
        yield api


@asynccontextmanager
async def served(api: ServedApi) -> AsyncIterator[str]:
    """The application behind a real uvicorn, whose lifespan is the fixture's; the URL."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(api.app, port=port, lifespan="off", log_config=None))
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        api.services.streams.end()
        server.should_exit = True
        await asyncio.wait_for(task, 30)


async def make_key(
    settings: Settings, role: api_keys.Role, scopes: tuple[str, ...] | None = None
) -> str:
    database = Database(settings.database_url, pool_size=1)
    try:
        async with database.session() as session:
            token = ApiTokens(settings.api_secret_file).make()
            await api_keys.create_api_key(session, token, role, scopes=scopes)
            return token
    finally:
        await database.close()


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


@asynccontextmanager
async def operator(
    api: ServedApi, commands: CommandForker, folder: Path
) -> AsyncIterator[OperatorCommand]:
    """Runs `berth …` with an operator's key; its exit code, output and errors."""
    key_file = folder / "operator.key"
    write_key_file(key_file, api.admin_key.encode(), private=True)
    async with served(api) as url:
        where = ("--url", url.removesuffix("/v1"), "--key-file", str(key_file))

        async def berth(*words: str, **environment: str) -> Finished:
            return await asyncio.to_thread(commands.run, *words, *where, **environment)

        yield berth


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
        async for found in client.list_workflows("ExecutionStatus = 'Running'"):
            with suppress(RPCError):  # the list is a moment behind: it may have ended by itself
                await client.get_workflow_handle(found.id).terminate()
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


async def alive(url: str) -> None:
    end = clock.monotonic() + 200  # its imports take 2 s of an idle core
    async with httpx.AsyncClient() as client:
        while True:
            try:
                if (await client.get(f"{url}/healthz")).status_code == 200:
                    return
            except httpx.TransportError:
                assert clock.monotonic() < end, "the API did not come up"
            await asyncio.sleep(0.05)


StartWorker = Callable[..., Awaitable[ScriptedWorker]]
OperatorCommand = Callable[..., Awaitable[Finished]]
Serve = Callable[..., tuple[subprocess.Popen[bytes], str]]


@pytest.fixture
async def staff(whole_api: ServedApi) -> AsyncIterator[httpx.AsyncClient]:
    async with whole_api.client(whole_api.admin_key) as client:
        yield client
