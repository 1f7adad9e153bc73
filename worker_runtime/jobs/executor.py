"""The children at work: jobs are given to them, what they say is heard, and every run comes to an end."""

from __future__ import annotations

import selectors
import signal
import time

import msgspec

from worker_runtime.jobs import prefetch
from worker_runtime.jobs.children import child_messages
from worker_runtime.jobs.children.child_messages import JobAssignment, RunOutcome
from worker_runtime.jobs.children.child_pool import ChildPool, JobChild, NotForked
from worker_runtime.jobs.children.runs import JobRun, RunningJobs
from worker_runtime.jobs.completion import PendingRunEnds, RunJudge, RunVerdict
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.prefetch import PrefetchedJobs, RuntimeEstimate
from worker_runtime.jobs.protocol.messages import Job, JobStatus, read_job
from worker_runtime.jobs.queue import ClaimedJob
from worker_runtime.jobs.registration import RunnerRegistration
from worker_runtime.jobs.types.job_type import JobRegistry
from worker_runtime.process.clock import Backoff
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import ValkeyFailed
from worker_runtime.protocol.errors import BerthError

#: Children that are forked in a row while jobs come quickly. After a fork the runner has to copy each page
#: that it writes to, 400 for a job (measured): so it does for every fourth one only. No more are forked in a
#: row than are claimed at once, for the same reason (`runner.py`).
_FORK_BATCH = 4
#: Jobs come quickly if so often, one time after the other, the children that were forked last were used up
#: within so many seconds for each.
_OFTEN, _QUICK = 4, 0.05


