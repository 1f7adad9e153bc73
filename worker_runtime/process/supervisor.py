"""The supervisor process: renews the mark, and with it the lease, and watches the session's pulse.

It runs no broker code and does not wait for the session, so neither a blocking broker call nor a
busy job delays a renewal, which takes at most `_CONNECT_TIMEOUT_S + _COMMAND_TIMEOUT_S` seconds.
"""

import math
import os
import select
import signal
import time
from collections.abc import Callable

import hiredis

from worker_runtime.process import kernel
from worker_runtime.process.clock import NS_PER_S
from worker_runtime.process.doorbell import JobDoorbell, WakePipe
from worker_runtime.process.log import Log
from worker_runtime.process.mark import WorkerMark, new_worker_event
from worker_runtime.process.replacement import KillReason, record_kill
from worker_runtime.process.shared_state import KILL_MARGIN_S, Lease, SharedState
from worker_runtime.process.valkey import Command, Valkey, ValkeyFailed
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import ExitCode, WorkerConfig
from worker_runtime.protocol.messages import WorkerEventKind
from worker_runtime.protocol.worker_reports import sign_event

#: Seconds before a renewal is retried that failed or found no owner key.
_RETRY_INTERVAL_S = 1.0
#: Seconds after which the event of a missing owner key is repeated: the first may have been lost
#: with the key.
_EVENT_REPEAT_INTERVAL_S = 30.0
#: Seconds to connect, and to wait for a command's reply.
_CONNECT_TIMEOUT_S = 0.5
_COMMAND_TIMEOUT_S = 1.0
#: Seconds that the last commands may take. The zygote waits a little longer.
_LAST_COMMAND_TIMEOUT_S = 3.3
#: Longest time between two checks of the pulse, in seconds.
_PULSE_CHECK_INTERVAL_S = 1.0
#: If two checks are more seconds apart, this process itself was stalled. Waits for Valkey take
#: less.
_MIN_STALL_S = 3.0
#: Seconds that a session may wait for the host, beyond the timeout, before it counts as frozen
#: anyway.
_MAX_HOST_WAIT_S = 7.0
#: Seconds that the zygote gets to replace a killed session. On a busy host the kernel needs most of
#: this to end it.
_ZYGOTE_TIMEOUT_S = 6.0


class PulseWatch:
    """Counts the seconds without a sign of life of the session, in this process's own time.

    The session pulses in the shared state at least once a second. Around a call that may take
    longer it says until when it may be busy instead. Whatever else keeps it from pulsing (a call
    past its limit, SIGSTOP, a loop that spins, native code that holds the interpreter's lock) looks
    the same from here: the session is frozen.

    A host that stands still is not the session's fault. So one check counts for at most a tick,
    however long ago the last one was; after a longer stall of this process the session gets its
    whole time anew; and seconds in which the session waited for a CPU or a disk do not count, up to
    `_MAX_HOST_WAIT_S`.
    """

    def __init__(
        self,
        shared_state: SharedState,
        timeout: float,
        clock: Callable[[], int] = time.monotonic_ns,
        host_wait: Callable[[int], float] = kernel.host_wait,
    ) -> None:
        """Watches the session's pulse. `host_wait` is `kernel.host_wait` for the session's pid."""
        self._shared_state = shared_state
        self._timeout = timeout
        self._clock = clock
        self._host_wait = host_wait
        self._seen = (0, 0, 0)
        self._checked_at = clock()
        self._still = 0.0
        #: How many seconds of `_still` the session waited for its host, and its host wait in all at
        #: the last check.
        self._excused = self._waited = 0.0

    def is_frozen(self) -> bool:
        """Checks once. Returns True if `timeout` seconds have passed without a sign of life; then
        counts anew."""
        shared_state, now = self._shared_state, self._clock()
        passed, self._checked_at = (now - self._checked_at) / NS_PER_S, now
        seen = (shared_state.session_number, shared_state.pulse, shared_state.busy_until)
        if seen != self._seen or passed > _MIN_STALL_S:
            self._seen, self._still, self._excused, self._waited = seen, 0.0, 0.0, math.inf
        passed = 0.0 if passed > _MIN_STALL_S else min(passed, _PULSE_CHECK_INTERVAL_S)
        # Counted from the pulse itself, not from the check that found it.
        self._still = max(
            0.0, min(self._still + passed, (now - self._silence_until_ns()) / NS_PER_S)
        )
        if self._still:
            waited = self._host_wait(shared_state.session_pid)
            self._excused += (
                passed if waited == math.inf else min(max(0.0, waited - self._waited), passed)
            )
            self._waited = waited
        if self._still - min(self._excused, _MAX_HOST_WAIT_S) < self._timeout:
            return False
        self._still = self._excused = 0.0
        return True

    def seconds_until_frozen(self) -> float:
        """Returns the seconds until the session could count as frozen."""
        busy = max(0.0, (self._silence_until_ns() - self._clock()) / NS_PER_S)
        return busy + self._timeout + min(self._excused, _MAX_HOST_WAIT_S) - self._still

    def _silence_until_ns(self) -> int:
        """Returns the CLOCK_MONOTONIC ns from which on silence counts: the last sign of life, or
        the end of the time for which the session has said that it may be busy."""
        return max(self._shared_state.pulse, self._shared_state.busy_until)


