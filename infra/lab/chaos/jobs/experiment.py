"""`berth chaos jobs`: runners killed and frozen at every step, Valkey flushed and killed; then the books are
compared.

Every job writes a line at its start and at its end into a ledger that no one else writes to. A line between
each runner and Valkey kills the runner before what it sends arrives, or after that had its effect and before
it hears of it; others die at any moment. Some are frozen there instead, for less or more than a lease, with
their children or without them, and go on as if nothing had been: what they say then of jobs that were taken
from them must change nothing. Jobs that may run again must end as done; those that must not run
twice end as done or as `JOB_OUTCOME_UNKNOWN`, and never begin a second time.

A job that has seen three runners die goes to the failed queue, as it should: it is requeued, as an operator
would do. After a flush, what may run twice is enqueued again; of the rest only the ledger knows.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

from infra.lab import figures
from infra.lab.chaos.jobs import ledger
from infra.lab.chaos.jobs.chaos_run import JobChaosRun
from infra.lab.chaos.jobs.ledger import JobHarm
from infra.lab.figures import Say, silent
from infra.local.servers import ValkeyServer

#: Seconds that all jobs get to end once nobody is killed any more.
_PATIENCE = 60.0


def run(
    kills: int = 2000,
    seed: int = 1,
    lease: float = 1.0,
    folder: Path | None = None,
    say: Say = silent,
) -> dict[str, Any]:
    """`lease` in seconds. Raises `ServerFailed` when a runner ends by itself."""
    began = time.monotonic()
    with _run_folder(folder) as where, ValkeyServer(where / "valkey") as server:
        storm = JobChaosRun(where, server, seed=seed, kills=kills, lease=lease, say=say)
        asyncio.run(storm.run(_PATIENCE + 3 * lease))
        say("jobs: comparing the books")
        executions = ledger.read_executions(storm.ledger)
        sent, ends = storm.sent.values(), storm.results
        findings = ledger.judge_jobs(sent, ends, storm.forgotten, executions, storm.anew)
        findings += ledger.changed_results(storm.results, storm.final)
        again = ledger.reruns(executions, storm.kills, storm.outages, storm.freezes)
    harms = [finding.harm for finding in findings]
    unknown = sum(result.failure is not None for result in storm.results.values())
    return {
        "jobs": len(storm.sent),
        "kills": len(storm.kills),
        "freezes": len(storm.freezes),
        "lost": harms.count(JobHarm.LOST),
        "doubled": harms.count(JobHarm.DOUBLED),
        "wrong": harms.count(JobHarm.WRONG),
        "rerun_p50_s": _percentile(again, 0.5),
        "rerun_p99_s": _percentile(again, 0.99),
        "reruns": len(again),
        "lease_s": lease,
        "executions": len(executions),
        "outcome_unknown": unknown,
        "forgotten": len(storm.forgotten),
        "requeued": storm.requeued,
        "returns": storm.returns,
        "freezes_past_lease": sum(lease < freeze.seconds < inf for freeze in storm.freezes),
        "begun_late": ledger.begun_late(executions, storm.results, time.time() - time.monotonic()),
        "late_ends": ledger.late_ends(executions, storm.results, storm.freezes),
        "kills_by_step": dict(sorted(storm.by_step.items())),
        "freezes_by_step": dict(sorted(Counter(freeze.step for freeze in storm.freezes).items())),
        "faults": dict(storm.faults),
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "findings": [{"harm": one.harm, "job": one.job_id, "what": one.what} for one in findings],
    }


def _percentile(taken: list[float], share: float) -> float | None:
    """Seconds; None: nothing had to run again."""
    return round(figures.percentile(taken, share), 3) if taken else None


@contextmanager
def _run_folder(folder: Path | None) -> Iterator[Path]:
    """A short path: a runner's line is a Unix socket in it."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    made = Path(tempfile.mkdtemp(prefix="berth-chaos-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def table(result: dict[str, Any]) -> None:
    """What a person reads."""
    steps = "   ".join(f"{step} {count}" for step, count in result["kills_by_step"].items())
    frozen = "   ".join(f"{step} {count}" for step, count in result["freezes_by_step"].items())
    faults = "   ".join(f"{name} {count}" for name, count in result["faults"].items())
    figures.print_table(
        f"chaos: jobs, seed {result['seed']}, {result['kills']} runners killed in {result['seconds']:g} s",
        [
            ("jobs   executions", f"{result['jobs']}   {result['executions']}"),
            ("lost   doubled   wrong", f"{result['lost']}   {result['doubled']}   {result['wrong']}"),
            (
                f"from the kill to the next start, lease {result['lease_s']:g} s",
                f"p50 {result['rerun_p50_s']} s   p99 {result['rerun_p99_s']} s   of {result['reruns']}",
            ),
            ("outcome unknown", str(result["outcome_unknown"])),
            ("not repeated after a flush", str(result["forgotten"])),
            ("requeued after three crashes", str(result["requeued"])),
            ("given back what was claimed ahead", f"{result['returns']} times"),
            ("killed at", steps),
            ("frozen   past the lease", f"{result['freezes']}   {result['freezes_past_lease']}"),
            ("late ends, not taken", str(result["late_ends"])),
            ("begun after the report as unknown", str(result["begun_late"])),
            ("frozen at", frozen or "none"),
            ("Valkey", faults or "left alone"),
        ],
    )
