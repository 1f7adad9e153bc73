"""Holds what the parts of a session share, and executes control messages.

The orchestrator signs control messages. They overtake orders.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from worker_runtime.brokers.port import BrokerFactory
from worker_runtime.process.clock import wall_ms
from worker_runtime.process.log import Log
from worker_runtime.process.replacement import WorkerExit
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Valkey
from worker_runtime.protocol.errors import BerthError, UnknownAccount
from worker_runtime.protocol.launch import ExitCode, WorkerConfig
from worker_runtime.protocol.messages import (
    ClaimReply,
    Failure,
    PlaceOrder,
    ReloadCredentials,
    Shutdown,
    decode,
)
from worker_runtime.protocol.requests import BooksCompared, ControlMessage
from worker_runtime.protocol.sealing import new_worker_key, verify
from worker_runtime.trading.account_session import CredentialOpener
from worker_runtime.trading.broker_sessions import BrokerSessions
from worker_runtime.trading.health import logins_of
from worker_runtime.trading.send_buffer import SendBuffer
from worker_runtime.trading.session_recovery import SessionRecovery

#: Seconds that the logins of one credential reload may take together: less than the orchestrator
#: waits for the answer (20 s).
RELOAD_TIMEOUT_S = 15.0


@dataclass(eq=False, repr=False)
class SessionParts:
    """Holds what the parts of one session share, and makes the session's key pair.

    Nothing else holds the private key, so a replaced session needs credentials that are sealed
    anew.
    """

    config: WorkerConfig
    shared_state: SharedState
    client: Valkey
    load_brokers: Callable[[], BrokerFactory]
    #: Returns True once the session is asked to end.
    stopping: Callable[[], bool]
    #: Wakes the session's loop, from any thread.
    wake: Callable[[], None]
    log: Log
    send_buffer: SendBuffer = field(init=False)
    opener: CredentialOpener = field(init=False)

    def __post_init__(self) -> None:
        self.send_buffer = SendBuffer(self.client, self.config, self.shared_state, self.log)
        key = new_worker_key()
        self.shared_state.publish_key(key.public_key().public_bytes_raw())
        self.opener = CredentialOpener(key, self.shared_state, self.config.worker_id)
        self._orchestrator_keys = [
            Ed25519PublicKey.from_public_bytes(public_key)
            for public_key in self.config.orchestrator_keys
        ]

    def verify(self, data: bytes) -> bytes:
        """Returns the payload of a message that the orchestrator signed; raises what
        `sealing.verify` does."""
        return verify(data, *self._orchestrator_keys)


class ControlHandler:
    """Executes the messages of the control list, each at most once (`message.number`)."""

    def __init__(
        self,
        parts: SessionParts,
        broker_sessions: BrokerSessions,
        recovery: SessionRecovery,
        load_open_orders: Callable[[Sequence[PlaceOrder]], None],
    ) -> None:
        self._parts = parts
        self._broker_sessions = broker_sessions
        self._recovery = recovery
        self._load_open_orders = load_open_orders
        self._shared_state, self._log = parts.shared_state, parts.log
        self._worker_id = parts.config.worker_id

    def handle(self, item: bytes) -> None:
        """Executes one message. Logs and drops a message that is forged, garbled, meant for another
        assignment, or no newer than the last one.

        `BooksCompared` has no number and may be repeated. A `ReloadCredentials` is marked as
        executed before it is, so a session that dies in it never repeats it. Raises `WorkerExit`
        for a `Shutdown`, and when new credentials leave no hope of a broker session.
        """
        try:
            message: ControlMessage = decode(self._parts.verify(item), ControlMessage)
        except BerthError as error:
            self._log.warning("control_dropped", code=error.code)
            return
        if (
            message.user_id != self._shared_state.user_id
            or message.epoch != self._shared_state.epoch
        ):
            self._log.warning(
                "control_dropped", code="NOT_FOR_THIS_ASSIGNMENT", epoch=message.epoch
            )
            return
        if isinstance(message, Shutdown):
            self._shared_state.last_activity_ms = wall_ms()
            raise WorkerExit(ExitCode.OK, message.reason)
        if isinstance(message, BooksCompared):
            self._log.info("books_compared", account=message.account_id, blocks=message.blocks)
            if (session := self._broker_sessions.find(message.account_id)) is not None:
                session.books_compared(message.at_ms, message.blocks)
            return
        if message.number <= self._shared_state.control_number:
            self._log.warning("control_dropped", code="NOT_THE_NEWEST", number=message.number)
            return
        self._shared_state.control_number = message.number
        self._shared_state.last_activity_ms = wall_ms()
        self._reload(message)

    def _reload(self, message: ReloadCredentials) -> None:
        """Replaces message keys and the credentials of accounts that have a newer version, within
        `RELOAD_TIMEOUT_S`, then sends the reply.

        After a failure the message keys may be replaced already, and some accounts logged in again;
        the reply says why, and how each login ended. Raises `WorkerExit` after the reply if no
        account can have a session any more.
        """
        if message.worker_id != self._worker_id:
            self._log.warning("control_dropped", code="NOT_FOR_THIS_WORKER")
            return
        failure: Failure | None = None
        versions = self._broker_sessions.versions()
        changed = [
            account
            for account in message.accounts
            if versions.get(account.account_id, 0) < account.version
        ]
        try:
            message_keys = self._parts.opener.open_message_keys(
                message.sealed_keys,
                user_id=message.user_id,
                epoch=message.epoch,
                claim_id=message.reload_id,
            )
            self._shared_state.write_message_keys(message_keys)
            if not message.accounts:
                raise UnknownAccount("the user has no broker account")
            self._load_open_orders(message.open_orders)
            accounts = self._parts.opener.open(changed, claim_id=message.reload_id)
            self._broker_sessions.replace(accounts, RELOAD_TIMEOUT_S)
        except BerthError as error:
            failure = Failure.of(error)
        self._shared_state.state = self._broker_sessions.state()
        self._log.info(
            "credentials_reloaded", accounts=len(changed), code=failure.code if failure else ""
        )
        self._parts.send_buffer.send_claim_reply(
            ClaimReply(
                claim_id=message.reload_id,
                worker_id=self._worker_id,
                epoch=self._shared_state.epoch,
                attempt=1,
                failure=failure,
                connected_at_ms=0 if failure else wall_ms(),
                logins=logins_of(self._broker_sessions.account_sessions()),
                at_ms=wall_ms(),
            )
        )
        self._recovery.raise_if_hopeless()  # after the answer, because it may end this worker
