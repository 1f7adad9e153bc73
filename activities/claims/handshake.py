"""A user's accounts, sealed to one worker's public key for one claim or reload.

Reading a worker's answer to a claim, a further login or a reload, without losing it.

The list is never popped: a lost activity result must find the answer again. Waiting is a BLMOVE of the
list onto itself, which blocks while it is empty and changes nothing when it is not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import structlog
from redis.asyncio import Redis

from activities.pool.entries import ask
from infra.database.accounts import EncryptedAccount
from infra.vault import vault
from infra.vault.key_pairs import KeyUnwrapper
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.messages import ClaimReply, SealedAccount, decode


async def seal_accounts(
    accounts: Sequence[EncryptedAccount],
    unwrapper: KeyUnwrapper,
    public_key: bytes,
    *,
    epoch: int,
    claim_id: str,
    worker_id: str,
) -> list[SealedAccount]:
    """Decrypts and seals in one breath: the clear text lives only in this call (invariant *sealed*)."""
    sealed = []
    for account in accounts:
        credentials = await vault.decrypt_credentials(
            account.encrypted, unwrapper, user_id=account.user_id, account_id=account.account_id
        )
        box = sealing.seal(
            msgspec.json.encode(credentials),
            public_key,
            user_id=account.user_id,
            account_id=account.account_id,
            epoch=epoch,
            claim_id=claim_id,
            worker_id=worker_id,
        )
        sealed.append(
            SealedAccount(
                account_id=account.account_id,
                broker=account.broker,
                broker_type=account.broker_type,
                simulation=account.simulation,
                version=account.version,
                sealed=box,
            )
        )
    return sealed


log = structlog.get_logger()


class ClaimReplies:
    """The answers that belong to one claim id (or reload id)."""

    def __init__(self, client: Redis, pool: str, claim_id: str) -> None:
        self._client = client
        self._claim_id = claim_id
        self._key = keys.pool_reply(pool, claim_id)

    async def present(self, worker_id: str, attempt: int) -> ClaimReply | None:
        """The answer to this attempt, if it is there; what does not belong here is removed."""
        items: list[bytes] = await ask(self._client.lrange(self._key, 0, -1))
        for item in items:
            reply = self._read(item)
            # A success stands whatever attempt it belongs to: the worker is connected.
            if (
                reply is None
                or reply.worker_id != worker_id
                or (reply.attempt < attempt and reply.failure is not None)
            ):
                await ask(self._client.lrem(self._key, 1, item))  # type: ignore[arg-type]
            else:
                return reply
        return None

    async def wait(self, worker_id: str, attempt: int, timeout: float) -> ClaimReply | None:
        """The answer to this attempt, or None after `timeout` seconds (less than the socket timeout)."""
        deadline = time.monotonic() + timeout
        while True:
            reply = await self.present(worker_id, attempt)
            left = deadline - time.monotonic()
            if reply is not None or left <= 0:
                return reply
            await ask(self._client.blmove(self._key, self._key, max(left, 0.01), "LEFT", "RIGHT"))  # type: ignore[arg-type]

    def _read(self, item: bytes) -> ClaimReply | None:
        try:
            reply: ClaimReply = decode(item, ClaimReply)
        except MalformedMessage as error:
            log.warning("malformed_claim_reply", claim_id=self._claim_id, reason=error.detail)
            return None
        return reply if reply.claim_id == self._claim_id else None
