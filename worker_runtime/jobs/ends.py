"""The ends of runs: to be written first, then told to the log."""

from __future__ import annotations

from dataclasses import dataclass

from worker_runtime.jobs.queue import ClaimedJob, Finish
from worker_runtime.jobs.registration import Registration
from worker_runtime.jobs.verdict import Verdict
from worker_runtime.log import Log
from worker_runtime.protocol.job_messages import RESULT_TTL, Job


@dataclass(slots=True)
class End:
    """The end of one run. `outcome` is what the queue answered."""

    claimed: ClaimedJob
    job: Job | None
    verdict: Verdict
    finish: Finish
    #: False if nothing of it has run.
    ran: bool
    outcome: str = ""
    #: How often it was sent: after a lost reply it is sent again.
    sent: int = 0


class Ends:
    """Those of one runner, in their order."""

    def __init__(self, desk: Registration, log: Log) -> None:
        self._desk = desk
        self._log = log
        self._open: list[End] = []
        self._written: list[End] = []
        #: One of them is to be written at once, whatever else is in hand.
        self.urgent = False

    def __len__(self) -> int:
        """Those to be written."""
        return len(self._open)

    def add(self, claimed: ClaimedJob, job: Job | None, verdict: Verdict, *, ran: bool, urgent: bool) -> None:
        ttl = RESULT_TTL if job is None else job.result_ttl
        self._open.append(End(claimed, job, verdict, verdict.finish(claimed, ttl), ran))
        self.urgent |= urgent

    def send(self) -> list[Finish]:
        """What is to be written now; again, if that was not heard."""
        for end in self._open:
            end.sent += 1
        return [end.finish for end in self._open]

    def heard(self, outcomes: list[str]) -> None:
        """What became of all that were sent."""
        for end, outcome in zip(self._open, outcomes, strict=True):
            end.outcome = outcome
        self._written += self._open
        self.clear()

    def fences(self) -> set[int]:
        return {end.claimed.fence for end in self._open}

    def clear(self) -> None:
        self._open = []
        self.urgent = False

    def tell(self) -> None:
        """The log comes last: the next job runs already."""
        for end in self._written:
            result = end.verdict.result
            repeated = end.outcome == "gone" and end.sent > 1
            if end.outcome == result.status or (repeated and self._desk.wrote(end.claimed)):
                self._desk.events.ended(end.claimed, end.job, result)
                ran_ms = result.finished_at_ms - result.started_at_ms if end.ran else None
                self._desk.tally.ended(end.job, result.status, ran_ms)
            else:
                self._log.warning(
                    "job_end_not_ours", job=end.claimed.job_id, wanted=result.status, became=end.outcome
                )
        self._written.clear()
