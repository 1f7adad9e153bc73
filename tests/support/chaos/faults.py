"""What can happen to one worker: its processes die or are stopped, its way to Valkey is cut or
blocked."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

from infra.lab.processes import WorkerProcesses, send_signal
from tests.support.proxies.worker_lines import LineTrouble, WorkerLines


@dataclass(frozen=True)
class Fault:
    """`inject` breaks something, and returns the function that frees the old worker again."""

    name: str
    #: Whether it takes a fresh login, in place or elsewhere, until the user is served for good
    #: again.
    relogin: bool
    inject: Callable[[WorkerProcesses, WorkerLines, str, str], Callable[[], None]]


def _stopping(
    name: str, chosen: Callable[[WorkerProcesses], tuple[int, ...]], relogin: bool = True
) -> Fault:
    def inject(
        processes: WorkerProcesses, lines: WorkerLines, worker_id: str, user_id: str
    ) -> Callable[[], None]:
        pids = chosen(processes)
        send_signal(signal.SIGSTOP, *pids)
        return lambda: send_signal(signal.SIGCONT, *pids)

    return Fault(name, relogin, inject)


def _killing(
    name: str, chosen: Callable[[WorkerProcesses], tuple[int, ...]], relogin: bool = True
) -> Fault:
    def inject(
        processes: WorkerProcesses, lines: WorkerLines, worker_id: str, user_id: str
    ) -> Callable[[], None]:
        send_signal(signal.SIGKILL, *chosen(processes))
        return lambda: None

    return Fault(name, relogin, inject)


def _line(line: LineTrouble) -> Fault:
    def inject(
        processes: WorkerProcesses, lines: WorkerLines, worker_id: str, user_id: str
    ) -> Callable[[], None]:
        lines.trouble(line, worker_id, user_id)
        return lambda: lines.heal(worker_id)

    return Fault(f"valkey {line.value}", True, inject)


FAULTS = (
    _stopping("stop session", lambda processes: (processes.session,)),
    _stopping("stop supervisor", lambda processes: (processes.supervisor,)),
    _stopping(
        "stop supervisor and session", lambda processes: (processes.supervisor, processes.session)
    ),
    _stopping("stop all", lambda processes: processes.all),
    _stopping("stop zygote and session", lambda processes: (processes.zygote, processes.session)),
    _line(LineTrouble.CUT),
    _line(LineTrouble.BLOCKED),
    _killing("kill session", lambda processes: (processes.session,)),
    _killing("kill supervisor", lambda processes: (processes.supervisor,), relogin=False),
    _killing("kill zygote", lambda processes: (processes.zygote,)),
    _killing("kill all", lambda processes: processes.all),
)


def by_turns(seed: int, count: int) -> list[Fault]:
    """`count` faults, each kind as often as any other, in an order of chance."""
    chance = random.Random(seed)  # noqa: S311 - which fault comes when is no secret
    deck: list[Fault] = []
    while len(deck) < count:
        cards = list(FAULTS)
        chance.shuffle(cards)
        deck += cards
    return deck[:count]
