"""The ledger of what was really executed,
written by the jobs themselves, and the judge that reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from infra.lab.chaos.jobs.steps import RunnerStep
from worker_runtime.jobs.protocol.messages import JobOutcomeUnknown, JobResult, JobStatus

#: Seconds that two clocks of one host may differ when they are written down.
_CLOCK_TOLERANCE_S = 0.01


@dataclass(frozen=True)
class RecordedExecution:
    """Describes a start. `at` and `ended` are seconds of CLOCK_MONOTONIC; `runner` is a process
    id."""

    job_id: str
    attempt: int
    fence: int
    runner: int
    at: float
    ended: float | None


@dataclass(frozen=True)
class SentJob:
    """A job as it was enqueued."""

    job_id: str
    idempotent: bool


@dataclass(frozen=True)
class RunnerKill:
    runner: int
    at: float


@dataclass(frozen=True)
class RunnerFreeze:
    """A runner that was frozen for a while. `until` is infinite if it was killed meanwhile."""

    runner: int
    at: float
    until: float
    step: RunnerStep

    @property
    def seconds(self) -> float:
        return self.until - self.at


class JobHarm(StrEnum):
    #: It has no end, or is done although no execution has ended.
    LOST = "lost"
    #: It must not run twice, and did.
    DOUBLED = "doubled"
    #: No kill or freeze explains its end, or its end has changed afterwards.
    WRONG = "wrong"


@dataclass(frozen=True)
class JobFinding:
    harm: JobHarm
    job_id: str
    what: str


def read_executions(path: Path) -> list[RecordedExecution]:
    """Reads all executions, in the order of their starts."""
    starts: dict[tuple[str, int, int], tuple[int, float]] = {}
    ends: dict[tuple[str, int, int], float] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        mark, job_id, attempt, fence, runner, at = line.split()
        execution = job_id, int(fence), int(runner)  # after a flush, fences start again
        if mark == "start":
            starts[execution] = int(attempt), float(at)
        else:
            ends[execution] = float(at)
    return [
        RecordedExecution(job_id, attempt, fence, runner, at, ends.get((job_id, fence, runner)))
        for (job_id, fence, runner), (attempt, at) in starts.items()
    ]


def judge_jobs(
    sent: Iterable[SentJob],
    results: Mapping[str, JobResult],
    forgotten: set[str],
    executions: Iterable[RecordedExecution],
    restarted: Set[str] = frozenset(),
) -> list[JobFinding]:
    """Checks that executions explain each job's end, and that only idempotent jobs started twice.

    `forgotten`: jobs that a flush has deleted and that must not run twice; only the ledger knows of
    them. `restarted`: jobs whose attempts count from one again.
    """
    by_job: dict[str, list[RecordedExecution]] = defaultdict(list)
    for execution in executions:
        by_job[execution.job_id].append(execution)
    findings = []
    for job in sent:
        runs, result = by_job[job.job_id], results.get(job.job_id)
        if not job.idempotent and len(runs) > 1:
            findings.append(JobFinding(JobHarm.DOUBLED, job.job_id, f"{len(runs)} executions"))
        if job.job_id in forgotten:
            continue
        if result is None:
            findings.append(JobFinding(JobHarm.LOST, job.job_id, f"no end; {len(runs)} executions"))
        elif result.status is JobStatus.DONE:
            if not any(run.ended is not None for run in runs):
                findings.append(
                    JobFinding(JobHarm.LOST, job.job_id, "done, and no execution has ended")
                )
            elif job.job_id not in restarted and any(run.attempt > result.attempt for run in runs):
                text = f"done by attempt {result.attempt}, which had been taken over"
                findings.append(JobFinding(JobHarm.WRONG, job.job_id, text))
        elif not _explained(job, result):
            code = result.failure.code if result.failure else ""
            findings.append(JobFinding(JobHarm.WRONG, job.job_id, f"{result.status} {code}"))
    return findings


def _explained(job: SentJob, result: JobResult) -> bool:
    return (
        not job.idempotent
        and result.failure is not None
        and result.failure.code == JobOutcomeUnknown.code
    )


def changed_results(
    before: Mapping[str, JobResult], after: Mapping[str, JobResult]
) -> list[JobFinding]:
    """Finds results that were overwritten although a fencing number should prevent it."""
    return [
        JobFinding(JobHarm.WRONG, job_id, f"{before[job_id].status} became {result.status}")
        for job_id, result in after.items()
        if result != before[job_id]
    ]


def late_ends(
    executions: Iterable[RecordedExecution],
    results: Mapping[str, JobResult],
    freezes: Iterable[RunnerFreeze],
) -> int:
    """Counts executions whose end was refused because their runner was frozen meanwhile."""
    freezes_by_runner = {freeze.runner: freeze for freeze in freezes}
    count = 0
    for run in executions:
        freeze, result = freezes_by_runner.get(run.runner), results.get(run.job_id)
        if freeze is None or result is None or run.ended is None or run.at > freeze.until:
            continue
        count += result.status is not JobStatus.DONE or result.attempt != run.attempt
    return count


def begun_late(
    executions: Iterable[RecordedExecution], results: Mapping[str, JobResult], boot: float
) -> int:
    """Counts jobs that started after they had been reported as `JOB_OUTCOME_UNKNOWN`.

    `boot`: the wall clock's seconds at which CLOCK_MONOTONIC was 0.
    """
    count = 0
    for run in executions:
        failure = results[run.job_id].failure if run.job_id in results else None
        if failure is not None and failure.code == JobOutcomeUnknown.code:
            count += run.at + boot > results[run.job_id].finished_at_ms / 1000 + _CLOCK_TOLERANCE_S
    return count


def reruns(
    executions: Iterable[RecordedExecution],
    kills: Iterable[RunnerKill],
    outages: Sequence[tuple[float, float]],
    freezes: Iterable[RunnerFreeze] = (),
) -> list[float]:
    """Returns the seconds from the kill of a runner to the next start of each job it had begun.

    Leaves out jobs that another runner claimed in between and was killed before they
    started, jobs whose wait touches an outage of Valkey, and jobs of a frozen runner,
    which are taken back sooner.
    """
    freezes_by_runner = {freeze.runner: freeze for freeze in freezes}
    by_runner: dict[int, list[float]] = defaultdict(list)
    for kill in kills:
        by_runner[kill.runner].append(kill.at)
    by_job: dict[str, list[RecordedExecution]] = defaultdict(list)
    for execution in executions:
        by_job[execution.job_id].append(execution)
    delays = []
    for runs in by_job.values():
        ordered = sorted(runs, key=lambda run: run.at)
        for earlier, later in pairwise(ordered):
            killed = min((at for at in by_runner[earlier.runner] if at >= earlier.at), default=None)
            if killed is None or later.attempt != earlier.attempt + 1 or later.at < killed:
                continue
            freeze = freezes_by_runner.get(earlier.runner)
            # It was frozen while it held the job.
            if freeze is not None and freeze.until >= earlier.at:
                continue
            if not any(began < later.at and killed < ended for began, ended in outages):
                delays.append(later.at - killed)
    return delays
