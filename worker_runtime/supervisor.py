"""The supervisor process: mark, lease and pulse.

It runs no broker code and waits for nothing of the session, so neither a blocking broker call nor a busy
job can delay a renewal (requirement W4). Its own waits are bounded: a renewal takes at most
`_CONNECT_TIMEOUT + _TIMEOUT` seconds.
"""

from __future__ import annotations

import os
import select
import signal
import time

import hiredis

from worker_runtime.board import Board
from worker_runtime.boottime import wall_ms
from worker_runtime.exits import ExitCode
from worker_runtime.lease import KILL_MARGIN, Lease
from worker_runtime.log import Log
from worker_runtime.mark import Mark
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import WorkerEvent, WorkerEventKind, encode
from worker_runtime.valkey import Valkey, ValkeyFailed
from worker_runtime.wake import WakePipe

#: Seconds between two looks at the pulse and the lease.
_TICK = 1.0
#: Seconds until a failed renewal is tried again.
_RETRY = 1.0
_CONNECT_TIMEOUT = 0.5
_TIMEOUT = 1.0
#: Seconds a pool worker may stand claimed without a claim message: more than the orchestrator's claim
#: timeout (30 s), after which such a claim is released.
_UNCONFIRMED_LIMIT = 90.0


class Supervisor:
    """One supervisor process, from the fork to its exit code."""

    def __init__(self, config: WorkerConfig, board: Board, log: Log) -> None:
        self._config = config
        self._board = board
        self._log = log
        self._mark = Mark(config, board)
        self._lease = Lease(board)
        self._client = Valkey(config.valkey_url, connect_timeout=_CONNECT_TIMEOUT, timeout=_TIMEOUT)
        self._wake = WakePipe()
        self._stopping = False
        self._next_renewal = 0.0
        self._owner_missing = False
        self._failing = False
        self._unconfirmed_since: float | None = None
        self._last_pulse = (0, 0)
        self._last_tick = time.monotonic()
        self._still = 0.0

    def run(self) -> ExitCode:
        """Renews until told to end; then takes the mark away. Returns the exit code."""
        self._wake.on_sigterm(self._stop)
        while not self._stopping:
            self._watch_pulse()
            self._watch_lease()
            if time.monotonic() >= self._next_renewal or self._newly_assigned():
                code = self._renew()
                if code is not ExitCode.OK:
                    return code
            select.select([self._wake], [], [], self._pause())
            self._wake.clear()
        self.finish()
        return ExitCode.OK

    def finish(self) -> None:
        """Takes the mark (or the pool entry) away, after the session has ended. Never raises."""
        try:
            if self._board.session_lost:
                self._tell(WorkerEventKind.CLOSED, "the session process died")
            self._mark.remove(self._client)
        except ValkeyFailed as error:  # it will expire
            self._log.warning("mark_left", code=error.code, reason=error.detail)

    def _pause(self) -> float:
        until_kill = self._lease.left() - KILL_MARGIN if self._board.broker_open else _TICK
        until_renewal = self._next_renewal - time.monotonic()
        return max(0.01, min(_TICK, until_renewal, until_kill))

    def _newly_assigned(self) -> bool:
        return bool(self._board.assigned) and self._unconfirmed_since is not None

    def _renew(self) -> ExitCode:
        self._next_renewal = time.monotonic() + self._config.mark_period
        # Never past the moment at which a session that kept its connections has to be killed.
        if self._board.broker_open:
            self._client.timeout = min(_TIMEOUT, max(0.1, self._lease.left() - KILL_MARGIN))
        try:
            code = self._renew_mark() if self._board.assigned else self._announce()
        except ValkeyFailed as error:
            if not self._failing:
                self._log.warning("renewal_failed", code=error.code, reason=error.detail)
            self._failing = True
            self._next_renewal = time.monotonic() + min(_RETRY, self._config.mark_period)
            return ExitCode.OK
        finally:
            self._client.timeout = _TIMEOUT
        if self._failing:
            self._failing = False
            self._log.info("renewal_back")
        return code

    def _announce(self) -> ExitCode:
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
        if state == "claimed" and now - self._unconfirmed_since > _UNCONFIRMED_LIMIT:
            if self._board.claiming:
                return ExitCode.OK
            self._log.warning("claim_never_came", waited_s=round(now - self._unconfirmed_since))
            self.finish()
            return ExitCode.CLAIM_REFUSED
        return ExitCode.OK

    def _renew_mark(self) -> ExitCode:
        self._unconfirmed_since = None
        outcome, lease_end = self._mark.renew(self._client)
        if outcome == "ok":
            self._board.lease_supervisor = lease_end
            self._owner_missing = False
        elif outcome == "fenced":
            self._board.fenced = 1  # first, so that the session sees it even before it is killed
            self._log.error("fenced", epoch=self._board.epoch)
            self._kill("fenced")
            self._tell(WorkerEventKind.FENCED, "at renewal")
            return ExitCode.FENCED
        elif not self._owner_missing:
            self._log.error("owner_missing", user_id=self._board.user_id)
            self._tell(WorkerEventKind.OWNER_MISSING, "")
            self._owner_missing = True
        return ExitCode.OK

    def _tell(self, kind: WorkerEventKind, detail: str) -> None:
        board = self._board
        if not board.assigned:
            return
        event = WorkerEvent(
            worker_id=self._config.worker_id,
            user_id=board.user_id,
            epoch=board.epoch,
            sequence=board.next_supervisor_event(),
            kind=kind,
            at_ms=wall_ms(),
            detail=detail,
        )
        reply = self._client.pipeline([("XADD", keys.EVENTS, "*", "e", encode(event))])[0]
        if isinstance(reply, hiredis.ReplyError):
            self._log.error("event_refused", kind=kind.value, reason=str(reply).split(" ", 1)[0])

    def _watch_pulse(self) -> None:
        """Kills a session that shows no life for `pulse_timeout` seconds of this process's own time.

        Own time: when the whole container was paused, both stood still, and that is nobody's fault.
        """
        now = time.monotonic()
        passed, self._last_tick = min(now - self._last_tick, 2 * _TICK), now
        seen = (self._board.session_number, self._board.pulse)
        if seen != self._last_pulse:
            self._last_pulse, self._still = seen, 0.0
            return
        self._still += passed
        if self._still > self._config.pulse_timeout:
            self._still = 0.0
            self._kill("no pulse")

    def _watch_lease(self) -> None:
        if self._board.broker_open and self._board.assigned and self._lease.left() < KILL_MARGIN:
            self._kill("open broker sessions at the end of the lease")

    def _kill(self, reason: str) -> None:
        pid = self._board.session_pid  # 0 from the moment the zygote has seen its end
        if pid <= 0:
            return
        self._log.error("session_killed", pid=pid, reason=reason)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            self._log.info("session_gone", pid=pid)

    def _stop(self) -> None:
        self._stopping = True
