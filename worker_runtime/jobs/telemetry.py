"""What a runner tells of its jobs, as log lines (`protocol/job_events.py`).

What a runner counts for the metrics: kept here, sent along with its renewals.

So a job costs no further command. A runner that is killed takes with it what it counted since its last
renewal, a third of a lease. What runners of users' own jobs count is added up over all users.
"""

from __future__ import annotations

import os
import select
from bisect import bisect_left

import msgspec
from msgspec import UNSET, UnsetType

from worker_runtime.jobs.event_sink import EventSink
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

#: What is told of an end: the action, its level and its outcome.
_END_EVENTS = {
    JobStatus.DONE: ("job-completed", "info", "success"),
    JobStatus.FAILED: ("job-failed", "error", "failure"),
    JobStatus.CANCELLED: ("job-cancelled", "info", "success"),
    JobStatus.RETRY: ("job-retry", "warning", "failure"),
}


class JobEventLog:
    """Lines that go to one descriptor with `flush`, which the runner calls before it waits for something to
    happen: of one job's end and the next one's start they are one write. `queued` is told by who enqueues.

    A `sink` gets them, too."""

    def __init__(self, runner: str, node: str, output: int = 2, sink: EventSink | None = None) -> None:
        self._sink = sink
        self._output = output
        self._lines = JobEventFormatter("berth-jobs", node)
        self._runner = runner
        self._told: list[bytes] = []

    def processing(self, claimed: ClaimedJob, job: Job) -> None:
        self._tell(JobEvent("job-processing"), "info", self._labels(claimed, job))

    def ended(self, claimed: ClaimedJob, job: Job | None, result: JobResult) -> None:
        failure = result.failure
        error: JobEventError | UnsetType = UNSET
        if failure is not None:
            trace = result.traceback or None
            error = JobEventError(code=failure.code, message=failure.detail, stack_trace=trace)
        action, level, outcome = _END_EVENTS[result.status]
        duration = max(0, result.finished_at_ms - result.started_at_ms) * 1_000_000
        self._tell(JobEvent(action, outcome, duration), level, self._labels(claimed, job), error)

    def returned(self, job_id: str, what: str, dead: str) -> None:
        """A dead runner's job went back to its queue, or failed."""
        labels: dict[str, object] = {"job_id": job_id, "runner": self._runner, "dead_runner": dead}
        action = "job-returned" if what == "returned" else f"job-{what}"
        self._tell(JobEvent(action, "unknown"), "warning", labels)

    def _labels(self, claimed: ClaimedJob, job: Job | None) -> dict[str, object]:
        labels: dict[str, object] = {
            "job_id": claimed.job_id,
            "attempt": claimed.attempt,
            "runner": self._runner,
        }
        if job is not None:
            labels["job"], labels["queue"], labels["priority"] = job.name, job.queue, job.priority
        return labels

    def _tell(
        self, event: JobEvent, level: str, labels: dict[str, object], error: JobEventError | UnsetType = UNSET
    ) -> None:
        self._told.append(self._lines.line(event, level, labels, error))

    def flush(self) -> None:
        """Writes whole lines only, and no more at once than a pipe takes whole, unless one line is longer: so
        lines of several processes do not mix."""
        told, self._told = self._told, []
        if self._sink is not None:
            self._sink.tell(told)
        if not told:
            return
        parcel = b""
        try:
            for line in told:
                if parcel and len(parcel) + len(line) > select.PIPE_BUF:
                    os.write(self._output, parcel)
                    parcel = b""
                parcel += line
            os.write(self._output, parcel)
        except OSError:
            return  # nobody reads any more; a runner does not die of its log


_encode_counts = msgspec.json.Encoder().encode

#: What is counted, and its labels: joined into a field only for a parcel, not for each job.
_CounterKey = tuple[CounterKind, tuple[str | int, ...]]


class JobCounters:
    """Numbers by field (`protocol/job_metrics.py`)."""

    def __init__(self) -> None:
        self._fresh: dict[_CounterKey, int] = {}
        self._sent: dict[str, int] = {}
        self._number = 0

    def started(self, job: Job, waited_ms: int) -> None:
        self._observe(CounterKind.WAIT, waited_ms, job.queue, job.priority)

    def ended(self, job: Job | None, status: JobStatus, ran_ms: int | None) -> None:
        """`job` is None for one that this runner cannot read or does not know; `ran_ms` if it never began."""
        name, queue = (job.name, job.queue) if job is not None else ("", "")
        self._add(CounterKind.ENDED, (queue, name, status))
        if job is not None and ran_ms is not None:
            self._observe(CounterKind.RUN, ran_ms, name)

    def renewed_late(self) -> None:
        self._add(CounterKind.LATE, ())

    def reaped(self, what: str) -> None:
        """A dead runner's job: `returned`, `failed` or `cancelled`."""
        self._add(CounterKind.REAPED, (what,))

    def parcel(self) -> tuple[int, bytes]:
        """What is to be sent now, with its number; the same again until it was `heard`. Empty: nothing."""
        if not self._sent and self._fresh:
            self._sent = {
                counter_field(what, *map(str, labels)): n for (what, labels), n in self._fresh.items()
            }
            self._fresh = {}
            self._number += 1
        return self._number, _encode_counts(self._sent) if self._sent else b""

    def heard(self) -> None:
        self._sent = {}

    def _observe(self, what: CounterKind, value_ms: int, *labels: str | int) -> None:
        self._add(what, (*labels, bisect_left(BOUNDS_MS, value_ms)))
        self._add(what, (*labels, "sum"), value_ms)

    def _add(self, what: CounterKind, labels: tuple[str | int, ...], by: int = 1) -> None:
        key = what, labels
        self._fresh[key] = self._fresh.get(key, 0) + by
