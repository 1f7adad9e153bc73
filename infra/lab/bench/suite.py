"""What `berth bench …` does: runs the benchmarks, prints their tables and aims, writes the figures."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from infra.lab import figures
from infra.lab.bench import aims, beside, claim, density, flood, memory, order, recovery, waits
from infra.lab.bench.claim_race import race as claim_race
from infra.lab.bench.fleet import idle, maintenance
from infra.lab.bench.jobs import comparison as jobs
from infra.lab.bench.jobs import tiers
from infra.lab.bench.starvation import heartbeat, lease
from worker_runtime.protocol.errors import BerthError

BENCHMARKS: dict[str, Callable[..., dict[str, Any]]] = {
    "claim": claim.run,
    "order": order.run,
    "beside": beside.run,
    "waits": waits.run,
    "flood": flood.run,
    "memory": memory.run,
    "density": density.run,
    "recovery": recovery.run,
    "idle": idle.run,
    "heartbeat": heartbeat.run,
    "claim-race": claim_race.run,
    "maintenance": maintenance.run,
    "jobs": jobs.run,
    "tiers": tiers.run,
    "lease": lease.run,
}
#: Those that tell how far they are: they get `say`.
_LONG = frozenset(BENCHMARKS) - {"claim", "order", "memory", "waits"}
_TABLE: dict[str, Callable[[dict[str, Any]], None]] = {
    "claim": claim.table,
    "order": order.table,
    "beside": beside.table,
    "waits": waits.table,
    "flood": flood.table,
    "memory": memory.table,
    "density": density.table,
    "recovery": recovery.table,
    "idle": idle.table,
    "heartbeat": heartbeat.table,
    "claim-race": claim_race.table,
    "maintenance": maintenance.table,
    "jobs": jobs.table,
    "tiers": tiers.table,
    "lease": lease.table,
}


def run_benchmarks(wanted: Mapping[str, Mapping[str, Any]], json_file: Path | None) -> int:
    """Runs each benchmark with its arguments. One alone writes its figures flat, several one key each.

    Returns the exit code: 1 with the reason on standard error when a benchmark could not be run.
    """
    for name, arguments in wanted.items():
        inspect.signature(BENCHMARKS[name]).bind(**arguments)
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started must be stopped, too
    results: dict[str, dict[str, Any]] = {}
    try:
        if json_file is not None:
            json_file.touch()  # an unwritable file is better known before the minutes of measuring
        for name, arguments in wanted.items():
            with console.status(f"measuring: {name}") as status:
                telling = {"say": status.update} if name in _LONG else {}
                results[name] = BENCHMARKS[name](**arguments, **telling)
            _TABLE[name](results[name])
            results[name]["aims"] = aims.judge(name, results[name])
            aims.table(name, results[name]["aims"])
            if json_file is not None:
                figures.write_json(json_file, results if len(wanted) > 1 else results[name])
    except (BerthError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
