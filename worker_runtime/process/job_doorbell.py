"""The first job of a user: heard by the supervisor, so that a worker without jobs has no runner.

A runner costs memory, connections and a write in five seconds; most users have no job most of the time. So
the supervisor waits on the bell of the user's job queue, in a BLPOP on a connection of its own, and has the
zygote fork a runner when it rings. That one waits on the bell itself, until it has been idle for a while.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable

from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.process.clock import Backoff
from worker_runtime.process.doorbell import Doorbell
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Valkey, ValkeyFailed

#: What the zygote takes for "fork a job runner".
JOB_RUNNER_WANTED = signal.SIGUSR1
_CONNECT_TIMEOUT = 0.25
_TIMEOUT = 0.5
#: Seconds after which the zygote is told again: it takes milliseconds.
_TELL_AGAIN = 5.0


class JobDoorbell:
    """Part of the supervisor. `limit`: seconds that it may wait at the most, at any moment.

    `main` is the supervisor's own connection: while it is open, questions go over it and it shows where the
    server is. While it is not, there is nothing to listen to.
    """

    def __init__(
        self, valkey_url: str, main: Valkey, shared_state: SharedState, log: Log, limit: Callable[[], float]
    ) -> None:
        self._main = main
        self._shared_state = shared_state
        self._log = log
        self._limit = limit
        self._client = Valkey(
            valkey_url, connect_timeout=_CONNECT_TIMEOUT, timeout=_TIMEOUT, limit=limit, beside=main
        )
        #: After a question that failed. The bell has one of its own, which ends with it.
        self._backoff = Backoff(1.0, 15.0)
        self._selector = selectors.DefaultSelector()
        self._bell: Doorbell | None = None
        self._told_at: float | None = None
        #: How many runners there had been when the zygote was told.
        self._told_after = 0

    def fileno(self) -> int:
        """Readable when something rang."""
        return self._selector.fileno()

    def left(self) -> float:
        """Seconds until `run_due` has something to do."""
        return (self._backoff.left() or 3600.0) if self._bell is None else self._bell.left()

    def run_due(self, *, reachable: bool) -> None:
        """Listens while nobody else does. To be called often, and when `fileno` is readable.

        Not while renewals fail (`reachable`): nothing may be waited for beside them then.
        """
        shared_state = self._shared_state
        served = shared_state.jobs_pid or time.monotonic_ns() < shared_state.jobs_not_before or self._told()
        if not reachable or not self._main.connected or not shared_state.assigned or served:
            self._close()
            return
        tag = job_keys.user_tag(shared_state.user_id)
        if self._bell is None:
            if not self._backoff.due():
                return
            self._bell = Doorbell(self._client, job_keys.doorbell(tag), self._selector, self._log)
        rung = self._bell.run_due() and self._work_is_there(tag)
        for _ in self._selector.select(0):
            rung = bool(self._bell.read_rings()) or rung
        if rung:
            self._tell()

    def _told(self) -> bool:
        """Whether the zygote was told a moment ago, and has not forked yet."""
        if self._told_at is None or self._shared_state.jobs_number != self._told_after:
            return False
        return time.monotonic() < self._told_at + _TELL_AGAIN

    def _work_is_there(self, tag: str) -> bool:
        """Whether jobs wait, or a runner is registered: an earlier one, whose jobs have to be taken back.

        A ring may have been lost, and a dead runner rings nothing.
        """
        main, timeout = self._main, self._main.timeout
        main.timeout = min(_TIMEOUT, self._limit())
        try:
            names = [job_keys.ready(tag), job_keys.delayed(tag), job_keys.beats(tag)]
            there = bool(main.execute("EXISTS", *names))
        except ValkeyFailed as error:
            self._log.warning("job_queue_not_seen", code=error.code, reason=error.detail)
            self._close()  # the next connection looks again
            self._backoff.failed()
            return False
        finally:
            main.timeout = timeout
        self._backoff.reset()
        return there

    def _tell(self) -> None:
        self._close()  # from here on, a ring stays for the runner
        self._told_at = time.monotonic()
        self._told_after = self._shared_state.jobs_number
        os.kill(os.getppid(), JOB_RUNNER_WANTED)

    def _close(self) -> None:
        if self._bell is not None:
            self._bell.close()
            self._bell = None
