"""From the pool to a user: what the messages of a worker's inbox do.

A claim is believed because the orchestrator signed it, and acted on because `settle_claim.lua` says that
nobody has released it. The same claim twice is answered twice and carried out once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from worker_runtime.process.clock import wall_ms
from worker_runtime.process.log import Log
from worker_runtime.process.mark import WorkerMark
from worker_runtime.process.replacement import WorkerExit
from worker_runtime.process.shared_state import SharedState, WorkerActivity
from worker_runtime.process.valkey import Valkey, ValkeyFailed, ValkeyUnreachable
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError, ClaimRefused, Fenced, UnknownAccount, WorkerUnavailable
from worker_runtime.protocol.launch import ExitCode, WorkerConfig
from worker_runtime.protocol.messages import (
    Claim,
    ClaimReply,
    Connect,
    Failure,
    InboxMessage,
    ReleaseClaim,
    SealedAccount,
    decode,
)
from worker_runtime.protocol.scripts import SETTLE_CLAIM
from worker_runtime.protocol.sealing import verify
from worker_runtime.session.request_loop import RequestLoop
from worker_runtime.session.send_buffer import SendBuffer
from worker_runtime.trading.account_session import CredentialOpener

#: Seconds a claimed worker waits for `Connect` or `ReleaseClaim` after a failed connect: more than the
#: orchestrator's longest backoff between attempts; every state has a deadline.
CONNECT_WAIT = 120.0
#: Seconds; no single connect may hold the session for longer, whatever a message asks for.
_LONGEST_CONNECT = 30.0
_SETTLE_ATTEMPTS = 3


class ClaimHandler:
    """The claim phase of one session."""

    def __init__(
        self,
        config: WorkerConfig,
        shared_state: SharedState,
        *,
        client: Valkey,
        mark: WorkerMark,
        send_buffer: SendBuffer,
        opener: CredentialOpener,
        open_request_loop: Callable[[], RequestLoop],
        log: Log,
    ) -> None:
        self._config = config
        self._shared_state = shared_state
        self._client = client
        self._mark = mark
        self._send_buffer = send_buffer
        self._opener = opener
        self._open_request_loop = open_request_loop
        self._log = log
        self._orchestrator_key = Ed25519PublicKey.from_public_bytes(config.orchestrator_key)
        self._claim: Claim | None = None
        self._claimed_at_ms = 0
        self._last_reply: ClaimReply | None = None
        self._give_up_at = 0.0
        #: There from the moment the claim is confirmed.
        self.request_loop: RequestLoop | None = None
        #: Every account is connected: requests may be taken.
        self.active = False

    def handle(self, data: bytes) -> None:
        """Acts on one inbox message; forged, garbled and misdirected ones are logged and dropped.

        Raises `WorkerExit` when this worker is not wanted or must not go on.
        """
        try:
            message: InboxMessage = decode(verify(data, self._orchestrator_key), InboxMessage)
        except BerthError as error:
            self._log.warning("inbox_dropped", code=error.code)
            return
        if message.worker_id != self._config.worker_id:
            self._log.warning("inbox_dropped", code="NOT_FOR_THIS_WORKER")
            return
        if isinstance(message, Claim):
            self._on_claim(message)
        elif isinstance(message, Connect):
            self._on_connect(message)
        else:
            self._on_release(message)

    def run_due(self) -> None:
        """Ends a worker that was claimed, failed to connect and has been forgotten."""
        if self._claim is not None and not self.active and time.monotonic() > self._give_up_at:
            raise WorkerExit(ExitCode.CLAIM_REFUSED, "claimed, not connected, and told nothing more")

    def left(self) -> float:
        """Seconds until `run_due` may have something to do."""
        return max(0.0, self._give_up_at - time.monotonic()) if self._claim and not self.active else math.inf

    def _on_claim(self, claim: Claim) -> None:
        if self._claim is not None:
            if claim.claim_id != self._claim.claim_id:
                self._log.warning("claim_refused", claim_id=claim.claim_id, reason="already claimed")
                self._reply(claim, attempt=claim.attempt, failure=ClaimRefused())
            elif self._last_reply is not None:
                self._send(self._last_reply)
            return
        self._shared_state.claiming = 1
        self._shared_state.state = WorkerActivity.Claimed
        state = self._settle(claim)
        if state != "confirmed":
            self._log.warning("claim_refused", claim_id=claim.claim_id, reason=state)
            self._reply(claim, attempt=claim.attempt, failure=ClaimRefused(f"the claim is {state}"))
            raise WorkerExit(ExitCode.CLAIM_REFUSED, f"the claim is {state}")
        self._claim = claim
        self._claimed_at_ms = wall_ms()
        self._shared_state.last_activity_ms = self._claimed_at_ms
        self._shared_state.assign(claim.user_id, claim.claim_id, claim.epoch)
        self._log.info("claimed", claim_id=claim.claim_id, user_id=claim.user_id, epoch=claim.epoch)
        self._shared_state.state = WorkerActivity.Connecting
        self._own(claim)
        self.request_loop = self._open_request_loop()
        self.request_loop.load_open_orders(claim.open_orders)
        self._connect(claim.accounts, claim.attempt, claim.connect_timeout)

    def _on_connect(self, message: Connect) -> None:
        claim = self._claim
        if claim is None or message.claim_id != claim.claim_id:
            self._log.warning("connect_dropped", claim_id=message.claim_id)
        elif self.active and self._last_reply is not None:
            self._send(self._last_reply)
        else:
            self._connect(claim.accounts, message.attempt, message.connect_timeout)

    def _on_release(self, message: ReleaseClaim) -> None:
        if self._claim is not None and message.claim_id != self._claim.claim_id:
            self._log.warning("release_dropped", claim_id=message.claim_id)
            return
        raise WorkerExit(ExitCode.OK, f"released: {message.reason}")

    def _settle(self, claim: Claim) -> str:
        """Confirms the claim; a repeat after a lost reply gives the same answer."""
        key = keys.pool_worker(self._config.pool, self._config.worker_id)
        for _ in range(_SETTLE_ATTEMPTS):
            try:
                state: bytes = self._client.run(SETTLE_CLAIM, [key], [claim.claim_id, "confirmed"])
            except ValkeyFailed as error:
                self._log.warning("settle_failed", code=error.code, reason=error.detail)
            else:
                return state.decode()
        return "unreachable"

    def _own(self, claim: Claim) -> None:
        """Takes the first lease; without one nothing may be connected."""
        try:
            outcome, lease_end = self._renewed()
        except ValkeyFailed as error:
            # The supervisor goes on trying; the login refuses by itself while there is no lease.
            self._log.warning("mark_failed", code=error.code, reason=error.detail)
            return
        if outcome == "ok":
            self._shared_state.lease_session = lease_end
            return
        failure = Fenced() if outcome == "fenced" else WorkerUnavailable("the user has no owner key")
        self._reply(claim, attempt=claim.attempt, failure=failure)
        raise WorkerExit(ExitCode.FENCED, f"the mark was refused: {outcome}")

    def _connect(self, sealed: list[SealedAccount], attempt: int, timeout: float) -> None:
        claim, request_loop = self._claim, self.request_loop
        if claim is None or request_loop is None:
            return
        self._shared_state.state = WorkerActivity.Connecting
        failure: BerthError | None = None
        try:
            if not sealed:
                raise UnknownAccount("the user has no broker account")
            accounts = self._opener.open(sealed, claim_id=claim.claim_id)
            request_loop.connect(accounts, min(max(timeout, 0.1), _LONGEST_CONNECT))
        except BerthError as error:
            failure = error
        if failure is None:
            self.active = True
            self._shared_state.connected = 1
            self._shared_state.state = WorkerActivity.Active
            request_loop.health.update(request_loop.broker_sessions.account_sessions(), f"attempt {attempt}")
            self._show()
        else:
            self._log.warning("connect_failed", attempt=attempt, code=failure.code)
            request_loop.broker_sessions.close_all()
            self._give_up_at = time.monotonic() + CONNECT_WAIT
        self._reply(claim, attempt=attempt, failure=failure)

    def _show(self) -> None:
        """Puts the new state up at once, so that it stands there when the reply is read."""
        try:
            outcome, lease_end = self._renewed()
        except ValkeyFailed as error:
            self._log.warning("mark_failed", code=error.code, reason=error.detail)
        else:
            if outcome == "ok":
                self._shared_state.lease_session = lease_end

    def _renewed(self) -> tuple[str, int]:
        """Once more over a new connection if there was no answer: without a lease a claim fails."""
        try:
            return self._mark.renew(self._client)
        except ValkeyUnreachable:
            return self._mark.renew(self._client)

    def _reply(self, claim: Claim, *, attempt: int, failure: BerthError | None = None) -> None:
        reply = ClaimReply(
            claim_id=claim.claim_id,
            worker_id=self._config.worker_id,
            epoch=claim.epoch,
            attempt=attempt,
            failure=Failure.of(failure) if failure else None,
            claimed_at_ms=self._claimed_at_ms,
            connected_at_ms=0 if failure else wall_ms(),
        )
        if self._claim is not None and claim.claim_id == self._claim.claim_id:
            self._last_reply = reply
        self._send(reply)

    def _send(self, reply: ClaimReply) -> None:
        self._send_buffer.add_claim_reply(reply)
        self._send_buffer.flush()
