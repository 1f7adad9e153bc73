"""Handles a session's inbox: claims a worker of the pool for its user, and lets a fresh session
take over from one that died.

A worker carries out a claim only if the orchestrator has signed it and `settle_claim.lua` says that
nobody has released it. A repeated claim gets the same answer and is carried out once.
"""

import math
import time
from abc import ABC, abstractmethod

from worker_runtime.process.clock import Backoff, wall_ms
from worker_runtime.process.mark import WorkerMark
from worker_runtime.process.replacement import WorkerExit, replacement_reason
from worker_runtime.process.shared_state import WorkerActivity
from worker_runtime.process.valkey import ValkeyFailed, ValkeyUnreachable
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import (
    BerthError,
    ClaimRefused,
    Fenced,
    InvalidSeal,
    UnknownAccount,
    WorkerUnavailable,
)
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import (
    AccountLogin,
    Claim,
    ClaimReply,
    Connect,
    Failure,
    InboxMessage,
    ReleaseClaim,
    WorkerEventKind,
    decode,
)
from worker_runtime.protocol.scripts import SETTLE_CLAIM
from worker_runtime.session.control import SessionParts
from worker_runtime.session.request_loop import RequestLoop
from worker_runtime.trading.health import logins_of

#: Seconds a claimed worker waits for `Connect` or `ReleaseClaim` after a failed connect: more than
#: the orchestrator's longest backoff between attempts.
CONNECT_MESSAGE_TIMEOUT_S = 120.0
#: Seconds; no connect holds the session for longer, whatever a message asks for.
_MAX_CONNECT_TIMEOUT_S = 30.0
#: Tries to confirm a claim; a lost reply costs one.
_MAX_SETTLE_ATTEMPTS = 3


class InboxHandler(ABC):
    """Reads the inbox, renews the mark and answers a claim, both for claiming and for resuming."""

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts
        self._config, self._shared_state, self._log = parts.config, parts.shared_state, parts.log
        self._client, self._send_buffer, self._opener = (
            parts.client,
            parts.send_buffer,
            parts.opener,
        )
        self._mark = WorkerMark(parts.config, parts.shared_state)
        self._retry = Backoff(0.05, 1.0)
        self._claimed_at_ms = 0
        #: The state of each login of the last connect.
        self._logins: list[AccountLogin] = []
        #: None until the claim is confirmed.
        self.request_loop: RequestLoop | None = None
        #: True if the request loop may run.
        self.active = False

    def handle(self, data: bytes) -> None:
        """Acts on one inbox message; logs and drops forged, garbled and misdirected ones.

        Raises `WorkerExit` when this worker was released or must stop.
        """
        try:
            message: InboxMessage = decode(self._parts.verify(data), InboxMessage)
        except BerthError as error:
            self._log.warning("inbox_dropped", code=error.code)
            return
        if message.worker_id != self._config.worker_id:
            self._log.warning("inbox_dropped", code="NOT_FOR_THIS_WORKER")
        elif isinstance(message, Claim):
            self._on_claim(message)
        elif isinstance(message, Connect):
            self._on_connect(message)
        else:
            self._on_release(message)

    @abstractmethod
    def run_due(self) -> None:
        """Does what is due. Raises `WorkerExit`."""

    @abstractmethod
    def seconds_until_due(self) -> float:
        """Returns the seconds until `run_due` may have something to do."""

    @abstractmethod
    def _on_claim(self, claim: Claim) -> None: ...

    @abstractmethod
    def _on_connect(self, message: Connect) -> None: ...

    def _on_release(self, message: ReleaseClaim) -> None:
        if self._shared_state.assigned and message.claim_id != self._shared_state.claim_id:
            self._log.warning("release_dropped", claim_id=message.claim_id)
            return
        raise WorkerExit(ExitCode.OK, f"released: {message.reason}")

    def _renew_mark(self) -> str:
        """Renews the mark and, with it, the session's lease. Returns the outcome, '' if Valkey did
        not answer.

        Retries once over a new connection, because without a lease a claim fails.
        """
        try:
            try:
                outcome, lease_end = self._mark.renew(self._client)
            except ValkeyUnreachable:
                outcome, lease_end = self._mark.renew(self._client)
        except ValkeyFailed as error:
            self._log.warning("mark_failed", code=error.code, reason=error.detail)
            return ""
        if outcome == "ok":
            self._shared_state.lease_session = lease_end
        return outcome

    def _reply(
        self, claim_id: str, epoch: int, attempt: int, failure: BerthError | None = None
    ) -> ClaimReply:
        reply = ClaimReply(
            claim_id=claim_id,
            worker_id=self._config.worker_id,
            epoch=epoch,
            attempt=attempt,
            failure=Failure.of(failure) if failure else None,
            claimed_at_ms=self._claimed_at_ms,
            connected_at_ms=0 if failure else wall_ms(),
            logins=self._logins,
            at_ms=wall_ms(),
        )
        self._send_buffer.send_claim_reply(reply)
        return reply

    def _refuse(self, message: Claim | Connect, epoch: int, failure: BerthError) -> None:
        self._log.warning("claim_refused", claim_id=message.claim_id, reason=failure.detail)
        self._reply(message.claim_id, epoch, message.attempt, failure)


