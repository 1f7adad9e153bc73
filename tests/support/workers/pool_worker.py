"""A pool worker without a process: it speaks the protocol, and does what a test tells it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from redis.asyncio import Redis

from activities.pool import entries
from infra.valkey import client as valkey
from infra.valkey.client import reply_of, text_of
from infra.vault.key_pairs import OrchestratorKeys
from infra.worker_task import LaunchSpec, Task
from worker_runtime.protocol import keys, scripts, sealing
from worker_runtime.protocol.messages import (
    AccountLogin,
    Claim,
    ClaimReply,
    Connect,
    Credentials,
    Failure,
    InboxMessage,
    decode,
)

POOL = "default"


async def popped(client: Redis, key: str, patience: float) -> bytes | None:
    """The first item of a list, once there is one; in short waits, below the client's socket
    timeout."""
    end = time.monotonic() + patience
    while (item := await reply_of(client.blpop([key], 1))) is None and time.monotonic() < end:
        pass
    return None if item is None else bytes(item[1])


class ScriptedPoolWorker:
    """Announces itself; `serve` answers what comes to its inbox."""

    def __init__(
        self,
        client: Redis,
        orchestrator_keys: OrchestratorKeys,
        worker_id: str,
        *,
        task_id: str = "",
        reserved_claim: str = "",
        version: str = "test",
    ) -> None:
        self._client = client
        self._keys = orchestrator_keys
        self.reserved = reserved_claim
        self._version = version
        self.worker_id = worker_id
        self.task_id = task_id or f"task-{worker_id}"
        self.private_key = X25519PrivateKey.generate()
        self.public_key = self.private_key.public_key().public_bytes_raw()
        self.proof = sealing.prove_key(
            orchestrator_keys.launch_token(worker_id), worker_id, self.public_key
        )
        self.received: list[InboxMessage] = []
        self.opened: list[Credentials] = []
        #: Failures of the next logins; when empty, logins succeed.
        self.failures: list[Failure] = []
        #: How the logins stand, as the next replies say.
        self.logins: list[AccountLogin] = []

    async def announce(self) -> str:
        """Its state, once it was taken into the pool, if it was not there."""
        if not await self.renew_entry(self._client):
            await entries.admit(self._client, POOL, self.worker_id, self.reserved)
        return text_of(
            await reply_of(self._client.hget(keys.pool_worker(POOL, self.worker_id), "state"))
        )

    async def renew_entry(self, client: Redis, *, ring: bool = False) -> str:
        """Its state; with `ring`, asks to be taken into the pool if it is not there, as real ones
        do."""
        words = [
            "public_key",
            self.public_key,
            "proof",
            self.proof,
            "reserved",
            self.reserved,
            "task",
            self.task_id,
            "version",
            self._version,
        ]
        entry = keys.pool_worker(POOL, self.worker_id)
        state = await valkey.run_script(client, scripts.ANNOUNCE_WORKER, [entry], [30_000, *words])
        if ring and not state:
            await reply_of(client.rpush(keys.EVENT_BELL, f"{POOL} {self.worker_id}"))
        return text_of(state)

    async def next(self, patience: float = 30.0) -> InboxMessage:
        """Takes one message from the inbox and checks its signature."""
        item = await popped(self._client, keys.pool_inbox(POOL, self.worker_id), patience)
        assert item is not None, "nothing came to the inbox"
        payload = sealing.verify(
            item, *map(Ed25519PublicKey.from_public_bytes, self._keys.public_keys)
        )
        message: InboxMessage = decode(payload, InboxMessage)
        self.received.append(message)
        return message

    async def serve(self, messages: int = 1, patience: float = 30.0) -> None:
        """Answers this many messages as a real worker would; waits `patience` seconds for each."""
        for _ in range(messages):
            message = await self.next(patience)
            if isinstance(message, Claim):
                await self.confirm(message)
                self._open(message)
                await self.reply(message.claim_id, message.epoch, 1)
            elif isinstance(message, Connect):
                await self.reply(message.claim_id, 1, message.attempt)

    async def confirm(self, claim: Claim) -> str:
        key = keys.pool_worker(POOL, self.worker_id)
        return bytes(
            await valkey.run_script(
                self._client, scripts.SETTLE_CLAIM, [key], [claim.claim_id, "confirmed"]
            )
        ).decode()

    def _open(self, claim: Claim) -> None:
        for account in claim.accounts:
            plain = sealing.unseal(
                account.sealed,
                self.private_key,
                user_id=claim.user_id,
                account_id=account.account_id,
                epoch=claim.epoch,
                claim_id=claim.claim_id,
                worker_id=self.worker_id,
            )
            self.opened.append(msgspec.json.decode(plain, type=Credentials))

    async def reply(self, claim_id: str, epoch: int, attempt: int) -> None:
        reply = ClaimReply(
            claim_id=claim_id,
            worker_id=self.worker_id,
            epoch=epoch,
            attempt=attempt,
            failure=self.failures.pop(0) if self.failures else None,
            claimed_at_ms=1000,
            connected_at_ms=2000,
            logins=self.logins,
            at_ms=1000,
        )
        proven = sealing.prove_reply(reply, self._keys.launch_token(self.worker_id))
        await reply_of(self._client.rpush(keys.pool_reply(POOL, self.worker_id, claim_id), proven))


def born(
    client: Redis, orchestrator_keys: OrchestratorKeys, made: dict[str, ScriptedPoolWorker]
) -> Callable[[LaunchSpec, Task], asyncio.Future[None]]:
    """For `FakeLauncher`: each launched worker announces itself."""

    async def announce(spec: LaunchSpec, task: Task) -> None:
        worker = ScriptedPoolWorker(
            client,
            orchestrator_keys,
            task.worker_id,
            task_id=task.task_id,
            reserved_claim=spec.config.reserved_claim,
        )
        made[task.worker_id] = worker
        await worker.announce()

    return lambda spec, task: asyncio.ensure_future(announce(spec, task))
