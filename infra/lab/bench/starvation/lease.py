"""`berth bench lease`: is a job runner's lease ever
renewed late or lost, whatever its jobs do to the CPU?

In a cgroup with a CPU quota: our runner with 64 busy jobs, each in its child process; a process
that is one of 64 busy ones and renews its lease in a thread of its own; and one that does so in an
asyncio task, in a loop that works in slices of 50 ms. One after the other, each with the same
quota, lease and period of renewals, so that each design meets its own load and no other one's. With
the load `threads`, the busy ones are 240 threads of one process that release the GIL.

A lease is lost when it is not renewed for its whole length; a renewal is late when it comes more
than a second after its time, which is a third of the lease. Valkey and the watch, which takes the
times from Valkey's clock, are outside the cgroup. A quota throttles only where the group could use
more, so `nr_throttled` is part of the result.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
from redis import Redis

from infra.lab import figures
from infra.lab.bench.jobs.contenders import new_job, runner_command, runner_config
from infra.lab.bench.starvation.cpu_group import CpuGroup, cpu_group
from infra.lab.bench.starvation.naive_lease import NaiveLease
from infra.lab.bench.starvation.renewal_watch import LATE_TOLERANCE_S, RenewalWatch, judge_renewals
from infra.lab.figures import Say, silent
from infra.lab.loadtest_job import KEYS
from infra.lab.target import own_folder
from infra.local.process import ServerFailed
from infra.local.servers import ValkeyServer
from infra.processes import end_with_parent
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys

#: CPUs as the figures name them (percent of one), the quota that is set, and the lease in seconds.
#: A host of two cores throttles at 95 % of them, not at 100.
QUOTA_PERCENT_AND_LEASE_S = {
    "200": (min(200, 95 * (os.cpu_count() or 1)), 5.0),
    "100": (100, 5.0),
    "25": (25, 10.0),
}
#: Busy at the same time.
LOAD_SIZES = {"processes": 64, "threads": 240}
#: Renewals in one lease: the runner's own number.
_RENEWALS_PER_LEASE = 3
DESIGNS = ("ours", "thread", "asyncio")
#: Seconds until all jobs are in hand.
_START_TIMEOUT_S = 60.0


def run(
    seconds: float = 60.0,
    quotas: Sequence[str] = tuple(QUOTA_PERCENT_AND_LEASE_S),
    load: str = "processes",
    say: Say = silent,
) -> dict[str, Any]:
    """Watches each design under each quota, for `seconds`. Raises `LimitsUnavailable`."""
    result: dict[str, Any] = {}
    with (
        own_folder() as folder,
        ValkeyServer(folder / "valkey", durable=False) as server,
        Redis.from_url(server.url) as client,
    ):
        for name in quotas:
            parts = {}
            for design in DESIGNS:
                say(f"lease: {name} % of a CPU, {design}, {seconds:g} s")
                client.flushall()
                bench = _LeaseBench(
                    folder, server.url, client, load, *QUOTA_PERCENT_AND_LEASE_S[name]
                )
                parts[design] = bench.measure(design, seconds)
            naive = [parts[design] for design in DESIGNS[1:]]
            result[name] = {
                "lost": parts["ours"]["lost"],
                "late": parts["ours"]["late"],
                "naive_lost": sum(part["lost"] for part in naive),
                "naive_late": sum(part["late"] for part in naive),
                "nr_throttled": parts["ours"]["nr_throttled"],
                "quota_pct": QUOTA_PERCENT_AND_LEASE_S[name][0],
                "lease_s": QUOTA_PERCENT_AND_LEASE_S[name][1],
                "by_design": parts,
            }
    return {
        **result,
        "load": load,
        "busy": LOAD_SIZES[load],
        "seconds": seconds,
        "late_after_s": LATE_TOLERANCE_S,
    }


class _LeaseBench:
    """Makes one measurement at a time, in a group of its own."""

    def __init__(
        self, folder: Path, url: str, client: Redis, load: str, quota: int, lease: float
    ) -> None:
        self._folder = folder
        self._url = url
        self._client: Any = client
        self._load = load
        self._quota = quota
        self._lease = lease
        #: Where our runners' beats are; the naive ones renew a key of their own.
        self._key = job_keys.beats(job_keys.FLEET_TAG)

    def measure(self, design: str, seconds: float) -> dict[str, Any]:
        name = f"berth-bench-{os.getpid()}-{design}"
        period = self._lease / _RENEWALS_PER_LEASE
        with ExitStack() as ending:
            watch = ending.enter_context(RenewalWatch(self._url, (self._key,), command="HINCRBY"))
            group = ending.enter_context(cpu_group(name, self._quota))
            still_ours = self._start_ours(group, ending) if design == "ours" else None
            if still_ours is None:
                self._start_naive(design, period, group, ending)
            _wait(lambda: watch.times(self._key), "a first renewal")
            began, before = watch.now(), group.throttling()
            time.sleep(seconds)
            throttling = group.throttling() - before
            ended = watch.now()
            kept = still_ours is None or still_ours()
            times = watch.times(self._key)
        renewals = judge_renewals(times, began, ended, period)
        return {
            "renewals": renewals.count,
            "late": renewals.late,
            "lost": lost_leases(times, began, ended, self._lease) + (not kept),
            "max_gap_s": renewals.max_gap,
            "nr_throttled": throttling.throttled,
            "nr_periods": throttling.periods,
            "throttled_s": throttling.seconds,
        }

    def _start_ours(self, group: CpuGroup, ending: ExitStack) -> Callable[[], bool]:
        """Starts a runner with its busy jobs. What it returns says whether it still has all of
        them."""
        processes = self._load == "processes"
        slots = LOAD_SIZES["processes"] if processes else 1
        gate = self._folder / f"gate-{self._quota}"
        document = runner_config("bench", self._url, slots=slots, lease=self._lease, kill_grace=0.0)
        runner = self._spawn(runner_command(), ending)
        assert runner.stdin is not None  # noqa: S101 — a pipe was asked for
        runner.stdin.write(document)
        runner.stdin.close()
        threads = 0 if processes else LOAD_SIZES["threads"]
        arguments = {"gate": str(gate), "spins": 86_400.0, "threads": threads}
        for _ in range(slots):
            call = job_calls.enqueue(
                msgspec.structs.replace(new_job(**arguments), timeout=86_400.0), KEYS
            )
            self._client.eval(call.script.source, len(call.keys), *call.keys, *call.args)

        def held() -> int:
            (runner_id,) = self._client.hkeys(self._key) or [b""]
            return int(self._client.scard(job_keys.held(job_keys.FLEET_TAG, runner_id.decode())))

        root = psutil.Process(runner.pid)
        _wait(lambda: held() == slots and len(root.children()) >= slots, "all jobs in hand")
        for process in (root, *root.children()):
            group.add(process.pid)
        gate.touch()
        return lambda: held() == slots and runner.poll() is None

    def _start_naive(self, design: str, period: float, group: CpuGroup, ending: ExitStack) -> None:
        naive = NaiveLease(
            url=self._url,
            key=self._key,
            period=period,
            design=design,
            load=self._load,
            count=LOAD_SIZES[self._load],
        )
        process = self._spawn(
            [sys.executable, "-P", "-m", "infra.lab.bench.starvation.naive_lease"], ending
        )
        group.add(process.pid)
        assert process.stdin is not None  # noqa: S101 — a pipe was asked for
        ending.callback(process.stdin.close)
        process.stdin.write(msgspec.json.encode(naive) + b"\n")
        process.stdin.flush()

    def _spawn(self, command: Sequence[str], ending: ExitStack) -> subprocess.Popen[bytes]:
        with (self._folder / "busy.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent(os.getpid()),
            )
        ending.callback(process.wait, 10)
        ending.callback(process.kill)
        return process


def lost_leases(times: Sequence[float], began: float, ended: float, lease: float) -> int:
    """Counts how often a whole lease passed without a renewal."""
    before = [at for at in times if at < began]
    within = [at for at in times if began <= at <= ended]
    points = [before[-1] if before else began, *within, ended]
    return sum(int((later - earlier) / lease) for earlier, later in pairwise(points))


def _wait(condition: Callable[[], object], description: str) -> None:
    until = time.monotonic() + _START_TIMEOUT_S
    while not condition():
        if time.monotonic() > until:
            raise ServerFailed(f"not within {_START_TIMEOUT_S:g} s: {description}")
        time.sleep(0.02)


def table(result: dict[str, Any]) -> None:
    titles = {
        "ours": "ours: the runner",
        "thread": "a thread in the busy process",
        "asyncio": "an asyncio task in the busy loop",
    }
    rows = []
    for name in (name for name in result if name in QUOTA_PERCENT_AND_LEASE_S):
        part = result[name]
        for design, seen in part["by_design"].items():
            rows.append(
                (
                    f"{name} % of a CPU (quota {part['quota_pct']} %), {titles[design]}",
                    f"lost {seen['lost']}   late {seen['late']}   "
                    f"of {seen['renewals']} renewals   longest gap {seen['max_gap_s']} s   "
                    f"lease {part['lease_s']:g} s   "
                    f"throttled {seen['nr_throttled']} of {seen['nr_periods']} periods",
                )
            )
    figures.print_table(
        f"lease: {result['busy']} busy {result['load']}, {result['seconds']:g} s each", rows
    )
