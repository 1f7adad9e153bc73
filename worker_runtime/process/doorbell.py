"""Wakes a process that waits: by doorbells, which are lists in Valkey, and by a pipe for signals
and threads.

For a doorbell, BLPOP is sent on a connection of its own, and its reply is read when the selector
says so. The server answers at the latest when the timeout of BLPOP is over, so a connection that is
silent for longer is dead.
"""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.process.clock import Backoff
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import NOTHING, Valkey, ValkeyFailed, raise_if_error


class Listening(NamedTuple):
    """How long a doorbell listens at a time, in seconds."""

    #: One BLPOP blocks so long.
    block: float
    #: A connection on which nothing arrives for so long after that counts as dead.
    grace: float


#: For what nobody waits for: a claim, which is repeated, and jobs.
PATIENT = Listening(20, 5.0)
#: For a user's requests: a connection that died silently costs an order 2 s at most.
PROMPT = Listening(1, 0.6)
#: Signal that asks the zygote to fork a job runner.
JOB_RUNNER_WANTED = signal.SIGUSR1
#: Seconds to connect, and to wait for a command's reply.
_CONNECT_TIMEOUT_S = 0.25
_COMMAND_TIMEOUT_S = 0.5
#: Seconds after which the zygote is asked again; a fork takes milliseconds.
_SIGNAL_RETRY_INTERVAL_S = 5.0


