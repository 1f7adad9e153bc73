"""`berth bench jobs`: our job runner compared with its peers and two floors, on one Valkey.

RQ and huey are in our environment. With `--peers` come dramatiq, arq and procrastinate, in one of
their own (`peer_environment.py`); `rate_peers.py` says how each peer is configured, and from where.

Jobs that do nothing and jobs of 5 ms CPU, one and two runners. Each contender gets a filled queue,
and its rate counts once all its processes have taken work. The rounds of all contenders are
interleaved, so a pause of the host affects all of them, and the median counts.

Pick-up is the time from the start of the enqueuing call to the job's first line, for single jobs
and idle runners. Leases, results and events are on in all of our figures. Then follow the time from
kill -9 of a runner to the next start of its job, and the memory of an idle runner.

Valkey keeps no append-only file here, for any contender. With one, our rates with recycled children
are a quarter lower (measured), because each job is a dozen writes; RQ's and huey's hardly change.
procrastinate's PostgreSQL, on the same machine, does not wait for the disk either (`fsync=off`).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from redis import Redis

from infra.lab import figures
from infra.lab.bench.jobs import contenders as field_of
from infra.lab.bench.jobs import floors
from infra.lab.bench.jobs.contenders import Contender, ContenderProcesses, OurRunner, PeerContender
from infra.lab.bench.memory import pss_mib
from infra.lab.cpu import StolenTime
from infra.lab.figures import Say, silent
from infra.lab.loadtest_job import KEYS
from infra.lab.target import own_folder
from infra.local.process import ServerFailed
from infra.local.servers import PostgresServer, ValkeyServer
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import Job

RUNNER_COUNTS = (1, 2)
#: CPU seconds of one job of the second kind.
BUSY_JOB_CPU_S = 0.005
#: Jobs a second that a contender may reach with one runner: this many are enqueued for each second.
#: If the queue runs empty, the rate is that of the time it took.
_EXPECTED_JOBS_PER_S = {
    "fresh": 1500,
    "recycled": 12_000,
    "rq": 300,
    "rq_simple": 1500,
    "huey": 12_000,
    "dramatiq": 5000,
    "arq": 3000,
    "procrastinate": 1500,
}
_PROGRESS_TIMEOUT_S = 30.0
#: Seconds between two checks of a queue.
_CHECK_INTERVAL_S = 0.002
#: The pause between two checks is at least this many times what a check takes: procrastinate has to
#: count rows for it.
_PAUSE_PER_CHECK_TIME = 20
#: Seconds between two jobs whose pick-up is measured: the runner is idle again by then.
_JOB_INTERVAL_RANGE_S = (0.02, 0.04)
#: Pops from which the floor is computed.
FLOOR_POPS = 20_000
#: Forks from which the floor is computed.
FLOOR_FORKS = 300


@dataclass
class _RateSamples:
    """The samples of one contender, by number of runners."""

    plain: dict[int, list[float]] = field(default_factory=dict)
    busy: dict[int, list[float]] = field(default_factory=dict)
    pick_up: dict[int, list[float]] = field(default_factory=dict)


def run(
    seconds: float = 1.5,
    rounds: int = 3,
    runners: Sequence[int] = RUNNER_COUNTS,
    pickups: int = 200,
    lease: float = 5.0,
    kills: int = 3,
    pops: int = FLOOR_POPS,
    forks: int = FLOOR_FORKS,
    peers: str = "",
    names: Sequence[str] = field_of.OTHER_PEERS,
    say: Say = silent,
) -> dict[str, Any]:
    """Compares the runners. `peers` is an interpreter with the peers' packages; without one only RQ
    and huey are measured. `names` are those of the peers that run in it.

    Raises `ServerFailed` when a contender does not start or stops working.
    """
    with (
        own_folder() as folder,
        ValkeyServer(folder / "valkey", durable=False) as server,
        # A connection of its own, as a producer with one thread has it.
        Redis.from_url(server.url, single_connection_client=True) as client,
        ExitStack() as stack,
    ):
        measure = JobMeasurement(folder, server.url, client)
        stolen = StolenTime()
        names = names if peers else ()
        postgres_url = _postgres_url(folder, stack) if "procrastinate" in names else ""
        all_peers = field_of.peer_contenders(server.url, peers, postgres_url, names)
        for peer in all_peers:
            stack.enter_context(peer)
        all_contenders: list[Contender] = [
            *field_of.our_contenders(client, server.url),
            *all_peers,
        ]
        rates = {contender.name: _RateSamples() for contender in all_contenders}
        for round_ in range(rounds):
            for count, contender in product(runners, all_contenders):
                say(f"jobs: round {round_ + 1} of {rounds}, {contender.name}, {count} runners")
                samples = rates[contender.name]
                samples.plain.setdefault(count, []).append(
                    measure.rate(contender, count, 0.0, seconds)
                )
                samples.busy.setdefault(count, []).append(
                    measure.rate(contender, count, BUSY_JOB_CPU_S, seconds)
                )
                taken = measure.pick_up(contender, count, -(-pickups // rounds))
                samples.pick_up.setdefault(count, []).extend(taken)
        say("jobs: floors")
        popped = _floor("pop", server.url, pops)
        forked = _floor("fork", server.url, forks)
        say(f"jobs: {kills} runners killed, lease {lease:g} s")
        rerun = measure.reruns(kills, lease)
        idle = measure.idle_pss()
    result: dict[str, Any] = {name: _figures(samples) for name, samples in rates.items()}
    return {
        **result,
        "floor_per_s": round(popped),
        "fork_floor_per_s": round(forked),
        "times_rq": {
            name: {
                count: round(result[name][count]["per_s"] / result["rq"][count]["per_s"], 1)
                for count in result[name]
            }
            for name in ("fresh", "recycled")
        },
        **_compare_with_keepers(result, all_peers, names),
        "peers": {
            peer.name: {
                "version": peer.version,
                "keeps_jobs": peer.name not in field_of.LOSING_PEERS,
            }
            for peer in all_peers
        },
        "lease_s": lease,
        "rerun_s": [round(took, 2) for took in rerun],
        "idle_pss_mib": round(idle, 1),
        "rounds": rounds,
        "seconds": seconds,
        "load": [round(number, 1) for number in os.getloadavg()],
        "stolen_percent": stolen.percent(),
    }


def _postgres_url(folder: Path, stack: ExitStack) -> str:
    """Starts PostgreSQL with an empty database; returns the URL for psycopg."""
    postgres = stack.enter_context(PostgresServer(folder / "postgres", durable=False))
    postgres.create_database("bench")
    return postgres.url("bench").replace("postgresql+asyncpg://", "postgresql://")


def _compare_with_keepers(
    result: dict[str, Any], peers: Sequence[PeerContender], names: Sequence[str]
) -> dict[str, Any]:
    """Returns our rate with recycled children, times that of the fastest peer that keeps the job of
    a killed worker, by number of runners. Returns nothing unless all peers were measured."""
    if not set(field_of.OTHER_PEERS) <= set(names):
        return {}
    keepers = [peer.name for peer in peers if peer.name not in field_of.LOSING_PEERS]
    return {
        "times_fastest_keeper": {
            count: round(ours["per_s"] / max(result[name][count]["per_s"] for name in keepers), 2)
            for count, ours in result["recycled"].items()
        }
    }


def _figures(rates: _RateSamples) -> dict[str, Any]:
    return {
        str(count): {
            "per_s": round(statistics.median(rates.plain[count])),
            "cpu_per_s": round(statistics.median(rates.busy[count])),
            **figures.milliseconds(rates.pick_up[count], 50, 99),
        }
        for count in rates.plain
    }


class JobMeasurement:
    """The single measurements; each leaves an empty server."""

    def __init__(self, folder: Path, url: str, client: Redis) -> None:
        self._url = url
        self._client: Any = client
        self._log = folder / "runners.log"
        self._stamps = folder / "stamps"
        self._ledger = folder / "ledger"

    def rate(self, contender: Contender, runners: int, busy: float, seconds: float) -> float:
        """Measures jobs a second with `runners` runners."""
        self._client.flushall()
        expected = min(_EXPECTED_JOBS_PER_S[contender.name], 1 / busy if busy else 1e9) * runners
        count = round(expected * (seconds + 0.5))
        contender.fill(count, busy)
        with ContenderProcesses(contender, runners, self._log) as processes:
            first, began = count, time.perf_counter()

            def started() -> bool:
                """Returns True if all have started: a twentieth of the jobs is done. The rate
                counts from the check before, because the queue may be empty after a pause of this
                process."""
                nonlocal first, began
                remaining, now = contender.count_waiting_jobs(), time.perf_counter()
                if remaining < count * 0.95:
                    return True
                first, began = remaining, now
                return False

            _wait(started, processes)
            pause = _CHECK_INTERVAL_S
            while True:
                time.sleep(pause)
                looked = time.perf_counter()
                remaining, now = contender.count_waiting_jobs(), time.perf_counter()
                pause = max(_CHECK_INTERVAL_S, _PAUSE_PER_CHECK_TIME * (now - looked))
                if remaining == 0 or now - began >= seconds:
                    break
                if now - began > _PROGRESS_TIMEOUT_S:
                    raise ServerFailed(f"{contender.name} has stopped working")
        return (first - remaining) / (now - began)

    def pick_up(self, contender: Contender, runners: int, count: int) -> list[float]:
        """Measures the seconds from the enqueuing call to the job's first line, each job alone."""
        self._client.flushall()
        chance = random.Random(1)  # noqa: S311 — nothing secret about it
        taken = []
        contender.fill(5 * runners, 0.0)
        with (
            ContenderProcesses(contender, runners, self._log) as processes,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stamps,
        ):
            self._stamps.unlink(missing_ok=True)
            stamps.bind(str(self._stamps))
            stamps.settimeout(_PROGRESS_TIMEOUT_S)
            _wait(lambda: contender.count_waiting_jobs() == 0, processes)
            time.sleep(0.5)  # all have started and are idle
            for number in range(count + 5):
                time.sleep(chance.uniform(*_JOB_INTERVAL_RANGE_S))
                began = contender.enqueue(str(self._stamps))
                (started,) = struct.unpack("d", stamps.recv(64))
                if number >= 5:
                    taken.append(started - began)
        return taken

    def reruns(self, kills: int, lease: float) -> list[float]:
        """Measures the seconds from kill -9 of a runner to the next start of the job that it
        held."""
        taken = []
        for number in range(kills):
            self._client.flushall()
            self._ledger.unlink(missing_ok=True)
            contender = OurRunner("killed", self._client, self._url, 1, lease=lease)
            with ContenderProcesses(contender, 1, self._log) as victim:
                self._registered(1, victim)
                # It outlasts all that follows: its runner is killed while it runs.
                contender.put(
                    {"sleeps": 2 * _PROGRESS_TIMEOUT_S + lease, "ledger": str(self._ledger)}
                )
                self._started(1, victim)
                with ContenderProcesses(contender, 1, self._log) as other:
                    self._registered(2, other)
                    # At another point between two beats each time: there are three a lease.
                    time.sleep(lease * (0.3 + number / kills / 3))
                    killed = time.monotonic()
                    os.kill(victim.pids[0], signal.SIGKILL)
                    taken.append(self._started(2, other) - killed)
        return taken

    def idle_pss(self) -> float:
        """Measures the MiB of a runner of the fleet with its children, which has run a job and is
        idle."""
        self._client.flushall()
        contender = _RunnerFleet("idle", self._client, self._url, 1)
        with ContenderProcesses(contender, 1, self._log) as processes:
            call = job_calls.enqueue(Job(job_id="ping", name="ping"), KEYS)
            self._client.eval(call.script.source, len(call.keys), *call.keys, *call.args)
            _wait(
                lambda: self._client.exists(job_keys.result(job_keys.FLEET_TAG, "ping")), processes
            )
            time.sleep(1.0)  # the next child is ready
            return pss_mib(processes.pids[0])

    def _registered(self, count: int, processes: ContenderProcesses) -> None:
        beats = job_keys.beats(job_keys.FLEET_TAG)
        _wait(lambda: self._client.hlen(beats) >= count, processes)

    def _started(self, times: int, processes: ContenderProcesses) -> float:
        """Returns the time of start number `times` in the ledger."""
        starts: list[float] = []

        def has_started() -> bool:
            lines = self._ledger.read_text().splitlines() if self._ledger.exists() else []
            starts[:] = [float(line.split()[-1]) for line in lines if line.startswith("start")]
            return len(starts) >= times

        _wait(has_started, processes)
        return starts[times - 1]


