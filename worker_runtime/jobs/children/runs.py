"""The jobs that a runner has in hand: each with its child, its deadline and the reason if it was killed."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from worker_runtime.jobs.children.child_pool import JobChild
from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.jobs.queue import RUNNER_TTL, ClaimedJob
from worker_runtime.process.clock import wall_ms

#: Seconds that a runner's entry outlives the timeout of its longest job (requirement J4).
_BEYOND_TIMEOUT = 60


@dataclass(slots=True)
class JobRun:
    """One job in one child. `why` says for what it is being killed: 'timeout', 'cancelled' or ''."""

    claimed: ClaimedJob
    job: Job
    child: JobChild
    started_ms: int
    kill_at: float
    why: str = ""

    @property
    def plain(self) -> bool:
        """Nobody waits for its end but its producer, and nothing is lost if it runs again."""
        awaited = self.job.group or self.job.unique or self.claimed.limited
        return self.job.idempotent and not awaited and not self.claimed.crashes


class RunningJobs:
    """By the pid of the child. Kills are the parent's: TERM to the whole group, then KILL."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._by_pid: dict[int, JobRun] = {}

    def __len__(self) -> int:
        return len(self._by_pid)

    def __iter__(self) -> Iterator[JobRun]:
        return iter(list(self._by_pid.values()))

    def start(self, claimed: ClaimedJob, job: Job, child: JobChild) -> JobRun:
        run = JobRun(claimed, job, child, wall_ms(), time.monotonic() + job.timeout)
        self._by_pid[child.pid] = run
        return run

    def of(self, child: JobChild) -> JobRun | None:
        return self._by_pid.get(child.pid)

    def end(self, child: JobChild) -> JobRun | None:
        return self._by_pid.pop(child.pid, None)

    def fences(self) -> set[int]:
        return {run.claimed.fence for run in self._by_pid.values()}

    def job_ids(self) -> list[str]:
        return [run.claimed.job_id for run in self._by_pid.values()]

    def left(self) -> float:
        """Seconds until the next one has to be killed."""
        first = min([run.kill_at for run in self._by_pid.values()], default=math.inf)
        return first - time.monotonic()

    def kill_overdue(self) -> list[JobRun]:
        """TERM to those past their time, KILL to those that did not heed it; returns the newly late."""
        now, late = time.monotonic(), []
        for run in self._by_pid.values():
            if now >= run.kill_at:
                if run.why:
                    run.child.kill(signal.SIGKILL)
                    run.kill_at = now + max(1.0, self._grace)  # until its end has been seen
                else:
                    self._terminate(run, "timeout")
                    late.append(run)
        return late

    def cancel(self, job_id: str, fence: int) -> bool:
        """Ends one run; false if it is not in hand (any more)."""
        for run in self._by_pid.values():
            if run.claimed.job_id == job_id and run.claimed.fence == fence:
                if not run.why:
                    self._terminate(run, "cancelled")
                return True
        return False

    def abandon(self) -> None:
        """Kills all at once and forgets them: they belong to nobody, or to another runner."""
        for run in self._by_pid.values():
            run.child.kill(signal.SIGKILL)
        self._by_pid.clear()

    def entry_ttl(self) -> int:
        """Seconds that the runner's entry has to live."""
        longest = max((run.job.timeout for run in self._by_pid.values()), default=0.0)
        return max(RUNNER_TTL, math.ceil(longest) + _BEYOND_TIMEOUT)

    def _terminate(self, run: JobRun, why: str) -> None:
        run.why = why
        run.child.kill(signal.SIGTERM)
        run.kill_at = time.monotonic() + self._grace
