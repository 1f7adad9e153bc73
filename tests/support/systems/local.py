"""Contains `RunningSystem`: the whole system as processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx
from redis import Redis

from infra.exchange.behaviour import Behaviour
from infra.exchange.client import ExchangeAdmin
from infra.exchange.records import LedgerOrder, LedgerSession
from infra.lab.processes import processes_of
from infra.local.process import accepts, free_port
from infra.local.stack import LocalStack

POOL = 3

#: Seconds; long enough for a claim that has to be taken again on a busy machine.
PATIENCE = 45.0

T = TypeVar("T")

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Trader:
    user_id: str
    api_key: str
    account_id: str


class RunningSystem:
    """A running stack, and what tests ask of it. All calls block."""

    def __init__(self, stack: LocalStack) -> None:
        self.stack = stack
        self.threads = ThreadPoolExecutor(max_workers=8)
        #: Made once: each client would read the authorities' certificates again, which takes 23 ms.
        self._tls = httpx.create_ssl_context(trust_env=False)

    # --- REST -------------------------------------------------------------------------------------

    def call(self, method: str, path: str, key: str, **how: Any) -> httpx.Response:
        with httpx.Client(
            base_url=self.stack.api_url, timeout=PATIENCE, trust_env=False, verify=self._tls
        ) as http:
            headers = {"X-API-Key": key, **how.pop("headers", {})}
            return http.request(method, path, headers=headers, **how)

    def trader(
        self, *, api_key: str = "key", secret_key: str = "secret", wrong_key: bool = False
    ) -> Trader:
        """A new user with an account at the exchange and stored credentials, without a worker."""
        user_id = f"user{os.getpid()}x{next(_numbers)}"
        account = f"acc-{user_id}"
        made = self.call("POST", "/v1/users", self.stack.admin_key, json={"user_id": user_id})
        assert made.status_code == 201, made.text
        self.exchange(lambda admin: admin.register(account, api_key, secret_key, person_id=user_id))
        stored = self.call(
            "PUT",
            f"/v1/users/{user_id}/accounts/{account}/credentials",
            made.json()["api_key"],
            json={
                "broker": "paper",
                "api_key": "wrong" if wrong_key else api_key,
                "secret_key": secret_key,
                "person_id": user_id,
            },
        )
        assert stored.is_success, stored.text
        return Trader(user_id, made.json()["api_key"], account)

    def order(self, trader: Trader, client_order_id: str = "", **changes: Any) -> httpx.Response:
        body = {
            "client_order_id": client_order_id or uuid4().hex,
            "account_id": trader.account_id,
            "symbol": "2330",
            "side": "buy",
            "quantity": 1,
            "price_type": "MKT",
            "time_in_force": "IOC",
            **changes,
        }
        return self.call(
            "POST",
            f"/v1/users/{trader.user_id}/orders",
            trader.api_key,
            json=body,
            params={"wait": 30},
        )

    def begin(self, trader: Trader) -> Future[httpx.Response]:
        """Starts the trader's worker, in the background."""
        return self.threads.submit(
            self.call,
            "POST",
            f"/v1/users/{trader.user_id}/worker/start",
            trader.api_key,
            params={"wait": 40},  # not before the API gives up
        )

    def start_until_active(self, trader: Trader) -> dict[str, Any]:
        """As a client does it: asks again while it is under way (202), or nobody is there (503)."""

        def active() -> dict[str, Any] | None:
            try:
                answer = self.begin(trader).result(PATIENCE)
            except httpx.HTTPError:
                return None
            assert answer.status_code in {200, 202, 503}, answer.text
            return answer.json() if answer.status_code == 200 else None

        return until(active, "an active worker")

    def restore(self) -> None:
        """Starts what an earlier test has stopped, and waits for a full pool."""
        for server in self.stack.servers:
            if not server.running:
                server.start()
        self.stack.wait_pool(POOL)

    # --- what happened ----------------------------------------------------------------------------

    def exchange(self, ask: Callable[[ExchangeAdmin], Any]) -> Any:
        async def asked() -> Any:
            async with ExchangeAdmin(self.stack.settings.exchange_admin_url) as admin:
                return await ask(admin)

        return asyncio.run(asked())

    def slow_login(self, trader: Trader, seconds: float) -> None:
        behaviour = Behaviour(login_latency_ms=int(seconds * 1000))
        self.exchange(lambda admin: admin.set_behaviour(trader.account_id, behaviour))

    def ledger(self, trader: Trader) -> list[LedgerOrder]:
        orders: list[LedgerOrder] = self.exchange(lambda admin: admin.ledger(trader.account_id))
        return orders

    def open_sessions(self, trader: Trader) -> list[LedgerSession]:
        sessions: list[LedgerSession] = self.exchange(
            lambda admin: admin.sessions(trader.account_id, open=True)
        )
        return sessions

    def sessions(self, trader: Trader) -> list[LedgerSession]:
        sessions: list[LedgerSession] = self.exchange(
            lambda admin: admin.sessions(trader.account_id)
        )
        return sessions

    def valkey(self) -> Redis:
        return Redis.from_url(self.stack.settings.valkey_url, socket_timeout=10.0)

    def claims(self) -> dict[str, str]:
        """Claim id → worker id, of all claims of the pool."""
        with self.valkey() as client:
            names = [name.decode() for name in client.scan_iter("pool:*:claim:*")]
            values = client.mget(names) if names else []
        return {
            name.rsplit(":", 1)[1]: value.decode()
            for name, value in zip(names, values, strict=True)
            if value
        }

    def next_claim(self, before: dict[str, str]) -> tuple[str, str]:
        """The claim that was not there before: its id and its worker."""
        return until(
            lambda: next(((c, w) for c, w in self.claims().items() if c not in before), None),
            "a claim",
        )

    def worker_pid(self, worker_id: str) -> int:
        """The pid of a worker's first process. By its name, for its children may have lower
        numbers: those of a machine begin anew after 32,768."""
        zygote = processes_of(worker_id).zygote
        assert zygote, f"no process of {worker_id}"
        return zygote

    @contextlib.contextmanager
    def codec_endpoint(self) -> Iterator[str]:
        """`berth codec`, which decrypts what Temporal has stored."""
        port = free_port()
        command = [
            str(Path(sys.executable).with_name("berth")),
            "codec",
            "--data",
            str(self.stack.folder.path),
        ]
        command += ["--port", str(port), "--origin", self.stack.ui_url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                endpoint = server.stdout.readline().split()[-1]
                until(lambda: accepts(port), "codec server")
                yield endpoint
            finally:
                server.terminate()

    def kill_worker(self, worker_id: str) -> None:
        os.kill(self.worker_pid(worker_id), signal.SIGKILL)


def until(condition: Callable[[], T | None], description: str, patience: float = PATIENCE) -> T:
    """The first value that is neither None nor False.

    Rests twice as long as a check takes: what is waited for needs the machine, too.
    """
    deadline = time.monotonic() + patience
    pause = threading.Event()
    while True:
        began = time.monotonic()
        value = condition()
        if value is not None and value is not False:
            return value
        now = time.monotonic()
        assert now < deadline, f"no {description} within {patience:.0f} s"
        pause.wait(min(max(0.02, 2 * (now - began)), 0.5))


#: Seconds after which an order with an unknown outcome may count as absent. In real life it is 60.
VERIFY: dict[str, Any] = {"absent_after": 2.0}


@contextlib.contextmanager
def run_system(make: Callable[[Path], LocalStack]) -> Iterator[RunningSystem]:
    """A running system, in a folder of its own that goes with it (`BERTH_KEEP_CHAOS` keeps it)."""
    folder = Path(tempfile.mkdtemp(prefix="berth-e2e-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user than root
    try:
        with make(folder) as stack:
            system = RunningSystem(stack)
            yield system
            system.threads.shutdown()
    finally:
        if not os.environ.get("BERTH_KEEP_CHAOS"):
            shutil.rmtree(folder, ignore_errors=True)
