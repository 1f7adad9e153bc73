"""What the end of a run means: done, failed, cancelled, or another attempt and when.

The ends of runs: to be written first, then told to the log.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from worker_runtime.jobs.children.child_messages import RunOutcome
from worker_runtime.jobs.protocol.messages import (
    NULL,
    RESULT_TTL,
    Job,
    JobCancelled,
    JobCrashed,
    JobOutcomeUnknown,
    JobResult,
    JobStatus,
    JobTimeout,
)
from worker_runtime.jobs.queue import MAX_CRASHES, ClaimedJob, FinishedRun
from worker_runtime.jobs.registration import RunnerRegistration
from worker_runtime.process.clock import wall_ms
from worker_runtime.process.log import Log
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Failure, encode

#: A retry comes within a quarter of its delay, before or after: many that failed at once spread out.
_JITTER = 0.25


class RunVerdict(msgspec.Struct, frozen=True):
    """The end of one run: what the log tells, and what the queue is told."""

    result: JobResult
    delay: float = 0.0
    crashed: bool = False

    def finish(self, claimed: ClaimedJob, result_ttl: int = RESULT_TTL) -> FinishedRun:
        result = self.result
        return FinishedRun(
            claimed.job_id,
            claimed.fence,
            result.status,
            encode(result),
            result_ttl,
            self.delay,
            self.crashed,
        )


@dataclass(frozen=True, slots=True)
class RunJudge:
    """Makes verdicts for one runner."""

    runner: str

    def reported(
        self, claimed: ClaimedJob, job: Job, outcome: RunOutcome, output: str, started_ms: int
    ) -> RunVerdict:
        """The child said how it ended."""
        failure = outcome.failure
        if failure is None:
            return RunVerdict(self._result(claimed, JobStatus.DONE, None, output, started_ms, outcome))
        if failure.retryable and claimed.attempt < job.attempts:
            result = self._result(claimed, JobStatus.RETRY, failure, output, started_ms, outcome)
            return RunVerdict(result, jittered(job.retry_delay if outcome.delay is None else outcome.delay))
        return RunVerdict(self._result(claimed, JobStatus.FAILED, failure, output, started_ms, outcome))

    def died(
        self, claimed: ClaimedJob, job: Job, why: str, how: str, output: str, started_ms: int
    ) -> RunVerdict:
        """The child said nothing: it crashed, or was killed (`why`: 'timeout' or 'cancelled')."""
        if why == "cancelled":
            failure = Failure.of(JobCancelled("killed on demand"))
            return RunVerdict(self._result(claimed, JobStatus.CANCELLED, failure, output, started_ms))
        error: BerthError = JobTimeout(f"killed after {job.timeout:g} s") if why else JobCrashed(how)
        if not job.idempotent:
            failure = Failure.of(JobOutcomeUnknown(f"{error.detail}; it must not run twice"))
            return RunVerdict(self._result(claimed, JobStatus.FAILED, failure, output, started_ms))
        if claimed.crashes + 1 >= MAX_CRASHES or claimed.attempt >= job.attempts:
            result = self._result(claimed, JobStatus.FAILED, Failure.of(error), output, started_ms)
            return RunVerdict(result, crashed=True)
        result = self._result(claimed, JobStatus.RETRY, Failure.of(error), output, started_ms)
        return RunVerdict(result, jittered(job.retry_delay), crashed=True)

    def refused(self, claimed: ClaimedJob, job: Job | None, error: BerthError) -> RunVerdict:
        """Nothing of the job has run here: it is unreadable (None), of a type that is unknown here, or had no
        process."""
        if job is not None and error.retryable and claimed.attempt < job.attempts:
            result = self._result(claimed, JobStatus.RETRY, Failure.of(error), "", wall_ms())
            return RunVerdict(result, jittered(job.retry_delay))
        return RunVerdict(self._result(claimed, JobStatus.FAILED, Failure.of(error), "", wall_ms()))

    def cancelled(self, claimed: ClaimedJob) -> RunVerdict:
        """Someone cancelled it before it began."""
        failure = Failure.of(JobCancelled("cancelled before it ran"))
        return RunVerdict(self._result(claimed, JobStatus.CANCELLED, failure, "", wall_ms()))

    def _result(
        self,
        claimed: ClaimedJob,
        status: JobStatus,
        failure: Failure | None,
        output: str,
        started_ms: int,
        outcome: RunOutcome | None = None,
    ) -> JobResult:
        return JobResult(
            job_id=claimed.job_id,
            status=status,
            value=NULL if outcome is None else outcome.value,
            failure=failure,
            traceback="" if outcome is None else outcome.traceback,
            output=output,
            attempt=claimed.attempt,
            runner=self.runner,
            started_at_ms=started_ms,
            finished_at_ms=wall_ms(),
        )


def jittered(delay: float) -> float:
    """`delay` (seconds), up to a quarter shorter or longer."""
    # Jitter needs no cryptographic randomness.
    return delay * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311


@dataclass(slots=True)
class RunEnd:
    """The end of one run. `outcome` is what the queue answered."""

    claimed: ClaimedJob
    job: Job | None
    verdict: RunVerdict
    finish: FinishedRun
    #: False if nothing of it has run.
    ran: bool
    outcome: str = ""
    #: How often it was sent: after a lost reply it is sent again.
    sent: int = 0


class PendingRunEnds:
    """Those of one runner, in their order."""

    def __init__(self, desk: RunnerRegistration, log: Log) -> None:
        self._desk = desk
        self._log = log
        self._open: list[RunEnd] = []
        self._written: list[RunEnd] = []
        #: One of them is to be written at once, whatever else is in hand.
        self.urgent = False

    def __len__(self) -> int:
        """Those to be written."""
        return len(self._open)

    def add(
        self, claimed: ClaimedJob, job: Job | None, verdict: RunVerdict, *, ran: bool, urgent: bool
    ) -> None:
        ttl = RESULT_TTL if job is None else job.result_ttl
        self._open.append(RunEnd(claimed, job, verdict, verdict.finish(claimed, ttl), ran))
        self.urgent |= urgent

    def send(self) -> list[FinishedRun]:
        """What is to be written now; again, if that was not heard."""
        for end in self._open:
            end.sent += 1
        return [end.finish for end in self._open]

    def heard(self, outcomes: list[str]) -> None:
        """What became of all that were sent."""
        for end, outcome in zip(self._open, outcomes, strict=True):
            end.outcome = outcome
        self._written += self._open
        self.clear()

    def fences(self) -> set[int]:
        return {end.claimed.fence for end in self._open}

    def clear(self) -> None:
        self._open = []
        self.urgent = False

    def tell(self) -> None:
        """The log comes last: the next job runs already."""
        for end in self._written:
            result = end.verdict.result
            repeated = end.outcome == "gone" and end.sent > 1
            if end.outcome == result.status or (repeated and self._desk.wrote(end.claimed)):
                self._desk.events.ended(end.claimed, end.job, result)
                ran_ms = result.finished_at_ms - result.started_at_ms if end.ran else None
                self._desk.tally.ended(end.job, result.status, ran_ms)
            else:
                self._log.warning(
                    "job_end_not_ours", job=end.claimed.job_id, wanted=result.status, became=end.outcome
                )
        self._written.clear()
