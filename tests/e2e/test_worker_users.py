"""Restarts and a failover of Valkey, whose users workers are: all come back, and no order is
lost."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis import Redis

from infra.lab.bench.fleet.simulated.worker import SimulatedBehaviour
from infra.lab.bench.fleet.stack import SimulatedStack
from infra.local.process import free_port
from infra.local.servers import ValkeyServer
from infra.local.stack import LocalStack
from infra.valkey.job_login import user_of_jobs
from tests.support.systems.local import VERIFY, RunningSystem, Trader, run_system, until
from worker_runtime.jobs.protocol.keys import FLEET_TAG

#: Real workers, and simulated ones; of the latter 300 in the long form.
WORKERS = 6
FLEET = int(os.environ.get("BERTH_USERS_FLEET", "16"))
#: Workers that nobody has claimed.
POOL = 2


class UserCrowd:
    """Users with an Active worker each, some of whom trade."""

    def __init__(self, system: RunningSystem, size: int, traders: int = 4) -> None:
        self.system = system
        with ThreadPoolExecutor(max_workers=6) as threads:
            self.all = list(threads.map(lambda _: system.trader(), range(size)))
            active = list(threads.map(system.start_until_active, self.all))
        self._workers = {worker["user_id"]: worker["worker_id"] for worker in active}
        self._trading = self.all[:traders]
        #: Accepted orders.
        self.accepted: list[tuple[Trader, str]] = []

    def trade_through(self, fault: Callable[[], None]) -> None:
        """Orders before, during and after the fault."""
        over = threading.Event()
        before = len(self.accepted)

        def trade(trader: Trader) -> None:
            last = False
            while not last:
                last = over.is_set()
                answer = self.system.order(trader)
                told = answer.json()
                if answer.status_code in {201, 202}:
                    self.accepted.append((trader, told["id"]))
                else:
                    last = False  # Valkey is not back yet
                    # It may be queued; of unknown outcome it blocks its symbol.
                    if told.get("order"):
                        self.accepted.append((trader, told["order"]["id"]))
                time.sleep(0.2)

        trading = [self.system.threads.submit(trade, trader) for trader in self._trading]
        until(lambda: len(self.accepted) >= before + len(trading), "orders before the fault")
        fault()
        over.set()
        for future in trading:
            future.result(90)

    def check(self) -> None:
        """All orders end or wait for an operator, all workers are those from before and answer, and
        Valkey has refused nothing."""
        until(lambda: all(map(self._settled, self.accepted)), "the end of all orders")
        with ThreadPoolExecutor(max_workers=6) as threads:
            until(lambda: all(threads.map(self._serves, self.all)), "all workers from before")
            answers = list(threads.map(self.system.order, self.all))
        assert [answer.text for answer in answers if answer.status_code != 201] == []
        self.system.stack.wait_pool(POOL)
        assert refusals(self.system) == []

    def _settled(self, order: tuple[Trader, str]) -> bool:
        trader, order_id = order
        answer = self.system.call("GET", f"/v1/orders/{order_id}", trader.api_key)
        return answer.status_code == 200 and bool(
            answer.json()["final"] or answer.json()["attention"]
        )

    def _serves(self, trader: Trader) -> bool:
        """Whether the worker is live and Active, and the one from before."""
        answer = self.system.call("GET", f"/v1/users/{trader.user_id}/worker", trader.api_key)
        if not answer.is_success:  # the first call on a connection that Valkey has closed
            return False
        view = answer.json()
        assert view["lifecycle"]["worker_id"] == self._workers[trader.user_id]
        assert view["lifecycle"]["state"] == "Active"
        return bool(view["live"] and view["state"] == "Active")


def refusals(system: RunningSystem) -> list[str]:
    """What Valkey refused to workers, but for early logins and what clients try: to bring scripts
    that are missing, and redis-py (of simulated workers) to tell its version."""
    tried = {"script|load", "eval", "client|setinfo"}
    with system.valkey() as client:
        refusals_logged = [
            {str(name): str(value) for name, value in entry.items()} for entry in client.acl_log()
        ]
    return [
        str(refusal)
        for refusal in refusals_logged
        if refusal["object"] not in tried and refusal["reason"] != "auth"
    ]


@pytest.mark.timeout(120)
def test_a_restart_parks_no_worker_and_loses_no_order() -> None:
    with run_system(
        lambda folder: LocalStack(folder, pool_target=POOL, orchestrators=2, **VERIFY)
    ) as system:
        crowd = UserCrowd(system, WORKERS)
        assert refusals(system) == []
        crowd.trade_through(lambda: restart(system, 1.0))
        crowd.check()
        until(lambda: len(fleets(system)) >= 3, "job runners that have logged in again")


def fleets(system: RunningSystem) -> list[str]:
    """Connections of job runners by the login of their own. A runner has three, its fleet another
    one."""
    with Redis.from_url(system.stack.valkey.url, decode_responses=True) as client:
        users: list[str] = [str(connection["user"]) for connection in client.client_list()]
    return [user for user in users if user == user_of_jobs(FLEET_TAG)]


def restart(system: RunningSystem, down: float = 0.0) -> None:
    system.stack.valkey.restart(signal.SIGKILL, down=down)


def empty(system: RunningSystem) -> None:
    """A server without any of the data takes the place."""
    server = system.stack.valkey
    server.stop(signal.SIGKILL)
    shutil.rmtree(server.directory / "appendonlydir")
    server.start()


def fail_over(system: RunningSystem, replica: ValkeyServer, login: str) -> None:
    """The primary dies, and its replica answers at its address."""
    primary = system.stack.valkey
    with Redis.from_url(replica.url, decode_responses=True) as client:
        client.config_set("masterauth", login)
        client.replicaof("127.0.0.1", str(primary.port))
        until(lambda: client.info("replication")["master_link_status"] == "up", "a replica")
        primary.stop(signal.SIGKILL)
        client.replicaof("NO", "ONE")
        client.config_set("port", primary.port)


@pytest.mark.drill
@pytest.mark.timeout(120 + 3 * FLEET)
def test_restarts_and_a_failover_under_a_fleet(tmp_path: Path) -> None:
    """In the long form with 300 workers: `BERTH_USERS_FLEET=300`."""
    habits = SimulatedBehaviour(own_login=True)
    with run_system(
        lambda folder: SimulatedStack(
            folder, habits=habits, pool_target=POOL, orchestrators=2, **VERIFY
        )
    ) as system:
        crowd = UserCrowd(system, FLEET)
        login = system.stack.folder.passwords.valkey
        with ValkeyServer(tmp_path, free_port(), password=login) as replica:
            for fault in (
                lambda: restart(system),
                lambda: empty(system),
                lambda: fail_over(system, replica, login),
            ):
                crowd.trade_through(fault)
                crowd.check()
            system.stack.stop()
