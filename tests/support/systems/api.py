"""Contains the API in this process, and its parts as tests use them: keys, orders, commands."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import time as clock
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.container import Services
from infra.database import api_keys
from infra.database.engine import Database
from infra.local.process import free_port
from infra.market.calendar import HOME_ZONE
from infra.settings import Settings
from infra.vault.api_tokens import ApiTokens
from infra.vault.key_file import write_key_file
from tests.support.commands import CommandForker, Finished
from tests.support.waiting import until
from tests.support.workers.api_worker import ScriptedWorker

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
        services: Services = self.app.state.services
        return services

    def client(self, key: str | None) -> httpx.AsyncClient:
        headers = {"X-API-Key": key} if key else {}
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(
            transport=transport, base_url="http://api/v1", headers=headers, timeout=40
        )


async def on_one_day() -> None:
    """Waits while a day in Taipei is about to end: what a test counts for a day is of one then."""
    now = datetime.now(HOME_ZONE)
    time_left = datetime.combine(now.date() + timedelta(days=1), time(), HOME_ZONE) - now
    if time_left < timedelta(seconds=25):
        await asyncio.sleep(time_left.total_seconds() + 0.1)


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
