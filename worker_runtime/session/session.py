"""The session process: one key pair and one user's broker sessions.

It runs a single-threaded loop around a selector. It writes its pulse into the shared state in each
round, at least once a second, and before each wait for Valkey; around a broker call it writes how
long that may take.
"""

import selectors
import signal
import time
from collections.abc import Callable
from functools import cache

from worker_runtime.brokers.port import BrokerFactory
from worker_runtime.process.clock import Backoff, wall_ms
from worker_runtime.process.doorbell import PATIENT, PROMPT, Doorbell, Listening, WakePipe
from worker_runtime.process.log import Log
from worker_runtime.process.mark import WorkerMark
from worker_runtime.process.replacement import WorkerExit
from worker_runtime.process.shared_state import Lease, SharedState, WorkerActivity
from worker_runtime.process.valkey import Valkey, ValkeyFailed
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import ExitCode, WorkerConfig
from worker_runtime.protocol.messages import WorkerEventKind
from worker_runtime.session.claim import ClaimHandler, InboxHandler, ResumeHandler
from worker_runtime.session.control import SessionParts

#: Seconds that sending the last events and answers may take at the end.
_LAST_FLUSH_TIMEOUT_S = 2.0


class Session:
    """Runs one session process, from the fork to its exit code.

    It serves the worker's assignment, which outlives it: a successor continues it. Its broker
    sessions (`AccountSession`) end with the process.
    """

    def __init__(
        self,
        config: WorkerConfig,
        shared_state: SharedState,
        load_factory: Callable[[], BrokerFactory],
        log: Log,
    ) -> None:
        self._config = config
        self._shared_state = shared_state
        self._log = log
        self._stopping = False
        #: True if the pool knows of this worker. An assigned worker is not announced again.
        self._announced = bool(shared_state.assigned)
        self._selector = selectors.DefaultSelector()
        self._wake = WakePipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._lease = Lease(shared_state)
        self._client = self._new_client(checked=True)
        self._mark = WorkerMark(config, shared_state)
        self._parts = SessionParts(
            config,
            shared_state,
            self._client,
            cache(load_factory),
            stopping=lambda: self._stopping,
            wake=self._wake.set,
            log=log,
        )
        self._send_buffer = self._parts.send_buffer
        new_handler = ResumeHandler if shared_state.assigned else ClaimHandler
        self._inbox_handler: InboxHandler = new_handler(self._parts)
        self._announcing = Backoff(0.05, 2.0)
        self._inbox = self._new_doorbell(keys.pool_inbox(config.pool, config.worker_id))
        self._doorbell: Doorbell | None = None

    def run(self) -> ExitCode:
        """Runs the loop until SIGTERM or `WorkerExit`; returns the exit code."""
        self._wake.on_signals([signal.SIGTERM], self._stop)
        try:
            while not self._stopping:
                self._shared_state.pulse = time.monotonic_ns()
                self._step()
                self._wait()
            end = WorkerExit(ExitCode.OK, "asked to end")
        except WorkerExit as raised:
            end = raised
        self._close(end)
        return end.code

    def _step(self) -> None:
        if not self._announced:
            self._announce()
        self._inbox.run_due()
        self._inbox_handler.run_due()
        request_loop = self._inbox_handler.request_loop
        if request_loop is None or not self._inbox_handler.active:
            self._send_buffer.flush_if_due()
            return
        if self._doorbell is None:
            self._doorbell = self._new_doorbell(keys.doorbell(self._shared_state.user_id), PROMPT)
        request_loop.step()
        if self._doorbell.run_due():
            request_loop.queue_changed()  # a ring may have been lost with the connection

    def _wait(self) -> None:
        waits = [1.0, self._inbox.seconds_until_due(), self._inbox_handler.seconds_until_due()]
        if not self._announced:
            waits.append(self._announcing.seconds_until_due())
        if self._doorbell is not None and self._inbox_handler.request_loop is not None:
            waits.append(self._doorbell.seconds_until_due())
            waits.append(self._inbox_handler.request_loop.seconds_until_due())
        if self._stopping:
            return
        for selected, _ in self._selector.select(min(waits)):
            if selected.data is self._inbox:
                for message in self._inbox.read_rings():
                    self._inbox_handler.handle(message)
            elif selected.data is not None and selected.data is self._doorbell:
                if self._doorbell.read_rings() and self._inbox_handler.request_loop is not None:
                    self._inbox_handler.request_loop.queue_changed()
            else:
                self._wake.clear()

    def _announce(self) -> None:
        """Announces this worker as ready, without waiting for the supervisor's next renewal."""
        if not self._announcing.due():
            return
        try:
            state = self._mark.announce(self._client)
        except ValkeyFailed as error:
            self._log.warning("announce_failed", code=error.code, reason=error.detail)
            self._announcing.failed()
            return
        self._announced = True
        # Loaded now, while nobody waits: importing the adapters takes 2 to 4 ms.
        self._parts.load_brokers()
        took = wall_ms() - self._shared_state.launched_at_ms
        self._log.info(
            "ready", state=state, session=self._shared_state.session_number, took_ms=took
        )

    def _new_doorbell(self, key: str, listening: Listening = PATIENT) -> Doorbell:
        return Doorbell(
            self._new_client(),
            (key,),
            self._selector,
            self._log,
            listening=listening,
            on_silence=self._client.close,
        )

    def _new_client(self, *, checked: bool = False) -> Valkey:
        return Valkey(
            self._config.valkey_url,
            limit=self._may_wait,
            busy=self._shared_state.busy,
            checked=checked,
        )

    def _may_wait(self) -> float:
        """Returns the seconds that a wait for Valkey may take. Renews the pulse, so that several
        waits in a row do not look like a frozen session."""
        self._shared_state.pulse = time.monotonic_ns()
        return self._lease.wait_limit()

    def _stop(self) -> None:
        self._stopping = True

    def _close(self, end: WorkerExit) -> None:
        self._log.info("session_ending", code=int(end.code), reason=end.reason)
        # The worker continues with another session after SESSION_REPLACE.
        replaced = end.code is ExitCode.SESSION_REPLACE
        if not replaced:
            self._shared_state.state = WorkerActivity.Draining
        if self._inbox_handler.request_loop is not None:
            self._inbox_handler.request_loop.close()
        if not replaced:
            self._send_buffer.add_worker_event(WorkerEventKind.CLOSED, end.reason)
        until = time.monotonic() + _LAST_FLUSH_TIMEOUT_S
        while not self._send_buffer.flush() and time.monotonic() < until:
            self._shared_state.pulse = time.monotonic_ns()
            time.sleep(min(0.1, self._send_buffer.seconds_until_due() or 0.0))
        if len(self._send_buffer):
            self._log.error("last_messages_lost", count=len(self._send_buffer))
