"""How long the jobs of each type take lately: jobs are claimed ahead of brief ones only.

Jobs that were claimed ahead: in hand, and not begun.

A recycled child takes 50 us for an empty job, a claim 150 us of Valkey's time and a wait for it. So a claim
brings several, and the ends of those are written together with the next one. They wait here and not in the
child's socket: what no child has seen can be cancelled, or given back as if it had never been claimed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.jobs.queue import ClaimedJob

#: Seconds. With 0.4 ms of the runner's and Valkey's for each job there is little to gain on longer ones; and
#: eight of these are over before they would have gained much by another runner.
BRIEF_RUNTIME = 0.002
#: Seconds that one run counts at the most: a moment in which the host did something else is not the type's.
_MAX_SAMPLE = 0.01
#: Seconds that a type is taken to need before it has run: six quick runs, and it is brief.
_INITIAL_ESTIMATE = 0.004
_WEIGHT = 1 / 8


class RuntimeEstimate:
    """A moving average for each type, of what the children measured: without the way to them and back."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}
        #: The types that are brief, comma separated, as a claim takes them.
        self.brief = ""
        self._brief: set[str] = set()

    def ran(self, name: str, seconds: float) -> None:
        """One run, which took so long."""
        mean = self._mean.get(name, _INITIAL_ESTIMATE)
        mean += (min(seconds, _MAX_SAMPLE) - mean) * _WEIGHT
        self._mean[name] = mean
        if (mean < BRIEF_RUNTIME) != (name in self._brief):
            self._brief ^= {name}
            self.brief = ",".join(sorted(self._brief))

    def is_brief(self, name: str) -> bool:
        return name in self._brief


#: Jobs that wait in hand at the most. Eight gain as much as sixteen (measured).
MAX_PREFETCHED = 8
#: Seconds after which they go back to the queue: the job before them takes longer than its type does.
MAX_PREFETCH_WAIT = 0.02


@dataclass(frozen=True, slots=True)
class PrefetchedJob:
    """One of them. `since`: monotonic, when it was claimed."""

    claimed: ClaimedJob
    job: Job
    since: float

    def waited_ms(self) -> int:
        """Since it was due."""
        return self.claimed.waited_ms + round((time.monotonic() - self.since) * 1000)


class PrefetchedJobs:
    """In the order of their claims. Once they are to go back, none of them begins any more: nobody knows
    whether a call that failed has given them back."""

    def __init__(self) -> None:
        self._jobs: deque[PrefetchedJob] = deque()
        self._going_back = False

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, claimed: ClaimedJob, job: Job) -> None:
        self._jobs.append(PrefetchedJob(claimed, job, time.monotonic()))

    def startable(self) -> bool:
        return bool(self._jobs) and not self._going_back

    def take(self) -> PrefetchedJob:
        """The next one to begin."""
        return self._jobs.popleft()

    def cancel(self, job_id: str, fence: int) -> PrefetchedJob | None:
        """Takes one out; None if it is not here."""
        for waiting in self._jobs:
            if (waiting.claimed.job_id, waiting.claimed.fence) == (job_id, fence):
                self._jobs.remove(waiting)
                self._going_back &= bool(self._jobs)
                return waiting
        return None

    def send_back(self) -> None:
        """All that are here are to be given back."""
        self._going_back = bool(self._jobs)

    def going_back(self) -> list[PrefetchedJob]:
        """Those to be given back now; to be cleared when that was heard."""
        if self._jobs and time.monotonic() >= self._jobs[0].since + MAX_PREFETCH_WAIT:
            self._going_back = True
        return list(self._jobs) if self._going_back else []

    def left(self) -> float:
        """Seconds until they have waited for too long."""
        if not self._jobs or self._going_back:
            return math.inf
        return self._jobs[0].since + MAX_PREFETCH_WAIT - time.monotonic()

    def fences(self) -> set[int]:
        return {waiting.claimed.fence for waiting in self._jobs}

    def clear(self) -> None:
        self._jobs.clear()
        self._going_back = False
