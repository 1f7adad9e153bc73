"""What was really executed: a line at each start and each end of a job, written by the job itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from worker_runtime.protocol.job_messages import JobOutcomeUnknown, JobResult, JobStatus


@dataclass(frozen=True)
class Execution:
    """One start. `at` and `ended` are seconds of CLOCK_MONOTONIC; `runner` is a process id."""

    job_id: str
    attempt: int
    fence: int
    runner: int
    at: float
    ended: float | None


@dataclass(frozen=True)
class Sent:
    """One job as it was enqueued."""

    job_id: str
    idempotent: bool


@dataclass(frozen=True)
class Kill:
    runner: int
    at: float


class Harm(StrEnum):
    #: No end, or an end as done without an execution that came to its end.
    LOST = "lost"
    #: A job that must not run twice did.
    DOUBLED = "doubled"
    #: Ended in a way that no kill explains.
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    harm: Harm
    job_id: str
    what: str


def read(path: Path) -> list[Execution]:
    """All executions, in the order of their starts."""
    starts: dict[tuple[str, int], list[str]] = {}
    ends: dict[tuple[str, int], float] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        what, job_id, attempt, fence, runner, at = line.split()
        if what == "start":
            starts[job_id, int(fence)] = [attempt, runner, at]
        else:
            ends[job_id, int(fence)] = float(at)
    return [
        Execution(job_id, int(attempt), fence, int(runner), float(at), ends.get((job_id, fence)))
        for (job_id, fence), (attempt, runner, at) in starts.items()
    ]


def judge(
    sent: Iterable[Sent],
    results: Mapping[str, JobResult],
    forgotten: set[str],
    executions: Iterable[Execution],
) -> list[Finding]:
    """Every job has an end that its executions explain, and none but an idempotent one began twice.

    `forgotten`: jobs that a flush took and that must not run twice; whether they ran, only the ledger knows.
    """
    by_job: dict[str, list[Execution]] = defaultdict(list)
    for one in executions:
        by_job[one.job_id].append(one)
    found = []
    for job in sent:
        runs, result = by_job[job.job_id], results.get(job.job_id)
        if not job.idempotent and len(runs) > 1:
            found.append(Finding(Harm.DOUBLED, job.job_id, f"{len(runs)} executions"))
        if job.job_id in forgotten:
            continue
        if result is None:
            found.append(Finding(Harm.LOST, job.job_id, f"no end; {len(runs)} executions"))
        elif result.status is JobStatus.DONE:
            if not any(run.ended is not None for run in runs):
                found.append(Finding(Harm.LOST, job.job_id, "done, and no execution came to its end"))
        elif not _explained(job, result):
            code = result.failure.code if result.failure else ""
            found.append(Finding(Harm.WRONG, job.job_id, f"{result.status} {code}"))
    return found


def _explained(job: Sent, result: JobResult) -> bool:
    return not job.idempotent and result.failure is not None and result.failure.code == JobOutcomeUnknown.code


def reruns(
    executions: Iterable[Execution], kills: Iterable[Kill], outages: Sequence[tuple[float, float]]
) -> list[float]:
    """Seconds from the kill of a runner to the next start of each job it had begun.

    Not counted: jobs that another runner had claimed in between, which was killed before the job began, and
    those whose wait touches an outage of Valkey.
    """
    by_runner: dict[int, list[float]] = defaultdict(list)
    for kill in kills:
        by_runner[kill.runner].append(kill.at)
    by_job: dict[str, list[Execution]] = defaultdict(list)
    for one in executions:
        by_job[one.job_id].append(one)
    found = []
    for runs in by_job.values():
        ordered = sorted(runs, key=lambda run: run.at)
        for earlier, later in pairwise(ordered):
            killed = min((at for at in by_runner[earlier.runner] if at >= earlier.at), default=None)
            if killed is None or later.attempt != earlier.attempt + 1 or later.at < killed:
                continue
            if not any(began < later.at and killed < ended for began, ended in outages):
                found.append(later.at - killed)
    return found
