"""`berth bench tiers`: a flood of one tier of jobs,
and how soon the other tiers' jobs are picked up.

Each tier has a fleet of its own, of one runner. Single jobs of each tier come at a steady rate
(open loop); their pick-up is the time from the start of the enqueuing call to the job's first line.
First it is quiet. Then one tier has a queue that does not run empty, of jobs that take as long as a
provider's answer, and more of them keep coming. At last, as a peer, the same flood with as many
runners that all serve all tiers.
"""

import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
from redis import Redis

from infra.lab import figures
from infra.lab.bench.jobs import contenders
from infra.lab.bench.jobs.contenders import ContenderProcesses
from infra.lab.cpu import StolenTime
from infra.lab.figures import Say, silent
from infra.lab.loadtest_job import KEYS
from infra.lab.target import own_folder
from infra.local.process import ServerFailed
from infra.local.servers import ValkeyServer
from infra.processes import end_with_parent
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts

TIERS = ("email", "webhook", "sms", "whatsapp", "push")
#: The tier that is flooded.
FLOODED_TIER = "sms"
#: Seconds that one of its jobs takes: a messaging API's answer.
ANSWER_TIME_S = 0.1
_PROGRESS_TIMEOUT_S = 30.0
#: Jobs enqueued in one round trip.
_JOBS_PER_PIPELINE = 100


class _TierFleets:
    """The runners of all tiers. `shared`: each serves all of them."""

    name = "tiers"

    def __init__(self, url: str, shared: bool) -> None:
        self._url = url
        self._shared = shared

    def commands(self, runners: int) -> list[tuple[Sequence[str], bytes]]:
        command = contenders.runner_command()
        queues = [["*"] if self._shared else [tier] for tier in TIERS]
        return [
            (command, contenders.runner_config(tier, self._url, queues=served))
            for tier, served in zip(TIERS, queues, strict=True)
        ]

    def fill(self, count: int, busy: float) -> None:
        raise NotImplementedError

    def enqueue(self, stamp: str) -> float:
        raise NotImplementedError

    def count_waiting_jobs(self) -> int:
        raise NotImplementedError


def run(
    seconds: float = 20.0,
    rate: float = 10.0,
    flood: int = 20_000,
    flood_rate: float = 200.0,
    say: Say = silent,
) -> dict[str, Any]:
    """Enqueues `rate` jobs a second of each other tier. `flood` jobs wait at the beginning, and
    `flood_rate` more of them come each second. Raises `ServerFailed`."""
    stolen = StolenTime()
    quiet, flooded, shared = (
        _part(seconds, rate, *numbers, say=say)
        for numbers in ((False, 0, 0.0), (False, flood, flood_rate), (True, flood, flood_rate))
    )
    return {
        "tiers": list(TIERS),
        "rate": rate,
        "quiet": quiet["all"],
        "flooded": flooded,
        "shared": shared,
        "worst_p99_ms": max(flooded["tiers"][tier]["p99_ms"] for tier in flooded["tiers"]),
        "stolen_percent": stolen.percent(),
        "load": [round(number, 1) for number in os.getloadavg()],
    }


