"""The runner's loop: claims jobs, has child processes run them, and writes how they ended.

One thread with one selector runs no job code. It starts the children and renews the lease, so a
busy job cannot delay a renewal. Everything it writes is fenced and may be repeated, so an outage of
Valkey only delays it.
"""

import errno
import gc
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence

from worker_runtime.jobs.child_pool import ChildPool, JobChild, RunningJobs
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.executor import JobExecutor
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.manifest import PackageConflict
from worker_runtime.jobs.queue import ClaimBatch, ClaimedJob
from worker_runtime.jobs.registration import RunnerRegistration
from worker_runtime.jobs.types.job_registry import JobRegistry, build_registry
from worker_runtime.process import kernel
from worker_runtime.process.doorbell import Doorbell, WakePipe
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Valkey, ValkeyFailed
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.launch import ExitCode, WorkerConfig

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
#: Jobs of one claim. Each may cost a fork, and the lease is renewed between two claims: under a
#: quota of a quarter CPU, 64 forks among busy children took longer than a lease (measured).
_MAX_JOBS_PER_CLAIM = 4
#: Seconds that a stopping runner tries to write the ends of its last jobs.
_SHUTDOWN_TIMEOUT_S = 10.0
#: Seconds that it then tries to sign off. A runner next to a session gets four seconds in all.
_SIGN_OFF_TIMEOUT_S = 3.0
#: Seconds. No other runner waits to take over from a user's,
#: so a long lease will do: a write every 5 s.
_USER_RUNNER_LEASE_S = 15.0
#: Orders come first: at 10, the kernel gives a busy session about nine times as much CPU.
_USER_RUNNER_NICE = 10


class QueueListener(Doorbell):
    """A doorbell that takes one ring for each `listen`, so that a busy runner does not take the
    rings of idle ones.

    Calls `on_element` with the element that arrives. Calls `on_connect` after each new connection:
    an element may have been lost before it.
    """

    def __init__(
        self,
        client: Valkey,
        selector: selectors.BaseSelector,
        log: Log,
        on_element: Callable[[bytes], None],
        on_connect: Callable[[], None],
    ) -> None:
        """Takes a `client` that this listener alone uses."""
        super().__init__(client, (), selector, log)
        self._on_element = on_element
        self._on_connect = on_connect

    def __call__(self) -> None:
        """Reads what has arrived; the runner's loop calls this when the connection is readable."""
        for element in self.read_rings():
            self._keys = ()
            self._on_element(element)

    def seconds_until_due(self) -> float:
        """Returns the seconds until `run_due` has something to do."""
        return super().seconds_until_due() if self._keys else 3600.0

    def listen(self, keys: Sequence[str]) -> None:
        """Waits for one element of these lists, unless it waits already."""
        if not self._keys:
            self._keys = tuple(keys)
            self.run_due()

    def run_due(self) -> bool:
        """Connects, if it should wait and has no live connection; true if it has connected."""
        connected = bool(self._keys) and super().run_due()
        if connected:
            self._on_connect()
        return connected

    def stop(self) -> None:
        """Stops waiting and closes the connection."""
        self._keys = ()
        self.close()


