"""Jobs that were claimed ahead: in hand, and not begun.

A recycled child takes 50 us for an empty job, a claim 150 us of Valkey's time and a wait for it. So a claim
brings several, and the ends of those are written together with the next one. They wait here and not in the
child's socket: what no child has seen can be cancelled, or given back as if it had never been claimed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

from worker_runtime.jobs.queue import ClaimedJob
from worker_runtime.protocol.job_messages import Job

#: Jobs that wait in hand at the most. Eight gain as much as sixteen (measured).
MOST = 8
#: Seconds after which they go back to the queue: the job before them takes longer than its type does.
PATIENCE = 0.02


@dataclass(frozen=True, slots=True)
class Waiting:
    """One of them. `since`: monotonic, when it was claimed."""

    claimed: ClaimedJob
    job: Job
    since: float

    def waited_ms(self) -> int:
        """Since it was due."""
        return self.claimed.waited_ms + round((time.monotonic() - self.since) * 1000)


class Ahead:
    """In the order of their claims. Once they are to go back, none of them begins any more: nobody knows
    whether a call that failed has given them back."""

    def __init__(self) -> None:
        self._jobs: deque[Waiting] = deque()
        self._going_back = False

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, claimed: ClaimedJob, job: Job) -> None:
        self._jobs.append(Waiting(claimed, job, time.monotonic()))

    def startable(self) -> bool:
        return bool(self._jobs) and not self._going_back

    def take(self) -> Waiting:
        """The next one to begin."""
        return self._jobs.popleft()

    def cancel(self, job_id: str, fence: int) -> Waiting | None:
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

    def going_back(self) -> list[Waiting]:
        """Those to be given back now; to be cleared when that was heard."""
        if self._jobs and time.monotonic() >= self._jobs[0].since + PATIENCE:
            self._going_back = True
        return list(self._jobs) if self._going_back else []

    def left(self) -> float:
        """Seconds until they have waited for too long."""
        if not self._jobs or self._going_back:
            return math.inf
        return self._jobs[0].since + PATIENCE - time.monotonic()

    def fences(self) -> set[int]:
        return {waiting.claimed.fence for waiting in self._jobs}

    def clear(self) -> None:
        self._jobs.clear()
        self._going_back = False
