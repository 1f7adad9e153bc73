"""`berth bench job-crashes`: what becomes of jobs when a part dies, for our runner and its peers.

Each contender gets two workers and some jobs that take a second. While the first jobs run, one
thing happens:

| fault | what it is |
|---|---|
| runner | kill -9 of all processes of one worker |
| child | kill -9 of the process that runs a job, where a worker has such processes |
| server | kill -9 of Valkey (procrastinate: PostgreSQL), which starts again after a second |
| freeze | SIGSTOP of all processes of one worker, for longer than our lease; then SIGCONT |

The worker that is left stays, and nothing else is repaired. The ledger that the jobs write says
which jobs were lost (no end within the patience), which ended twice, and how late the last one was.
Valkey keeps an append-only file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from redis import Redis

from infra.lab import figures
from infra.lab.bench.jobs import contenders
from infra.lab.bench.jobs.contenders import OurRunner
from infra.lab.bench.jobs.peer_environment import ROOT
from infra.lab.bench.jobs.tasks import MAX_CONCURRENT_JOBS
from infra.lab.cpu import StolenTime
from infra.lab.figures import Say, silent
from infra.lab.target import own_folder
from infra.local.process import Server, ServerFailed
from infra.local.servers import PostgresServer, ValkeyServer
from infra.processes import descendants, end_with_parent

#: Not imported here: our environment does not have what it imports.
PEER_MODULE = "infra.lab.bench.jobs.crash_peers"
PEERS = ("rq", "huey", "dramatiq", "arq", "procrastinate")
OURS = "ours"
FAULTS = ("runner", "child", "server", "freeze")
WORKERS = 2
#: Seconds until both workers have taken jobs.
START_TIMEOUT_S = 60.0
#: The share of a running job that is done when the fault comes.
FAULT_AFTER_SHARE = 0.3


class CrashContender:
    """Runs a contender with its server and two workers. The block ends them."""

    def __init__(self, name: str, folder: Path, lease: float, python: str) -> None:
        """Takes `python`, the interpreter that has the peers' packages."""
        self.name = name
        self._folder = folder
        self._lease = lease
        self._python = python
        self._stack = ExitStack()
        self.ledger = folder / "ledger"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.server: Server

    def __enter__(self) -> CrashContender:
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        if self.name == "procrastinate":
            postgres = self._stack.enter_context(PostgresServer(self._folder / "postgres"))
            postgres.create_database("bench")
            self.server = postgres
            self._url = postgres.url("bench").replace("postgresql+asyncpg://", "postgresql://")
        else:
            valkey = self._stack.enter_context(ValkeyServer(self._folder / "valkey"))
            self.server = valkey
            self._url = valkey.url
        if self.name != OURS:
            self._peer("prepare")
        for number in range(WORKERS):
            self._start_worker(number)

    def _start_worker(self, number: int) -> None:
        command: Sequence[str] = self._peer_command("run")
        text = b""
        if self.name == OURS:
            command = contenders.runner_command()
            text = contenders.runner_config(
                f"ours-{number}", self._url, lease=self._lease, slots=MAX_CONCURRENT_JOBS
            )
        with (self._folder / "workers.log").open("ab") as out:
            worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=end_with_parent(os.getpid()),
            )
        self._stack.callback(_kill_tree, worker)
        assert worker.stdin is not None  # noqa: S101 - a pipe was asked for
        worker.stdin.write(text)
        worker.stdin.close()
        self.workers.append(worker)

    def enqueue(self, first: int, count: int, seconds: float) -> None:
        """Enqueues jobs; those of a peer are numbered from `first`."""
        if self.name != OURS:
            self._peer("enqueue", str(self.ledger), str(first), str(count), str(seconds))
            return
        with Redis.from_url(self._url, single_connection_client=True) as client:
            ours = OurRunner(OURS, client, self._url, 1)
            ours.load_script()
            for _ in range(count):
                ours.put({"sleeps": seconds, "ledger": str(self.ledger)})

    def lines(self) -> list[list[str]]:
        """Returns the words of the ledger's lines: `start` or `end`, the job, and more."""
        text = self.ledger.read_text() if self.ledger.exists() else ""
        return [line.split() for line in text.splitlines()]

    def ends(self) -> dict[str, list[float]]:
        """Returns the times of the ends of each job that has ended (CLOCK_MONOTONIC)."""
        times: dict[str, list[float]] = {}
        for line in self.lines():
            if line[0] == "end":
                times.setdefault(line[1], []).append(float(line[-1]))
        return times

    def is_busy(self, worker: subprocess.Popen[bytes]) -> bool:
        """Returns True if a job runs on this worker: the ledger has the process ids of each."""
        processes = {
            str(pid) for pid in (worker.pid, *(each.pid for each in descendants(worker.pid)))
        }
        ended = self.ends().keys()
        return any(
            line[1] not in ended and processes.intersection(line[2:-1])
            for line in self.lines()
            if line[0] == "start"
        )

    def _peer(self, act: str, *arguments: str) -> None:
        done = subprocess.run(
            [*self._peer_command(act), *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if done.returncode:
            raise ServerFailed(f"{self.name}: {done.stderr[-500:]}")

    def _peer_command(self, act: str) -> list[str]:
        return [self._python, "-m", PEER_MODULE, act, self.name, self._url]


def run(
    peers: str = "",
    jobs: int = 12,
    seconds: float = 1.0,
    lease: float = 5.0,
    frozen: float = 12.0,
    patience: float = 120.0,
    faults: Sequence[str] = FAULTS,
    names: Sequence[str] = PEERS,
    say: Say = silent,
) -> dict[str, Any]:
    """Measures crashes. `peers` is an interpreter with the peers' packages; without one only our
    runner is measured. `names` are those of the peers that are. `jobs` take `seconds` each.
    `frozen` is the seconds of a freeze. After `patience` seconds a job without an end counts as
    lost.

    Raises `ServerFailed` when a contender does not start.
    """
    stolen = StolenTime()
    matrix: dict[str, dict[str, Any]] = {}
    for name in (OURS, *(names if peers else ())):
        matrix[name] = {}
        for fault in faults:
            say(f"job crashes: {name}, {fault}")
            with own_folder() as folder, CrashContender(name, folder, lease, peers) as contender:
                figures_of_fault = _measure(contender, fault, jobs, seconds, frozen, patience)
            if figures_of_fault is not None:
                matrix[name][fault] = figures_of_fault
    return {
        "matrix": matrix,
        "jobs": jobs,
        "seconds": seconds,
        "lease_s": lease,
        "frozen_s": frozen,
        "patience_s": patience,
        "load": [round(number, 1) for number in os.getloadavg()],
        "stolen_percent": stolen.percent(),
    }


def _measure(
    contender: CrashContender, fault: str, jobs: int, seconds: float, frozen: float, patience: float
) -> dict[str, Any] | None:
    """Returns what became of the jobs; None if the contender has nothing that the fault could
    hit."""
    until = time.monotonic() + START_TIMEOUT_S
    enqueued = 0
    while not contender.is_busy(contender.workers[0]):
        if len(contender.ends()) == enqueued:  # the other worker was the first to start
            contender.enqueue(enqueued, jobs, seconds)
            enqueued += jobs
        if time.monotonic() > until:
            raise ServerFailed(f"{contender.name}: a worker takes no job")
        time.sleep(0.02)
    time.sleep(FAULT_AFTER_SHARE * seconds)
    began = time.monotonic()
    if not _inject(contender, fault, frozen):
        return None
    ends: dict[str, list[float]] = {}
    while len(ends) < enqueued and time.monotonic() < began + patience:
        time.sleep(0.05)
        ends = contender.ends()
    # What runs a second time without need would have ended by then.
    time.sleep(2 * seconds + 1.0)
    ends = contender.ends()
    first_ends = [times[0] for times in ends.values()]
    return {
        "lost": enqueued - len(ends),
        "doubled": sum(len(times) - 1 for times in ends.values()),
        "late_s": round(max(first_ends, default=began) - began, 1),
    }


def _inject(contender: CrashContender, fault: str, frozen: float) -> bool:
    worker = contender.workers[0]
    below = [process.pid for process in descendants(worker.pid)]
    if fault == "runner":
        _kill_tree(worker)
    elif fault == "child":
        if not below:
            return False
        os.kill(below[-1], signal.SIGKILL)
    elif fault == "server":
        contender.server.kill()
        time.sleep(1.0)
        contender.server.start()
    else:
        _signal_all([worker.pid, *below], signal.SIGSTOP)
        time.sleep(frozen)
        _signal_all([*below, worker.pid], signal.SIGCONT)
    return True


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _kill_tree(worker: subprocess.Popen[bytes]) -> None:
    """Kills a worker and all it has started. Safe to repeat."""
    if worker.poll() is None:
        below = [process.pid for process in descendants(worker.pid)]
        _signal_all([worker.pid, *below], signal.SIGKILL)
        worker.wait(10)


def table(result: dict[str, Any]) -> None:
    rows = []
    for name, faults in result["matrix"].items():
        for fault, outcome in faults.items():
            ended = f"late {outcome['late_s']} s" if not outcome["lost"] else "never all"
            text = f"lost {outcome['lost']}   doubled {outcome['doubled']}   {ended}"
            rows.append((f"{name}, {fault}", text))
    circumstances = f"lease {result['lease_s']:g} s; load {result['load'][0]}"
    figures.print_table(f"job crashes: {result['jobs']} jobs each; {circumstances}", rows)
