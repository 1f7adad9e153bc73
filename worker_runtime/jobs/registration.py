"""Keeps a runner registered with the queue: its lease, its recovery, its watch over other runners.

One beat renews the lease of all jobs that the runner holds. Every runner watches the beats of the
others by its own clock and takes a dead one's jobs back.
"""

import math
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from worker_runtime.jobs.child_pool import RunningJobs
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.protocol.telemetry import CounterKind, error_report
from worker_runtime.jobs.queue import ClaimedJob, JobQueue, RunnerIdentity
from worker_runtime.jobs.telemetry import JobCounters, JobEventLog
from worker_runtime.process.clock import Backoff
from worker_runtime.process.log import Log, recent_errors
from worker_runtime.process.valkey import Valkey, ValkeyFailed
from worker_runtime.protocol.errors import MalformedMessage

if TYPE_CHECKING:
    from worker_runtime.jobs.own_types.announcement import Announcement

#: Renewals in one lease.
_RENEWALS_PER_LEASE = 3


class LeaseObserver:
    """Finds runners whose beat has not changed for a lease. Check the beats every `period` seconds.

    No clocks are compared, so a step of Valkey's clock or of a host's makes no runner look dead.
    Only time in which this runner could check counts: after an outage of Valkey every runner has a
    whole lease to come back, and no healthy one loses its jobs (invariant *no-healthy-kill*).
    """

    def __init__(self, lease: float) -> None:
        """Observes runners whose lease is `lease` seconds."""
        self._lease = lease
        self._max_step = 3 * self.period
        self._last: float | None = None
        #: Each runner's beat, and the seconds for which it has not changed.
        self._seen: dict[str, tuple[bytes, float]] = {}

    @property
    def period(self) -> float:
        """Seconds between two checks while there are other runners."""
        return min(1.0, self._lease / 20)

    def check(self, beats: dict[str, bytes], own: str, now: float) -> list[tuple[str, bytes]]:
        """Takes the beats of all runners; returns those that are dead. `now`: monotonic seconds."""
        # A late check proves less than it seems:
        # the other runners may have been held up like this one.
        passed = 0.0 if self._last is None else min(now - self._last, self._max_step)
        self._last = now
        seen, dead = {}, []
        for runner, beat in beats.items():
            if runner == own:
                continue
            before, unchanged = self._seen.get(runner, (b"", 0.0))
            unchanged = unchanged + passed if beat == before else 0.0
            seen[runner] = beat, unchanged
            if unchanged >= self._lease:
                dead.append((runner, beat))
        self._seen = seen
        return dead

    def pause(self) -> None:
        """Ignores the time until the next check, because the connection was lost."""
        self._last = None

    def has_others(self) -> bool:
        return bool(self._seen)


