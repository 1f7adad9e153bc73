"""A host is lost with every user's worker on it: each is served again, by one owner, and in
time."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from activities.events.mark_watcher import MIN_ABSENCE_S
from infra.exchange.records import LedgerSession
from infra.lab.processes import WorkerProcesses, processes_of, send_signal
from infra.local.stack import LocalStack
from tests.support.proxies.worker_lines import LineTrouble, WorkerLines
from tests.support.systems.local import RunningSystem, Trader, run_system, until
from worker_runtime.protocol import keys

USERS = 5
MARK_TTL = 7.0
#: Seconds after the loss in which a user has an Active worker again: the life of a mark, a third of
#: it while many are missing (5 s at least), a check (2 s), the launcher's turn (2 s), the margin
#: (10 s), a claim; the rest is for a busy machine. With the default life of a mark (30 s) these are
#: 58 s.
IN_TIME = MARK_TTL + max(MARK_TTL / 3, MIN_ABSENCE_S) + 2.0 + 2.0 + 10.0 + 20.0


@dataclass(frozen=True)
class LostHost:
    system: RunningSystem
    lines: WorkerLines


@pytest.fixture(scope="module")
def host() -> Iterator[LostHost]:
    with WorkerLines() as lines:

        def lined(folder: Path) -> LocalStack:
            stack = LocalStack(
                folder,
                pool_target=3 * USERS,
                connect_timeout=5.0,
                mark_ttl=MARK_TTL,
                mark_period=0.5,
                worker_valkey_url=lines.url,
            )
            lines.target = stack.valkey.port
            return stack

        with run_system(lined) as system:
            system.stack.wait_pool(3 * USERS)
            yield LostHost(system, lines)


@pytest.mark.drill
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "how", ["frozen", "frozen with its node", "killed with its node", "partitioned"]
)
def test_each_user_of_a_lost_host_is_served_again_by_one_owner(host: LostHost, how: str) -> None:
    system = host.system
    traders = [system.trader() for _ in range(USERS)]
    with ThreadPoolExecutor(USERS) as threads:
        answers = list(threads.map(system.start_until_active, traders))
    lost = {
        trader: str(answer["worker_id"]) for trader, answer in zip(traders, answers, strict=True)
    }
    processes = {trader: processes_of(worker) for trader, worker in lost.items()}
    with ExitStack() as back:
        began = time.monotonic()
        if how == "killed with its node":  # which reports no end
            system.stack.node.kill()
            back.callback(system.stack.node.start)
        for trader, worker in lost.items():
            lose(host, how, trader, worker, processes[trader], back)
        if how == "frozen with its node":
            send_signal(signal.SIGSTOP, system.stack.node.pid)
            back.callback(send_signal, signal.SIGCONT, system.stack.node.pid)
        for trader in traders:
            seconds_left = IN_TIME - (time.monotonic() - began)
            until(partial(another, system, trader, lost[trader]), "another", seconds_left)
    for trader in traders:
        [session] = until(
            lambda trader=trader: alone(system, trader),  # type: ignore[misc]
            "single session",
        )
        assert lost[trader] not in session.client
        assert system.order(trader).json()["state"] == "filled"


def lose(
    host: LostHost,
    how: str,
    trader: Trader,
    worker: str,
    processes: WorkerProcesses,
    back: ExitStack,
) -> None:
    if how == "partitioned":
        host.lines.trouble(LineTrouble.BLOCKED, worker, trader.user_id)
        back.callback(host.lines.heal, worker)
    elif how == "killed with its node":
        send_signal(signal.SIGKILL, *processes.all)
    else:
        send_signal(signal.SIGSTOP, *processes.all)
        back.callback(send_signal, signal.SIGCONT, *processes.all)


def another(system: RunningSystem, trader: Trader, lost: str) -> str | None:
    """The worker that has the user's mark, if it is another one."""
    with system.valkey() as client:
        mark = client.get(keys.mark(trader.user_id))
    assert mark is None or isinstance(mark, bytes)
    worker = (mark or b"").decode().partition(":")[2]
    return worker if worker not in ("", lost) else None


def alone(system: RunningSystem, trader: Trader) -> list[LedgerSession] | None:
    sessions = system.open_sessions(trader)
    return sessions if len(sessions) == 1 else None
