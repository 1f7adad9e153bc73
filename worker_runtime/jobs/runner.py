"""The runner: claims jobs, gives each to a child process, and writes how it ended.

One thread, one selector, no job code. It is the parent of the children and the renewer of the lease in
one: nothing that a job does, however busy its processes are, runs in here. All that is written is fenced
and may be repeated, so an outage of Valkey only delays it.
"""

from __future__ import annotations

import gc
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from worker_runtime import kernel
from worker_runtime.backoff import Backoff
from worker_runtime.jobs import reports
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.listener import Listener
from worker_runtime.jobs.nursery import Child, NotForked, Nursery
from worker_runtime.jobs.queue import ClaimedJob, Claims, Finish
from worker_runtime.jobs.registration import Registration
from worker_runtime.jobs.registry import Registry
from worker_runtime.jobs.reports import Assignment, Outcome
from worker_runtime.jobs.runs import Run, Runs
from worker_runtime.jobs.signals import SignalPipe
from worker_runtime.jobs.verdict import Judge, Verdict
from worker_runtime.log import Log
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.exit_codes import ExitCode
from worker_runtime.protocol.job_messages import RESULT_TTL, Job, JobStatus, read_job
from worker_runtime.valkey import Valkey, ValkeyFailed

#: Jobs that are claimed at once. Each may cost a fork, and the lease is renewed between two claims: 64 forks
#: in a row, while those before spin under a quota of a quarter CPU, took longer than a lease (measured).
_AT_ONCE = 4
#: Seconds that a stopping runner tries to write the ends of its last jobs and to sign off.
_FAREWELL = 10.0
#: Seconds after which it signs off no more: who is stopped beside a session has four in all.
_LAST_WORDS = 3.0


@dataclass(slots=True)
class End:
    """The end of one run: to be written, then told to the log. `outcome` is what the queue answered."""

    claimed: ClaimedJob
    job: Job | None
    verdict: Verdict
    finish: Finish
    outcome: str = ""
    #: How often it was sent: after a lost reply it is sent again.
    sent: int = 0


