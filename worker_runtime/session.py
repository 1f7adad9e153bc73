"""The session process: one key pair, one user's broker sessions. It comes to the user by a claim, or stands
in the place of a session that died.

A single-threaded loop around a selector. It pulses on the board in each round, at least once a second, and
before each wait for Valkey; around a broker call it says there how long the call may take.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

from worker_runtime.backoff import Backoff
from worker_runtime.bell import Bell
from worker_runtime.board import Board, State
from worker_runtime.brokers.port import BrokerFactory
from worker_runtime.claiming import Claiming
from worker_runtime.credentials import Opener
from worker_runtime.exits import WorkerEnds
from worker_runtime.lease import Lease
from worker_runtime.log import Log
from worker_runtime.mark import Mark
from worker_runtime.outbox import Outbox
from worker_runtime.protocol import keys
from worker_runtime.protocol.exit_codes import ExitCode
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import WorkerEventKind
from worker_runtime.protocol.sealing import new_worker_key
from worker_runtime.resuming import Resuming
from worker_runtime.serving import Serving
from worker_runtime.valkey import Valkey, ValkeyFailed
from worker_runtime.wake import WakePipe

#: Seconds that the last words (events, answers) may take at the end.
_LAST_WORDS = 2.0


class Session:
    """One session process, from the fork to its exit code."""

    def __init__(
        self, config: WorkerConfig, board: Board, load_factory: Callable[[], BrokerFactory], log: Log
    ) -> None:
        self._config = config
        self._board = board
        self._load_factory = load_factory
        self._factory: BrokerFactory | None = None
        self._log = log
        self._stopping = False
        #: In the pool. A fresh session of an assigned worker has no business there.
        self._announced = bool(board.assigned)
        self._selector = selectors.DefaultSelector()
        self._wake = WakePipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._lease = Lease(board)
        self._client = self._valkey()
        self._mark = Mark(config, board)
        self._outbox = Outbox(self._client, config, board, log)
        key = new_worker_key()
        board.publish_key(key.public_key().public_bytes_raw())
        self._opener = Opener(key, board, config.worker_id)
        self._entry: Claiming | Resuming = self._resuming() if board.assigned else self._claiming()
        self._announcing = Backoff(0.05, 2.0)
        self._inbox = self._bell(keys.pool_inbox(config.pool, config.worker_id))
        self._doorbell: Bell | None = None

    def run(self) -> ExitCode:
        """Works until told to end; returns the exit code."""
        self._wake.on_sigterm(self._stop)
        try:
            while not self._stopping:
                self._board.pulse = time.monotonic_ns()
                self._step()
                self._wait()
            end = WorkerEnds(ExitCode.OK, "asked to end")
        except WorkerEnds as raised:
            end = raised
        self._close(end)
        return end.code

    def _step(self) -> None:
        if not self._announced:
            self._announce()
        self._inbox.tend()
        self._entry.tend()
        serving = self._entry.serving
        if serving is None or not self._entry.active:
            self._outbox.flush_if_due()
            return
        if self._doorbell is None:
            self._doorbell = self._bell(keys.doorbell(self._board.user_id))
        serving.step()
        if self._doorbell.tend():
            serving.look()  # a ring may have been lost with the connection

    def _wait(self) -> None:
        waits = [1.0, self._inbox.left(), self._entry.left()]
        if not self._announced:
            waits.append(self._announcing.left())
        if self._doorbell is not None and self._entry.serving is not None:
            waits.append(self._doorbell.left())
            waits.append(self._entry.serving.left())
        if self._stopping:
            return
        for selected, _ in self._selector.select(min(waits)):
            if selected.data is self._inbox:
                for message in self._inbox.take():
                    self._entry.handle(message)
            elif selected.data is not None and selected.data is self._doorbell:
                if self._doorbell.take() and self._entry.serving is not None:
                    self._entry.serving.rung()
            else:
                self._wake.clear()

    def _announce(self) -> None:
        """Says that this worker is ready, so that nobody waits for the supervisor's next renewal."""
        if not self._announcing.due():
            return
        try:
            state = self._mark.announce(self._client)
        except ValkeyFailed as error:
            self._log.warning("announce_failed", code=error.code, reason=error.detail)
            self._announcing.failed()
            return
        self._announced = True
        self._brokers()  # while nobody waits: importing our adapters costs a claim 2 to 4 ms otherwise
        took = time.time_ns() // 1_000_000 - self._board.launched_at_ms
        self._log.info("ready", state=state, session=self._board.session_number, took_ms=took)

    def _claiming(self) -> Claiming:
        return Claiming(
            self._config,
            self._board,
            client=self._client,
            mark=self._mark,
            outbox=self._outbox,
            opener=self._opener,
            open_service=self._open_service,
            log=self._log,
        )

    def _resuming(self) -> Resuming:
        return Resuming(
            self._config,
            self._board,
            client=self._client,
            mark=self._mark,
            outbox=self._outbox,
            open_service=self._open_service,
            log=self._log,
        )

    def _open_service(self) -> Serving:
        return Serving(
            self._config,
            self._board,
            client=self._client,
            outbox=self._outbox,
            opener=self._opener,
            load_factory=self._brokers,
            stopping=lambda: self._stopping,
            wake=self._wake.set,
            log=self._log,
        )

    def _brokers(self) -> BrokerFactory:
        if self._factory is None:
            self._factory = self._load_factory()
        return self._factory

    def _bell(self, key: str) -> Bell:
        return Bell(self._valkey(), key, self._selector, self._log)

    def _valkey(self) -> Valkey:
        return Valkey(self._config.valkey_url, limit=self._may_wait)

    def _may_wait(self) -> float:
        """Asked before each wait for Valkey, so several of them in a row are no missing pulse."""
        self._board.pulse = time.monotonic_ns()
        return self._lease.wait_limit()

    def _stop(self) -> None:
        self._stopping = True

    def _close(self, end: WorkerEnds) -> None:
        self._log.info("session_ending", code=int(end.code), reason=end.reason)
        replaced = end.code is ExitCode.SESSION_REPLACE  # then the worker goes on: nothing has closed
        if not replaced:
            self._board.state = State.Draining
        if self._entry.serving is not None:
            self._entry.serving.close()
        if not replaced:
            self._outbox.tell(WorkerEventKind.CLOSED, end.reason)
        until = time.monotonic() + _LAST_WORDS
        while not self._outbox.flush() and time.monotonic() < until:
            self._board.pulse = time.monotonic_ns()
            time.sleep(min(0.1, self._outbox.left() or 0.0))
        if len(self._outbox):
            self._log.error("last_words_lost", count=len(self._outbox))