class WakePipe:
    """Wakes a selector from a signal or another thread."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake up anyway
            os.write(self._writer, b"\0")

    def clear(self) -> list[int]:
        """Takes back all that arrived; returns the numbers of the signals among it (0: a `set`)."""
        numbers: list[int] = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reader, 4096):
                numbers += data
        return numbers

    def on_signals(self, numbers: Sequence[signal.Signals], call: Callable[[], None]) -> None:
        """Makes these signals call `call` and wake the selector, also those that came while
        blocked."""
        for number in numbers:
            signal.signal(number, lambda *_: call())
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


class Doorbell:
    """Hands out the elements of its lists as they come. An element that was popped while the
    connection broke is lost, so the caller checks the queue itself after each new connection."""

    def __init__(
        self,
        client: Valkey,
        keys: tuple[str, ...],
        selector: selectors.BaseSelector,
        log: Log,
        *,
        listening: Listening = PATIENT,
        on_silence: Callable[[], None] = lambda: None,
    ) -> None:
        """Listens on `keys`; calls `on_silence` when the connection has died silently: others may
        have, too."""
        self._client = client  # used by this doorbell alone
        self._times = listening
        self._on_silence = on_silence
        self._keys = keys
        self._selector = selector
        self._log = log
        self._backoff = Backoff(0.05, 2.0)
        #: A BLPOP is under way.
        self._listening = False
        self._silent_after = 0.0
        self._registered: int | None = None

    def seconds_until_due(self) -> float:
        """Returns the seconds until `run_due` has something to do."""
        if self._client.connected:
            return max(0.0, self._silent_after - time.monotonic()) if self._listening else 0.0
        return self._backoff.seconds_until_due()

    def run_due(self) -> bool:
        """Connects, and listens again, when due; returns whether it connected just now.

        After a ring, call it when the work is done: a ring that comes meanwhile stays in the list.
        """
        if self._client.connected and self._listening:
            if time.monotonic() < self._silent_after or self._is_readable():
                return False
            self._drop("silent")
            self._backoff.reset()  # the next connection may be served at once
            self._on_silence()
        connected = self._client.connected
        if not connected and not self._backoff.due():
            return False
        try:
            self._client.connect()
            self._listen()
        except ValkeyFailed as error:
            self._drop(error.detail)
            return False
        if connected:
            return False
        self._registered = self._client.fileno()
        self._selector.register(self._registered, selectors.EVENT_READ, self)
        self._backoff.reset()
        return True

    def read_rings(self) -> list[bytes]:
        """Returns the elements that have arrived. Call it when the descriptor is readable, and
        `run_due` after it."""
        try:
            reply = raise_if_error(self._client.ready())
        except ValkeyFailed as error:
            self._drop(error.detail)
            return []
        if reply is NOTHING:
            return []
        self._listening = False
        return [reply[1]] if reply else []

    def _is_readable(self) -> bool:
        """Return True if something has arrived: then it was this process that stood still, not the
        server."""
        return any(key.data is self for key, _ in self._selector.select(0))

    def close(self) -> None:
        # By number: a failed client has closed its socket already. Nothing else has been opened
        # since, so the number is still ours.
        if self._registered is not None:
            self._selector.unregister(self._registered)
            self._registered = None
        self._client.close()
        self._listening = False

    def _listen(self) -> None:
        self._client.send("BLPOP", *self._keys, self._times.block)
        self._listening = True
        self._silent_after = time.monotonic() + self._times.block + self._times.grace

    def _drop(self, reason: str) -> None:
        self._log.warning("doorbell_lost", reason=reason)
        self.close()
        self._backoff.failed()


class JobDoorbell:
    """Waits, in the supervisor, for the first job of the user and has the zygote fork a job runner
    for it.

    So a worker without jobs has no runner, which would cost memory, connections and a write in five
    seconds. The runner listens itself until it has been idle for a while.

    `main` is the supervisor's own connection, which is used for questions while it is open; while
    it is not, this one does not listen. `limit` says at any moment how many seconds it may wait.
    """

    def __init__(
        self,
        valkey_url: str,
        main: Valkey,
        shared_state: SharedState,
        log: Log,
        limit: Callable[[], float],
    ) -> None:
        self._main = main
        self._shared_state = shared_state
        self._log = log
        self._limit = limit
        self._client = Valkey(
            valkey_url,
            connect_timeout=_CONNECT_TIMEOUT_S,
            timeout=_COMMAND_TIMEOUT_S,
            limit=limit,
            beside=main,
        )
        #: After a failed question. The doorbell has a backoff of its own.
        self._backoff = Backoff(1.0, 15.0)
        self._selector = selectors.DefaultSelector()
        self._doorbell: Doorbell | None = None
        self._signalled_at: float | None = None
        #: How many runners had been forked when the zygote was asked.
        self._runners_before = 0

    def fileno(self) -> int:
        """Returns a descriptor that is readable when something rang."""
        return self._selector.fileno()

    def seconds_until_due(self) -> float:
        """Returns the seconds until `run_due` has something to do."""
        return (
            (self._backoff.seconds_until_due() or 3600.0)
            if self._doorbell is None
            else self._doorbell.seconds_until_due()
        )

    def run_due(self, *, reachable: bool) -> None:
        """Listens while there is no runner. Call it often, and when `fileno` is readable.

        While renewals fail (`reachable` is false) it does not listen, because it must not delay
        them.
        """
        state = self._shared_state
        served = (
            state.jobs_pid or time.monotonic_ns() < state.jobs_not_before or self._fork_pending()
        )
        if not reachable or not self._main.connected or not state.assigned or served:
            self._close()
            return
        tag = job_keys.user_tag(state.user_id)
        if self._doorbell is None:
            if not self._backoff.due():
                return
            self._doorbell = Doorbell(
                self._client, (job_keys.doorbell(tag),), self._selector, self._log
            )
        rung = self._doorbell.run_due() and self._has_work(tag)
        for _ in self._selector.select(0):
            rung = bool(self._doorbell.read_rings()) or rung
        if rung:
            self._request_runner()

    def _fork_pending(self) -> bool:
        """Returns True if the zygote was asked a moment ago and has not forked yet."""
        if self._signalled_at is None or self._shared_state.jobs_number != self._runners_before:
            return False
        return time.monotonic() < self._signalled_at + _SIGNAL_RETRY_INTERVAL_S

    def _has_work(self, tag: str) -> bool:
        """Returns True if jobs wait, or an earlier runner is registered, whose jobs have to be
        taken back.

        A ring may have been lost, and a dead runner does not ring.
        """
        main, timeout = self._main, self._main.timeout
        main.timeout = min(_COMMAND_TIMEOUT_S, self._limit())
        try:
            names = [job_keys.ready(tag), job_keys.delayed(tag), job_keys.beats(tag)]
            there = bool(main.execute("EXISTS", *names))
        except ValkeyFailed as error:
            self._log.warning("job_queue_unknown", code=error.code, reason=error.detail)
            self._close()  # the next connection checks again
            self._backoff.failed()
            return False
        finally:
            main.timeout = timeout
        self._backoff.reset()
        return there

    def _request_runner(self) -> None:
        self._close()  # from here on, a ring stays for the runner
        self._signalled_at = time.monotonic()
        self._runners_before = self._shared_state.jobs_number
        os.kill(os.getppid(), JOB_RUNNER_WANTED)

    def _close(self) -> None:
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
