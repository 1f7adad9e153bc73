"""Decides what the end of a run means (done, failed, cancelled, retried), and writes it to the
queue."""

import random
from dataclasses import dataclass

import msgspec

from worker_runtime.jobs.child_process import RunOutcome
from worker_runtime.jobs.protocol.messages import (
    MAX_CRASHES,
    NULL,
    RESULT_TTL_S,
    Job,
    JobCancelled,
    JobCrashed,
    JobMemoryExceeded,
    JobOutcomeUnknown,
    JobResult,
    JobStatus,
    JobTimeout,
    sign_result,
)
from worker_runtime.jobs.queue import ClaimedJob, FinishedRun
from worker_runtime.jobs.registration import RunnerRegistration
from worker_runtime.process.clock import wall_ms
from worker_runtime.process.log import Log
from worker_runtime.protocol.authentication import MessageKeys
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Failure

#: Retries spread by up to a quarter of their delay,
#: earlier or later; none comes before its `Retry-After`.
_JITTER_SHARE = 0.25
#: Reasons of kills that a run's memory has caused.
MEMORY_KILLS = ("memory", "process_memory")


@dataclass(slots=True)
class RunEnd:
    """Says how one run ended. `job` is None if it is not readable, or of an unknown type."""

    claimed: ClaimedJob
    job: Job | None
    result: JobResult
    #: Seconds until a retry.
    delay: float = 0.0
    crashed: bool = False
    #: False if the job has not started.
    ran: bool = True
    #: The queue's answer.
    outcome: str = ""
    #: How often it was sent: it is sent again after a lost reply.
    sent: int = 0


@dataclass(frozen=True, slots=True)
class RunJudge:
    runner: str

    def reported(
        self, claimed: ClaimedJob, job: Job, outcome: RunOutcome, output: str, started_ms: int
    ) -> RunEnd:
        failure, delay = outcome.failure, 0.0
        if failure is None:
            status = JobStatus.DONE
        elif failure.retryable and claimed.attempt < job.attempts:
            status = JobStatus.RETRY
            delay = (
                jittered(job.retry_delay) if outcome.delay is None else jittered(outcome.delay, 0.0)
            )
        else:
            status = JobStatus.FAILED
        result = self._result(claimed, status, failure, output, started_ms, outcome)
        return RunEnd(claimed, job, result, delay)

    def died(
        self,
        claimed: ClaimedJob,
        job: Job,
        kill_reason: str,
        crash_detail: str,
        output: str,
        started_ms: int,
    ) -> RunEnd:
        """Judges a child that ended without a report: the runner killed it for `kill_reason`, or it
        crashed (then `kill_reason` is empty, and `crash_detail` says how)."""
        error: BerthError = (
            JobTimeout(f"killed after {job.timeout:g} s")
            if kill_reason
            else JobCrashed(crash_detail)
        )
        status, delay, may_run_again = JobStatus.FAILED, 0.0, job.idempotent
        if kill_reason == "cancelled":
            status, error = JobStatus.CANCELLED, JobCancelled("killed because it was cancelled")
            may_run_again = False
        elif kill_reason == "memory":  # a retry would need as much memory
            error = JobMemoryExceeded("killed: it took more memory than its type may have")
            may_run_again = False
        elif kill_reason == "process_memory":  # perhaps another job of the process has taken it
            error = JobMemoryExceeded("killed: its process took more memory than its jobs may have")
        elif not job.idempotent:
            error = JobOutcomeUnknown(f"{error.detail}; it must not run twice")
        can_retry = claimed.crashes + 1 < MAX_CRASHES and claimed.attempt < job.attempts
        if may_run_again and can_retry:
            status, delay = JobStatus.RETRY, jittered(job.retry_delay)
        result = self._result(claimed, status, Failure.of(error), output, started_ms)
        return RunEnd(claimed, job, result, delay, crashed=may_run_again)

    def refused(self, claimed: ClaimedJob, job: Job | None, error: BerthError) -> RunEnd:
        """Judges a job that has not run here: it is unreadable (None), of an unknown type, or got
        no process. It is tried again after the pause of its type, or earlier if the error says
        so."""
        status, delay = JobStatus.FAILED, 0.0
        if job is not None and error.retryable and claimed.attempt < job.attempts:
            delay = job.retry_delay
            if error.retry_after is not None:
                delay = min(delay, error.retry_after)
            status, delay = JobStatus.RETRY, jittered(delay)
        result = self._result(claimed, status, Failure.of(error), "", wall_ms())
        return RunEnd(claimed, job, result, delay, ran=False)

    def cancelled(self, claimed: ClaimedJob, job: Job) -> RunEnd:
        failure = Failure.of(JobCancelled("cancelled before it ran"))
        result = self._result(claimed, JobStatus.CANCELLED, failure, "", wall_ms())
        return RunEnd(claimed, job, result, ran=False)

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


def jittered(delay: float, shorter: float = _JITTER_SHARE) -> float:
    """Returns `delay` (seconds), up to a quarter longer, or shorter by up to the part `shorter`."""
    # Jitter needs no cryptographic randomness.
    return delay * random.uniform(1 - shorter, 1 + _JITTER_SHARE)  # noqa: S311


class PendingRunEnds:
    """The ends of one runner's runs, in their order: first written to the queue, then logged."""

    def __init__(
        self, registration: RunnerRegistration, log: Log, message_keys: MessageKeys
    ) -> None:
        self._registration = registration
        self._log = log
        self._message_keys = message_keys
        self._open: list[RunEnd] = []
        self._written: list[RunEnd] = []

    def __len__(self) -> int:
        """Returns the number of ends still to be written."""
        return len(self._open)

    def add(self, end: RunEnd) -> None:
        self._open.append(end)

    def to_write(self) -> list[FinishedRun]:
        """Returns all ends to send now, with those whose reply was lost."""
        finished = []
        for end in self._open:
            end.sent += 1
            ttl = RESULT_TTL_S if end.job is None else end.job.result_ttl
            status, result = end.result.status, sign_result(end.result, self._message_keys)
            job_id, fence = end.claimed.job_id, end.claimed.fence
            finished.append(FinishedRun(job_id, fence, status, result, ttl, end.delay, end.crashed))
        return finished

    def written(self, outcomes: list[str]) -> None:
        """Takes the queue's answers to all ends of `to_write`."""
        for end, outcome in zip(self._open, outcomes, strict=True):
            end.outcome = outcome
            if outcome == JobStatus.FAILED and end.job is not None and end.job.on_failed:
                self._registration.renew_soon()  # which enqueues the handler
        self._written += self._open
        self._open = []

    def fences(self) -> set[int]:
        return {end.claimed.fence for end in self._open}

    def disown(self) -> None:
        """Gives up the jobs, which are no longer this runner's: no fencing number fits these
        ends."""
        for end in self._open:
            end.claimed = msgspec.structs.replace(end.claimed, fence=0)

    def log_written(self) -> None:
        """Logs and counts written ends. It is called late, so that the next job starts first."""
        for end in self._written:
            result = end.result
            repeated = end.outcome == "gone" and end.sent > 1
            if end.outcome == result.status or (
                repeated and self._registration.has_written(end.claimed)
            ):
                self._registration.events.log_end(end.claimed, end.job, result)
                ran_ms = max(0, result.finished_at_ms - result.started_at_ms) if end.ran else None
                self._registration.counters.count_end(end.job, result.status, ran_ms)
            else:
                self._log.warning(
                    "job_end_not_ours",
                    job=end.claimed.job_id,
                    wanted=result.status,
                    became=end.outcome,
                )
        self._written.clear()
