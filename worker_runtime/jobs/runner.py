"""Signals as numbers on a pipe, so that the runner meets them in its selector and nowhere else.

The runner: claims jobs, has each run by a child process (`crew.py`), and writes how it ended.

One thread, one selector, no job code. It is the parent of the children and the renewer of the lease in
one: nothing that a job does, however busy its processes are, runs in here. All that is written is fenced
and may be repeated, so an outage of Valkey only delays it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import time
from collections.abc import Callable

from worker_runtime.jobs.blocking_claim import BlockingClaim
from worker_runtime.jobs.children.runs import RunningJobs
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.executor import JobExecutor
from worker_runtime.jobs.listener import FollowUpCommand, QueueListener
from worker_runtime.jobs.queue import ClaimBatch, ClaimedJob
from worker_runtime.jobs.registration import RunnerRegistration
from worker_runtime.jobs.types.job_type import JobRegistry
from worker_runtime.process import kernel
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import Valkey, ValkeyFailed
from worker_runtime.protocol.launch import ExitCode

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class SignalPipe:
    """SIGTERM, SIGINT and SIGCHLD of this process, from now on."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def fileno(self) -> int:
        return self._reader

    def take(self) -> list[int]:
        """The numbers of the signals that have come."""
        numbers: list[int] = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reader, 4096):
                numbers += data
        return numbers


#: Jobs that are claimed at once. Each may cost a fork, and the lease is renewed between two claims: 64 forks
#: in a row, while those before spin under a quota of a quarter CPU, took longer than a lease (measured).
_MAX_CLAIM = 4
#: Seconds that a stopping runner tries to write the ends of its last jobs and to sign off.
_SHUTDOWN_LIMIT = 10.0
#: Seconds after which it signs off no more: who is stopped beside a session has four in all.
_SIGN_OFF_LIMIT = 3.0


