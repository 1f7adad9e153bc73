"""A fresh session in the place of one that died, for the user it served.

The assignment stands in the shared state; the credentials died with the predecessor's key. So the fresh
session takes the lease for itself, says that it is there, and waits: control messages are taken, requests are
not. The orchestrator seals the credentials to the new key and sends `ReloadCredentials`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from worker_runtime.process.clock import Backoff
from worker_runtime.process.log import Log
from worker_runtime.process.mark import WorkerMark
from worker_runtime.process.replacement import WorkerExit, replacement_reason
from worker_runtime.process.shared_state import SharedState, WorkerActivity
from worker_runtime.process.valkey import Valkey, ValkeyFailed
from worker_runtime.protocol.errors import BerthError, ClaimRefused, WorkerUnavailable
from worker_runtime.protocol.launch import ExitCode, WorkerConfig
from worker_runtime.protocol.messages import (
    Claim,
    ClaimReply,
    Failure,
    InboxMessage,
    ReleaseClaim,
    WorkerEventKind,
    decode,
)
from worker_runtime.protocol.sealing import verify
from worker_runtime.session.request_loop import RequestLoop
from worker_runtime.session.send_buffer import SendBuffer

#: Seconds after which a session that has heard nothing says again that it waits: a flushed server or an
#: orchestrator that was away may have lost the event. No deadline: whoever owns the worker may end it.
TELL_AGAIN = 120.0


class ResumeHandler:
    """The way back to work of one session; stands where `Claiming` stands in a worker from the pool."""

    def __init__(
        self,
        config: WorkerConfig,
        shared_state: SharedState,
        *,
        client: Valkey,
        mark: WorkerMark,
        send_buffer: SendBuffer,
        open_request_loop: Callable[[], RequestLoop],
        log: Log,
        tell_again: float = TELL_AGAIN,
    ) -> None:
        self._config = config
        self._shared_state = shared_state
        self._client = client
        self._mark = mark
        self._send_buffer = send_buffer
        self._log = log
        self._orchestrator_key = Ed25519PublicKey.from_public_bytes(config.orchestrator_key)
        self._retry = Backoff(0.05, 1.0)
        self._tell_at = 0.0
        self._tell_again = tell_again
        shared_state.state = WorkerActivity.Reconnecting
        self.request_loop: RequestLoop | None = open_request_loop()
        #: The mark carries our key: control messages may be taken.
        self.active = False

    def run_due(self) -> None:
        """Renews the mark and tells of the new key, until the credentials are here. Raises `WorkerExit`."""
        if not self.active and self._retry.due():
            self._own()
        if self.active and self._waiting() and time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + self._tell_again
            self._send_buffer.add_worker_event(
                WorkerEventKind.SESSION_REPLACED, replacement_reason(self._shared_state)
            )
            self._send_buffer.flush_if_due()

    def left(self) -> float:
        """Seconds until `run_due` has something to do."""
        if not self.active:
            return self._retry.left()
        return max(0.0, self._tell_at - time.monotonic()) if self._waiting() else math.inf

    def handle(self, data: bytes) -> None:
        """Answers a message of the claim that the predecessor had carried out. Raises `WorkerExit`."""
        try:
            message: InboxMessage = decode(verify(data, self._orchestrator_key), InboxMessage)
        except BerthError as error:
            self._log.warning("inbox_dropped", code=error.code)
            return
        if message.worker_id != self._config.worker_id:
            self._log.warning("inbox_dropped", code="NOT_FOR_THIS_WORKER")
            return
        ours = message.claim_id == self._shared_state.claim_id
        if isinstance(message, ReleaseClaim):
            if ours:
                raise WorkerExit(ExitCode.OK, f"released: {message.reason}")
            self._log.warning("release_dropped", claim_id=message.claim_id)
            return
        if not ours and not isinstance(message, Claim):
            self._log.warning("connect_dropped", claim_id=message.claim_id)
            return
        failure = WorkerUnavailable("the session was replaced") if ours else ClaimRefused()
        self._log.warning("claim_refused", claim_id=message.claim_id, reason=failure.detail)
        self._send_buffer.add_claim_reply(
            ClaimReply(
                claim_id=message.claim_id,
                worker_id=self._config.worker_id,
                epoch=message.epoch if isinstance(message, Claim) else self._shared_state.epoch,
                attempt=message.attempt,
                failure=Failure.of(failure),
            )
        )
        self._send_buffer.flush()

    def _waiting(self) -> bool:
        return self.request_loop is not None and not self.request_loop.broker_sessions.loaded

    def _own(self) -> None:
        try:
            outcome, lease_end = self._mark.renew(self._client)
        except ValkeyFailed as error:
            self._log.warning("mark_failed", code=error.code, reason=error.detail)
            self._retry.failed()
            return
        if outcome == "fenced":
            self._shared_state.fenced = 1
            self._send_buffer.add_worker_event(WorkerEventKind.FENCED, "by a fresh session")
            raise WorkerExit(ExitCode.FENCED, "another epoch owns the user")
        if outcome != "ok":  # the supervisor has told that the owner key is missing
            self._retry.failed()
            return
        self._shared_state.lease_session = lease_end
        self.active = True
        self._log.info(
            "resumed",
            session=self._shared_state.session_number,
            because=replacement_reason(self._shared_state),
        )
