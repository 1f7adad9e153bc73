"""Jobs claimed ahead: a runner with recycled children
claims short jobs before a child is free for them.

A recycled child runs an empty job in 50 us, while a claim takes 150 us of Valkey's time and a wait
for the reply. So one claim brings several jobs, and their ends are written together with the next
claim. Measured with empty jobs (`berth bench jobs`, one and two runners): 36 and 39 times RQ's rate
without prefetching, 57 and 50 times with it.

Prefetched jobs wait in the runner, not in the child's socket. So a cancelled one never starts, and
the others can go back to the queue as if they had never been claimed.
"""

import math
import time
from dataclasses import dataclass, field

from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.jobs.queue import ClaimedJob

#: Jobs that wait at most. Sixteen gain no more than eight (measured).
MAX_PREFETCHED_JOBS = 8
#: Seconds after which waiting jobs go back to the queue:
#: the job before them takes longer than usual.
PREFETCH_TIMEOUT_S = 0.02
#: Seconds. Only types that run for less than this are prefetched: a job costs the runner and Valkey
#: 0.4 ms, so there is little to gain on longer ones, and another runner could start those sooner.
MAX_BRIEF_RUNTIME_S = 0.002
#: Seconds that one run counts at most: one pause of the host says little about the type.
_MAX_SAMPLE_S = 0.01
#: Seconds assumed for a type that has not run yet: it takes six quick runs to count as brief.
_INITIAL_ESTIMATE_S = 0.004
#: Share of the latest run in the average.
_SAMPLE_WEIGHT = 1 / 8


class RuntimeEstimate:
    """A moving average of the run time of each job type, as measured by the children."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def add_run(self, name: str, seconds: float) -> None:
        mean = self._mean.get(name, _INITIAL_ESTIMATE_S)
        self._mean[name] = mean + (min(seconds, _MAX_SAMPLE_S) - mean) * _SAMPLE_WEIGHT

    def brief_types(self) -> str:
        """Returns the types that may be prefetched, comma separated, as a claim takes them."""
        return ",".join(
            sorted(name for name, mean in self._mean.items() if mean < MAX_BRIEF_RUNTIME_S)
        )


@dataclass(frozen=True, slots=True)
class PrefetchedJob:
    """A claimed job that has not started. `since`: monotonic seconds of the claim."""

    claimed: ClaimedJob
    job: Job
    since: float = field(default_factory=time.monotonic)

    def waited_ms(self) -> int:
        """Returns the milliseconds since the job was due."""
        return self.claimed.waited_ms + round((time.monotonic() - self.since) * 1000)


class PrefetchedJobs:
    """The claimed jobs that have not started, in the order of their claims.

    Once they are to be released, none of them may start: when a release fails, nobody knows whether
    Valkey has carried it out.
    """

    def __init__(self) -> None:
        self._jobs: list[PrefetchedJob] = []
        self._releasing = False

    def __len__(self) -> int:
        return len(self._jobs)

    def jobs(self) -> list[Job]:
        return [waiting.job for waiting in self._jobs]

    def add(self, claimed: ClaimedJob, job: Job) -> None:
        self._jobs.append(PrefetchedJob(claimed, job))

    def may_start(self) -> bool:
        return bool(self._jobs) and not self._releasing

    def pop_next(self) -> PrefetchedJob:
        return self._jobs.pop(0)

    def remove(self, job_id: str, fence: int) -> PrefetchedJob | None:
        """Takes out one job, because it was cancelled; None if it is not here."""
        for waiting in self._jobs:
            if (waiting.claimed.job_id, waiting.claimed.fence) == (job_id, fence):
                self._jobs.remove(waiting)
                self._releasing &= bool(self._jobs)
                return waiting
        return None

    def mark_for_release(self) -> None:
        """Marks all jobs here for their return to the queue: none starts any more."""
        self._releasing = bool(self._jobs)

    def to_release(self) -> list[PrefetchedJob]:
        """Returns the jobs to give back now. The caller calls `clear` once Valkey has confirmed."""
        if self.seconds_until_due() <= 0:
            self.mark_for_release()
        return list(self._jobs) if self._releasing else []

    def seconds_until_due(self) -> float:
        """Returns the seconds until the jobs have waited for too long."""
        if not self.may_start():
            return math.inf
        return self._jobs[0].since + PREFETCH_TIMEOUT_S - time.monotonic()

    def fences(self) -> set[int]:
        return {waiting.claimed.fence for waiting in self._jobs}

    def clear(self) -> None:
        self._jobs.clear()
        self._releasing = False
