"""Notices runners that have died, by their beats and by this process's own clock.

Nobody compares clocks: a step of Valkey's clock, or of a host's, makes no runner look dead. And only time
in which this runner could look counts: after an outage of Valkey every runner has a whole lease to come
back, so no healthy one loses its jobs (invariant *no-healthy-kill*).

The runner's standing with the queue: joined, renewed, found again after an outage, or lost.

One beat renews the lease of everything the runner holds, so many busy slots cost no more than one. The
same look at the beats shows which other runners have died; any runner takes a dead one's jobs back.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from worker_runtime.jobs.children.runs import RunningJobs
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.event_sink import EventSink
from worker_runtime.jobs.queue import ClaimedJob, JobQueue, RunnerIdentity
from worker_runtime.jobs.telemetry import JobCounters, JobEventLog
from worker_runtime.process.clock import Backoff
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import Valkey, ValkeyFailed
from worker_runtime.protocol.errors import MalformedMessage


@dataclass(slots=True)
class _ObservedBeat:
    beat: bytes
    still: float = 0.0


class LeaseObserver:
    """`lease` in seconds; looks should come every `lease / 20`."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._most = 3 * self.period
        self._last: float | None = None
        self._seen: dict[str, _ObservedBeat] = {}

    @property
    def period(self) -> float:
        """Seconds between two looks while other runners are there."""
        return min(1.0, self._lease / 20)

    def look(self, beats: dict[str, bytes], own: str, now: float) -> list[tuple[str, bytes]]:
        """Takes the beats of all in; returns those that stood still for a lease. `now` is monotonic."""
        # A look that comes late proves less than it seems: the others may have been held up like this one.
        passed = 0.0 if self._last is None else min(now - self._last, self._most)
        self._last = now
        seen, dead = {}, []
        for runner, beat in beats.items():
            if runner == own:
                continue
            before = self._seen.get(runner)
            if before is None or before.beat != beat:
                before = _ObservedBeat(beat)
            else:
                before.still += passed
            seen[runner] = before
            if before.still >= self._lease:
                dead.append((runner, beat))
        self._seen = seen
        return dead

    def forget(self) -> None:
        """After a lost connection: count anew."""
        self._last = None

    def others(self) -> bool:
        return bool(self._seen)


#: Renewals in one lease.
_RENEWALS_PER_LEASE = 3


