"""`berth bench own-jobs`: an application's own job types, compared with built-in ones.

Three questions, in one run:

1. How many jobs a second does a direct producer enqueue? It checks and signs each of them.
2. How much slower is a runner of own types than one of built-in types? The jobs do nothing. Rounds
   of both are interleaved, and the median counts.
3. How much dearer is a claim when many jobs wait? Two Valkey servers hold few and many jobs; claims
   from both take turns, each with the end of the job before, as a runner claims.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis

from infra.berth_jobs import declaration
from infra.berth_jobs.direct import DirectProducer
from infra.lab import figures
from infra.lab.bench.jobs import contenders
from infra.lab.bench.jobs.comparison import JobMeasurement
from infra.lab.bench.jobs.contenders import OurRunner
from infra.lab.bench.jobs.waiting_jobs import WaitingJobs
from infra.lab.cpu import StolenTime
from infra.lab.figures import Say, silent
from infra.lab.loadtest_job import KEYS
from infra.lab.target import own_folder
from infra.local.servers import ValkeyServer
from worker_runtime.jobs.protocol import keys as job_keys

APPLICATION = "bench"
TAG = job_keys.application_tag(APPLICATION)
#: Jobs that one child runs, by the name of the way.
JOBS_PER_CHILD = {"fresh": 1, "recycled": 100}
#: Claims before the other server's turn.
CLAIMS_PER_TURN = 20


@declaration.job(name="perform", idempotent=True)
def perform(busy: float = 0.0) -> None:
    """Stands for the job that a producer enqueues; `own_tasks` has what runs."""


class OwnTypesRunner(OurRunner):
    """A runner of the application's type."""

    def __init__(
        self, name: str, client: Redis, url: str, recycle: int, producer: DirectProducer
    ) -> None:
        super().__init__(name, client, url, recycle)
        self._producer = producer

    def commands(self, runners: int) -> list[tuple[Sequence[str], bytes]]:
        own = {
            "application": APPLICATION,
            "modules": ["own_tasks"],
            "path": [str(Path(__file__).parent)],
        }
        return [
            (
                contenders.runner_command("worker_runtime.jobs"),
                contenders.runner_config(
                    f"{self.name}-{number}", self._url, tag=TAG, own=own, **self._settings
                ),
            )
            for number in range(runners)
        ]

    def fill(self, count: int, busy: float) -> None:
        self._producer.enqueue_many(self._producer.call(perform, busy) for _ in range(count))

    def count_waiting_jobs(self) -> int:
        queued_type = f"{APPLICATION}/perform@1"
        return int(self._client.zcard(job_keys.subqueue(TAG, "default", queued_type)))


def run(
    seconds: float = 1.5,
    rounds: int = 5,
    enqueued: int = 20_000,
    few: int = 1_000,
    many: int = 500_000,
    claims: int = 800,
    say: Say = silent,
) -> dict[str, Any]:
    """Measures each rate for `seconds`. A direct producer enqueues `enqueued` jobs in each round.
    `few` or `many` jobs wait while `claims` of them are claimed.

    Raises `ServerFailed` when a runner does not start or stops working.
    """
    stolen = StolenTime()
    with own_folder() as folder, ValkeyServer(folder / "valkey", durable=False) as server:
        result = _rates(folder, server.url, seconds, rounds, enqueued, say)
    with own_folder() as folder:
        say(f"own jobs: claims while {few} and {many} jobs wait")
        waiting = _claim_times(folder, few, many, claims)
    return {
        **result,
        "claim_us": waiting,
        "claim_ratio": round(waiting[str(many)] / waiting[str(few)], 2),
        "waiting": [few, many],
        "rounds": rounds,
        "seconds": seconds,
        "load": [round(number, 1) for number in os.getloadavg()],
        "stolen_percent": stolen.percent(),
    }


def _rates(
    folder: Path, url: str, seconds: float, rounds: int, enqueued: int, say: Say
) -> dict[str, Any]:
    with (
        Redis.from_url(url, single_connection_client=True) as client,
        _producer(folder, url) as producer,
    ):
        measure = JobMeasurement(folder, url, client)
        rates: dict[str, dict[str, list[float]]] = {
            way: {"built_in": [], "own": []} for way in JOBS_PER_CHILD
        }
        direct_rates = []
        for round_ in range(rounds):
            say(f"own jobs: round {round_ + 1} of {rounds}")
            client.flushall()
            direct_rates.append(_enqueue_rate(producer, enqueued))
            for way, recycle in JOBS_PER_CHILD.items():
                for kind, runner in (
                    ("built_in", OurRunner(way, client, url, recycle)),
                    ("own", OwnTypesRunner(way, client, url, recycle, producer)),
                ):
                    rates[way][kind].append(measure.rate(runner, 1, 0.0, seconds))
    medians = {
        way: {kind: statistics.median(samples) for kind, samples in of_way.items()}
        for way, of_way in rates.items()
    }
    return {
        "direct_per_s": round(statistics.median(direct_rates)),
        **{
            way: {
                "built_in_per_s": round(median["built_in"]),
                "own_per_s": round(median["own"]),
                "ratio": round(median["built_in"] / median["own"], 3),
            }
            for way, median in medians.items()
        },
    }


def _producer(folder: Path, url: str) -> DirectProducer:
    key_file = folder / "bench.key"
    key_file.write_bytes(msgspec.json.encode(KEYS))
    key_file.chmod(0o600)
    return DirectProducer(url, key_file, application=APPLICATION, use_login=False)


def _enqueue_rate(producer: DirectProducer, count: int) -> float:
    """Measures jobs a second, with the check and the signature of each."""
    began = time.perf_counter()
    producer.enqueue_many(producer.call(perform, 0.0) for _ in range(count))
    return count / (time.perf_counter() - began)


def _claim_times(folder: Path, few: int, many: int, claims: int) -> dict[str, float]:
    """Measures the microseconds of a claim, the median, by the number of waiting jobs."""
    with ExitStack() as stack:
        waiting = {}
        for count in (few, many):
            server = ValkeyServer(folder / f"valkey-{count}", durable=False)
            url = stack.enter_context(server).url
            waiting[count] = stack.enter_context(closing(WaitingJobs(url, count)))
        taken: dict[int, list[float]] = {few: [], many: []}
        while len(taken[many]) < claims:
            for count, jobs in waiting.items():
                taken[count] += [jobs.claim() for _ in range(CLAIMS_PER_TURN)]
    return {str(count): round(statistics.median(times) * 1e6, 1) for count, times in taken.items()}


def table(result: dict[str, Any]) -> None:
    rows = [("a direct producer's enqueue_many", f"{result['direct_per_s']}/s")]
    for way, title in (("fresh", "a fresh child for each job"), ("recycled", "100 jobs a child")):
        figure = result[way]
        rows.append(
            (
                f"{title}, one runner",
                f"own {figure['own_per_s']}/s   built-in {figure['built_in_per_s']}/s   "
                f"{figure['ratio']} times as quick",
            )
        )
    rows += [
        (f"a claim and an end while {count} jobs wait", f"{result['claim_us'][str(count)]} µs")
        for count in result["waiting"]
    ]
    circumstances = (
        f"load {result['load'][0]}, {result['stolen_percent']} % of the CPU time given to others"
    )
    figures.print_table(f"own jobs: median of {result['rounds']} rounds; {circumstances}", rows)