class JobRunner:
    """Runs one runner process, from its start to its exit code."""

    def __init__(self, config: RunnerConfig, registry: JobRegistry, log: Log) -> None:
        self._config = config
        self._registry = registry
        self._log = log
        self._selector = selectors.DefaultSelector()
        self._runs = RunningJobs(config.kill_grace, config.runner_ttl, config.timeout_margin)
        self._registration = RunnerRegistration(
            config, self._runs, log, self._recover_held, self._lost
        )
        self._executor = JobExecutor(
            config, registry, self._runs, self._registration, log, self._make_pool
        )
        self._doorbell = self._listener(self._on_ring)
        self._mailbox = self._listener(self._on_mail)
        self._pending_ends = self._executor.pending_ends
        self._prefetched = self._executor.prefetched
        #: The queue may hold jobs for this runner.
        self._may_have_work = True
        self._leave_by: float | None = None
        self._idle_since = time.monotonic()
        #: The runner has been idle for long. It ends unless one more claim finds a job.
        self._last_claim = False

    def _make_pool(
        self, on_packet: Callable[[JobChild], None], on_ended: Callable[[], None]
    ) -> ChildPool:
        config, registry = self._config, self._registry
        if config.own is None:
            return ChildPool(registry, self._selector, on_packet, config.recycle)
        # Imported here, because only runners of own types need it.
        from worker_runtime.jobs.own_types.pool import ForkServerPool, OwnTypeRegistry

        assert isinstance(registry, OwnTypeRegistry)  # noqa: S101 - `main` builds it for such a runner
        return ForkServerPool(
            registry,
            self._selector,
            on_packet,
            config.recycle,
            own=config.own,
            log=self._log,
            on_ended=on_ended,
            on_ready=self._on_reconnect,
        )

    def _listener(self, on_element: Callable[[bytes], None]) -> QueueListener:
        client = Valkey(self._config.valkey_url)
        return QueueListener(client, self._selector, self._log, on_element, self._on_reconnect)

    def run(self) -> ExitCode:
        """Runs until a signal: the first one lets running jobs end, the second one kills them."""
        kernel.rename_process("berth-jobs")
        signals = WakePipe()
        signals.on_signals(_SIGNALS, lambda: None)
        self._selector.register(signals, selectors.EVENT_READ, lambda: self._on_signals(signals))
        if self._config.own is not None:
            kernel.forbid_dumps()  # jobs of the same user must not read the keys from this memory
        try:
            self._executor.pool.open()
            self._announce_types()
        except BerthError as error:
            return self._refuse_to_run(error)
        gc.collect()
        # The children's garbage collectors leave these pages alone, so they stay shared.
        gc.freeze()
        try:
            while not self._ended():
                self._run_once()
        except PackageConflict as error:
            return self._refuse_to_run(error)
        return self._shut_down()

    def _announce_types(self) -> None:
        """Has the registration announce the application's types."""
        if self._config.own is None:
            return
        from worker_runtime.jobs.own_types.announcement import Announcement
        from worker_runtime.jobs.own_types.pool import ForkServerPool

        pool = self._executor.pool
        assert isinstance(pool, ForkServerPool)  # noqa: S101 - see `_make_pool`
        self._registration.announcement = Announcement(self._config, pool.manifest, self._log)

    def _refuse_to_run(self, error: BerthError) -> ExitCode:
        self._log.error("job_types_unusable", code=error.code, reason=error.detail)
        self._executor.pool.close()
        self._sign_off(last_try=True)
        return ExitCode.BAD_CONFIG

    def _run_once(self) -> None:
        if not self._registration.reachable:
            self._doorbell.stop()  # it may be connected to another server than the next claims
        if self._registration.run_due(self._executor.stopping):
            self._may_have_work = True
        self._mailbox.run_due()
        self._doorbell.run_due()
        self._check_idleness()
        self._executor.run_due()
        self._executor.start_or_release_prefetched()
        self._finish_and_claim()
        self._pending_ends.log_written()
        for run in self._runs.kill_overdue():
            self._log.warning("job_timed_out", job=run.claimed.job_id, timeout_s=run.job.timeout)
        self._registration.events.flush()
        fork = self._executor.needs_spare_child()
        events = self._selector.select(0 if fork else self._seconds_until_due())
        if fork and not events:
            self._may_have_work |= self._executor.fork_spare_child()
        for key, _ in events:
            key.data()

    def _seconds_until_due(self) -> float:
        if self._should_call_queue():
            return 0.0
        due = [
            self._registration.seconds_until_due(),
            self._mailbox.seconds_until_due(),
            self._doorbell.seconds_until_due(),
            self._runs.seconds_until_due(),
            self._prefetched.seconds_until_due(),
            self._executor.seconds_until_due(),
        ]
        if self._config.idle_exit:
            due.append(self._idle_since + self._config.idle_exit - time.monotonic())
        if self._leave_by is not None:
            due.append(self._leave_by - time.monotonic())
        if not self._executor.fork_backoff.due():
            due.append(self._executor.fork_backoff.seconds_until_due())
        return max(0.0, min(due))

    # --- ending -----------------------------------------------------------------------------------

    def _ended(self) -> bool:
        if not self._executor.stopping or self._runs:
            return False
        if self._leave_by is None:
            self._leave_by = time.monotonic() + _SHUTDOWN_TIMEOUT_S
        return not (self._pending_ends or self._prefetched) or time.monotonic() >= self._leave_by

    def _check_idleness(self) -> None:
        """Has the last claim made after a long idle time. Leaves later rings to other runners."""
        registration = self._registration
        busy = self._runs or self._pending_ends or self._prefetched
        if (
            busy
            or registration.expects_work
            or registration.suspended
            or not registration.reachable
        ):
            self._idle_since = time.monotonic()
        elif (
            self._config.idle_exit and time.monotonic() >= self._idle_since + self._config.idle_exit
        ):
            self._idle_since = time.monotonic()
            self._doorbell.stop()
            self._last_claim = self._may_have_work = True

    def _shut_down(self) -> ExitCode:
        self._executor.pool.close()
        self._doorbell.stop()
        self._mailbox.stop()
        until = time.monotonic() + _SIGN_OFF_TIMEOUT_S
        while not self._sign_off(last_try=time.monotonic() >= until):
            time.sleep(0.05)
        self._log.info("job_runner_ended", runner=self._registration.runner_id)
        return ExitCode.OK

    def _sign_off(self, last_try: bool) -> bool:
        """Tries to sign off; returns True if no further try is needed or allowed (`last_try`)."""
        try:
            self._registration.sign_off()
        except ValkeyFailed as error:
            if last_try:  # other runners notice one lease later
                self._log.warning("job_runner_left_silently", code=error.code, reason=error.detail)
            return last_try
        return True

    # --- claiming ---------------------------------------------------------------------------------

    def _should_call_queue(self) -> bool:
        ends = self._pending_ends and not self._prefetched  # prefetched jobs start first
        claim = self._may_have_work and self._executor.free_slots() > 0
        return self._registration.reachable and bool(ends or claim)

    def _finish_and_claim(self) -> None:
        """Writes what has ended and claims what there is room for, in one step."""
        if not self._should_call_queue():
            return
        self._may_have_work |= bool(self._pending_ends)
        max_jobs = prefetch = 0
        if self._may_have_work:
            max_jobs = min(self._executor.free_slots(), _MAX_JOBS_PER_CLAIM)
            prefetch = self._executor.prefetch_room()
        brief = self._executor.runtime_estimate.brief_types() if prefetch else ""
        try:
            outcomes, claims = self._registration.queue.finish_and_claim(
                self._pending_ends.to_write(),
                max_jobs,
                prefetch if brief else 0,
                brief,
                receiver_limit=self._config.receiver_limit,
                receivers=self._executor.receivers(),
            )
        except ValkeyFailed as error:
            self._registration.drop_connection(error)
            return
        self._pending_ends.written(outcomes)
        if claims is not None:
            self._accept_claims(claims, max_jobs)

    def _accept_claims(self, claims: ClaimBatch, max_jobs: int) -> None:
        registration = self._registration
        self._may_have_work = len(claims.jobs) >= max_jobs
        if claims.status == "lost":
            registration.register_anew()
            return
        if claims.status == "stale":  # an earlier reply was lost: ask what the runner holds
            registration.drop_connection(ValkeyFailed("a claim came late"))
            return
        registration.suspended = claims.status == "suspended"
        registration.set_next_due(claims.due)
        if claims.jobs and not registration.ensure_lease(self._executor.stopping):
            return  # the jobs that are still this runner's are recovered after a reconnect
        for claimed in claims.jobs:
            self._executor.accept_claim(claimed)
        if self._last_claim:
            self._last_claim = False
            if not claims.jobs and not registration.expects_work and not registration.suspended:
                self._executor.stopping = True
                return
        if registration.suspended:
            self._return_ring()  # a ring that led here was meant for a runner that may claim
        if len(claims.jobs) < max_jobs and not registration.suspended:
            self._doorbell.listen(registration.queue.doorbells())
        self._listen_for_mail()

    def _recover_held(self, held: list[ClaimedJob]) -> None:
        """Accepts jobs whose claim succeeded but whose reply was lost."""
        self._last_claim &= not held
        if not self._registration.ensure_lease(self._executor.stopping):
            return
        known = self._executor.fences()
        for claimed in sorted(held, key=lambda job: job.fence):
            if claimed.fence not in known:
                self._executor.accept_claim(claimed)

    def _lost(self) -> None:
        self._executor.forget_all()
        self._mailbox.stop()
        self._doorbell.stop()
        self._may_have_work = True

    # --- events -----------------------------------------------------------------------------------

    def _on_ring(self, _element: bytes) -> None:
        if self._executor.free_slots() > 0:
            self._may_have_work = True
            self._finish_and_claim()  # at once: a job is waiting
        else:
            self._return_ring()

    def _return_ring(self) -> None:
        """Gives a ring back, so that a runner with room gets it."""
        try:
            if self._registration.reachable:
                self._registration.queue.return_ring()
        except ValkeyFailed as error:
            self._registration.drop_connection(error)

    def _listen_for_mail(self) -> None:
        self._mailbox.listen([self._registration.queue.mailbox()])

    def _on_mail(self, element: bytes) -> None:
        message, _, rest = element.partition(b" ")
        if message == b"cancel":
            fence, _, job = rest.partition(b" ")
            self._executor.cancel(
                job.decode("utf-8", "replace"), int(fence) if fence.isdigit() else 0
            )
        else:
            self._on_reconnect()
        self._listen_for_mail()

    def _on_reconnect(self) -> None:
        """Renews and claims again, because settings may have changed or a ring was lost. Gives back
        jobs that were claimed under the old settings and have not started."""
        self._registration.suspended = False
        self._prefetched.mark_for_release()
        self._registration.renew_soon()
        self._may_have_work = True

    def _on_signals(self, signals: WakePipe) -> None:
        for number in signals.clear():
            if number == signal.SIGCHLD:
                self._executor.reap_children()
            elif self._executor.stopping:
                self._executor.kill_running()
            else:
                self._log.info(
                    "stop_requested", signal=signal.Signals(number).name, jobs=len(self._runs)
                )
                self._executor.stopping = True
                self._doorbell.stop()


def run_for_user(config: WorkerConfig, shared_state: SharedState, log: Log) -> ExitCode:
    """Runs a user's jobs next to the session, one at a time, until none came for a while or a
    signal comes."""
    os.nice(_USER_RUNNER_NICE)
    try:
        kernel.die_first()  # when memory runs out; by size alone the session would die first
    except OSError as error:
        log.warning("oom_score_not_raised", reason=errno.errorcode.get(error.errno or 0, ""))
    runner = RunnerConfig(
        name=config.worker_id,
        node=config.worker_id,
        valkey_url=config.valkey_url,
        message_keys=shared_state.message_keys().request,
        tag=job_keys.user_tag(shared_state.user_id),
        lease=_USER_RUNNER_LEASE_S,
        idle_exit=config.jobs_idle,
        version=config.version,
        log_level=config.log_level,
    )
    return JobRunner(runner, build_registry(runner, shared_state.message_keys), log).run()