class _RunnerFleet(OurRunner):
    """A runner of the fleet, without the load-test job."""

    def commands(self, runners: int) -> list[tuple[Sequence[str], bytes]]:
        module = field_of.runner_command("worker_runtime.jobs")
        return [(module, config) for _, config in super().commands(runners)]


def _wait(condition: Any, processes: ContenderProcesses) -> None:
    until = time.monotonic() + _PROGRESS_TIMEOUT_S
    while not condition():
        if not processes.alive:
            raise ServerFailed("a runner ended, or did not start")
        if time.monotonic() > until:
            raise ServerFailed(f"nothing within {_PROGRESS_TIMEOUT_S:g} s")
        time.sleep(0.002)


def _floor(floor: str, url: str, count: int) -> float:
    words = [sys.executable, "-P", "-m", floors.__name__, floor, url, str(count)]
    return float(
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout
    )


#: The table's name of each contender; of a peer, `%s` is its version.
TITLES = {
    "fresh": "ours, a fresh child for each job",
    "recycled": "ours, 100 jobs a child",
    "rq": "RQ %s Worker, a fork for each job",
    "rq_simple": "RQ %s SimpleWorker, no isolation",
    "huey": "huey %s, a process a worker",
    "dramatiq": "dramatiq %s, 8 threads a worker",
    "arq": "arq %s, 10 coroutines a worker, poll 10 ms",
    "procrastinate": "procrastinate %s, 10 coroutines a worker",
}