class RunnerRegistration:
    """Keeps one runner registered.

    `on_found` gets jobs whose claim succeeded although its reply was lost. `on_lost` is called when
    the jobs no longer belong to this runner: another runner reaped it, or Valkey lost its data.
    """

    def __init__(
        self,
        config: RunnerConfig,
        runs: RunningJobs,
        log: Log,
        on_found: Callable[[list[ClaimedJob]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._config = config
        self._runs = runs
        self._log = log
        self._on_found = on_found
        self._on_lost = on_lost
        self._client = Valkey(config.valkey_url, connect_timeout=0.5, timeout=1.0)
        self._observer = LeaseObserver(config.lease)
        self._backoff = Backoff(0.05, 1.0)
        self._registered = False
        self.counters = JobCounters()
        self._renewed_at: float | None = None
        self._next_renewal = 0.0
        self._next_check = 0.0
        self._due_at: float | None = None
        #: True if the queue may be called now.
        self.reachable = False
        self.suspended = False
        #: The announcement by which a runner of own types tells the queue of them; None for a
        #: runner of Berth's types.
        self.announcement: Announcement | None = None
        self._take_identity()

    def _take_identity(self) -> None:
        config = self._config
        runner_id = f"{config.name}-{secrets.token_hex(4)}"
        identity = RunnerIdentity(
            runner_id, config.name, config.node, config.served_queues, config.version
        )
        self.queue = JobQueue(self._client, identity, config.tag)
        self.queue.failed_ttl = config.failed_ttl
        self.queue.runner_ttl = config.runner_ttl
        self.events = JobEventLog(runner_id, config.node)

    @property
    def runner_id(self) -> str:
        return self.queue.identity.runner_id

    @property
    def expects_work(self) -> bool:
        """Returns True if jobs wait for their time, or another runner's jobs may come back."""
        return self._due_at is not None or self._observer.has_others()

    def seconds_until_due(self) -> float:
        """Returns the seconds until `run_due` has something to do."""
        if not self.reachable:
            return self._backoff.seconds_until_due()
        due = self._next_renewal
        if self._observer.has_others():
            due = min(due, self._next_check)
        if self._due_at is not None:
            due = min(due, self._due_at)
        return max(0.0, due - time.monotonic())

    def run_due(self, stopping: bool) -> bool:
        """Connects, renews or checks other runners if that is due;
        true if there may be work now."""
        now = time.monotonic()
        if not self.reachable:
            return self._backoff.due() and self._connect() and self._renew(stopping)
        if now >= self._next_renewal or (self._due_at is not None and now >= self._due_at):
            return self._renew(stopping)
        if self._observer.has_others() and now >= self._next_check:
            try:
                self._reap_dead(self.queue.beats())
            except ValkeyFailed as error:
                self.drop_connection(error)
        return False

    def renew_soon(self) -> None:
        """Lets the next `run_due` renew the lease."""
        self._next_renewal = 0.0

    def set_next_due(self, due: float | None) -> None:
        """Sets the seconds until a delayed job is due; None if there is none."""
        self._due_at = None if due is None else time.monotonic() + due

    def ensure_lease(self, stopping: bool) -> bool:
        """Renews the lease if less than a third of it is left. Call it before a job starts.

        Returns True if at least a third is left then. Returns False if the jobs belong to other
        runners, or if nobody knows. The lease may be old here because a claim's reply came late or
        this process stood still.
        """
        max_age = 2 * self._config.lease / _RENEWALS_PER_LEASE
        if self._lease_age() > max_age and self._renew(stopping) and self._lease_age() > max_age:
            self.drop_connection(ValkeyFailed("a renewal's answer came late"))
        return self.reachable

    def drop_connection(self, error: ValkeyFailed) -> None:
        """Closes the connection after a call that Valkey may or may not have carried out; `run_due`
        connects again after a backoff."""
        if self.reachable:
            self._log.warning("job_queue_unreachable", code=error.code, reason=error.detail)
        self.reachable = False
        self._client.close()
        self._observer.pause()
        self._backoff.failed()

    def register_anew(self) -> None:
        """Starts again under another id, because the runner's jobs belong to others now."""
        self._log.error("job_runner_lost", runner=self.runner_id, jobs=len(self._runs))
        self._on_lost()
        self.events.flush()
        self._take_identity()
        self._registered = False
        self.reachable = False

    def has_written(self, claimed: ClaimedJob) -> bool:
        """Returns True if the stored result is that of this run, because its first sending
        succeeded."""
        try:
            stored = self.queue.result(claimed.job_id)
        except (ValkeyFailed, MalformedMessage):
            return False
        return stored is not None and (stored.runner, stored.attempt) == (
            self.runner_id,
            claimed.attempt,
        )

    def sign_off(self) -> None:
        """Removes the runner. Jobs that it still holds go back or fail. Raises `ValkeyFailed`."""
        counted = self.counters.next_batch()
        if counted[1]:
            self.queue.renew("suspended", (), counted=counted)
        for job_id, fate in self.queue.sign_off().items():
            self.events.log_returned(job_id, fate, self.runner_id)
        self.events.flush()
        self._client.close()

    def _connect(self) -> bool:
        try:
            held = self.queue.list_held() if self._registered else None
            if self._registered and held is None:
                self.register_anew()
            if not self._registered:
                self.queue.join()
                if self.announcement is not None:
                    self.announcement.make(self.queue)
                self._registered = True
        except ValkeyFailed as error:
            self.drop_connection(error)
            return False
        self._backoff.reset()
        self.reachable = True
        event = "job_runner_registered" if held is None else "job_queue_reached"
        self._log.info(event, runner=self.runner_id, queues=list(self._config.queues))
        if held:
            self._on_found(held)
        return self.reachable

    def _lease_age(self) -> float:
        """Returns the seconds since the last renewal was sent."""
        return math.inf if self._renewed_at is None else time.monotonic() - self._renewed_at

    def _renew(self, stopping: bool) -> bool:
        sent_at = time.monotonic()
        busy = len(self._runs) > 0
        state = "busy" if busy else "suspended" if self.suspended or stopping else "idle"
        try:
            counted = self.counters.next_batch()
            renewal = self.queue.renew(state, self._runs.job_ids(), self._runs.entry_ttl(), counted)
            if self.announcement is not None and renewal.registered:
                self.announcement.handlers.enqueue_due(self._client)
            while self._config.report_errors and recent_errors:
                self.queue.report_error(*error_report("jobs", *recent_errors.popleft()))
        except ValkeyFailed as error:
            self.drop_connection(error)
            return False
        if not renewal.registered:
            self.register_anew()
            return False
        self.counters.acknowledged()
        self._count_lateness(sent_at)
        self._next_renewal = sent_at + self._config.lease / _RENEWALS_PER_LEASE
        self.suspended = renewal.suspended
        self.set_next_due(renewal.due)
        self._reap_dead(renewal.beats)
        return True

    def _count_lateness(self, sent_at: float) -> None:
        """Counts a renewal that was sent more than a third of a lease after its time."""
        before, self._renewed_at = self._renewed_at, sent_at
        if before is not None and sent_at - before > 2 * self._config.lease / _RENEWALS_PER_LEASE:
            self.counters.add(CounterKind.LATE)
            self._log.warning("job_lease_renewed_late", after_s=round(sent_at - before, 3))

    def _reap_dead(self, beats: dict[str, bytes]) -> None:
        now = time.monotonic()
        self._next_check = now + self._observer.period
        self.queue.others = len(beats) > 1
        for runner, beat in self._observer.check(beats, self.runner_id, now):
            try:
                fates = self.queue.reap(runner, beat)
            except ValkeyFailed as error:
                self.drop_connection(error)
                return
            if fates is None:  # it has beaten since
                continue
            self._log.warning("job_runner_reaped", dead=runner, jobs=len(fates))
            for job_id, fate in fates.items():
                self.events.log_returned(job_id, fate, runner)
                self.counters.add(CounterKind.REAPED, (fate,))
