"""What the end of a run means: done, failed, cancelled, or another attempt and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from worker_runtime.boottime import wall_ms
from worker_runtime.jobs.queue import MAX_CRASHES, ClaimedJob, Finish
from worker_runtime.jobs.reports import Outcome
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.job_messages import (
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
from worker_runtime.protocol.messages import Failure, encode

#: A retry comes within a quarter of its delay, before or after: many that failed at once spread out.
_JITTER = 0.25


class Verdict(msgspec.Struct, frozen=True):
    """The end of one run: what the log tells, and what the queue is told."""

    result: JobResult
    delay: float = 0.0
    crashed: bool = False

    def finish(self, claimed: ClaimedJob, result_ttl: int = RESULT_TTL) -> Finish:
        result = self.result
        return Finish(
            claimed.job_id,
            claimed.fence,
            result.status,
            encode(result),
            result_ttl,
            self.delay,
            self.crashed,
        )


@dataclass(frozen=True, slots=True)
class Judge:
    """Makes verdicts for one runner."""

    runner: str

    def reported(
        self, claimed: ClaimedJob, job: Job, outcome: Outcome, output: str, started_ms: int
    ) -> Verdict:
        """The child said how it ended."""
        failure = outcome.failure
        if failure is None:
            return Verdict(self._result(claimed, JobStatus.DONE, None, output, started_ms, outcome))
        if failure.retryable and claimed.attempt < job.attempts:
            result = self._result(claimed, JobStatus.RETRY, failure, output, started_ms, outcome)
            return Verdict(result, spread(job.retry_delay if outcome.delay is None else outcome.delay))
        return Verdict(self._result(claimed, JobStatus.FAILED, failure, output, started_ms, outcome))

    def died(
        self, claimed: ClaimedJob, job: Job, why: str, how: str, output: str, started_ms: int
    ) -> Verdict:
        """The child said nothing: it crashed, or was killed (`why`: 'timeout' or 'cancelled')."""
        if why == "cancelled":
            failure = Failure.of(JobCancelled("killed on demand"))
            return Verdict(self._result(claimed, JobStatus.CANCELLED, failure, output, started_ms))
        error: BerthError = JobTimeout(f"killed after {job.timeout:g} s") if why else JobCrashed(how)
        if not job.idempotent:
            failure = Failure.of(JobOutcomeUnknown(f"{error.detail}; it must not run twice"))
            return Verdict(self._result(claimed, JobStatus.FAILED, failure, output, started_ms))
        if claimed.crashes + 1 >= MAX_CRASHES or claimed.attempt >= job.attempts:
            result = self._result(claimed, JobStatus.FAILED, Failure.of(error), output, started_ms)
            return Verdict(result, crashed=True)
        result = self._result(claimed, JobStatus.RETRY, Failure.of(error), output, started_ms)
        return Verdict(result, spread(job.retry_delay), crashed=True)

    def refused(self, claimed: ClaimedJob, job: Job | None, error: BerthError) -> Verdict:
        """Nothing of the job has run here: it is unreadable (None), of a type that is unknown here, or had no
        process."""
        if job is not None and error.retryable and claimed.attempt < job.attempts:
            result = self._result(claimed, JobStatus.RETRY, Failure.of(error), "", wall_ms())
            return Verdict(result, spread(job.retry_delay))
        return Verdict(self._result(claimed, JobStatus.FAILED, Failure.of(error), "", wall_ms()))

    def cancelled(self, claimed: ClaimedJob) -> Verdict:
        """Someone cancelled it before it began."""
        failure = Failure.of(JobCancelled("cancelled before it ran"))
        return Verdict(self._result(claimed, JobStatus.CANCELLED, failure, "", wall_ms()))

    def _result(
        self,
        claimed: ClaimedJob,
        status: JobStatus,
        failure: Failure | None,
        output: str,
        started_ms: int,
        outcome: Outcome | None = None,
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


def spread(delay: float) -> float:
    """`delay` (seconds), up to a quarter shorter or longer."""
    # Jitter needs no cryptographic randomness.
    return delay * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311
