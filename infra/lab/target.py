"""The system under measurement: a local stack of its own, on free ports, in a folder of its own."""

from __future__ import annotations

import asyncio
import base64
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from infra.exchange.client import ExchangeAdmin
from infra.lab.rest import RestConnection
from infra.lab.shioaji import keys
from infra.local.process import ServerFailed
from infra.local.stack import LocalStack
from infra.temporal.connection import open_client
from infra.worker_task import Task

#: Connections that register users at the same time.
_MAX_CONNECTIONS = 8
#: Api key and secret key of each account.
BENCH_KEYS = ("key", "secret")


@dataclass(frozen=True)
class BenchUser:
    """A user with paper credentials and no worker yet."""

    user_id: str
    api_key: str
    account_id: str
    #: API key and secret key of its account at the broker.
    broker_keys: tuple[str, str] = BENCH_KEYS


class Target:
    """A running stack, and what benchmarks do to it besides measuring."""

    def __init__(self, stack: LocalStack) -> None:
        self.stack = stack
        self.settings = stack.settings

    @property
    def api_url(self) -> str:
        return self.stack.api.url

    def admin(self) -> RestConnection:
        return RestConnection(self.api_url, self.stack.admin_key)

    def workers(self) -> list[Task]:
        return self.stack.tasks()

    def worker_pids(self) -> dict[str, int]:
        """Returns the pid of each worker's first process by worker id, found by the command line
        that the node gives it."""
        worker_ids = {task.worker_id for task in self.workers()}
        pids: dict[str, int] = {}
        for process in psutil.process_iter(["pid", "cmdline"]):
            for worker_id in worker_ids.intersection(process.info["cmdline"] or []):
                # A worker's other processes show the same command line;
                # the first one has the least pid.
                pids[worker_id] = min(pids.get(worker_id, process.info["pid"]), process.info["pid"])
        return pids

    def make_users(
        self, prefix: str, count: int, *, at_exchange: bool = True, broker: str = "paper"
    ) -> list[BenchUser]:
        """Registers users, their credentials,
        and (unless nobody logs in) their accounts at the exchange.

        `broker` shioaji: live accounts there,
        of which workers with the stand-in think that they are real.
        """
        with ThreadPoolExecutor(max_workers=min(_MAX_CONNECTIONS, count)) as threads:
            shares = threads.map(
                lambda maker: self._make(
                    [f"{prefix}{n}" for n in range(maker, count, _MAX_CONNECTIONS)], broker
                ),
                range(min(_MAX_CONNECTIONS, count)),
            )
            users = [user for share in shares for user in share]

        async def register_accounts() -> None:
            async with ExchangeAdmin(self.settings.exchange_admin_url) as exchange:
                for user in users:
                    await exchange.register(user.account_id, *user.broker_keys, user.user_id)

        if at_exchange:
            asyncio.run(register_accounts())
        return users

    def _make(self, user_ids: list[str], broker: str) -> list[BenchUser]:
        admin = self.admin()
        try:
            return [_register(admin, user_id, broker) for user_id in user_ids]
        finally:
            admin.close()

    def pool_update(self, name: str, *args: object) -> None:
        """Sends an update (`pause`, `resume`, `set_target`) to the pool's workflow."""

        async def send() -> None:
            client = await open_client(self.settings)
            handle = client.get_workflow_handle(f"worker-pool-{self.settings.pool}")
            await handle.execute_update(name, args=list(args))
            # The client's threads end before the loop does (sdk-python#300).
            await asyncio.sleep(0.1)

        asyncio.run(send())

    def fill_pool(self, workers: int) -> None:
        """Sets the pool's target, and waits until as many workers are ready. Raises
        `ServerFailed`."""
        self.pool_update("set_target", {"target": workers})
        self.pool_update("resume")
        self.wait_ready(workers)

    def wait_ready(self, count: int, timeout: float = 120.0) -> None:
        """Waits until `count` workers are free for a claim. Raises `ServerFailed`."""
        self.stack.wait_pool(count, timeout)

    def wait_workers(self, max_count: int, timeout: float = 60.0) -> None:
        """Waits until at most `max_count` workers run. Raises `ServerFailed`."""
        until = time.monotonic() + timeout
        while (count := len(self.workers())) > max_count:
            if time.monotonic() > until:
                raise ServerFailed(
                    f"{count} workers still run after {timeout:.0f} s, {max_count} wanted"
                )
            time.sleep(0.05)


def _register(admin: RestConnection, user_id: str, broker: str) -> BenchUser:
    made = admin.call("POST", "/v1/users", {"user_id": user_id})
    account_id, live = f"acc-{user_id}", broker == "shioaji"
    broker_keys = (keys.api_key_of(account_id), keys.SECRET_KEY) if live else BENCH_KEYS
    user = BenchUser(user_id, made["api_key"], account_id, broker_keys)
    credentials: dict[str, object] = {
        "broker": broker,
        "api_key": broker_keys[0],
        "secret_key": broker_keys[1],
        "person_id": user_id,
    }
    if live:
        credentials |= {
            "simulation": False,
            "ca_certificate": base64.b64encode(keys.make_certificate()).decode(),
            "ca_password": keys.CERTIFICATE_PASSWORD,
        }
    admin.call("PUT", f"/v1/users/{user_id}/accounts/{account_id}/credentials", credentials)
    return user


@contextmanager
def own_folder() -> Iterator[Path]:
    """Yields a folder for one measurement, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="berth-bench-"))
    # PostgreSQL refuses to run as root and must reach its folder as another user.
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running(
    pool_target: int, stack: Callable[..., LocalStack] = LocalStack, **overrides: Any
) -> Iterator[Target]:
    """Yields a fresh local stack with a filled pool; stopped and removed at the end.

    `stack` makes it; `overrides` are settings. Keys and users have no limit of requests.
    """
    unlimited = {"limit_key": 0.0, "limit_user": 0.0}
    with (
        own_folder() as folder,
        stack(folder, pool_target=pool_target, **unlimited, **overrides) as started,
    ):
        yield Target(started)