class Runner:
    """One runner process, from its start to its exit code."""

    def __init__(self, config: RunnerConfig, registry: Registry, log: Log) -> None:
        self._config = config
        self._registry = registry
        self._log = log
        self._selector = selectors.DefaultSelector()
        self._runs = Runs(config.kill_grace)
        #: Set by a fork that failed, until one has succeeded.
        self._forkless = False
        self._forks = Backoff(0.25, 5.0)
        self._nursery = Nursery(registry, self._selector, self._heard, config.recycle)
        self._desk = Registration(config, self._runs, log, self._found, self._lost)
        self._bell = self._listener(self._rung)
        self._mail = self._listener(self._told)
        self._ends: list[End] = []
        self._written: list[End] = []
        self._hungry = True
        self._stopping = False
        self._leave_by: float | None = None
        self._idle_since = time.monotonic()
        #: It has been idle for long: one more look, with nobody waiting on the bell, then it ends.
        self._last_look = False

    def _listener(self, on_element: Callable[[bytes], None]) -> Listener:
        client = Valkey(self._config.valkey_url)
        return Listener(client, self._selector, self._log, on_element, self._missed)

    def run(self) -> ExitCode:
        """Runs until told to stop. The first signal lets running jobs end, the second one kills them."""
        kernel.rename("berth-jobs")
        signals = SignalPipe()
        self._selector.register(signals, selectors.EVENT_READ, lambda: self._signalled(signals))
        gc.collect()
        gc.freeze()  # the children's collectors leave these pages alone, so they stay shared
        while not self._ended():
            if self._desk.tend(self._stopping):
                self._hungry = True
            self._mail.tend()
            self._bell.tend()
            self._watch_idleness()
            self._turn()
            self._tell_ends()
            for run in self._runs.kill_late():
                self._log.warning("job_timed_out", job=run.claimed.job_id, timeout_s=run.job.timeout)
            self._desk.events.flush()
            ahead = not self._stopping and self._forks.due() and self._nursery.short_of(1)
            events = self._selector.select(0 if ahead else self._pause())
            if ahead and not events:
                self._fork_ahead()
            for key, _ in events:
                key.data()
        return self._farewell()

    def _pause(self) -> float:
        if self._wants_turn():
            return 0.0
        left = [self._desk.left(), self._mail.left(), self._bell.left(), self._runs.left()]
        if self._desk.sink is not None:
            left.append(self._desk.sink.left())
        if self._config.idle_exit:
            left.append(self._idle_since + self._config.idle_exit - time.monotonic())
        if self._leave_by is not None:
            left.append(self._leave_by - time.monotonic())
        if not self._forks.due():
            left.append(self._forks.left())
        return max(0.0, min(left))

    def _ended(self) -> bool:
        if not self._stopping or self._runs:
            return False
        if self._leave_by is None:
            self._leave_by = time.monotonic() + _FAREWELL
        return not self._ends or time.monotonic() >= self._leave_by

    def _watch_idleness(self) -> None:
        """A ring that comes after the last look stays on its list, for whoever listens next."""
        idle = not (self._runs or self._ends or self._desk.work_to_come or self._desk.suspended)
        if not idle or not self._desk.up:
            self._idle_since = time.monotonic()
        elif self._config.idle_exit and time.monotonic() >= self._idle_since + self._config.idle_exit:
            self._idle_since = time.monotonic()
            self._bell.close()
            self._last_look = self._hungry = True

    def _farewell(self) -> ExitCode:
        self._nursery.end()
        self._bell.close()
        self._mail.close()
        until = time.monotonic() + _LAST_WORDS
        while not self._signed_off(last=time.monotonic() >= until):
            time.sleep(0.05)
        if self._desk.sink is not None:
            self._desk.sink.close()
        self._log.info("job_runner_ended", runner=self._desk.runner_id)
        return ExitCode.OK

    def _signed_off(self, last: bool) -> bool:
        """One try; true if there is to be no other."""
        try:
            self._desk.leave()
        except ValkeyFailed as error:
            if last:  # others will notice, one lease later
                self._log.warning("job_runner_left_silently", code=error.code, reason=error.detail)
            return last
        return True

    # --- claiming ---------------------------------------------------------------------------------

    def _room(self) -> int:
        """Jobs that could be started now."""
        if self._stopping or self._desk.suspended or (self._forkless and self._nursery.short_of(1)):
            return 0
        return self._config.slots - len(self._runs)

    def _wants_turn(self) -> bool:
        return self._desk.up and (bool(self._ends) or (self._hungry and self._room() > 0))

    def _turn(self) -> None:
        """Writes what has ended and claims what there is room for, in one step."""
        if not self._wants_turn():
            return
        want = min(self._room(), _AT_ONCE) if self._hungry else 0
        ends = list(self._ends)
        for end in ends:
            end.sent += 1
        try:
            outcomes, claims = self._desk.queue.turn([end.finish for end in ends], want)
        except ValkeyFailed as error:
            self._desk.cut_off(error)
            return
        del self._ends[: len(ends)]
        for end, outcome in zip(ends, outcomes, strict=True):
            end.outcome = outcome
        self._written += ends
        if claims is not None:
            self._claimed(claims, want)

    def _tell_ends(self) -> None:
        """The log comes last: the next job runs already."""
        for end in self._written:
            wanted = end.verdict.result.status
            repeated = end.outcome == "gone" and end.sent > 1
            if end.outcome == wanted or (repeated and self._desk.wrote(end.claimed)):
                result = end.verdict.result
                self._desk.events.ended(end.claimed, end.job, result)
                self._desk.tally.ended(end.job, result.status, result.finished_at_ms - result.started_at_ms)
            else:
                self._log.warning(
                    "job_end_not_ours", job=end.claimed.job_id, wanted=wanted, became=end.outcome
                )
        self._written.clear()

    def _claimed(self, claims: Claims, want: int) -> None:
        self._hungry = len(claims.jobs) == want  # there may be more of them
        if claims.status == "lost":
            self._desk.lost()
            return
        if claims.status == "stale":  # an earlier reply was lost: ask what is in hand
            self._desk.cut_off(ValkeyFailed("a claim came late"))
            return
        self._desk.suspended = claims.status == "suspended"
        self._desk.note_due(claims.due)
        if claims.jobs and not self._desk.assure(self._stopping):
            return  # what is still ours is found again
        for claimed in claims.jobs:
            self._start(claimed)
        if self._last_look:
            self._last_look = False
            if not claims.jobs and not self._desk.work_to_come and not self._desk.suspended:
                self._stopping = True
                return
        if self._desk.suspended:
            self._pass_on()  # if a ring led here, it was meant for one that may claim
        if len(claims.jobs) < want and not self._desk.suspended:
            self._bell.listen(self._desk.queue.bells())
        if not self._mail.waiting:
            self._mail.listen([self._desk.queue.mail()])

    def _fork_ahead(self) -> None:
        try:
            self._nursery.prepare(1)
            self._forks.reset()
            self._forkless = False
        except NotForked as error:
            self._not_forked(error)

    def _not_forked(self, error: NotForked) -> None:
        """Claims nothing until a child stands ready: each job would lose an attempt."""
        self._log.error("job_child_not_forked", reason=error.detail)
        self._forks.failed()
        self._forkless = self._hungry = True

    def _start(self, claimed: ClaimedJob) -> None:
        job = None
        try:
            job = read_job(claimed.body)
            self._registry.find(job.name)
            child = self._nursery.take()
        except BerthError as error:
            if isinstance(error, NotForked):
                self._not_forked(error)
            self._end(claimed, Judge(self._desk.runner_id).refused(claimed, job, error))
            return
        packet = reports.encode(
            Assignment(fence=claimed.fence, attempt=claimed.attempt, job=msgspec.Raw(claimed.body))
        )
        self._runs.start(claimed, job, child)
        if not child.give(packet):
            self._log.warning("job_child_gone", pid=child.pid, job=claimed.job_id)
        self._desk.events.processing(claimed, job)
        self._desk.tally.started(job, claimed.waited_ms)

    def _found(self, held: list[ClaimedJob]) -> None:
        """After an outage: jobs that were claimed, but the reply was lost."""
        if not self._desk.assure(self._stopping):
            return
        known = self._runs.fences() | {end.claimed.fence for end in self._ends}
        for claimed in held:
            if claimed.fence not in known:
                self._start(claimed)

    def _lost(self) -> None:
        self._runs.abandon()
        self._ends.clear()
        self._mail.close()
        self._bell.close()
        self._hungry = True

    # --- what comes in ----------------------------------------------------------------------------

    def _rung(self, _element: bytes) -> None:
        if self._room() > 0:
            self._hungry = True
        else:
            self._pass_on()

    def _pass_on(self) -> None:
        """Gives a ring back: one that has room gets it."""
        try:
            if self._desk.up:
                self._desk.queue.ring()
        except ValkeyFailed as error:
            self._desk.cut_off(error)

    def _told(self, element: bytes) -> None:
        what, _, rest = element.partition(b" ")
        if what == b"cancel":
            fence, _, job_id = rest.partition(b" ")
            if fence.isdigit() and self._runs.cancel(job_id.decode("utf-8", "replace"), int(fence)):
                self._log.info("job_cancelling", job=job_id.decode("utf-8", "replace"))
        else:
            self._missed()
        self._mail.listen([self._desk.queue.mail()])

    def _missed(self) -> None:
        """Something may have come up: look at the settings, and claim."""
        self._desk.suspended = False
        self._desk.hurry()
        self._hungry = True

    def _signalled(self, signals: SignalPipe) -> None:
        for number in signals.take():
            if number == signal.SIGCHLD:
                for child, status in self._nursery.reap():
                    self._child_ended(child, status)
            elif self._stopping:
                self._log.warning("jobs_killed", jobs=len(self._runs))
                self._runs.abandon()
            else:
                self._log.info("stop_requested", signal=signal.Signals(number).name, jobs=len(self._runs))
                self._stopping = True
                self._bell.close()

    # --- children ---------------------------------------------------------------------------------

    def _heard(self, child: Child) -> None:
        packet = child.hear()
        if packet:
            self._report(child, packet)
        elif packet is not None:  # closed: its end comes as a signal
            self._nursery.unwatch(child)

    def _report(self, child: Child, packet: bytes) -> None:
        run = self._runs.of(child)
        try:
            report = reports.read_report(packet)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._log.error("job_child_talks_nonsense", pid=child.pid)
            child.kill(signal.SIGKILL)
            return
        if run is None or report.fence != run.claimed.fence:
            return
        if isinstance(report, Outcome):
            self._reported(run, report)
            return
        try:
            if self._desk.up:
                self._desk.queue.progress(run.claimed.job_id, report.fence, bytes(report.value))
        except ValkeyFailed as error:
            self._desk.cut_off(error)

    def _reported(self, run: Run, outcome: Outcome) -> None:
        child = run.child
        if run.why and outcome.failure is not None:
            return  # it is being killed, and that is what ended it
        child.capture.read()
        output = child.capture.text()
        judge = Judge(self._desk.runner_id)
        self._runs.end(child)
        self._end(run.claimed, judge.reported(run.claimed, run.job, outcome, output, run.started_ms), run=run)
        if outcome.last:
            child.uses = 0
        self._nursery.give_back(child)

    def _child_ended(self, child: Child, status: int) -> None:
        while packet := child.hear():  # what it said before it ended
            self._report(child, packet)
        child.capture.read()
        run = self._runs.end(child)
        if run is not None:
            how = f"its process ended by signal {-status}" if status < 0 else f"its process exited {status}"
            judge = Judge(self._desk.runner_id)
            verdict = judge.died(run.claimed, run.job, run.why, how, child.capture.text(), run.started_ms)
            self._end(run.claimed, verdict, run=run)
        self._nursery.close(child)

    def _end(self, claimed: ClaimedJob, verdict: Verdict, run: Run | None = None) -> None:
        job = None if run is None else run.job
        ttl = RESULT_TTL if job is None else job.result_ttl
        self._ends.append(End(claimed, job, verdict, verdict.finish(claimed, ttl)))
        self._hungry = True
        if verdict.result.status is JobStatus.FAILED and run is not None and run.why:
            self._log.warning("job_killed", job=claimed.job_id, why=run.why)
