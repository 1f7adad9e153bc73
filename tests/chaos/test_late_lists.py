"""*one-owner* where the launcher's list is a minute old and its answers to a stop come late: the
judge is the exchange's ledger, the processes are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from infra.lab.chaos.orders.judge import overlapping_sessions, sessions_in_order
from infra.lab.processes import processes_of
from infra.local.stack import LocalStack
from tests.support.chaos import late_orchestrator
from tests.support.systems.local import RunningSystem, Trader, run_system, until
from worker_runtime.protocol import keys
from workflows.names import user_worker_id

USERS = 4
#: Seconds; a worker whose end nobody confirms counts as ended 10 s after them.
MARK_TTL = 8.0


@pytest.fixture
def late_system() -> Iterator[RunningSystem]:
    def late(folder: Path) -> LocalStack:
        stack = LocalStack(
            folder,
            pool_target=2,
            connect_timeout=5.0,
            mark_ttl=MARK_TTL,
            mark_period=0.5,
            orchestrators=2,
        )
        for orchestrator in stack.orchestrators:
            orchestrator.command = lambda: [sys.executable, late_orchestrator.__file__]  # type: ignore[method-assign]
        return stack

    with run_system(late) as system:
        yield system


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_no_user_has_two_sessions_where_lists_are_late(late_system: RunningSystem) -> None:
    system = late_system

    def ordered(trader: Trader) -> bool:
        answer = system.order(trader)
        return answer.status_code == 201 and answer.json()["state"] == "filled"

    def play(trader: Trader) -> None:
        """Its worker is killed, stopped, and killed while no workflow knows it."""
        system.start_until_active(trader)
        until(lambda: ordered(trader), "a first fill")
        _kill(system, trader)
        until(lambda: ordered(trader), "a fill after a kill", 90.0)
        old = _worker(system, trader)
        stopped = system.call(
            "POST", f"/v1/users/{trader.user_id}/worker/stop", trader.api_key, json={}
        )
        assert stopped.is_success, stopped.text
        # The old one may fill an order before it ends, and then nobody has a mark until the next
        # order.
        until(
            lambda: ordered(trader) and _marked(system, trader) not in {"", old},
            "a fill after a stop",
            90.0,
        )
        _terminate(system, trader)
        _kill(system, trader)
        until(lambda: ordered(trader), "a fill after the workflow was ended by hand", 90.0)

    traders = [system.trader() for _ in range(USERS)]
    with ThreadPoolExecutor(max_workers=USERS) as threads:
        list(threads.map(play, traders))
    for trader in traders:
        sessions = sessions_in_order(system.sessions(trader))
        assert overlapping_sessions(sessions) == []
        assert len({session.client for session in sessions}) >= 4, sessions
    running = {task.worker_id for task in system.stack.tasks()}
    serving = {_worker(system, trader) for trader in traders}
    assert serving <= running


def _marked(system: RunningSystem, trader: Trader) -> str:
    """The worker that has the user's mark now; empty if none has."""
    with system.valkey() as client:
        mark = client.get(keys.mark(trader.user_id))
    return mark.decode().partition(":")[2] if isinstance(mark, bytes) else ""


def _worker(system: RunningSystem, trader: Trader) -> str:
    """The worker that has the user's mark, or gets it within 90 s."""
    return until(lambda: _marked(system, trader) or None, "a mark", 90.0)


def _kill(system: RunningSystem, trader: Trader) -> None:
    """The mark may still name one that was asked to stop. The session follows its first process a
    moment later, and could fill one more order before."""

    def killed() -> tuple[int, ...]:
        processes = processes_of(_worker(system, trader))
        if processes.zygote:
            os.kill(processes.zygote, signal.SIGKILL)
        return processes.all

    pids = until(killed, "a worker to kill")
    until(lambda: not any(map(psutil.pid_exists, pids)), "the end of what was killed")


def _terminate(system: RunningSystem, trader: Trader) -> None:
    command = [str(Path(sys.executable).with_name("temporal")), "workflow", "terminate"]
    command += [
        "--address",
        system.stack.settings.temporal_address,
        "-w",
        user_worker_id(trader.user_id),
    ]
    subprocess.run([*command, "--reason", "a test"], check=True, capture_output=True)