def _full_title(title: str, peer: dict[str, Any] | None) -> str:
    if peer is None:
        return f"{title}; keeps jobs"
    return f"{title % peer['version']}; {'keeps' if peer['keeps_jobs'] else 'loses'} jobs"


def _runners(count: str) -> str:
    return f"{count} {'runner' if count == '1' else 'runners'}"


def table(result: dict[str, Any]) -> None:
    rows = []
    for name, title in TITLES.items():
        for count, shown in result.get(name, {}).items():
            times = result["times_rq"].get(name, {}).get(count)
            rows.append(
                (
                    f"{_full_title(title, result['peers'].get(name))}, {_runners(count)}",
                    f"{shown['per_s']}/s   5 ms CPU {shown['cpu_per_s']}/s   "
                    f"pick-up p50 {shown['p50_ms']} p99 {shown['p99_ms']} ms"
                    + (f"   {times} times RQ Worker" if times else ""),
                )
            )
    for count, times in result.get("times_fastest_keeper", {}).items():
        rows.append(
            (
                f"ours, 100 jobs a child, {_runners(count)}",
                f"{times} times the fastest peer that keeps jobs",
            )
        )
    rows += [
        (
            "floors",
            f"BZPOPMAX {result['floor_per_s']}/s   fork and wait {result['fork_floor_per_s']}/s",
        ),
        (
            f"kill -9 of a runner to the job's next start, lease {result['lease_s']:g} s",
            ", ".join(f"{took:g} s" for took in result["rerun_s"]),
        ),
        ("PSS of an idle runner with its child", f"{result['idle_pss_mib']} MiB"),
    ]
    circumstances = (
        f"load {result['load'][0]}, {result['stolen_percent']} % of the CPU time given to others"
    )
    figures.print_table(f"jobs: median of {result['rounds']} rounds; {circumstances}", rows)
