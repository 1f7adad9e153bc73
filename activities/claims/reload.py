"""The activity that gives a running worker new credentials."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio import Redis
from temporalio import activity

from activities.claims.handshake import (
    MAX_BLOCKING_WAIT_S,
    AssignmentSealer,
    ClaimReplies,
    admit_worker,
    send_control,
)
from activities.pool import entries
from infra.database import audit
from infra.database.accounts import record_logins, split_rejected
from infra.database.engine import Database
from infra.database.models import StoredCredentials
from infra.database.orders import listing as open_orders_table
from infra.database.workers import sessions as worker_sessions
from infra.valkey.client import reply_of
from infra.valkey.worker_users import WorkerUsers
from worker_runtime.protocol import errors, keys
from worker_runtime.protocol.messages import ClaimReply, Failure, PlaceOrder, ReloadCredentials
from workflows.user_worker.messages import ReloadRequest, ReloadResult

#: The cause of a reload that the worker itself asked for: its session is new.
SESSION_REPLACED = "session replaced"
#: Seconds to wait for a fresh session's key, which it writes before it reports itself.
FRESH_KEY_TIMEOUT_S = 3.0
#: Seconds between two reads of it.
POLL_INTERVAL_S = 0.1


@dataclass(frozen=True, eq=False, repr=False)
class ReloadActivity:
    client: Redis
    database: Database
    sealer: AssignmentSealer
    #: None: workers log in to Valkey as we do.
    users: WorkerUsers | None = None

    @activity.defn
    async def reload_credentials(self, request: ReloadRequest) -> ReloadResult:
        """Seals the user's accounts to the worker's present key and waits for its answer.

        A repeat finds the answer, or sends the same again, which the worker ignores by the
        accounts' versions. The outcome is written into the audit trail once.
        """
        async with self.database.session() as session:
            number = await worker_sessions.next_control_number(session)
            held, open_orders = await open_orders_table.open_orders_with_accounts(
                session, request.user_id
            )
            fresh = request.cause == SESSION_REPLACED
            stored, rejection = await split_rejected(session, held, starts=fresh)
        reply = await self._reload(request, stored, open_orders, number)
        result = _result(reply)
        if rejection is not None and (not stored or (result.ok and not fresh)):
            result = _failed(rejection)
        async with self.database.session() as session:
            if isinstance(reply, ClaimReply):
                epoch = request.worker.epoch
                await record_logins(session, request.user_id, epoch, reply.at_ms, reply.logins)
            await audit.append_entry_once(
                session,
                "orchestrator",
                "credentials.reloaded" if result.ok else "credentials.reload_failed",
                f"user:{request.user_id}",
                id=request.reload_id,
                cause=request.cause,
                result="OK" if result.ok else result.failure_code,
                worker=request.worker.worker_id,
                epoch=request.worker.epoch,
                versions={account.account_id: account.version for account in stored},
            )
        return result

    async def _reload(
        self,
        request: ReloadRequest,
        stored: Sequence[StoredCredentials],
        open_orders: list[PlaceOrder],
        number: int,
    ) -> ClaimReply | str:
        """Returns the worker's answer, or why there is none."""
        worker, user = request.worker, request.user_id
        replies = ClaimReplies(self.client, self.sealer.keys, worker, request.reload_id)
        began = time.monotonic()
        if await replies.present(0) is None:
            public_key = await self._public_key(request)
            if not public_key:
                return "the key of the worker's session is not known yet"
            planner = self.sealer.budgets
            plan = await planner.plan(user, worker.epoch, reload=True)
            accounts, sealed_keys = await self.sealer.seal(
                user, stored, public_key, worker, request.reload_id, plan
            )
            permitted = await planner.record(plan, reload=True)
            if not await admit_worker(self.users, self.database, worker, user, permitted):
                return "the worker is fenced"
            message = ReloadCredentials(
                reload_id=request.reload_id,
                user_id=user,
                epoch=worker.epoch,
                number=number,
                worker_id=worker.worker_id,
                open_orders=open_orders,
                accounts=accounts,
                sealed_keys=sealed_keys,
            )
            await send_control(self.client, self.sealer.keys, message)
        while time.monotonic() - began < request.timeout:
            activity.heartbeat()
            reply = await replies.wait(0, MAX_BLOCKING_WAIT_S)
            if reply is not None:
                return reply
        return "the worker did not answer in time"

    async def _public_key(self, request: ReloadRequest) -> bytes:
        """Returns the proven key of the worker's present session; empty if it does not appear
        within `FRESH_KEY_TIMEOUT_S`.

        A replaced session has a new key pair. The key of the claim is used only if the session was
        not replaced and no key appears: a flushed Valkey has no metadata for a moment.
        """
        at_claim = bytes.fromhex(request.worker.public_key)
        replaced = request.cause == SESSION_REPLACED
        until = time.monotonic() + min(FRESH_KEY_TIMEOUT_S, request.timeout)
        while True:
            key = await self._published_key(request)
            if key and not (replaced and key == at_claim):
                return key
            if time.monotonic() >= until:
                return b"" if replaced else at_claim
            activity.heartbeat()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _published_key(self, request: ReloadRequest) -> bytes:
        """Returns the key in the worker's metadata, if it is proven to be the worker's own."""
        fields = await reply_of(
            self.client.hmget(keys.metadata(request.user_id), ["public_key", "proof"])
        )
        try:
            key, proof = (bytes.fromhex((value or b"").decode("ascii")) for value in fields)
        except ValueError:
            return b""
        proven = entries.is_workers_key(self.sealer.keys, request.worker.worker_id, key, proof)
        return key if proven else b""


def _result(reply: ClaimReply | str) -> ReloadResult:
    if isinstance(reply, str):
        return _failed(errors.WorkerUnavailable(reply))
    return _failed(reply.failure) if reply.failure else ReloadResult(ok=True)


def _failed(why: errors.BerthError | Failure) -> ReloadResult:
    return ReloadResult(ok=False, failure_code=why.code, failure_detail=why.detail)