class JobExecutor:
    """All that one runner has in hand, from the claim to the end of each run."""

    def __init__(
        self,
        config: RunnerConfig,
        registry: JobRegistry,
        selector: selectors.BaseSelector,
        runs: RunningJobs,
        desk: RunnerRegistration,
        log: Log,
    ) -> None:
        self._config = config
        self._registry = registry
        self._runs = runs
        self._desk = desk
        self._log = log
        self._nursery = ChildPool(registry, selector, self._heard, config.recycle)
        #: Set by a fork that failed, until one has succeeded.
        self._forkless = False
        self.forks = Backoff(0.25, 5.0)
        #: Until then, those that were forked last count as used up quickly; and how often they were.
        self._quick_until = 0.0
        self._quick = 0
        self.ends = PendingRunEnds(desk, log)
        self.ahead = PrefetchedJobs()
        self.pace = RuntimeEstimate()
        #: No further job begins.
        self.stopping = False
        #: Fences of runs that a second signal ended. They stay in hand until the runner signs off.
        self._killed: set[int] = set()

    def room(self) -> int:
        """Jobs that could be claimed and started now."""
        if self.ahead or not self._may_start():
            return 0
        return self._config.slots - len(self._runs)

    def spare(self) -> int:
        """Jobs that could be claimed ahead now: none behind a job whose end should not wait for theirs."""
        if self._config.recycle == 1 or not self.pace.brief or not self._may_start():
            return 0
        if not all(run.plain and self.pace.is_brief(run.job.name) for run in self._runs):
            return 0
        return prefetch.MAX_PREFETCHED - len(self.ahead)

    def _may_start(self) -> bool:
        halted = self.stopping or self._desk.suspended
        return not (halted or (self._forkless and self._nursery.short_of(1)))

    def needs_spare_child(self) -> bool:
        """Whether one should be forked ahead of need."""
        return not self.stopping and self.forks.due() and self._nursery.short_of(1)

    def fork_spare_children(self) -> bool:
        """Makes a child for the next job, or a few; true if there was no room for one before."""
        forkless = self._forkless
        self._quick = self._quick + 1 if time.monotonic() < self._quick_until else 0
        wanted = _FORK_BATCH if self._config.recycle == 1 and self._quick >= _OFTEN else 1
        try:
            self._nursery.prepare(wanted)
        except NotForked as error:
            self._not_forked(error)
            return False
        self._quick_until = time.monotonic() + wanted * _QUICK
        self.forks.reset()
        self._forkless = False
        return forkless

    def end(self) -> None:
        """Kills all children."""
        self._nursery.end()

    def abandon(self) -> None:
        """Forgets all that is in hand: it belongs to others now."""
        self._runs.abandon()
        self._killed.clear()
        self.ends.clear()
        self.ahead.clear()

    def kill(self) -> None:
        """Kills all that runs. What is to become of it is said when the runner signs off."""
        self._log.warning("jobs_killed", jobs=len(self._runs))
        self._killed |= self._runs.fences()
        self._runs.abandon()

    def fences(self) -> set[int]:
        """Of all claims that are in hand."""
        return self._runs.fences() | self.ends.fences() | self.ahead.fences() | self._killed

    def _not_forked(self, error: NotForked) -> None:
        """Claims nothing until a child stands ready: each job would lose an attempt."""
        self._log.error("job_child_not_forked", reason=error.detail)
        self._quick_until = 0.0
        self.forks.failed()
        self._forkless = True

    def accept_claim(self, claimed: ClaimedJob) -> None:
        """Begins a job; or lets it wait, if all slots are taken or none may begin now."""
        job = None
        try:
            job = read_job(claimed.body)
            self._registry.find(job.name)
        except BerthError as error:
            self._refuse(claimed, job, error)
            return
        if claimed.cancelled:  # while nobody knew that it was here
            self._cancelled(claimed, job)
        elif len(self._runs) < self._config.slots and self._may_start():
            self._begin(claimed, job, claimed.waited_ms)
        else:
            self.ahead.add(claimed, job)

    def _begin_next(self) -> None:
        """Begins what waits in hand, as far as slots are free."""
        while self.ahead.startable() and len(self._runs) < self._config.slots and self._may_start():
            if not self._desk.up or not self._desk.ensure_lease(self.stopping) or self._desk.suspended:
                return
            waiting = self.ahead.take()
            self._begin(waiting.claimed, waiting.job, waiting.waited_ms())

    def _begin(self, claimed: ClaimedJob, job: Job, waited_ms: int) -> None:
        try:
            child = self._give(claimed)
        except NotForked as error:
            self._not_forked(error)
            self._refuse(claimed, job, error)
            return
        self._runs.start(claimed, job, child)
        self._desk.events.processing(claimed, job)
        self._desk.tally.started(job, waited_ms)

    def _give(self, claimed: ClaimedJob) -> JobChild:
        """Gives a job to a child; to another one, if that has ended right after its last job."""
        packet = child_messages.encode_message(
            JobAssignment(fence=claimed.fence, attempt=claimed.attempt, job=msgspec.Raw(claimed.body))
        )
        child = self._nursery.take()
        if not child.give(packet):
            self._log.warning("job_child_gone", pid=child.pid, job=claimed.job_id)
            child = self._nursery.take()
            child.give(packet)
        return child

    def look_ahead(self) -> None:
        """Begins what was claimed ahead; or gives it back, if it waits for long or must not begin now."""
        if not self.ahead:
            return
        self._begin_next()
        if self.stopping or self._desk.suspended:
            self.ahead.send_back()
        back = self.ahead.going_back()
        if not back or not self._desk.up:
            return
        try:
            fates = self._desk.queue.release([waiting.claimed for waiting in back])
        except ValkeyFailed as error:
            self._desk.cut_off(error)
            return
        self.ahead.clear()
        self._log.debug("jobs_given_back", jobs=len(back))
        for waiting, fate in zip(back, fates, strict=True):
            if fate == "cancelled":
                self._cancelled(waiting.claimed, waiting.job)

    def cancel(self, job_id: str, fence: int) -> None:
        """Ends a job, if it is in hand: kills it, or it never begins."""
        if self._runs.cancel(job_id, fence):
            self._log.info("job_cancelling", job=job_id)
        elif waiting := self.ahead.cancel(job_id, fence):
            self._cancelled(waiting.claimed, waiting.job)

    def _cancelled(self, claimed: ClaimedJob, job: Job) -> None:
        verdict = RunJudge(self._desk.runner_id).cancelled(claimed)
        self._end(claimed, job, verdict, ran=False)

    # --- children ---------------------------------------------------------------------------------

    def _heard(self, child: JobChild) -> None:
        packet = child.hear()
        if packet:
            self._report(child, packet)
        elif packet is not None:  # closed: its end comes as a signal
            self._nursery.unwatch(child)

    def _report(self, child: JobChild, packet: bytes) -> None:
        run = self._runs.of(child)
        try:
            report = child_messages.read_report(packet)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._log.error("job_child_talks_nonsense", pid=child.pid)
            child.kill(signal.SIGKILL)
            return
        if run is None or report.fence != run.claimed.fence:
            return
        if isinstance(report, RunOutcome):
            self._reported(run, report)
            return
        try:
            if self._desk.up:
                self._desk.queue.progress(run.claimed.job_id, report.fence, bytes(report.value))
        except ValkeyFailed as error:
            self._desk.cut_off(error)

    def _reported(self, run: JobRun, outcome: RunOutcome) -> None:
        child = run.child
        if run.why and outcome.failure is not None:
            return  # it is being killed, and that is what ended it
        child.capture.read()
        output = child.capture.text()
        self._runs.end(child)
        if outcome.last:
            child.uses = 0
        elif run.why:
            child.uses = 0  # it got a signal: what that does to the next job, nobody knows
            self._nursery.kill(child)
        self._nursery.give_back(child)
        self.pace.ran(run.job.name, outcome.took)
        runner = self._desk.runner_id
        self._begin_next()
        if self._desk.runner_id != runner:
            return  # meanwhile all that was in hand was lost, and this end with it
        judge = RunJudge(self._desk.runner_id)
        verdict = judge.reported(run.claimed, run.job, outcome, output, run.started_ms)
        self._end(run.claimed, run.job, verdict, urgent=not run.plain)

    def reap(self) -> None:
        """Children have ended."""
        for child, status in self._nursery.reap():
            self._child_ended(child, status)

    def _child_ended(self, child: JobChild, status: int) -> None:
        run = self._runs.of(child)
        while packet := child.hear():  # what it said before it ended
            self._report(child, packet)
        child.capture.read()
        if run is not None and self._runs.of(child) is run:
            self._runs.end(child)
            how = f"its process ended by signal {-status}" if status < 0 else f"its process exited {status}"
            judge = RunJudge(self._desk.runner_id)
            verdict = judge.died(run.claimed, run.job, run.why, how, child.capture.text(), run.started_ms)
            self._end(run.claimed, run.job, verdict, why=run.why)
        self._nursery.close(child)

    def _refuse(self, claimed: ClaimedJob, job: Job | None, error: BerthError) -> None:
        self._end(claimed, None, RunJudge(self._desk.runner_id).refused(claimed, job, error), ran=False)

    def _end(
        self,
        claimed: ClaimedJob,
        job: Job | None,
        verdict: RunVerdict,
        *,
        ran: bool = True,
        urgent: bool = True,
        why: str = "",
    ) -> None:
        self.ends.add(claimed, job, verdict, ran=ran, urgent=urgent)
        if verdict.result.status is JobStatus.FAILED and why:
            self._log.warning("job_killed", job=claimed.job_id, why=why)
