"""`berth chaos jobs`: kills and freezes runners at every step,
flushes and kills Valkey, judges the jobs.

Every job writes a line into a ledger at its start and at its end. A proxy between each runner and
Valkey kills the runner before a request arrives, or after it took effect and before the reply;
other runners die at random times. Some are frozen instead, for less or more than a lease, with or
without their children, and continue later: what they write then about jobs that were taken from
them must change nothing. Jobs that may run twice must end as done. The others end as done or as
`JOB_OUTCOME_UNKNOWN`, and never start a second time.

A job that has seen three runners die is requeued from the failed queue, as an operator would do.
After a flush, the jobs that may run twice are enqueued again; only the ledger knows of the others.
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
from infra.lab.chaos.jobs.own_types import OwnTypesChaos
from infra.lab.figures import Say, silent
from infra.local.servers import ValkeyServer

#: Seconds in which all jobs have to end after the last kill.
_SETTLE_TIMEOUT_S = 60.0


def run(
    kills: int = 2000,
    seed: int = 1,
    lease: float = 1.0,
    folder: Path | None = None,
    say: Say = silent,
    own_faults: int = 0,
) -> dict[str, Any]:
    """Takes `lease` in seconds; `own_faults` are those of a second part, with own job types
    (`own_types.py`).

    Raises `ServerFailed` when a runner ends by itself.
    """
    began = time.monotonic()
    with _run_folder(folder) as where, ValkeyServer(where / "valkey") as server:
        chaos_run = JobChaosRun(where, server, seed=seed, kills=kills, lease=lease, say=say)
        asyncio.run(chaos_run.run(_SETTLE_TIMEOUT_S + 3 * lease))
        say("jobs: comparing ledger and results")
        executions = ledger.read_executions(chaos_run.ledger)
        sent, ends = chaos_run.sent.values(), chaos_run.results
        findings = ledger.judge_jobs(
            sent, ends, chaos_run.forgotten, executions, chaos_run.restarted
        )
        findings += ledger.changed_results(chaos_run.results, chaos_run.final)
        again = ledger.reruns(executions, chaos_run.kills, chaos_run.outages, chaos_run.freezes)
        own = OwnTypesChaos(where, server.url, seed=seed, faults=own_faults, lease=lease, say=say)
        if own_faults:
            findings += own.run(_SETTLE_TIMEOUT_S + 3 * lease)
    harms = [finding.harm for finding in findings]
    unknown = sum(result.failure is not None for result in chaos_run.results.values())
    return {
        "jobs": len(chaos_run.sent),
        "kills": len(chaos_run.kills),
        "freezes": len(chaos_run.freezes),
        "lost": harms.count(JobHarm.LOST),
        "doubled": harms.count(JobHarm.DOUBLED),
        "wrong": harms.count(JobHarm.WRONG),
        "rerun_p50_s": _percentile(again, 0.5),
        "rerun_p99_s": _percentile(again, 0.99),
        "reruns": len(again),
        "lease_s": lease,
        "executions": len(executions),
        "outcome_unknown": unknown,
        "forgotten": len(chaos_run.forgotten),
        "requeued": chaos_run.requeued,
        "returns": chaos_run.releases,
        "freezes_past_lease": sum(lease < freeze.seconds < inf for freeze in chaos_run.freezes),
        "begun_late": ledger.begun_late(
            executions, chaos_run.results, time.time() - time.monotonic()
        ),
        "late_ends": ledger.late_ends(executions, chaos_run.results, chaos_run.freezes),
        "kills_by_step": dict(sorted(chaos_run.by_step.items())),
        "freezes_by_step": dict(
            sorted(Counter(freeze.step for freeze in chaos_run.freezes).items())
        ),
        "faults": dict(chaos_run.faults),
        "own_jobs": len(own.sent),
        "own_faults": dict(sorted(own.by_fault.items())),
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "findings": [
            {"harm": finding.harm, "job": finding.job_id, "what": finding.what}
            for finding in findings
        ],
    }


def _percentile(taken: list[float], share: float) -> float | None:
    """Returns the seconds of a percentile; None if no job ran again."""
    return round(figures.percentile(taken, share), 3) if taken else None


@contextmanager
def _run_folder(folder: Path | None) -> Iterator[Path]:
    """Yields a short path, because a runner's Unix socket is in it."""
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
    """Prints the result for a person."""
    steps = "   ".join(f"{step} {count}" for step, count in result["kills_by_step"].items())
    frozen = "   ".join(f"{step} {count}" for step, count in result["freezes_by_step"].items())
    faults = "   ".join(f"{name} {count}" for name, count in result["faults"].items())
    own = "   ".join(f"{name} {count}" for name, count in result["own_faults"].items())
    figures.print_table(
        f"chaos: jobs, seed {result['seed']}, {result['kills']} runners killed in "
        f"{result['seconds']:g} s",
        [
            ("jobs   executions", f"{result['jobs']}   {result['executions']}"),
            (
                "lost   doubled   wrong",
                f"{result['lost']}   {result['doubled']}   {result['wrong']}",
            ),
            (
                f"from the kill to the next start, lease {result['lease_s']:g} s",
                f"p50 {result['rerun_p50_s']} s   p99 {result['rerun_p99_s']} s   of "
                f"{result['reruns']}",
            ),
            ("outcome unknown", str(result["outcome_unknown"])),
            ("not repeated after a flush", str(result["forgotten"])),
            ("requeued after three crashes", str(result["requeued"])),
            ("prefetched jobs given back", f"{result['returns']} times"),
            ("killed at", steps),
            ("frozen   past the lease", f"{result['freezes']}   {result['freezes_past_lease']}"),
            ("late ends, refused", str(result["late_ends"])),
            ("begun after the report as unknown", str(result["begun_late"])),
            ("frozen at", frozen or "none"),
            ("Valkey", faults or "left alone"),
            ("own jobs   what was killed or frozen", f"{result['own_jobs']}   {own or 'nothing'}"),
        ],
    )
