"""Opens sealed credentials: the one place where a user's secrets become readable (invariant *sealed*)."""

from __future__ import annotations

from collections.abc import Iterable

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from worker_runtime.board import Board
from worker_runtime.connection import Account
from worker_runtime.protocol.errors import InvalidSeal, MalformedMessage
from worker_runtime.protocol.messages import Credentials, SealedAccount, decode
from worker_runtime.protocol.sealing import unseal


class Opener:
    """Holds the session's private key."""

    def __init__(self, private_key: X25519PrivateKey, board: Board, worker_id: str) -> None:
        self._private_key = private_key
        self._board = board
        self._worker_id = worker_id

    def open(self, sealed: Iterable[SealedAccount], *, claim_id: str) -> list[Account]:
        """The accounts with their credentials in clear; raises `InvalidSeal` if one cannot be opened."""
        return [self._open_one(one, claim_id) for one in sealed]

    def _open_one(self, sealed: SealedAccount, claim_id: str) -> Account:
        clear = unseal(
            sealed.sealed,
            self._private_key,
            user_id=self._board.user_id,
            account_id=sealed.account_id,
            epoch=self._board.epoch,
            claim_id=claim_id,
            worker_id=self._worker_id,
        )
        try:
            credentials: Credentials = decode(clear, Credentials)
        except MalformedMessage:
            # Without the cause: its text comes from what was sealed.
            raise InvalidSeal("what was sealed is no set of credentials") from None
        return Account.of(sealed, credentials)
