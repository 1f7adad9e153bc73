"""The runner's telemetry: a log line for each event of a job, and counts for the metrics."""

import os
import select
from bisect import bisect_left

import msgspec
from msgspec import UNSET, UnsetType

from worker_runtime.jobs.protocol.messages import Job, JobResult, JobStatus
from worker_runtime.jobs.protocol.telemetry import (
    BOUNDS_MS,
    CounterKind,
    JobEvent,
    JobEventError,
    JobEventFormatter,
    counter_field,
)
from worker_runtime.jobs.queue import ClaimedJob

#: Status → action, level and outcome of the event.
_END_EVENTS = {
    JobStatus.DONE: ("job-completed", "info", "success"),
    JobStatus.FAILED: ("job-failed", "error", "failure"),
    JobStatus.CANCELLED: ("job-cancelled", "info", "success"),
    JobStatus.RETRY: ("job-retry", "warning", "failure"),
}


class JobEventLog:
    """Collects events as lines; `flush` writes them to a descriptor.

    The runner flushes once in each turn of its loop, so one job's end and the next one's start cost
    one write. The producer logs `queued`.
    """

    def __init__(self, runner: str, node: str, output: int = 2) -> None:
        self._output = output
        self._formatter = JobEventFormatter("berth-jobs", node)
        self._runner = runner
        self._lines: list[bytes] = []

    def log_start(self, claimed: ClaimedJob, job: Job) -> None:
        self._add(JobEvent("job-processing"), "info", self._labels(claimed, job))

    def log_end(self, claimed: ClaimedJob, job: Job | None, result: JobResult) -> None:
        failure = result.failure
        error: JobEventError | UnsetType = UNSET
        if failure is not None:
            trace = result.traceback or None
            error = JobEventError(code=failure.code, message=failure.detail, stack_trace=trace)
        action, level, outcome = _END_EVENTS[result.status]
        duration = max(0, result.finished_at_ms - result.started_at_ms) * 1_000_000
        self._add(JobEvent(action, outcome, duration), level, self._labels(claimed, job), error)

    def log_returned(self, job_id: str, fate: str, dead: str) -> None:
        """Logs that a dead runner's job went back to its queue, or ended."""
        labels: dict[str, object] = {"job_id": job_id, "runner": self._runner, "dead_runner": dead}
        self._add(JobEvent(f"job-{fate}", "unknown"), "warning", labels)

    def _labels(self, claimed: ClaimedJob, job: Job | None) -> dict[str, object]:
        labels: dict[str, object] = {
            "job_id": claimed.job_id,
            "attempt": claimed.attempt,
            "runner": self._runner,
        }
        if job is not None:
            labels |= {"job": job.name, "queue": job.queue, "priority": job.priority}
        return labels

    def _add(
        self,
        event: JobEvent,
        level: str,
        labels: dict[str, object],
        error: JobEventError | UnsetType = UNSET,
    ) -> None:
        self._lines.append(self._formatter.line(event, level, labels, error))

    def flush(self) -> None:
        """Writes whole lines, and no more at once than a pipe takes whole unless one line is
        longer, so that lines of several processes do not mix."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        batch = b""
        try:
            for line in lines:
                if batch and len(batch) + len(line) > select.PIPE_BUF:
                    os.write(self._output, batch)
                    batch = b""
                batch += line
            os.write(self._output, batch)
        except OSError:
            return  # nobody reads the log any more; the runner continues


_encode_counts = msgspec.json.Encoder().encode

#: A counter and its labels. They are joined into a field once a batch, not once a job.
_CounterKey = tuple[CounterKind, tuple[str | int, ...]]


class JobCounters:
    """Counts for the metrics, by the fields of `protocol/telemetry.py`.

    They are sent with the renewals, so a job costs no further command. A runner that is killed
    loses what it has counted since its last renewal, a third of a lease.
    """

    def __init__(self) -> None:
        self._unsent: dict[_CounterKey, int] = {}
        self._sent: dict[str, int] = {}
        self._number = 0

    def count_start(self, job: Job, waited_ms: int) -> None:
        self._observe(CounterKind.WAIT, waited_ms, job.queue, job.priority)

    def count_end(self, job: Job | None, status: JobStatus, ran_ms: int | None) -> None:
        """Counts the end of a run. `job` is None if it is not authentic, or unknown to this runner;
        `ran_ms` if it never started."""
        name, queue = (job.name, job.queue) if job is not None else ("", "")
        self.add(CounterKind.ENDED, (queue, name, status))
        if job is not None and ran_ms is not None:
            self._observe(CounterKind.RUN, ran_ms, name)

    def next_batch(self) -> tuple[int, bytes]:
        """Returns the counts to send now and their number: the same until `acknowledged`, b"" for
        none."""
        if not self._sent and self._unsent:
            self._sent = {
                counter_field(kind, *map(str, labels)): n
                for (kind, labels), n in self._unsent.items()
            }
            self._unsent = {}
            self._number += 1
        return self._number, _encode_counts(self._sent) if self._sent else b""

    def acknowledged(self) -> None:
        """Records that Valkey has added the last batch."""
        self._sent = {}

    def _observe(self, kind: CounterKind, value_ms: int, *labels: str | int) -> None:
        self.add(kind, (*labels, bisect_left(BOUNDS_MS, value_ms)))
        self.add(kind, (*labels, "sum"), value_ms)

    def add(self, kind: CounterKind, labels: tuple[str | int, ...] = (), by: int = 1) -> None:
        key = kind, labels
        self._unsent[key] = self._unsent.get(key, 0) + by