class RunnerRegistration:
    """`on_found` gets jobs that a lost reply had claimed; `on_lost` is called when the runner's jobs are no
    longer its own: it was reaped, or Valkey lost its data."""

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
        self._known = False
        self.tally = JobCounters()
        self.sink = EventSink(config.events_to, log) if config.events_to else None
        self._renewed_at: float | None = None
        self._next_renewal = 0.0
        self._next_look = 0.0
        self._due_at: float | None = None
        #: Whether calls may be made now.
        self.up = False
        self.suspended = False
        self._identify()

    def _identify(self) -> None:
        config = self._config
        runner_id = f"{config.name}-{secrets.token_hex(4)}"
        identity = RunnerIdentity(runner_id, config.name, config.node, config.queues, config.version)
        self.queue = JobQueue(self._client, identity, config.tag)
        self.events = JobEventLog(runner_id, config.node, sink=self.sink)

    @property
    def runner_id(self) -> str:
        return self.queue.identity.runner_id

    def left(self) -> float:
        """Seconds until `run_due` has something to do."""
        if not self.up:
            return self._backoff.left()
        wanted = self._next_renewal
        if self._observer.others():
            wanted = min(wanted, self._next_look)
        if self._due_at is not None:
            wanted = min(wanted, self._due_at)
        return max(0.0, wanted - time.monotonic())

    def run_due(self, stopping: bool) -> bool:
        """Does what is due; true if work may have come up meanwhile."""
        now = time.monotonic()
        if not self.up:
            return self._backoff.due() and self._connect() and self._renew(stopping)
        if now >= self._next_renewal:
            return self._renew(stopping)
        if self._due_at is not None and now >= self._due_at:
            return self._renew(stopping)
        if self._observer.others() and now >= self._next_look:
            self._look()
        return False

    @property
    def expects_work(self) -> bool:
        """Jobs wait for their time, or another runner's may have to be taken back."""
        return self._due_at is not None or self._observer.others()

    def renew_soon(self) -> None:
        """The next `run_due` renews."""
        self._next_renewal = 0.0

    def note_due(self, due: float | None) -> None:
        """`due`: seconds until a delayed job may run; None: there is none."""
        self._due_at = None if due is None else time.monotonic() + due

    def look_up(self) -> None:
        """The next `run_due` asks what is in hand: the reply of a claim will never be read."""
        self.up = False

    def cut_off(self, error: ValkeyFailed) -> None:
        """A call failed: nobody knows whether it was heard."""
        if self.up:
            self._log.warning("job_queue_unreachable", code=error.code, reason=error.detail)
        self.up = False
        self._client.close()
        self._observer.forget()
        self._backoff.failed()

    def lost(self) -> None:
        """What was in hand belongs to others; the runner starts anew under another id."""
        self._log.error("job_runner_lost", runner=self.runner_id, jobs=len(self._runs))
        self._on_lost()
        self.events.flush()
        self._identify()
        self._known = False
        self.up = False

    def wrote(self, claimed: ClaimedJob) -> bool:
        """Whether the result that is stored is that of this run: its first sending was heard."""
        try:
            stored = self.queue.result(claimed.job_id)
        except (ValkeyFailed, MalformedMessage):
            return False
        return stored is not None and (stored.runner, stored.attempt) == (self.runner_id, claimed.attempt)

    def leave(self) -> None:
        """Signs off; what is still in hand goes back or fails. Raises `ValkeyFailed`."""
        counted = self.tally.parcel()
        if counted[1]:
            self.queue.renew("suspended", (), counted=counted)
        for job_id, what in self.queue.leave().items():
            self.events.returned(job_id, what, self.runner_id)
        self.events.flush()
        self._client.close()

    def _connect(self) -> bool:
        try:
            held = self.queue.held() if self._known else None
            if self._known and held is None:
                self.lost()
            if not self._known:
                self.queue.join()
                self._known = True
        except ValkeyFailed as error:
            self.cut_off(error)
            return False
        self._backoff.reset()
        self.up = True
        event = "job_runner_registered" if held is None else "job_queue_reached"
        self._log.info(event, runner=self.runner_id, queues=list(self._config.queues))
        if held:
            self._on_found(held)
        return self.up

    def ensure_lease(self, stopping: bool) -> bool:
        """Whether others will leave the runner its jobs for a while: true with a third of the lease left, if
        need be after a renewal. False: they are not its own any more, or nobody knows.

        What a claim brought may have gone to others while its answer was on its way, or this process stood
        still: to be asked before a job begins.
        """
        late = 2 * self._config.lease / _RENEWALS_PER_LEASE
        if self._age() > late and self._renew(stopping) and self._age() > late:
            self.cut_off(ValkeyFailed("a renewal's answer came late"))
        return self.up

    def _age(self) -> float:
        """Seconds since the last renewal was sent."""
        return math.inf if self._renewed_at is None else time.monotonic() - self._renewed_at

    def _renew(self, stopping: bool) -> bool:
        now = time.monotonic()
        busy = len(self._runs) > 0
        state = "busy" if busy else "suspended" if self.suspended or stopping else "idle"
        try:
            counted = self.tally.parcel()
            renewal = self.queue.renew(state, self._runs.job_ids(), self._runs.entry_ttl(), counted)
        except ValkeyFailed as error:
            self.cut_off(error)
            return False
        if not renewal.registered:
            self.lost()
            return False
        self.tally.heard()
        self._note_lateness(now)
        self._next_renewal = now + self._config.lease / _RENEWALS_PER_LEASE
        self.suspended = renewal.suspended
        self.note_due(renewal.due)
        self._judge(renewal.beats)
        return True

    def _note_lateness(self, now: float) -> None:
        """`now`: before the renewal was sent. More than a third of a lease after its time is late."""
        before, self._renewed_at = self._renewed_at, now
        if before is not None and now - before > 2 * self._config.lease / _RENEWALS_PER_LEASE:
            self.tally.renewed_late()
            self._log.warning("job_lease_renewed_late", after_s=round(now - before, 3))

    def _look(self) -> None:
        try:
            self._judge(self.queue.beats())
        except ValkeyFailed as error:
            self.cut_off(error)

    def _judge(self, beats: dict[str, bytes]) -> None:
        now = time.monotonic()
        self._next_look = now + self._observer.period
        self.queue.others = len(beats) > 1
        for runner, beat in self._observer.look(beats, self.runner_id, now):
            try:
                fates = self.queue.reap(runner, beat)
            except ValkeyFailed as error:
                self.cut_off(error)
                return
            if fates is None:
                continue
            self._log.warning("job_runner_reaped", dead=runner, jobs=len(fates))
            for job_id, what in fates.items():
                self.events.returned(job_id, what, runner)
                self.tally.reaped(what)