class Supervisor:
    """Runs one supervisor process, from the fork to its exit code."""

    def __init__(self, config: WorkerConfig, shared_state: SharedState, log: Log) -> None:
        self._config = config
        self._shared_state = shared_state
        self._log = log
        self._mark = WorkerMark(config, shared_state)
        self._lease = Lease(shared_state)
        self._client = Valkey(
            config.valkey_url, connect_timeout=_CONNECT_TIMEOUT_S, timeout=_COMMAND_TIMEOUT_S
        )
        self._wake = WakePipe()
        self._stopping = False
        self._next_renewal = 0.0
        #: When the event of a missing owner key is due again; 0 while the key is there.
        self._owner_event_at = 0.0
        self._failing = False
        self._unconfirmed_since: float | None = None
        self._pulse = PulseWatch(shared_state, config.pulse_timeout)
        self._jobs = JobDoorbell(
            config.valkey_url, self._client, shared_state, log, self._wait_limit
        )
        #: Number of the session that was killed last because it was frozen.
        self._killed_session = 0
        #: When the zygote counts as frozen if it has not replaced that session.
        self._zygote_frozen_at = 0.0
        #: Session and condition that the mark shows.
        self._shown = (0, 0)

    def run(self) -> ExitCode:
        """Renews the mark until SIGTERM, then removes it. Returns the exit code."""
        self._wake.on_signals([signal.SIGTERM], self._stop)
        while not self._stopping:
            if self._pulse.is_frozen():
                self._kill_frozen_session()
            self._watch_lease()
            if time.monotonic() >= self._next_renewal or self._newly_assigned() or self._changed():
                code = self._renew()
                if code is not ExitCode.OK:
                    return code
            self._jobs.run_due(reachable=not self._failing)
            select.select([self._wake.fileno(), self._jobs.fileno()], [], [], self._pause())
            self._wake.clear()
        self.finish()
        return ExitCode.OK

    def finish(self) -> None:
        """Removes the mark or the pool entry when the worker ends. Never raises."""
        self._client.timeout = _LAST_COMMAND_TIMEOUT_S
        try:
            if self._shared_state.session_lost:
                self._add_event(WorkerEventKind.CLOSED, "the session process died")
            self._mark.remove(self._client)
        except ValkeyFailed as error:  # it will expire
            self._log.warning("mark_left", code=error.code, reason=error.detail)

    def _pause(self) -> float:
        until_kill = (
            self._lease.remaining_s() - KILL_MARGIN_S
            if self._shared_state.broker_open
            else _PULSE_CHECK_INTERVAL_S
        )
        until_renewal = self._next_renewal - time.monotonic()
        return max(
            0.01,
            min(
                _PULSE_CHECK_INTERVAL_S,
                until_renewal,
                until_kill,
                self._pulse.seconds_until_frozen(),
                self._jobs.seconds_until_due(),
            ),
        )

    def _wait_limit(self) -> float:
        """Returns the seconds that a wait for jobs may take without delaying a kill."""
        return (
            max(0.01, self._lease.remaining_s() - KILL_MARGIN_S)
            if self._shared_state.broker_open
            else _COMMAND_TIMEOUT_S
        )

    def _newly_assigned(self) -> bool:
        """Returns True if the session has confirmed a claim and the mark was not renewed since."""
        return bool(self._shared_state.assigned) and self._unconfirmed_since is not None

    def _changed(self) -> bool:
        """Returns True if the mark shows an older session or condition. Then it is renewed within a
        second."""
        return (
            self._now_shown() != self._shown
            and not self._failing
            and bool(self._shared_state.assigned)
        )

    def _now_shown(self) -> tuple[int, int]:
        return self._shared_state.session_number, self._shared_state.condition

    def _renew(self) -> ExitCode:
        self._shown = self._now_shown()
        self._next_renewal = time.monotonic() + self._config.mark_period
        # A renewal never delays the kill of a session that kept its broker sessions.
        if self._shared_state.broker_open:
            self._client.timeout = min(
                _COMMAND_TIMEOUT_S, max(0.1, self._lease.remaining_s() - KILL_MARGIN_S)
            )
        try:
            code = self._renew_mark() if self._shared_state.assigned else self._renew_pool_entry()
        except ValkeyFailed as error:
            if not self._failing:
                self._log.warning("renewal_failed", code=error.code, reason=error.detail)
            self._failing = True
            self._next_renewal = time.monotonic() + min(_RETRY_INTERVAL_S, self._config.mark_period)
            return ExitCode.OK
        finally:
            self._client.timeout = _COMMAND_TIMEOUT_S
        if self._failing:
            self._failing = False
            self._log.info("renewal_back")
        return code

    def _renew_pool_entry(self) -> ExitCode:
        """Renews the pool entry of a worker without a user. Ends a worker whose claim was released,
        or whose claim message has not come within `confirm_timeout`."""
        state = self._mark.announce(self._client)
        if state in ("", "ready"):
            self._unconfirmed_since = None
            return ExitCode.OK
        if state == "released":
            self._log.info("released")
            self.finish()
            return ExitCode.CLAIM_REFUSED
        now = time.monotonic()
        if self._unconfirmed_since is None:
            self._unconfirmed_since = now
        if state == "claimed" and now - self._unconfirmed_since > self._config.confirm_timeout:
            if self._shared_state.claiming:
                return ExitCode.OK
            self._log.warning("claim_never_came", waited_s=round(now - self._unconfirmed_since))
            self.finish()
            return ExitCode.CLAIM_REFUSED
        return ExitCode.OK

    def _renew_mark(self) -> ExitCode:
        self._unconfirmed_since = None
        outcome, lease_end = self._mark.renew(self._client)
        if outcome == "ok":
            self._shared_state.lease_supervisor = lease_end
            self._owner_event_at = 0.0
            return ExitCode.OK
        if outcome == "fenced":
            self._shared_state.fenced = (
                1  # first, so that the session sees it even before it is killed
            )
            self._log.error("fenced", epoch=self._shared_state.epoch)
            self._kill(KillReason.FENCED)
            self._add_event(WorkerEventKind.FENCED, "at renewal")
            return ExitCode.FENCED
        self._next_renewal = time.monotonic() + min(_RETRY_INTERVAL_S, self._config.mark_period)
        if time.monotonic() >= self._owner_event_at:
            self._shared_state.owner_missing += 1
            self._log.error("owner_missing", user_id=self._shared_state.user_id)
            self._add_event(WorkerEventKind.OWNER_MISSING, "")
            self._owner_event_at = time.monotonic() + _EVENT_REPEAT_INTERVAL_S
        return ExitCode.OK

    def _add_event(self, kind: WorkerEventKind, detail: str) -> None:
        state = self._shared_state
        if not state.assigned:
            return
        event = new_worker_event(self._config, state, state.next_supervisor_event(), kind, detail)
        entry, worker_id = (
            sign_event(event, state.message_keys().assignment),
            self._config.worker_id,
        )
        added: Command = ("RPUSH", keys.events_of(worker_id), entry)
        for reply in self._client.pipeline([added, ("RPUSH", keys.EVENT_BELL, worker_id)]):
            if isinstance(reply, hiredis.ReplyError):
                self._log.error(
                    "event_refused", kind=kind.value, reason=str(reply).split(" ", 1)[0]
                )

    def _watch_lease(self) -> None:
        if (
            self._shared_state.broker_open
            and self._shared_state.assigned
            and self._lease.remaining_s() < KILL_MARGIN_S
        ):
            self._kill(KillReason.LEASE)

    def _kill_frozen_session(self) -> None:
        """Kills the session. If it was killed before and no other has followed, kills the zygote,
        which is frozen, too.

        That ends the whole worker, so that the launcher sees it. Further renewals would only keep a
        worker that serves nobody.
        """
        if self._killed_session != self._shared_state.session_number:
            self._killed_session = self._shared_state.session_number
            self._zygote_frozen_at = time.monotonic() + _ZYGOTE_TIMEOUT_S
            self._kill(KillReason.NO_PULSE)
        elif time.monotonic() >= self._zygote_frozen_at:
            self._log.error("zygote_frozen", session=self._killed_session)
            os.kill(os.getppid(), signal.SIGKILL)

    def _kill(self, reason: KillReason) -> None:
        pid = self._shared_state.session_pid  # 0 from the moment the zygote has seen its end
        if pid <= 0:
            return
        self._log.error("session_killed", pid=pid, reason=reason.text())
        record_kill(self._shared_state, reason)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            self._log.info("session_gone", pid=pid)

    def _stop(self) -> None:
        self._stopping = True
