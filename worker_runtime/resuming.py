"""A fresh session in the place of one that died, for the user it served.

The assignment stands on the board; the credentials died with the predecessor's key. So the fresh session
takes the lease for itself, says that it is there, and waits: control messages are taken, requests are not.
The orchestrator seals the credentials to the new key and sends `ReloadCredentials`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from worker_runtime.backoff import Backoff
from worker_runtime.board import Board, State
from worker_runtime.exits import WorkerEnds
from worker_runtime.log import Log
from worker_runtime.mark import Mark
from worker_runtime.outbox import Outbox
from worker_runtime.protocol.errors import BerthError, ClaimRefused, WorkerUnavailable
from worker_runtime.protocol.exit_codes import ExitCode
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import (
    Claim,
    ClaimReply,
    Failure,
    InboxMessage,
    Release,
    WorkerEventKind,
    decode,
)
from worker_runtime.protocol.sealing import verify
from worker_runtime.replacement import why
from worker_runtime.serving import Serving
from worker_runtime.valkey import Valkey, ValkeyFailed

#: Seconds after which a session that has heard nothing says again that it waits: a flushed server or an
#: orchestrator that was away may have lost the event. No deadline: whoever owns the worker may end it.
TELL_AGAIN = 120.0


class Resuming:
    """The way back to work of one session; stands where `Claiming` stands in a worker from the pool."""

    def __init__(
        self,
        config: WorkerConfig,
        board: Board,
        *,
        client: Valkey,
        mark: Mark,
        outbox: Outbox,
        open_service: Callable[[], Serving],
        log: Log,
        tell_again: float = TELL_AGAIN,
    ) -> None:
        self._config = config
        self._board = board
        self._client = client
        self._mark = mark
        self._outbox = outbox
        self._log = log
        self._orchestrator_key = Ed25519PublicKey.from_public_bytes(config.orchestrator_key)
        self._retry = Backoff(0.05, 1.0)
        self._tell_at = 0.0
        self._tell_again = tell_again
        board.state = State.Reconnecting
        self.serving: Serving | None = open_service()
        #: The mark carries our key: control messages may be taken.
        self.active = False

    def tend(self) -> None:
        """Renews the mark and tells of the new key, until the credentials are here. Raises `WorkerEnds`."""
        if not self.active and self._retry.due():
            self._own()
        if self.active and self._waiting() and time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + self._tell_again
            self._outbox.tell(WorkerEventKind.SESSION_REPLACED, why(self._board))
            self._outbox.flush_if_due()

    def left(self) -> float:
        """Seconds until `tend` has something to do."""
        if not self.active:
            return self._retry.left()
        return max(0.0, self._tell_at - time.monotonic()) if self._waiting() else math.inf

    def handle(self, data: bytes) -> None:
        """Answers a message of the claim that the predecessor had carried out. Raises `WorkerEnds`."""
        try:
            message: InboxMessage = decode(verify(data, self._orchestrator_key), InboxMessage)
        except BerthError as error:
            self._log.warning("inbox_dropped", code=error.code)
            return
        if message.worker_id != self._config.worker_id:
            self._log.warning("inbox_dropped", code="NOT_FOR_THIS_WORKER")
            return
        ours = message.claim_id == self._board.claim_id
        if isinstance(message, Release):
            if ours:
                raise WorkerEnds(ExitCode.OK, f"released: {message.reason}")
            self._log.warning("release_dropped", claim_id=message.claim_id)
            return
        if not ours and not isinstance(message, Claim):
            self._log.warning("connect_dropped", claim_id=message.claim_id)
            return
        failure = WorkerUnavailable("the session was replaced") if ours else ClaimRefused()
        self._log.warning("claim_refused", claim_id=message.claim_id, reason=failure.detail)
        self._outbox.claim_reply(
            ClaimReply(
                claim_id=message.claim_id,
                worker_id=self._config.worker_id,
                epoch=message.epoch if isinstance(message, Claim) else self._board.epoch,
                attempt=message.attempt,
                failure=Failure.of(failure),
            )
        )
        self._outbox.flush()

    def _waiting(self) -> bool:
        return self.serving is not None and not self.serving.connections.loaded

    def _own(self) -> None:
        try:
            outcome, lease_end = self._mark.renew(self._client)
        except ValkeyFailed as error:
            self._log.warning("mark_failed", code=error.code, reason=error.detail)
            self._retry.failed()
            return
        if outcome == "fenced":
            self._board.fenced = 1
            self._outbox.tell(WorkerEventKind.FENCED, "by a fresh session")
            raise WorkerEnds(ExitCode.FENCED, "another epoch owns the user")
        if outcome != "ok":  # the supervisor has told that the owner key is missing
            self._retry.failed()
            return
        self._board.lease_session = lease_end
        self.active = True
        self._log.info("resumed", session=self._board.session_number, because=why(self._board))
