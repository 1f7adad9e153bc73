"""The messages between a claim or reload and its worker: sealed accounts, signed messages, and replies.

The list of replies is never popped, because the repeat of a lost activity must find the reply again. Waiting
is a BLMOVE of the list onto itself, which blocks while it is empty and changes nothing when it is not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from redis.asyncio import Redis

from infra.database.models import StoredCredentials
from infra.valkey.client import reply_of
from infra.vault import vault
from infra.vault.key_pairs import KeyUnwrapper
from worker_runtime.protocol import keys, sealing
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.messages import ClaimReply, Message, SealedAccount, decode
from workflows.user_worker.messages import WorkerRef

#: Seconds of one blocking wait: below Valkey's socket timeout (5 s), with a heartbeat in between.
WAIT_SLICE = 1.0

log = structlog.get_logger()


async def seal_accounts(
    stored: Sequence[StoredCredentials],
    unwrapper: KeyUnwrapper,
    public_key: bytes,
    worker: WorkerRef,
    claim_id: str,
) -> list[SealedAccount]:
    """Decrypts and seals each account at once, so that the clear text exists only in this call (sealed)."""
    sealed = []
    for one in stored:
        credentials = await vault.decrypt_credentials(
            one.encrypted, unwrapper, user_id=one.user_id, account_id=one.account_id
        )
        box = sealing.seal(
            msgspec.json.encode(credentials),
            public_key,
            user_id=one.user_id,
            account_id=one.account_id,
            epoch=worker.epoch,
            claim_id=claim_id,
            worker_id=worker.worker_id,
        )
        sealed.append(
            SealedAccount(
                account_id=one.account_id,
                broker=one.account.broker,
                broker_type=one.account.broker_type,
                simulation=one.account.simulation,
                version=one.version,
                sealed=box,
            )
        )
    return sealed


async def push_signed(client: Redis, key: str, message: Message, signing: Ed25519PrivateKey) -> None:
    """Puts a signed message on a worker's inbox, which expires after `CLAIM_TTL`."""
    async with client.pipeline(transaction=True) as pipe:
        pipe.rpush(key, sealing.sign(message, signing))
        pipe.expire(key, keys.CLAIM_TTL)
        await pipe.execute()


class ClaimReplies:
    """The answers to one claim id or reload id."""

    def __init__(self, client: Redis, pool: str, claim_id: str) -> None:
        self._client = client
        self._claim_id = claim_id
        self._key = keys.pool_reply(pool, claim_id)

    async def present(self, worker_id: str, attempt: int) -> ClaimReply | None:
        """The answer to this attempt, if it has come. Removes answers to other attempts."""
        items: list[bytes] = await reply_of(self._client.lrange(self._key, 0, -1))
        for item in items:
            reply = self._read(item)
            # A success of any attempt counts: the worker is connected.
            if (
                reply is None
                or reply.worker_id != worker_id
                or (reply.attempt < attempt and reply.failure is not None)
            ):
                await reply_of(self._client.lrem(self._key, 1, item))  # type: ignore[arg-type]
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
            await reply_of(self._client.blmove(self._key, self._key, max(left, 0.01), "LEFT", "RIGHT"))  # type: ignore[arg-type]

    def _read(self, item: bytes) -> ClaimReply | None:
        try:
            reply: ClaimReply = decode(item, ClaimReply)
        except MalformedMessage as error:
            log.warning("malformed_claim_reply", claim_id=self._claim_id, reason=error.detail)
            return None
        return reply if reply.claim_id == self._claim_id else None