class JobRunner:
    """One runner process, from its start to its exit code."""

    def __init__(self, config: RunnerConfig, registry: JobRegistry, log: Log) -> None:
        self._config = config
        self._log = log
        self._selector = selectors.DefaultSelector()
        self._runs = RunningJobs(config.kill_grace)
        self._desk = RunnerRegistration(config, self._runs, log, self._found, self._lost)
        self._crew = JobExecutor(config, registry, self._selector, self._runs, self._desk, log)
        self._bell = self._listener(self._rung, BlockingClaim(self._crew, self._desk, self._served))
        self._mail = self._listener(self._told)
        self._ends = self._crew.ends
        self._ahead = self._crew.ahead
        #: What rings bring while the jobs of another claim are taken in.
        self._brought: list[ClaimedJob] | None = None
        #: Something may wait for this runner.
        self._hungry = True
        self._leave_by: float | None = None
        self._idle_since = time.monotonic()
        #: It has been idle for long: one more look, with nobody waiting on the bell, then it ends.
        self._last_look = False

    def _listener(
        self, on_element: Callable[[bytes], None], behind: FollowUpCommand | None = None
    ) -> QueueListener:
        client = Valkey(self._config.valkey_url)
        return QueueListener(client, self._selector, self._log, on_element, self._missed, behind)

    def run(self) -> ExitCode:
        """Runs until told to stop. The first signal lets running jobs end, the second one kills them."""
        kernel.rename_process("berth-jobs")
        signals = SignalPipe()
        self._selector.register(signals, selectors.EVENT_READ, lambda: self._signalled(signals))
        gc.collect()
        gc.freeze()  # the children's collectors leave these pages alone, so they stay shared
        while not self._ended():
            if not self._desk.up:
                self._bell.close()  # it may lead to another server than the next claims
            if self._desk.run_due(self._crew.stopping):
                self._hungry = True
            self._mail.run_due()
            self._bell.run_due()
            self._watch_idleness()
            self._crew.look_ahead()
            self._turn()
            self._ends.tell()
            for run in self._runs.kill_overdue():
                self._log.warning("job_timed_out", job=run.claimed.job_id, timeout_s=run.job.timeout)
            self._desk.events.flush()
            forking = self._crew.needs_spare_child()
            events = self._selector.select(0 if forking else self._pause())
            if forking and not events:
                self._hungry |= self._crew.fork_spare_children()
            for key, _ in events:
                key.data()
        return self._farewell()

    def _pause(self) -> float:
        if self._wants_turn():
            return 0.0
        left = [
            self._desk.left(),
            self._mail.left(),
            self._bell.left(),
            self._runs.left(),
            self._ahead.left(),
        ]
        if self._desk.sink is not None:
            left.append(self._desk.sink.left())
        if self._config.idle_exit:
            left.append(self._idle_since + self._config.idle_exit - time.monotonic())
        if self._leave_by is not None:
            left.append(self._leave_by - time.monotonic())
        if not self._crew.forks.due():
            left.append(self._crew.forks.left())
        return max(0.0, min(left))

    def _ended(self) -> bool:
        if not self._crew.stopping or self._runs:
            return False
        if self._leave_by is None:
            self._leave_by = time.monotonic() + _SHUTDOWN_LIMIT
        return not (self._ends or self._ahead) or time.monotonic() >= self._leave_by

    def _watch_idleness(self) -> None:
        """A ring that comes after the last look stays on its list, for whoever listens next."""
        idle = not (
            self._runs or self._ends or self._ahead or self._desk.expects_work or self._desk.suspended
        )
        if not idle or not self._desk.up:
            self._idle_since = time.monotonic()
        elif self._config.idle_exit and time.monotonic() >= self._idle_since + self._config.idle_exit:
            self._idle_since = time.monotonic()
            self._bell.close()
            self._last_look = self._hungry = True

    def _farewell(self) -> ExitCode:
        self._crew.end()
        self._bell.close()
        self._mail.close()
        until = time.monotonic() + _SIGN_OFF_LIMIT
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

    def _wants_turn(self) -> bool:
        ready = bool(self._ends) and (not self._ahead or self._ends.urgent)
        return self._desk.up and (ready or (self._hungry and self._crew.room() > 0))

    def _turn(self) -> None:
        """Writes what has ended and claims what there is room for, in one step."""
        if not self._wants_turn():
            return
        self._hungry |= bool(self._ends)
        want = min(self._crew.room(), _MAX_CLAIM) if self._hungry else 0
        spare = self._crew.spare() if self._hungry else 0
        try:
            outcomes, claims = self._desk.queue.turn(self._ends.send(), want, spare, self._crew.pace.brief)
        except ValkeyFailed as error:
            self._desk.cut_off(error)
            return
        self._ends.heard(outcomes)
        if claims is not None:
            self._claimed(claims, want)

    def _claimed(self, claims: ClaimBatch, want: int) -> None:
        self._hungry = len(claims.jobs) >= want  # there may be more of them
        if claims.status == "lost":
            self._desk.lost()
            return
        if claims.status == "stale":  # an earlier reply was lost: ask what is in hand
            self._desk.cut_off(ValkeyFailed("a claim came late"))
            return
        self._desk.suspended = claims.status == "suspended"
        self._desk.note_due(claims.due)
        if claims.jobs and not self._desk.ensure_lease(self._crew.stopping):
            return  # what is still ours is found again
        if claims.jobs:
            self._take_in(claims.jobs)
        if self._last_look:
            self._last_look = False
            if not claims.jobs and not self._desk.expects_work and not self._desk.suspended:
                self._crew.stopping = True
                return
        if self._desk.suspended:
            self._pass_on()  # if a ring led here, it was meant for one that may claim
        if len(claims.jobs) < want and not self._desk.suspended:
            self._bell.listen(self._desk.queue.bells())
        if not self._mail.waiting:
            self._mail.listen([self._desk.queue.mail()])

    def _take_in(self, jobs: list[ClaimedJob]) -> None:
        """With what a ring has brought by now: what was claimed first begins first."""
        brought: list[ClaimedJob] = []
        self._brought = brought
        self._bell.hear()
        self._brought = None
        if self._desk.up:  # else they are not its own any more, or found again
            for claimed in sorted([*jobs, *brought], key=lambda one: one.fence):
                self._crew.accept_claim(claimed)

    def _found(self, held: list[ClaimedJob]) -> None:
        """Jobs that were claimed, but the reply was lost."""
        self._last_look &= not held
        if not self._desk.ensure_lease(self._crew.stopping):
            return
        known = self._crew.fences()
        for claimed in sorted(held, key=lambda one: one.fence):
            if claimed.fence not in known:
                self._crew.accept_claim(claimed)

    def _lost(self) -> None:
        self._crew.abandon()
        self._mail.close()
        self._bell.close()
        self._hungry = True

    # --- what comes in ----------------------------------------------------------------------------

    def _served(self, jobs: list[ClaimedJob]) -> None:
        """The ring has brought a job: there may be more of them."""
        self._hungry = True
        if self._brought is None:
            for claimed in jobs:
                self._crew.accept_claim(claimed)
        else:
            self._brought += jobs

    def _rung(self, _element: bytes) -> None:
        if self._crew.room() > 0:
            self._hungry = True
            if self._brought is None:
                self._turn()  # before all else: somebody waits for this job
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
            fence, _, job = rest.partition(b" ")
            self._crew.cancel(job.decode("utf-8", "replace"), int(fence) if fence.isdigit() else 0)
        else:
            self._missed()
        self._mail.listen([self._desk.queue.mail()])

    def _missed(self) -> None:
        """Something may have come up: look at the settings, and claim. What was claimed by the old ones and
        has not begun is claimed anew."""
        self._desk.suspended = False
        self._ahead.send_back()
        self._desk.renew_soon()
        self._hungry = True

    def _signalled(self, signals: SignalPipe) -> None:
        for number in signals.take():
            if number == signal.SIGCHLD:
                self._crew.reap()
            elif self._crew.stopping:
                self._crew.kill()
            else:
                self._log.info("stop_requested", signal=signal.Signals(number).name, jobs=len(self._runs))
                self._crew.stopping = True
                self._bell.close()