class ClaimHandler(InboxHandler):
    """Claims a worker of the pool for a user."""

    _claim: Claim | None = None
    _last_reply: ClaimReply | None = None
    _give_up_at = 0.0

    def run_due(self) -> None:
        """Ends a worker that was claimed, failed to connect and got no further message."""
        if self._claim is not None and not self.active and time.monotonic() > self._give_up_at:
            raise WorkerExit(
                ExitCode.CLAIM_REFUSED, "claimed, not connected, and no further message came"
            )

    def seconds_until_due(self) -> float:
        return (
            max(0.0, self._give_up_at - time.monotonic())
            if self._claim and not self.active
            else math.inf
        )

    def _on_claim(self, claim: Claim) -> None:
        if self._claim is not None:
            if claim.claim_id != self._claim.claim_id:
                self._refuse(claim, claim.epoch, ClaimRefused())
            elif self._last_reply is not None:
                self._send_buffer.send_claim_reply(self._last_reply)
            return
        self._confirm(claim)
        self._take_assignment(claim)
        self._take_lease(claim)
        self.request_loop = RequestLoop(self._parts)
        self.request_loop.load_open_orders(claim.open_orders)
        self._connect(claim, self.request_loop, claim.attempt, claim.connect_timeout)

    def _on_connect(self, message: Connect) -> None:
        claim = self._claim
        if claim is None or message.claim_id != claim.claim_id or self.request_loop is None:
            self._log.warning("connect_dropped", claim_id=message.claim_id)
        elif self._last_reply is not None and (
            self.active or message.attempt <= self._last_reply.attempt
        ):
            # A repeat: another login for it would spend the broker's limit of logins.
            self._send_buffer.send_claim_reply(self._last_reply)
        else:
            self._connect(claim, self.request_loop, message.attempt, message.connect_timeout)

    def _confirm(self, claim: Claim) -> None:
        """Confirms the claim. Refuses it and raises `WorkerExit` if it no longer holds."""
        self._shared_state.claiming = 1
        self._shared_state.state = WorkerActivity.Claimed
        claim_state = self._settle(claim)
        if claim_state != "confirmed":
            self._refuse(claim, claim.epoch, ClaimRefused(f"the claim is {claim_state}"))
            raise WorkerExit(ExitCode.CLAIM_REFUSED, f"the claim is {claim_state}")

    def _take_assignment(self, claim: Claim) -> None:
        """Opens the message keys and writes the user and the epoch to the shared state. Refuses the
        claim and raises `WorkerExit` if the keys cannot be opened."""
        state = self._shared_state
        try:
            # Before the assignment: the supervisor needs them for its first renewal of the mark.
            state.write_message_keys(
                self._opener.open_message_keys(
                    claim.sealed_keys,
                    user_id=claim.user_id,
                    epoch=claim.epoch,
                    claim_id=claim.claim_id,
                )
            )
        except InvalidSeal as error:
            self._refuse(claim, claim.epoch, error)
            raise WorkerExit(ExitCode.CLAIM_REFUSED, "the message keys cannot be opened") from None
        self._claim = claim
        self._claimed_at_ms = state.last_activity_ms = wall_ms()
        state.switch_version = claim.switch_version
        state.assign(claim.user_id, claim.claim_id, claim.epoch)
        self._log.info("claimed", claim_id=claim.claim_id, user_id=claim.user_id, epoch=claim.epoch)

    def _take_lease(self, claim: Claim) -> None:
        """Renews the mark, which gives the session its lease. Answers the claim with the failure
        and raises `WorkerExit` if the mark is refused."""
        self._shared_state.state = WorkerActivity.Connecting
        # Without an answer the supervisor keeps trying; without a lease no login is made.
        outcome = self._renew_mark()
        if outcome not in ("ok", ""):
            failure = (
                Fenced() if outcome == "fenced" else WorkerUnavailable("the user has no owner key")
            )
            self._answer(claim, claim.attempt, failure)
            raise WorkerExit(ExitCode.FENCED, f"the mark was refused: {outcome}")

    def _settle(self, claim: Claim) -> str:
        """Settles the claim: asks Valkey to confirm it, and returns the state that holds from now
        on. A repeat after a lost reply gives the same answer."""
        key = keys.pool_worker(self._config.pool, self._config.worker_id)
        for _ in range(_MAX_SETTLE_ATTEMPTS):
            try:
                state: bytes = self._client.run(SETTLE_CLAIM, [key], [claim.claim_id, "confirmed"])
            except ValkeyFailed as error:
                self._log.warning("claim_not_settled", code=error.code, reason=error.detail)
            else:
                return state.decode()
        return "unreachable"

    def _connect(
        self, claim: Claim, request_loop: RequestLoop, attempt: int, timeout: float
    ) -> None:
        self._shared_state.state = WorkerActivity.Connecting
        failure: BerthError | None = None
        try:
            if not claim.accounts:
                raise UnknownAccount("the user has no broker account")
            accounts = self._opener.open(claim.accounts, claim_id=claim.claim_id)
            request_loop.connect(accounts, min(max(timeout, 0.1), _MAX_CONNECT_TIMEOUT_S))
        except BerthError as error:
            failure = error
        self._logins = logins_of(request_loop.broker_sessions.account_sessions())
        if failure is None:
            self.active = True
            self._shared_state.connected = 1
            self._shared_state.state = WorkerActivity.Active
            request_loop.health.update(
                request_loop.broker_sessions.account_sessions(), f"attempt {attempt}"
            )
            self._renew_mark()  # so that the mark shows the new state before the reply is read
        else:
            self._log.warning("connect_failed", attempt=attempt, code=failure.code)
            request_loop.broker_sessions.close_all()
            self._give_up_at = time.monotonic() + CONNECT_MESSAGE_TIMEOUT_S
        self._answer(claim, attempt, failure)

    def _answer(self, claim: Claim, attempt: int, failure: BerthError | None) -> None:
        self._last_reply = self._reply(claim.claim_id, claim.epoch, attempt, failure)


