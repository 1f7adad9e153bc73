"""Every key is rotated by its command in a running system, under orders, and nothing is
restarted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infra.cli.options import KeyName
from tests.support.systems.local import PATIENCE, POOL, RunningSystem, Trader, until
from worker_runtime.protocol import keys

BERTH = str(Path(sys.executable).with_name("berth"))
#: Seconds between two orders of a user: the budget of orders is not what is tried here.
PAUSE = 0.1
#: The local system delivers no webhooks: `tests/integration/local/test_job_fleet.py` rotates that
#: key.
ROTATED = [key for key in KeyName if key is not KeyName.WEBHOOKS]


def berth_keys(system: RunningSystem, *words: str) -> subprocess.CompletedProcess[str]:
    """`berth keys …` on the data folder, as an operator types it."""
    stack = system.stack
    ports = {"valkey": stack.valkey, "postgres": stack.postgres, "temporal": stack.temporal}
    return subprocess.run(
        [BERTH, "keys", *words, "--data", str(stack.folder.path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ
        | {f"BERTH_LOCAL_{name.upper()}_PORT": str(server.port) for name, server in ports.items()},
    )


class SteadyTrader:
    """A user who orders all the time, from a thread."""

    def __init__(self, system: RunningSystem) -> None:
        self.system = system
        self.trader = system.trader()
        self.worker_id = system.start_until_active(self.trader)["worker_id"]
        self.answers: list[int] = []
        self._stop = threading.Event()
        self._trading = system.threads.submit(self._trade)

    def _trade(self) -> None:
        while not self._stop.wait(PAUSE):
            self.answers.append(self.system.order(self.trader).status_code)

    def traded(self) -> None:
        """Waits for two more orders: the second was placed after this call."""
        expected_count = len(self.answers) + 2
        until(lambda: len(self.answers) >= expected_count or self._trading.done(), "more orders")

    def end(self) -> list[int]:
        self._stop.set()
        self._trading.result(PATIENCE)
        return self.answers


def start(system: RunningSystem) -> Trader:
    """A new user, whose worker starts at the first try and trades."""
    trader = system.trader()
    started = system.begin(trader).result(PATIENCE)
    assert started.status_code == 200, started.text
    assert system.order(trader).status_code == 201
    return trader


def reload_credentials(system: RunningSystem, trader: Trader) -> None:
    """Waits until the worker has a session with new credentials, and no other."""
    [old] = system.open_sessions(trader)
    system.exchange(lambda admin: admin.register(trader.account_id, "new", "new", trader.user_id))
    stored = system.call(
        "PUT",
        f"/v1/users/{trader.user_id}/accounts/{trader.account_id}/credentials",
        trader.api_key,
        json={
            "broker": "paper",
            "api_key": "new",
            "secret_key": "new",
            "person_id": trader.user_id,
        },
    )
    assert stored.is_success, stored.text

    def renewed() -> bool:
        sessions = system.open_sessions(trader)
        return len(sessions) == 1 and sessions[0].session_id != old.session_id

    until(renewed, "session with the new credentials")


def switch_versions(system: RunningSystem, trader: Trader) -> str:
    """The versions of the message secret under which the trader's switch is signed."""
    with system.valkey() as client:
        mac = client.hget(keys.switch(trader.user_id), "*mac")
    assert isinstance(mac, bytes)
    return ",".join(signature.split(".")[0] for signature in mac.decode().split(","))


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_every_key_is_rotated_under_orders_and_nothing_is_restarted(system: RunningSystem) -> None:
    steady = [SteadyTrader(system), SteadyTrader(system)]
    before = [server.pid for server in system.stack.servers]
    for key in ROTATED:
        rotated = berth_keys(system, "rotate", key)
        assert rotated.returncode == 0, rotated.stderr
        start(system)  # its worker was mostly launched before
        for user in steady:
            user.traded()
    until(lambda: switch_versions(system, steady[0].trader) == "2,1", "the switch, signed anew")
    for _ in range(POOL):  # so that workers launched after all rotations have their turn
        start(system)
    reload_credentials(system, steady[0].trader)
    for user in steady:
        user.traded()
    for user in steady:
        answers = user.end()
        assert set(answers) == {201}
        assert len(system.ledger(user.trader)) == len(answers)
        # The same worker, launched before, has served all the time, and ends when it is told to.
        assert system.start_until_active(user.trader)["worker_id"] == user.worker_id
    assert [server.pid for server in system.stack.servers] == before

    for key in set(ROTATED) - {KeyName.MASTER, KeyName.TEMPORAL}:
        early = berth_keys(system, "retire", key)
        assert early.returncode == 1
        assert "may still need version 1" in early.stderr
        again = berth_keys(system, "rotate", key)
        assert again.returncode == 1
        assert f"`berth keys retire {key}` comes first" in again.stderr
    gone = steady[1].trader
    system.call("POST", f"/v1/users/{gone.user_id}/worker/stop", gone.api_key)
    until(lambda: not system.open_sessions(gone), "end of a worker launched before the rotations")
