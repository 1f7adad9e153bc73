"""The activity that gives a running worker new credentials."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from redis.asyncio import Redis
from temporalio import activity

from activities.claims.handshake import WAIT_SLICE, ClaimReplies, seal_accounts
from activities.pool import entries
from infra.database import audit
from infra.database.engine import Database
from infra.database.models import StoredCredentials
from infra.database.orders import listing as open_orders_table
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.vault.key_pairs import KeyUnwrapper, OrchestratorKeys
from worker_runtime.protocol import errors, keys, scripts, sealing
from worker_runtime.protocol.messages import PlaceOrder, ReloadCredentials
from workflows.user_worker import messages as m

#: The cause of a reload that the worker itself asked for: its session is new.
SESSION_REPLACED = "session replaced"
#: Seconds to wait for a fresh session's key, which it writes before it reports itself.
FRESH_KEY = 3.0
#: Seconds between two reads of it.
POLL = 0.1


class ReloadActivity:
    """Activity `reload_credentials`."""

    def __init__(
        self, client: Redis, database: Database, unwrapper: KeyUnwrapper, orchestrator_keys: OrchestratorKeys
    ) -> None:
        self._client = client
        self._database = database
        self._unwrapper = unwrapper
        self._keys = orchestrator_keys

    @activity.defn
    async def reload_credentials(self, request: m.ReloadRequest) -> m.ReloadResult:
        """Seals the user's accounts to the worker's present key and waits for its answer.

        A repeat finds the answer, or sends the same again, which the worker ignores by the accounts'
        versions. The outcome is written into the audit trail once.
        """
        async with self._database.session() as session:
            stored, open_orders = await open_orders_table.open_orders_with_accounts(session, request.user_id)
        result = await self._reload(request, stored, open_orders)
        async with self._database.session() as session:
            await audit.append_entry_once(
                session,
                actor="orchestrator",
                action="credentials.reloaded" if result.ok else "credentials.reload_failed",
                subject=f"user:{request.user_id}",
                id=request.reload_id,
                cause=request.cause,
                result="OK" if result.ok else result.failure_code,
                worker=request.worker.worker_id,
                epoch=request.worker.epoch,
                versions={account.account_id: account.version for account in stored},
            )
        return result

    async def _reload(
        self, request: m.ReloadRequest, stored: Sequence[StoredCredentials], open_orders: list[PlaceOrder]
    ) -> m.ReloadResult:
        worker = request.worker
        replies = ClaimReplies(self._client, worker.pool, request.reload_id)
        began = time.monotonic()
        if await replies.present(worker.worker_id, 0) is None:
            public_key = await self._public_key(request)
            if not public_key:
                return _failed("the key of the worker's session is not known yet")
            await self._send(request, stored, open_orders, public_key)
        while time.monotonic() - began < request.timeout:
            activity.heartbeat()
            reply = await replies.wait(worker.worker_id, 0, WAIT_SLICE)
            if reply is not None:
                failure = reply.failure
                if failure is None:
                    return m.ReloadResult(ok=True)
                return m.ReloadResult(ok=False, failure_code=failure.code, failure_detail=failure.detail)
        return _failed("the worker did not answer in time")

    async def _send(
        self,
        request: m.ReloadRequest,
        stored: Sequence[StoredCredentials],
        open_orders: list[PlaceOrder],
        public_key: bytes,
    ) -> None:
        worker, user = request.worker, request.user_id
        message = ReloadCredentials(
            reload_id=request.reload_id,
            user_id=user,
            epoch=worker.epoch,
            worker_id=worker.worker_id,
            open_orders=open_orders,
            accounts=await seal_accounts(stored, self._unwrapper, public_key, worker, request.reload_id),
        )
        signed = sealing.sign(message, self._keys.signing_key)
        await valkey.run_script(
            self._client, scripts.SEND_CONTROL, [keys.control(user), keys.doorbell(user)], [signed]
        )

    async def _public_key(self, request: m.ReloadRequest) -> bytes:
        """The proven key of the worker's present session; empty if it does not appear within FRESH_KEY.

        A replaced session has a new key pair. The key of the claim is used only if the session was not
        replaced and no key appears: a flushed Valkey has no metadata for a moment.
        """
        at_claim = bytes.fromhex(request.worker.public_key)
        replaced = request.cause == SESSION_REPLACED
        until = time.monotonic() + min(FRESH_KEY, request.timeout)
        while True:
            key = await self._published_key(request)
            if key and not (replaced and key == at_claim):
                return key
            if time.monotonic() >= until:
                return b"" if replaced else at_claim
            activity.heartbeat()
            await asyncio.sleep(POLL)

    async def _published_key(self, request: m.ReloadRequest) -> bytes:
        """The key in the worker's metadata, if it is proven to be the worker's own."""
        fields = await reply_of(self._client.hmget(keys.metadata(request.user_id), ["public_key", "proof"]))
        try:
            key, proof = (bytes.fromhex((value or b"").decode("ascii")) for value in fields)
        except ValueError:
            return b""
        found = entries.PoolEntry(
            status="again", worker_id=request.worker.worker_id, public_key=key, proof=proof
        )
        return key if found.proven(self._keys) else b""


def _failed(why: str) -> m.ReloadResult:
    return m.ReloadResult(ok=False, failure_code=errors.WorkerUnavailable.code, failure_detail=why)
