"""Control messages of an assigned worker: signed by the orchestrator, overtaking orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from worker_runtime.board import Board
from worker_runtime.boottime import wall_ms
from worker_runtime.connections import Connections
from worker_runtime.credentials import Opener
from worker_runtime.exits import WorkerEnds
from worker_runtime.log import Log
from worker_runtime.outbox import Outbox
from worker_runtime.protocol.errors import BerthError, UnknownAccount
from worker_runtime.protocol.exit_codes import ExitCode
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
from worker_runtime.recovery import Recovery

#: Seconds that the logins of one credential reload may take together: less than the orchestrator waits for
#: the answer (20 s).
RELOAD_TIMEOUT = 15.0


class Control:
    """Carries out control messages for one user."""

    def __init__(
        self,
        connections: Connections,
        recovery: Recovery,
        prime: Callable[[Sequence[PlaceOrder]], None],
        *,
        orchestrator_key: bytes,
        opener: Opener,
        outbox: Outbox,
        board: Board,
        worker_id: str,
        log: Log,
    ) -> None:
        self._connections = connections
        self._recovery = recovery
        self._prime = prime
        self._orchestrator_key = Ed25519PublicKey.from_public_bytes(orchestrator_key)
        self._opener = opener
        self._outbox = outbox
        self._board = board
        self._worker_id = worker_id
        self._log = log

    def handle(self, item: bytes) -> None:
        """Carries out one message; what is forged, garbled or meant for another is logged and dropped.

        Raises `WorkerEnds` for a `Shutdown`, and when the credentials of a fresh session are of no use.
        """
        try:
            message: ControlMessage = decode(verify(item, self._orchestrator_key), ControlMessage)
        except BerthError as error:
            self._log.warning("control_dropped", code=error.code)
            return
        if message.user_id != self._board.user_id or message.epoch != self._board.epoch:
            self._log.warning("control_dropped", code="NOT_FOR_THIS_ASSIGNMENT", epoch=message.epoch)
            return
        self._board.last_activity_ms = wall_ms()
        if isinstance(message, Shutdown):
            raise WorkerEnds(ExitCode.OK, message.reason)
        self._reload(message)

    def _reload(self, message: ReloadCredentials) -> None:
        if message.worker_id != self._worker_id:
            self._log.warning("control_dropped", code="NOT_FOR_THIS_WORKER")
            return
        failure: Failure | None = None
        versions = self._connections.versions()
        changed = [one for one in message.accounts if versions.get(one.account_id) != one.version]
        try:
            if not message.accounts:
                raise UnknownAccount("the user has no broker account")
            self._prime(message.open_orders)
            accounts = self._opener.open(changed, claim_id=message.reload_id)
            self._connections.replace(accounts, RELOAD_TIMEOUT)
        except BerthError as error:
            failure = Failure.of(error)
        self._board.state = self._connections.state()
        self._log.info("credentials_reloaded", accounts=len(changed), code=failure.code if failure else "")
        self._outbox.claim_reply(
            ClaimReply(
                claim_id=message.reload_id,
                worker_id=self._worker_id,
                epoch=self._board.epoch,
                attempt=1,
                failure=failure,
                connected_at_ms=0 if failure else wall_ms(),
            )
        )
        self._outbox.flush()
        self._recovery.judge()  # after the answer: it may be this worker's last word
