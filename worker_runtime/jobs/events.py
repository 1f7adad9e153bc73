"""What a runner tells of its jobs, as log lines (`protocol/job_events.py`)."""

from __future__ import annotations

import os
import select

from msgspec import UNSET, UnsetType

from worker_runtime.jobs.queue import ClaimedJob
from worker_runtime.jobs.sink import Sink
from worker_runtime.protocol.job_events import Event, EventError, EventLines
from worker_runtime.protocol.job_messages import Job, JobResult, JobStatus

#: What is told of an end: the action, its level and its outcome.
_ENDS = {
    JobStatus.DONE: ("job-completed", "info", "success"),
    JobStatus.FAILED: ("job-failed", "error", "failure"),
    JobStatus.CANCELLED: ("job-cancelled", "info", "success"),
    JobStatus.RETRY: ("job-retry", "warning", "failure"),
}


class JobEvents:
    """Lines that go to one descriptor with `flush`, which the runner calls before it waits for something to
    happen: of one job's end and the next one's start they are one write. `queued` is told by who enqueues.

    A `sink` gets them, too."""

    def __init__(self, runner: str, node: str, output: int = 2, sink: Sink | None = None) -> None:
        self._sink = sink
        self._output = output
        self._lines = EventLines("berth-jobs", node)
        self._runner = runner
        self._told: list[bytes] = []

    def processing(self, claimed: ClaimedJob, job: Job) -> None:
        self._tell(Event("job-processing"), "info", self._labels(claimed, job))

    def ended(self, claimed: ClaimedJob, job: Job | None, result: JobResult) -> None:
        failure = result.failure
        error: EventError | UnsetType = UNSET
        if failure is not None:
            trace = result.traceback or None
            error = EventError(code=failure.code, message=failure.detail, stack_trace=trace)
        action, level, outcome = _ENDS[result.status]
        duration = max(0, result.finished_at_ms - result.started_at_ms) * 1_000_000
        self._tell(Event(action, outcome, duration), level, self._labels(claimed, job), error)

    def returned(self, job_id: str, what: str, dead: str) -> None:
        """A dead runner's job went back to its queue, or failed."""
        labels: dict[str, object] = {"job_id": job_id, "runner": self._runner, "dead_runner": dead}
        action = "job-returned" if what == "returned" else f"job-{what}"
        self._tell(Event(action, "unknown"), "warning", labels)

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
        self, event: Event, level: str, labels: dict[str, object], error: EventError | UnsetType = UNSET
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