def _part(
    seconds: float, rate: float, shared: bool, flood: int, flood_rate: float, say: Say
) -> dict[str, Any]:
    phase = (
        "quiet"
        if not flood
        else "flooded, runners for all tiers"
        if shared
        else "flooded, a fleet a tier"
    )
    say(f"tiers: {phase}, {seconds:g} s")
    with ExitStack() as stack:
        folder = stack.enter_context(own_folder())
        server = stack.enter_context(ValkeyServer(folder / "valkey", durable=False))
        client: Any = stack.enter_context(Redis.from_url(server.url, single_connection_client=True))
        processes = stack.enter_context(
            ContenderProcesses(_TierFleets(server.url, shared), len(TIERS), folder / "runners.log")
        )
        client.script_load(job_scripts.ENQUEUE.source)
        _wait(lambda: client.hlen(job_keys.beats(job_keys.FLEET_TAG)) == len(TIERS), processes)
        time.sleep(0.5)  # the children that wait are forked
        if flood:
            _enqueue(client, FLOODED_TIER, flood, sleeps=ANSWER_TIME_S)
            stack.enter_context(_flood(server.url, flood_rate))
            before = client.zcard(_waiting(FLOODED_TIER))
            _wait(lambda: client.zcard(_waiting(FLOODED_TIER)) > before + flood_rate / 2, processes)
        others = [tier for tier in TIERS if tier != FLOODED_TIER]
        probes = [stack.enter_context(_TierProbe(server.url, tier, folder)) for tier in others]
        threads = [threading.Thread(target=probe.measure, args=(rate, seconds)) for probe in probes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        waiting = client.zcard(_waiting(FLOODED_TIER))
        if flood and not waiting:
            raise ServerFailed("the flood ended before the measurement did: more of it is needed")
    taken = {probe.tier: probe.taken for probe in probes}
    return {
        "all": figures.milliseconds(
            [duration for durations in taken.values() for duration in durations], 50, 99
        ),
        "tiers": {
            tier: figures.milliseconds(durations, 50, 99) for tier, durations in taken.items()
        },
        "flood_waiting": waiting,
    }


class _TierProbe:
    """Single jobs of one tier, each at its time, whatever became of the one before."""

    def __init__(self, url: str, tier: str, folder: Path) -> None:
        self.tier = tier
        self.taken: list[float] = []
        self._client: Any = Redis.from_url(url, single_connection_client=True)
        self._stamps = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # A folder of its own with a short name: a socket's path has at most 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix=f"{tier}-")
        self._path = str(Path(self._folder.name) / "s")
        self._stamps.bind(self._path)
        self._stamps.settimeout(_PROGRESS_TIMEOUT_S)

    def measure(self, rate: float, seconds: float) -> None:
        began = time.monotonic()
        sent: list[float] = []
        reader = threading.Thread(target=self._read, args=(round(rate * seconds), sent))
        reader.start()
        for number in range(round(rate * seconds)):
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
            sent.append(time.monotonic())
            _enqueue(self._client, self.tier, 1, stamp=self._path)
        reader.join()

    def _read(self, count: int, sent: list[float]) -> None:
        """Reads the starts. One runner takes the jobs of a tier in their order, and so do several
        as long as none waits."""
        for number in range(count):
            (started,) = struct.unpack("d", self._stamps.recv(64))
            self.taken.append(started - sent[number])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._client.close()
        self._stamps.close()
        self._folder.cleanup()


@contextmanager
def _flood(url: str, rate: float) -> Iterator[None]:
    """Lets another process enqueue `rate` jobs a second until the block ends."""
    words = [sys.executable, "-m", __name__, url, str(rate)]
    process = subprocess.Popen(words, preexec_fn=end_with_parent(os.getpid()))
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


def _enqueue(client: Any, tier: str, count: int, **arguments: Any) -> None:
    for first in range(0, count, _JOBS_PER_PIPELINE):
        pipeline = client.pipeline(transaction=False)
        for _ in range(min(_JOBS_PER_PIPELINE, count - first)):
            job = msgspec.structs.replace(contenders.new_job(**arguments), queue=tier)
            call = job_calls.enqueue(job, KEYS)
            pipeline.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
        pipeline.execute()


def _waiting(tier: str) -> str:
    return job_keys.subqueue(job_keys.FLEET_TAG, tier, contenders.LOADTEST)


def _wait(condition: Any, processes: ContenderProcesses) -> None:
    until = time.monotonic() + _PROGRESS_TIMEOUT_S
    while not condition():
        if time.monotonic() > until or not processes.alive:
            raise ServerFailed("the runners of the tiers do not start")
        time.sleep(0.01)


def table(result: dict[str, Any]) -> None:
    def numbers(tier_figures: dict[str, float]) -> str:
        return f"p50 {tier_figures['p50_ms']}   p99 {tier_figures['p99_ms']}"

    rows = [("quiet, all tiers", numbers(result["quiet"]))]
    for tier, tier_figures in result["flooded"]["tiers"].items():
        rows.append((f"{tier}, {FLOODED_TIER} flooded", numbers(tier_figures)))
    rows.append(("the same, runners for all tiers", numbers(result["shared"]["all"])))
    waits = f"{result['flooded']['flood_waiting']} of the flood wait"
    figures.print_table(f"tiers: pick-up of {result['rate']:g} jobs/s each (ms); {waits}", rows)


def keep_flooding(url: str, rate: float) -> None:
    """Floods the queue until it is killed."""
    with Redis.from_url(url, single_connection_client=True) as client:
        began, sent = time.monotonic(), 0
        while True:
            due = int((time.monotonic() - began) * rate) - sent
            _enqueue(client, FLOODED_TIER, due, sleeps=ANSWER_TIME_S)
            sent += due
            time.sleep(0.05)


if __name__ == "__main__":
    keep_flooding(sys.argv[1], float(sys.argv[2]))