class ResumeHandler(InboxHandler):
    """Lets a fresh session take the place of one that died, for the same user.

    The assignment is in the shared state; the credentials were lost with the predecessor's key. So
    the fresh session renews the lease, sends an event and waits: it takes control messages, but no
    requests. The orchestrator seals the credentials to the new key and sends `ReloadCredentials`.
    """

    #: Seconds after which the event is repeated: a flushed server or an orchestrator that was away
    #: may have lost it. There is no deadline; the orchestrator ends the worker if it gives up.
    repeat_event = 120.0
    _next_event_at = 0.0

    def run_due(self) -> None:
        """Renews the mark, then announces the new key until the credentials are here.

        Raises `WorkerExit`.
        """
        if self.request_loop is None:
            self._shared_state.state = WorkerActivity.Reconnecting
            self.request_loop = RequestLoop(self._parts)
        if not self.active and self._retry.due():
            self._take_lease()
        if self.active and self._needs_credentials() and time.monotonic() >= self._next_event_at:
            self._next_event_at = time.monotonic() + self.repeat_event
            reason = replacement_reason(self._shared_state)
            self._send_buffer.add_worker_event(WorkerEventKind.SESSION_REPLACED, reason)
            self._send_buffer.flush_if_due()

    def seconds_until_due(self) -> float:
        if not self.active:
            return self._retry.seconds_until_due()
        wait = max(0.0, self._next_event_at - time.monotonic())
        return wait if self._needs_credentials() else math.inf

    def _on_claim(self, claim: Claim) -> None:
        self._refuse_as_replaced(claim, claim.epoch)

    def _on_connect(self, message: Connect) -> None:
        if message.claim_id == self._shared_state.claim_id:
            self._refuse_as_replaced(message, self._shared_state.epoch)
        else:
            self._log.warning("connect_dropped", claim_id=message.claim_id)

    def _refuse_as_replaced(self, message: Claim | Connect, epoch: int) -> None:
        ours = message.claim_id == self._shared_state.claim_id
        self._refuse(
            message,
            epoch,
            WorkerUnavailable("the session was replaced") if ours else ClaimRefused(),
        )

    def _needs_credentials(self) -> bool:
        return self.request_loop is not None and not self.request_loop.broker_sessions.loaded

    def _take_lease(self) -> None:
        outcome = self._renew_mark()
        if outcome == "fenced":
            self._shared_state.fenced = 1
            self._send_buffer.add_worker_event(WorkerEventKind.FENCED, "by a fresh session")
            raise WorkerExit(ExitCode.FENCED, "another epoch owns the user")
        if outcome != "ok":  # no answer, or no owner key, of which the supervisor has sent an event
            self._retry.failed()
            return
        self.active = True
        self._log.info(
            "resumed",
            session=self._shared_state.session_number,
            because=replacement_reason(self._shared_state),
        )
