"""The state of one user's worker: a frozen dataclass whose methods return the next state.

The table `ALLOWED` says which state may follow which. `deadline_of` gives every state but the last
one a deadline (deadline-everywhere). Times are Unix seconds, durations are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workflows.entity import copied_fields
from workflows.user_worker.messages import (
    CRASH_WINDOW_S,
    STOP_TIMEOUT_S,
    UserWorkerFacts,
    UserWorkerSettings,
    UserWorkerView,
    WorkerRef,
    WorkerState,
)

#: Seconds after the end of an activity's own time until its state counts as stuck.
STUCK_MARGIN_S = 5.0
#: Seconds a parked user waits for a person; then the run ends and the next order starts afresh.
PARKED_TIMEOUT_S = 24 * 3600.0
#: Crashes within CRASH_WINDOW_S after which a user is parked.
MAX_CRASHES = 5
#: Seconds until the next check of a serving worker of which nothing certain is known.
CHECK_INTERVAL_S = 1200.0
#: Checks within any two idle timeouts. A check is a timer and an activity: with an idle timeout of
#: 30 min these are at most 6 actions an hour (cheap-at-rest). Without this limit, a worker that is
#: used every 16 min would be checked every 16 min (7.5 actions an hour).
MAX_CHECKS_PER_TWO_IDLE_TIMEOUTS = 3
#: Shortest pause in seconds between two checks of a worker that is to move.
MIN_MOVE_CHECK_INTERVAL_S = 5.0
#: Longest time in seconds that a worker may be asked to stay: from the earliest morning to the last
#: bell.
MAX_STAY_S = 4 * 3600.0
#: Times that a fresh session process is given its credentials before it counts as dead.
MAX_RELOAD_ATTEMPTS = 3


#: The states that may follow a state. Everything before Active may be cut short by a shutdown
#: (Draining).
ALLOWED: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.POOL_IDLE: frozenset({WorkerState.CLAIMED, WorkerState.DRAINING}),
    WorkerState.CLAIMED: frozenset(
        {WorkerState.CONNECTING, WorkerState.FAILED, WorkerState.DRAINING}
    ),
    WorkerState.CONNECTING: frozenset(
        {WorkerState.ACTIVE, WorkerState.FAILED, WorkerState.DRAINING}
    ),
    WorkerState.FAILED: frozenset(
        {
            WorkerState.FAILED,
            WorkerState.CLAIMED,
            WorkerState.CONNECTING,
            WorkerState.PARKED,
            WorkerState.DRAINING,
        }
    ),
    WorkerState.ACTIVE: frozenset(
        {
            WorkerState.RECONNECTING,
            WorkerState.FAILED,
            WorkerState.IDLE_TIMEOUT,
            WorkerState.DRAINING,
        }
    ),
    WorkerState.RECONNECTING: frozenset(
        {WorkerState.ACTIVE, WorkerState.FAILED, WorkerState.IDLE_TIMEOUT, WorkerState.DRAINING}
    ),
    WorkerState.IDLE_TIMEOUT: frozenset({WorkerState.DRAINING}),
    WorkerState.DRAINING: frozenset(
        {WorkerState.DRAINING, WorkerState.TERMINATED, WorkerState.POOL_IDLE}
    ),
    WorkerState.PARKED: frozenset({WorkerState.POOL_IDLE, WorkerState.DRAINING}),
    WorkerState.TERMINATED: frozenset(),
}

NEXT_STEP: dict[WorkerState, str] = {
    WorkerState.POOL_IDLE: "waits for someone to need a worker",
    WorkerState.CLAIMED: "gets a worker from the pool, or launches one",
    WorkerState.CONNECTING: "waits for the worker's broker login",
    WorkerState.FAILED: "tries again, or gives up",
    WorkerState.ACTIVE: "ends when idle",
    WorkerState.RECONNECTING: "waits for the worker to get its broker back",
    WorkerState.IDLE_TIMEOUT: "ends the worker",
    WorkerState.DRAINING: "waits until the worker has stopped",
    WorkerState.PARKED: "waits for the signal `resume`",
    WorkerState.TERMINATED: "nothing: the next order starts a new run",
}


class IllegalTransition(ValueError):
    """A change of state that `ALLOWED` does not have."""


@dataclass(frozen=True, kw_only=True)
class UserWorkerState(UserWorkerFacts):
    """Describes one moment in the life of a user's worker. Every method returns the next moment."""

    pool: str
    settings: UserWorkerSettings
    state: WorkerState = WorkerState.POOL_IDLE
    #: The claim under way or fulfilled.
    claim_id: str = ""
    claimed_at: float = 0.0
    connected_at: float = 0.0
    #: The idle time counts from here at the earliest: a worker of the morning stays beyond the
    #: bell.
    stay_until: float = 0.0
    #: Number of the worker's last event.
    sequence: int = 0
    #: Times of the worker's deaths while it was in service, within CRASH_WINDOW_S.
    crashes: tuple[float, ...] = ()
    #: Those of them that the infrastructure caused.
    outages: tuple[float, ...] = ()
    #: Workers that were found gone before their launcher reported how they ended, and when that
    #: was. These times are among `crashes` and `outages` until the report says what they were.
    unreported: dict[str, float] = field(default_factory=dict)
    #: The first claim of this run asked PostgreSQL for the crashes of earlier runs.
    crashes_known: bool = False
    #: Times of the last checks of the serving worker.
    checks: tuple[float, ...] = ()
    #: Until when nothing is tried, after a failure; 0: no such pause.
    retry_at: float = 0.0
    #: Session processes that replaced a dead one in the present worker.
    replacements: int = 0
    #: The last of them waits for its credentials.
    needs_credentials: bool = False
    #: Times that it was given them and did not answer.
    unanswered: int = 0
    #: A move to another version: when to check next whether the worker is quiet enough (0: it is
    #: not to move), by when it moves anyway, and how many seconds without use count as quiet.
    move_at: float = 0.0
    move_by: float = 0.0
    move_quiet: float = 0.0

    # --- properties -------------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """The worker is connected, or was and is getting its broker back by itself."""
        return self.state in (WorkerState.ACTIVE, WorkerState.RECONNECTING)

    @property
    def draining(self) -> bool:
        return self.state in (
            WorkerState.IDLE_TIMEOUT,
            WorkerState.DRAINING,
            WorkerState.TERMINATED,
        )

    @property
    def ended(self) -> bool:
        return self.state == WorkerState.TERMINATED

    @property
    def next_step(self) -> str:
        if self.needs_credentials:
            return "gives the replaced session its credentials"
        # The worker was in service.
        if self.state == WorkerState.FAILED and self.worker is not None and self.health:
            return "waits until the worker's end is certain, then gets another"
        if self.state == WorkerState.FAILED and self.retry_at:
            return "tries again after a pause"
        if self.state == WorkerState.RECONNECTING and self.health.startswith("degraded"):
            return "waits for the worker, which tries the broker again by itself"
        return NEXT_STEP[self.state]

    def deadline_of(self, state: WorkerState, now: float, extra: float = 0.0) -> float | None:
        """Returns the deadline of `state`, entered now; `extra` seconds are a wait within it."""
        own = self.settings
        spans: dict[WorkerState, float | None] = {
            WorkerState.POOL_IDLE: own.claim_timeout,
            # A claim, a launch, and the claim of what was launched.
            WorkerState.CLAIMED: own.claim_timeout + own.launch_timeout + STUCK_MARGIN_S,
            WorkerState.CONNECTING: own.connect_timeout + STUCK_MARGIN_S,
            WorkerState.FAILED: STOP_TIMEOUT_S + STUCK_MARGIN_S,
            WorkerState.ACTIVE: self.idle_at(now) - now,
            WorkerState.RECONNECTING: own.connect_timeout * own.connect_attempts,
            WorkerState.IDLE_TIMEOUT: own.drain_timeout,
            WorkerState.DRAINING: own.drain_timeout + STOP_TIMEOUT_S + STUCK_MARGIN_S,
            WorkerState.PARKED: PARKED_TIMEOUT_S,
            WorkerState.TERMINATED: None,
        }
        span = spans[state]
        return None if span is None else now + span + extra

    def idle_at(self, last: float) -> float:
        """Returns when a worker that was last used at `last` has been idle for long enough to
        end.
        """
        return max(last, self.stay_until) + self.settings.idle_timeout

    def crash_backoff(self) -> float:
        """Returns the seconds before a crashed worker is replaced: at once the first time, then 1,
        2, 4 …"""
        return 0.0 if len(self.crashes) < 2 else float(2 ** (len(self.crashes) - 2))

    @property
    def crash_times(self) -> tuple[float, ...]:
        """Times of recent crashes, without ends of which nobody knows yet whether they were
        crashes."""
        return tuple(at for at in self.crashes if at not in self.unreported.values())

    @property
    def crashes_too_often(self) -> bool:
        return len(set(self.crashes) - set(self.outages)) >= MAX_CRASHES

    # --- changes ----------------------------------------------------------------------------------

    def _to(
        self, state: WorkerState, now: float, *, extra: float = 0.0, **changes: Any
    ) -> UserWorkerState:
        if state not in ALLOWED[self.state]:
            raise IllegalTransition(f"{self.state} → {state}")
        deadline = self.deadline_of(state, now, extra)
        retry_at = now + extra if extra else 0.0
        return replace(
            self, state=state, since=now, deadline=deadline, retry_at=retry_at, **changes
        )

    def opened(self, now: float) -> UserWorkerState:
        """Returns the state at the first moment of a run."""
        return replace(self, since=now, deadline=self.deadline_of(self.state, now))

    def claimed(self, claim_id: str, now: float) -> UserWorkerState:
        """Begins a claim. The user's last worker must have been confirmed to have stopped."""
        if self.worker is not None:
            raise IllegalTransition("a claim while another worker may still run (one-owner)")
        return self._to(
            WorkerState.CLAIMED,
            now,
            claim_id=claim_id,
            attempts=0,
            claimed_at=0.0,
            sequence=0,
            checks=(),
            health="",
            health_at=0.0,
            replacements=0,
            needs_credentials=False,
            unanswered=0,
            move_at=0.0,
            note="",
        )

    def answered(self) -> UserWorkerState:
        """Records that the first claim was answered: the crashes of earlier runs are known."""
        return replace(self, crashes_known=True)

    def assigned(self, worker: WorkerRef) -> UserWorkerState:
        if self.worker is not None and self.worker.claim_id != worker.claim_id:
            raise IllegalTransition("two workers for one user (one-owner)")
        return replace(self, worker=worker)

    def adopted(self, worker: WorkerRef, crashes: Sequence[float], now: float) -> UserWorkerState:
        """Records that the user has this worker already, from a run that somebody ended."""
        return replace(self.assigned(worker), claim_id=worker.claim_id)._counting(crashes, now)

    def stopped(self) -> UserWorkerState:
        """Records that the worker is confirmed to have stopped."""
        if self.serving:
            raise IllegalTransition("a worker in service is not stopped: it fails or drains first")
        return replace(self, worker=None)

    def connecting(self, attempt: int, now: float) -> UserWorkerState:
        return self._to(WorkerState.CONNECTING, now, attempts=attempt)

    def active(self, claimed_at: float, connected_at: float, now: float) -> UserWorkerState:
        if self.worker is None:
            raise IllegalTransition("Active without a worker")
        return self._to(
            WorkerState.ACTIVE,
            now,
            claimed_at=claimed_at,
            connected_at=connected_at,
            last_activity=now,
            reason="",
            health="well",
            health_at=now,
            needs_credentials=False,
            unanswered=0,
        )

    def degraded(self, why: str, at: float) -> UserWorkerState:
        """Records that not all broker connections are healthy, as known at `at`."""
        return replace(self, health=f"degraded: {why}", health_at=at)

    def reconnecting(self, reason: str, now: float) -> UserWorkerState:
        return self._to(WorkerState.RECONNECTING, now, reason=reason)

    def reconnected(self, now: float) -> UserWorkerState:
        """Records that all connections are healthy again. This does not reset the idle timer."""
        back = self._to(
            WorkerState.ACTIVE, now, connected_at=now, reason="", health="well", health_at=now
        )
        deadline = max(self.idle_at(self.last_activity), now)
        return replace(back, deadline=deadline, needs_credentials=False, unanswered=0)

    def session_replaced(self, reason: str, now: float) -> UserWorkerState:
        """Records that the serving worker has a fresh session process, without credentials."""
        waiting = self if self.state == WorkerState.RECONNECTING else self.reconnecting(reason, now)
        return replace(
            waiting.degraded(reason, now),
            reason=reason,
            replacements=self.replacements + 1,
            needs_credentials=True,
            unanswered=0,
        )

    def not_answered(self) -> UserWorkerState:
        """Records that the fresh session process did not take its credentials."""
        return replace(self, unanswered=self.unanswered + 1)

    def provided(self) -> UserWorkerState:
        """Records that the fresh session process has its credentials."""
        return replace(self, needs_credentials=False, unanswered=0)

    def with_note(self, note: str) -> UserWorkerState:
        return replace(self, note=note)

    def failed(self, reason: str, now: float, *, backoff: float = 0.0) -> UserWorkerState:
        """Records that a claim, a launch or a connect failed, or the worker died."""
        return self._to(WorkerState.FAILED, now, reason=reason, extra=backoff)

    def _counting(self, crashes: Sequence[float], now: float) -> UserWorkerState:
        """Adds these crashes to the known ones, and drops those that are too old."""
        recent = sorted(at for at in {*self.crashes, *crashes} if now - at < CRASH_WINDOW_S)
        return replace(self, crashes=tuple(recent))

    def crashed(
        self, reason: str, now: float, *, outage: bool = False, unreported: str = ""
    ) -> UserWorkerState:
        """Records that the worker died in service; with `outage`, by the infrastructure's fault.

        `unreported`: its id, if its launcher has not reported yet how it ended.
        """
        counted = self._counting((now,), now)
        recent = {*self.outages, *((now,) if outage else ())}.intersection(counted.crashes)
        waiting = {worker: at for worker, at in self.unreported.items() if at in counted.crashes}
        if unreported:
            waiting[unreported] = now
        counted = replace(counted, outages=tuple(sorted(recent)), unreported=waiting)
        return counted.failed(reason, now, backoff=counted.crash_backoff())

    def reported(self, worker_id: str, *, planned: bool) -> UserWorkerState:
        """Records that the launcher has reported how a worker ended that was found gone before.

        An end that somebody asked for does not count; any other is a crash of the worker's own.
        """
        waiting = {worker: at for worker, at in self.unreported.items() if worker != worker_id}
        ended_at = self.unreported[worker_id]
        return replace(
            self,
            crashes=tuple(at for at in self.crashes if not planned or at != ended_at),
            outages=tuple(at for at in self.outages if at != ended_at),
            unreported=waiting,
        )

    def gave_up(self, reason: str, now: float) -> UserWorkerState:
        """Drains a worker that cannot get its broker back; that counts like a crash."""
        return self._counting((now,), now).drains(reason, now)

    def backs_off(self, crashes: Sequence[float], now: float) -> UserWorkerState:
        """Lets this start wait as long as earlier runs would have, whose workers crashed, as
        PostgreSQL says."""
        counted = self._counting(crashes, now)
        last = max(counted.crashes, default=now)
        backoff = min(max(last + counted.crash_backoff() - now, 0.0), counted.crash_backoff())
        return counted.failed(f"{len(counted.crashes)} recent crashes", now, backoff=backoff)

    def parked(self, now: float) -> UserWorkerState:
        return self._to(
            WorkerState.PARKED,
            now,
            reason=f"{len(self.crashes)} crashes in {CRASH_WINDOW_S / 60:.0f} min",
        )

    def resumed(self, now: float) -> UserWorkerState:
        """Resumes a parked run, because an operator found the cause. The run stays until the
        crashes are too old to count: a new run would read them from PostgreSQL and be parked
        again."""
        again = self._to(
            WorkerState.POOL_IDLE,
            now,
            crashes=(),
            outages=(),
            unreported={},
            crashes_known=True,
            reason="",
        )
        return replace(again, deadline=now + CRASH_WINDOW_S)

    def idle(self, now: float) -> UserWorkerState:
        return self._to(WorkerState.IDLE_TIMEOUT, now, reason="idle")

    def used(self, at: float, now: float) -> UserWorkerState:
        """Counts the worker's idle time from `at`, when it was last used."""
        return replace(self, last_activity=at).checked(self.idle_at(at), now)

    def stays(self, until: float, now: float) -> UserWorkerState:
        """Keeps the worker from counting as idle before `until`; ignores a time that cannot be a
        bell's."""
        if not max(self.stay_until, now) < until <= now + MAX_STAY_S:  # also what is no number
            return self
        longer = replace(self, stay_until=until)
        if self.state != WorkerState.ACTIVE or self.deadline is None:
            return longer
        return replace(longer, deadline=max(self.deadline, longer.idle_at(self.last_activity)))

    def checked(self, check_at: float, now: float) -> UserWorkerState:
        """Ends a check; the next is at `check_at`, or later if that were one too many
        (`MAX_CHECKS_PER_TWO_IDLE_TIMEOUTS`)."""
        window = 2 * self.settings.idle_timeout
        checks = (*(at for at in self.checks if now - at < window), now)[
            -MAX_CHECKS_PER_TWO_IDLE_TIMEOUTS:
        ]
        earliest = checks[0] + window if len(checks) == MAX_CHECKS_PER_TWO_IDLE_TIMEOUTS else now
        return replace(self, checks=checks, deadline=max(check_at, earliest))

    def postponed(self, until: float) -> UserWorkerState:
        return replace(self, deadline=until)

    def to_move(self, quiet: float, by: float, now: float) -> UserWorkerState:
        """Plans the worker's move: once nobody has used it for `quiet` seconds, at the latest at
        `by`."""
        at = min(max(self.last_activity + quiet, now), max(by, now))
        return replace(self, move_at=at, move_by=by, move_quiet=quiet)

    def move_later(self, at: float, now: float) -> UserWorkerState:
        """Postpones the move of a worker that is in use: the next check is at `at`, but not at
        once, and not after `move_by`."""
        return replace(
            self, move_at=max(min(max(at, now + MIN_MOVE_CHECK_INTERVAL_S), self.move_by), now)
        )

    def drains(self, reason: str, now: float) -> UserWorkerState:
        return self._to(WorkerState.DRAINING, now, reason=reason)

    def reopened(self, now: float, reason: str = "work is waiting") -> UserWorkerState:
        """Starts over because another worker is needed: orders were left in the queue, or the
        worker only moves."""
        return self._to(WorkerState.POOL_IDLE, now, reason=reason)

    def terminated(self, now: float) -> UserWorkerState:
        if self.worker is not None:
            raise IllegalTransition(
                "the run may not end while its worker may still run (one-owner)"
            )
        return self._to(WorkerState.TERMINATED, now)

    def view(self) -> UserWorkerView:
        shown = copied_fields(self, UserWorkerView)
        return UserWorkerView(
            **shown | {"state": str(self.state), "crashes": len(self.crash_times)}
        )
