"""A simulated worker's key pair, its calls of Valkey,
and the connections that the node's workers share.

The keys and the proof are real, since the orchestrator seals to the key. Renewals go many at a
time. Few connections carry the commands; each worker that waits has one of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from redis.exceptions import NoScriptError

from infra.valkey import client as valkey
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.authentication import AssignmentKeys
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import Claim
from worker_runtime.protocol.scripts import ANNOUNCE_WORKER, POP, REMOVE_MARK, RENEW_MARK, Script
from worker_runtime.protocol.sealing import new_worker_key, open_message_keys, prove_key


@dataclass(frozen=True)
class SimulatedIdentity:
    """Opens the message keys of its claim, and never an account: it has no broker."""

    private_key: X25519PrivateKey
    public_key: bytes
    proof: bytes

    @classmethod
    def of(cls, config: WorkerConfig) -> SimulatedIdentity:
        private_key = new_worker_key()
        public_key = private_key.public_key().public_bytes_raw()
        return cls(
            private_key, public_key, prove_key(config.launch_token, config.worker_id, public_key)
        )

    def open_message_keys(self, claim: Claim) -> AssignmentKeys:
        """Raises `InvalidSeal`."""
        return open_message_keys(
            claim.sealed_keys,
            self.private_key,
            user_id=claim.user_id,
            epoch=claim.epoch,
            claim_id=claim.claim_id,
            worker_id=claim.worker_id,
        )


class SimulatedCall(NamedTuple):
    """A run of a script."""

    script: Script
    keys: list[str]
    args: list[Any]


def announce(config: WorkerConfig, identity: SimulatedIdentity) -> SimulatedCall:
    """Returns the call that writes the pool entry of a worker without a user."""
    return SimulatedCall(
        ANNOUNCE_WORKER,
        [keys.pool_worker(config.pool, config.worker_id)],
        [
            int(config.mark_ttl * 1000),
            "public_key",
            identity.public_key,
            "proof",
            identity.proof,
            "reserved",
            config.reserved_claim,
            "task",
            config.task_id,
            "version",
            config.version,
        ],
    )


def renew(config: WorkerConfig, user_id: str, epoch: int, shown: dict[str, Any]) -> SimulatedCall:
    """Returns the call that writes the mark and the metadata of a worker with a user."""
    return SimulatedCall(
        RENEW_MARK,
        [keys.owner(user_id), keys.mark(user_id), keys.metadata(user_id)],
        [
            epoch,
            config.worker_id,
            int(config.mark_ttl * 1000),
            *(part for field in shown.items() for part in field),
        ],
    )


def pop(config: WorkerConfig, user_id: str, epoch: int, number: int) -> SimulatedCall:
    """Returns the call that takes the next control message or request of the user."""
    return SimulatedCall(
        POP,
        [
            keys.owner(user_id),
            keys.control(user_id),
            keys.requests(user_id),
            keys.processing(user_id),
            keys.pop(user_id),
            keys.switch(user_id),
        ],
        [epoch, config.worker_id, f"{config.worker_id}:1", number],
    )


def unmark(config: WorkerConfig, user_id: str, epoch: int) -> SimulatedCall:
    """Takes the mark away at the end."""
    names = [keys.mark(user_id), keys.metadata(user_id)]
    return SimulatedCall(REMOVE_MARK, names, [f"{epoch}:{config.worker_id}"])


#: Seconds of one blocking wait. Long, so that thousands of idle workers ask for little.
_BLOCK_TIMEOUT_S = 240.0
#: Workers that wait at once: Valkey's own limit is 10,000 connections.
_MAX_WAITING_WORKERS = 9000
#: Connections for everything else; who comes when all are taken waits for one.
_MAX_COMMAND_CONNECTIONS = 32


class SimulatedConnections:
    """Shared by all workers of the node, or one worker's own.
    Calls raise `RedisError` or `OSError`."""

    def __init__(self, url: str, commands: int = _MAX_COMMAND_CONNECTIONS) -> None:
        self._client: Any = valkey.connect_valkey(url, max_connections=2 * commands)
        self._turn = asyncio.Semaphore(commands)
        self._waiting: Any = valkey.connect_valkey(
            url, socket_timeout=_BLOCK_TIMEOUT_S + 30.0, max_connections=_MAX_WAITING_WORKERS
        )

    async def close(self) -> None:
        await self._waiting.aclose()
        await self._client.aclose()

    async def run(self, call: SimulatedCall) -> Any:
        async with self._turn:
            return await valkey.run_script(self._client, call.script, call.keys, call.args)

    async def run_all(self, calls: Sequence[SimulatedCall]) -> list[Any]:
        """Runs all calls in one round trip; each result is a reply or an error."""
        results = await self._send(calls)
        if any(isinstance(result, NoScriptError) for result in results):  # a new or flushed server
            for script in scripts.ALL:
                await self._client.script_load(script.source)
            # All again: a renewal may be repeated.
            results = await self._send(calls)
        return results

    async def _send(self, calls: Sequence[SimulatedCall]) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for call in calls:
            pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
        async with self._turn:
            return cast("list[Any]", await pipe.execute(raise_on_error=False))

    async def execute(self, *commands: tuple[Any, ...]) -> None:
        """Executes plain commands in one round trip."""
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        async with self._turn:
            await pipe.execute()

    async def take(self, *lists: str) -> tuple[str, bytes] | None:
        """Pops from the first of these lists that has something:
        (list, item), or None after a long wait."""
        popped = await self._waiting.blpop(list(lists), _BLOCK_TIMEOUT_S)
        return None if popped is None else (popped[0].decode(), popped[1])
