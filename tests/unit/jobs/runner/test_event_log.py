"""A runner logs its jobs in whole lines, with few writes."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from worker_runtime.jobs.protocol.messages import Job, JobResult, JobStatus
from worker_runtime.jobs.queue import ClaimedJob
from worker_runtime.jobs.telemetry import JobEventLog
from worker_runtime.protocol.messages import Failure

JOB = Job(job_id="j", name="work", queue="q", priority=7)
CLAIMED = ClaimedJob("j", b"", 7, 2, 0)


class Writes:
    """Keeps the writes to a descriptor apart."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def take(self) -> list[bytes]:
        taken = []
        while True:
            try:
                taken.append(self._link.recv(1 << 20))
            except BlockingIOError:
                return taken


@contextmanager
def listening() -> Iterator[tuple[JobEventLog, Writes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        yield JobEventLog("runner-1", "node-1", theirs.fileno()), Writes(ours)


def test_the_end_of_a_job_and_the_start_of_the_next_one_are_two_lines_of_one_write() -> None:
    done = JobResult(job_id="j", status=JobStatus.DONE, started_at_ms=1000, finished_at_ms=1500)
    with listening() as (events, writes):
        events.log_end(CLAIMED, JOB, done)
        events.log_start(CLAIMED, JOB)
        assert writes.take() == []
        events.flush()
        (written,) = writes.take()
        events.flush()
        assert writes.take() == []
    ended, processing = (json.loads(line) for line in written.splitlines())
    assert ended["event"] == {
        "action": "job-completed",
        "kind": "event",
        "dataset": "berth.jobs",
        "outcome": "success",
        "duration": 500_000_000,
    }
    assert ended["labels"] == {
        "job_id": "j",
        "attempt": 2,
        "runner": "runner-1",
        "job": "work",
        "queue": "q",
        "priority": 7,
    }
    assert "error" not in ended
    assert processing["event"] == {
        "action": "job-processing",
        "kind": "event",
        "dataset": "berth.jobs",
    }
    assert (processing["log.level"], processing["message"]) == ("info", "job processing")
    assert processing["service"] == {"name": "berth-jobs", "node": {"name": "node-1"}}
    assert processing["ecs.version"]


def test_a_failure_is_logged_with_its_code_and_where_it_happened() -> None:
    failure = Failure(code="X", detail="why")
    failed = JobResult(job_id="j", status=JobStatus.FAILED, failure=failure, traceback="line 1")
    with listening() as (events, writes):
        events.log_end(CLAIMED, None, failed)
        events.flush()
        logged = json.loads(writes.take()[0])
    assert logged["error"] == {"code": "X", "message": "why", "stack_trace": "line 1"}
    assert (logged["event"]["action"], logged["event"]["outcome"], logged["log.level"]) == (
        "job-failed",
        "failure",
        "error",
    )


def test_no_write_is_longer_than_a_pipe_takes_whole_unless_one_line_is() -> None:
    failure = Failure(code="X", detail="")
    trace = "x" * 2 * select.PIPE_BUF
    long = JobResult(job_id="j", status=JobStatus.RETRY, failure=failure, traceback=trace)
    with listening() as (events, writes):
        for _ in range(30):
            events.log_start(CLAIMED, JOB)
        events.log_end(CLAIMED, JOB, long)
        events.log_start(CLAIMED, JOB)
        events.flush()
        written = writes.take()
    assert 3 < len(written) < 32
    assert sum(len(part) > select.PIPE_BUF for part in written) == 1
    assert all(part.endswith(b"\n") for part in written)
    assert len([json.loads(line) for line in b"".join(written).splitlines()]) == 32


def test_a_runner_does_not_die_of_a_log_that_nobody_reads() -> None:
    with listening() as (events, _):
        events.log_start(CLAIMED, JOB)
    events.flush()
