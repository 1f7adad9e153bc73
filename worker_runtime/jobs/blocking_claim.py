"""The claim that stands behind the bell: whom a ring wakes has the job already.

Without it a ring costs a round trip, 0.3 of the 1.7 ms from a producer's call to the job's first line
(measured). It takes one plain job of a brief type, as claims ahead do (`claiming.lua`): a runner that stands
still, or dies between the ring and its next step, delays only a job that may run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker_runtime.jobs.executor import JobExecutor
from worker_runtime.jobs.queue import ClaimedJob
from worker_runtime.jobs.registration import RunnerRegistration
from worker_runtime.process.valkey import Command, ValkeyFailed


class BlockingClaim:
    """What a `Listener` sends behind its BLPOP. `served` gets what that has brought."""

    def __init__(
        self, crew: JobExecutor, desk: RunnerRegistration, served: Callable[[list[ClaimedJob]], None]
    ) -> None:
        self._crew = crew
        self._desk = desk
        self._served = served
        #: Of the claim that is under way; 0: none.
        self._number = 0

    def command(self) -> Command | None:
        if not self._desk.up or self._crew.spare() <= 0:
            return None
        self._number, command = self._desk.queue.claim_later(self._crew.pace.brief)
        return command

    def answered(self, reply: Any) -> bool:
        """True if it has brought a job. What it brings while Valkey cannot be asked is found there later."""
        number, self._number = self._number, 0
        try:
            claims = self._desk.queue.claimed(number, reply) if self._desk.up else None
        except ValkeyFailed as error:
            self._desk.cut_off(error)
            return False
        if claims is None:
            return False
        if claims.status == "lost":
            self._desk.lost()
            return False
        if not claims.jobs or not self._desk.ensure_lease(self._crew.stopping):
            return False
        self._served(claims.jobs)
        return True

    def broken(self) -> None:
        """Nobody knows whether it has taken a job, so the queue is asked."""
        if self._number:
            self._number = 0
            self._desk.look_up()
