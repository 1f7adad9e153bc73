"""A drill: with 50 active users, hosts are emptied one after the other and everything is deployed,
again and again. Nobody is parked, no end counts as a crash, and each order is filled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from infra.launchers.process import ProcessLauncher
from infra.local.stack import LocalStack
from tests.support.systems.local import RunningSystem, Trader, run_system, until

USERS = 50
#: Free workers: those of the second host take over from the first one's.
POOL = 10


class Drill:
    """A running system with active users, and what its operator does with it."""

    def __init__(self, system: RunningSystem) -> None:
        self.system = system
        self.traders = [system.trader() for _ in range(USERS)]
        self._threads = ThreadPoolExecutor(8)

    def trade(self) -> None:
        """One order of each. Each is filled, by whichever worker: none is refused or lost."""
        answers = list(self._threads.map(self._filled, self.traders))
        assert answers == ["filled"] * USERS

    def _filled(self, trader: Trader) -> str:
        order = f"o{time.monotonic_ns()}"

        def answered() -> str | None:
            """A client whose order is still under way asks for it again."""
            answer = self.system.order(trader, order)
            assert answer.status_code in (201, 202, 503), answer.text
            return str(answer.json()["state"]) if answer.status_code == 201 else None

        return until(answered, "answer", 60.0)

    def shown(self) -> list[tuple[str, int]]:
        """State and crashes of each user's worker."""

        def one(trader: Trader) -> tuple[str, int]:
            path = f"/v1/users/{trader.user_id}/worker"
            lifecycle: dict[str, Any] = self.system.call("GET", path, trader.api_key).json()[
                "lifecycle"
            ]
            return lifecycle["state"], lifecycle["crashes"]

        return list(self._threads.map(one, self.traders))

    def empty_hosts(self) -> None:
        """Drains one host, whose users get workers of the other one, and then that."""
        tasks = [task.task_id for task in self.system.stack.tasks()]
        for host in (tasks[::2], tasks[1::2]):
            asyncio.run(self._drain(host))
            self.trade()

    async def _drain(self, tasks: Sequence[str]) -> None:
        launcher = ProcessLauncher(self.system.stack.settings.node_socket)
        await asyncio.gather(*(launcher.stop(task, "drained") for task in tasks))


@pytest.fixture(scope="module")
def drill() -> Iterator[Drill]:
    with run_system(
        lambda folder: LocalStack(folder, pool_target=POOL, connect_timeout=10.0, orchestrators=2)
    ) as system:
        yield Drill(system)


@pytest.mark.drill
@pytest.mark.timeout(400)
def test_rolling_hosts_and_deploys_park_none_of_50_active_users(drill: Drill) -> None:
    stack = drill.system.stack
    drill.trade()
    drill.empty_hosts()
    for server in (*stack.orchestrators, stack.node, stack.api):  # a deploy: workers live on
        server.restart()
    drill.trade()
    stack.stop()  # `berth down`, and `berth up`
    stack.start()
    drill.trade()
    assert drill.shown() == [("Active", 0)] * USERS
