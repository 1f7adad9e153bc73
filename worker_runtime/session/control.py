"""Handles control messages: the orchestrator signs them, and they overtake orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from worker_runtime.process.clock import wall_ms
from worker_runtime.process.log import Log
from worker_runtime.process.replacement import WorkerExit
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol.errors import BerthError, UnknownAccount
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import (
    ClaimReply,
    ControlMessage,
    Failure,
    PlaceOrder,
    ReloadCredentials,
    Shutdown,
    decode,
)
from worker_runtime.protocol.sealing import verify
from worker_runtime.session.send_buffer import SendBuffer
from worker_runtime.trading.account_session import CredentialOpener
from worker_runtime.trading.broker_sessions import BrokerSessions
from worker_runtime.trading.session_recovery import SessionRecovery

#: Seconds that the logins of one credential reload may take together: less than the orchestrator waits for
#: the answer (20 s).
RELOAD_TIMEOUT = 15.0


class ControlHandler:
    def __init__(
        self,
        broker_sessions: BrokerSessions,
        recovery: SessionRecovery,
        load_open_orders: Callable[[Sequence[PlaceOrder]], None],
        *,
        orchestrator_key: bytes,
        opener: CredentialOpener,
        send_buffer: SendBuffer,
        shared_state: SharedState,
        worker_id: str,
        log: Log,
    ) -> None:
        self._broker_sessions = broker_sessions
        self._recovery = recovery
        self._load_open_orders = load_open_orders
        self._orchestrator_key = Ed25519PublicKey.from_public_bytes(orchestrator_key)
        self._opener = opener
        self._send_buffer = send_buffer
        self._shared_state = shared_state
        self._worker_id = worker_id
        self._log = log

    def handle(self, item: bytes) -> None:
        """Carries out one message; logs and drops forged, garbled and misdirected ones.

        Raises `WorkerExit` for a `Shutdown`, and when new credentials leave no hope of a broker session.
        """
        try:
            message: ControlMessage = decode(verify(item, self._orchestrator_key), ControlMessage)
        except BerthError as error:
            self._log.warning("control_dropped", code=error.code)
            return
        if message.user_id != self._shared_state.user_id or message.epoch != self._shared_state.epoch:
            self._log.warning("control_dropped", code="NOT_FOR_THIS_ASSIGNMENT", epoch=message.epoch)
            return
        self._shared_state.last_activity_ms = wall_ms()
        if isinstance(message, Shutdown):
            raise WorkerExit(ExitCode.OK, message.reason)
        self._reload(message)

    def _reload(self, message: ReloadCredentials) -> None:
        if message.worker_id != self._worker_id:
            self._log.warning("control_dropped", code="NOT_FOR_THIS_WORKER")
            return
        failure: Failure | None = None
        versions = self._broker_sessions.versions()
        changed = [one for one in message.accounts if versions.get(one.account_id) != one.version]
        try:
            if not message.accounts:
                raise UnknownAccount("the user has no broker account")
            self._load_open_orders(message.open_orders)
            accounts = self._opener.open(changed, claim_id=message.reload_id)
            self._broker_sessions.replace(accounts, RELOAD_TIMEOUT)
        except BerthError as error:
            failure = Failure.of(error)
        self._shared_state.state = self._broker_sessions.state()
        self._log.info("credentials_reloaded", accounts=len(changed), code=failure.code if failure else "")
        self._send_buffer.send_claim_reply(
            ClaimReply(
                claim_id=message.reload_id,
                worker_id=self._worker_id,
                epoch=self._shared_state.epoch,
                attempt=1,
                failure=failure,
                connected_at_ms=0 if failure else wall_ms(),
            )
        )
        self._recovery.raise_if_hopeless()  # after the answer, because it may end this worker
