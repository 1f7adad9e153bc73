"""The jobs that are running: each with its child, its deadline and the reason if it is being killed."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from worker_runtime.jobs.children.child_pool import JobChild
from worker_runtime.jobs.protocol.messages import RUNNER_TTL, Job
from worker_runtime.jobs.queue import ClaimedJob
from worker_runtime.process.clock import wall_ms

#: Seconds that a runner's entry outlives the timeout of its longest job.
_BEYOND_TIMEOUT = 60


@dataclass(slots=True)
class JobRun:
    """One job in one child. `kill_reason`: 'timeout', 'cancelled', or '' while it is not being killed."""

    claimed: ClaimedJob
    job: Job
    child: JobChild
    started_ms: int
    kill_at: float
    kill_reason: str = ""


class RunningJobs:
    """All runs, by the pid of the child. A kill is TERM to the child's whole group, then KILL."""

    def __init__(self, grace: float) -> None:
        """`grace`: seconds between TERM and KILL."""
        self._grace = grace
        self._by_pid: dict[int, JobRun] = {}

    def __len__(self) -> int:
        return len(self._by_pid)

    def __iter__(self) -> Iterator[JobRun]:
        return iter(list(self._by_pid.values()))

    def add(self, claimed: ClaimedJob, job: Job, child: JobChild) -> None:
        self._by_pid[child.pid] = JobRun(claimed, job, child, wall_ms(), time.monotonic() + job.timeout)

    def find(self, child: JobChild) -> JobRun | None:
        return self._by_pid.get(child.pid)

    def remove(self, child: JobChild) -> None:
        del self._by_pid[child.pid]

    def fences(self) -> set[int]:
        return {run.claimed.fence for run in self._by_pid.values()}

    def job_ids(self) -> list[str]:
        return [run.claimed.job_id for run in self._by_pid.values()]

    def seconds_until_due(self) -> float:
        """Seconds until the next run has to be killed."""
        first = min([run.kill_at for run in self._by_pid.values()], default=math.inf)
        return first - time.monotonic()

    def kill_overdue(self) -> list[JobRun]:
        """Sends TERM to runs past their timeout, and KILL to those that outlived the grace; returns those
        that have just timed out."""
        now, timed_out = time.monotonic(), []
        for run in self._by_pid.values():
            if now >= run.kill_at:
                if run.kill_reason:
                    run.child.kill(signal.SIGKILL)
                    run.kill_at = now + max(1.0, self._grace)  # again, until its end was seen
                else:
                    self._terminate(run, "timeout")
                    timed_out.append(run)
        return timed_out

    def cancel(self, job_id: str, fence: int) -> bool:
        """Terminates one run; false if it is not running."""
        for run in self._by_pid.values():
            if run.claimed.job_id == job_id and run.claimed.fence == fence:
                if not run.kill_reason:
                    self._terminate(run, "cancelled")
                return True
        return False

    def kill_all(self) -> None:
        """Kills all children at once and forgets their runs."""
        for run in self._by_pid.values():
            run.child.kill(signal.SIGKILL)
        self._by_pid.clear()

    def entry_ttl(self) -> int:
        """Seconds that the runner's entry has to live."""
        longest = max((run.job.timeout for run in self._by_pid.values()), default=0.0)
        return max(RUNNER_TTL, math.ceil(longest) + _BEYOND_TIMEOUT)

    def _terminate(self, run: JobRun, reason: str) -> None:
        run.kill_reason = reason
        run.child.kill(signal.SIGTERM)
        run.kill_at = time.monotonic() + self._grace
