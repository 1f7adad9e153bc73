"""Does what `berth bench …` does: runs the benchmarks, prints their tables and aims, writes the
figures.

A benchmark whose aim is missed fails: its exit code is 1.
"""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from infra.lab import figures
from infra.lab.bench import (
    aims,
    beside,
    claim,
    density,
    flood,
    measured,
    memory,
    order,
    recovery,
    waits,
)
from infra.lab.bench.claim_race import race as claim_race
from infra.lab.bench.fleet import idle, maintenance
from infra.lab.bench.jobs import comparison as jobs
from infra.lab.bench.jobs import crashes as job_crashes
from infra.lab.bench.jobs import own_types as own_jobs
from infra.lab.bench.jobs import tiers
from infra.lab.bench.starvation import heartbeat, lease
from worker_runtime.protocol.errors import BerthError


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Says what a benchmark measures, how that is shown, and what it must reach."""

    run: Callable[..., dict[str, Any]]
    table: Callable[[dict[str, Any]], None]
    aims: Sequence[aims.Aim]
    #: True if `run` shows how far it is: it gets `say`.
    is_long: bool = True


def _benchmark(name: str, module: Any, *, is_long: bool = True) -> Benchmark:
    return Benchmark(run=module.run, table=module.table, aims=aims.AIMS[name], is_long=is_long)


BENCHMARKS: Mapping[str, Benchmark] = {
    "claim": _benchmark("claim", claim, is_long=False),
    "order": _benchmark("order", order, is_long=False),
    "beside": _benchmark("beside", beside),
    "waits": _benchmark("waits", waits, is_long=False),
    "flood": _benchmark("flood", flood),
    "memory": _benchmark("memory", memory, is_long=False),
    "density": _benchmark("density", density),
    "recovery": _benchmark("recovery", recovery),
    "idle": _benchmark("idle", idle),
    "heartbeat": _benchmark("heartbeat", heartbeat),
    "claim-race": _benchmark("claim-race", claim_race),
    "maintenance": _benchmark("maintenance", maintenance),
    "jobs": _benchmark("jobs", jobs),
    "job-crashes": _benchmark("job-crashes", job_crashes),
    "own-jobs": _benchmark("own-jobs", own_jobs),
    "tiers": _benchmark("tiers", tiers),
    "lease": _benchmark("lease", lease),
}


def run_benchmarks(
    chosen: Mapping[str, Mapping[str, Any]],
    json_file: Path | None = None,
    *,
    command: str = "",
    update_docs: bool = False,
    benchmarks: Mapping[str, Benchmark] = BENCHMARKS,
    root: Path = measured.ROOT,
) -> int:
    """Runs each benchmark with its arguments. One alone writes its figures flat, several one key
    each.

    `update_docs` writes what was measured by `command` to `docs/measured.md` of the checkout at
    `root`.

    Returns the exit code: 1 when an aim was missed, or a benchmark could not be run; standard error
    says which and why. A missed aim does not keep the next benchmark from running.
    """
    for name, arguments in chosen.items():
        inspect.signature(benchmarks[name].run).bind(**arguments)
    console = Console(stderr=True)
    # What was started must be stopped, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results: dict[str, dict[str, Any]] = {}
    missed: list[str] = []
    try:
        commit = measured.present_commit(root) if update_docs else ""
        if json_file is not None:
            json_file.touch()  # an unwritable file is better known before the minutes of measuring
        for name, arguments in chosen.items():
            benchmark = benchmarks[name]
            with console.status(f"measuring: {name}") as status:
                progress = {"say": status.update} if benchmark.is_long else {}
                results[name] = benchmark.run(**arguments, **progress)
            with figures.printed_tables() as tables:
                benchmark.table(results[name])
            judged = aims.judge(benchmark.aims, results[name])
            aims.table(name, benchmark.aims, judged)
            missed += [f"{name}: {aims.describe(aim)}" for aim in judged if not aim["met"]]
            results[name]["aims"] = judged
            if json_file is not None:
                figures.write_json(json_file, results if len(chosen) > 1 else results[name])
            if update_docs:
                measured.write_record(
                    name, measured.make_record(command, commit, tables, judged), root
                )
    except (BerthError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for aim in missed:
        print(f"missed: {aim}", file=sys.stderr)
    return 1 if missed else 0
