"""The activities of a claim: from a claim id to a connected worker. All are idempotent by the claim id."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog
from redis.asyncio import Redis
from temporalio import activity

from activities.claims.handshake import WAIT_SLICE, ClaimReplies, push_signed, seal_accounts
from activities.pool import entries
from activities.pool.launch import COLD_PREFIX
from activities.rollout.canary import CanaryRegistry
from infra.database.engine import Database
from infra.database.models import StoredCredentials
from infra.database.orders import listing as open_orders_table
from infra.database.trading import switches
from infra.database.users import UserNotFound
from infra.database.workers import sessions as worker_sessions
from infra.valkey import client as valkey
from infra.valkey import switch_fanout
from infra.valkey.client import reply_of
from infra.vault.key_pairs import KeyUnwrapper, OrchestratorKeys
from worker_runtime.protocol import errors, keys
from worker_runtime.protocol.messages import Claim, ClaimReply, Connect, PlaceOrder
from workflows.user_worker import messages as m

#: Recent crashes after which a start is held back. After the first one, the user gets a new worker at once.
BACK_OFF_FROM = 2

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class _ClaimedWorker:
    """What a claim got in its transaction."""

    found: entries.PoolEntry
    worker: m.WorkerRef
    accounts: Sequence[StoredCredentials] = ()
    open_orders: list[PlaceOrder] = field(default_factory=list)
    crashes: tuple[float, ...] = ()


class ClaimActivities:
    """Activities `claim_worker`, `await_connected`, `connect_again`."""

    def __init__(
        self, client: Redis, database: Database, unwrapper: KeyUnwrapper, orchestrator_keys: OrchestratorKeys
    ) -> None:
        self._client = client
        self._database = database
        self._unwrapper = unwrapper
        self._keys = orchestrator_keys
        self._canaries = CanaryRegistry(client)

    @activity.defn
    async def claim_worker(self, request: m.ClaimRequest) -> m.ClaimResult:
        """Gives the user a worker of the pool: assignment, claim, owner key, sealed credentials."""
        if request.failed:
            await self._canaries.failed(request.pool, request.failed[-1], request.user_id)
        claimed = await self._assign(request)
        found, worker = claimed.found, claimed.worker
        if claimed.crashes and not worker.epoch:
            return m.ClaimResult(status=m.ClaimStatus.BACK_OFF, crashes=claimed.crashes)
        if found.status == "empty":
            return m.ClaimResult(status=m.ClaimStatus.EMPTY)
        if found.status == "gone":
            return _gone(worker, "the claimed worker is gone")
        if found.status == "refused":
            return _no_account(request, worker)
        if not found.proven(self._keys):
            log.error("worker_key_not_proven", worker_id=worker.worker_id, pool=request.pool)
            return _gone(worker, "the worker's public key is not proven to be its own")
        # Read after the commit of the assignment, so that no change of the switch is missed.
        generation, server = await valkey.read_generation_and_server(self._client, uuid.uuid4().hex)
        async with self._database.session(autocommit=True) as session:
            switch = await switches.switch_of_user(session, request.user_id)
        switch = switch_fanout.addressed_to(switch, server)
        if not await entries.write_owner(self._client, request.user_id, worker, generation, switch):
            return _gone(worker, "a later assignment owns the user")
        replies = ClaimReplies(self._client, request.pool, request.claim_id)
        reply = None if found.status == "claimed" else await replies.present(worker.worker_id, 1)
        if reply is None:
            inbox = keys.pool_inbox(request.pool, worker.worker_id)
            # Sent again only if it was lost on the way: a worker answers a repeated claim again.
            if found.status == "claimed" or not await reply_of(self._client.llen(inbox)):
                claim = await self._claim_message(request, claimed, generation)
                await push_signed(self._client, inbox, claim, self._keys.signing_key)
            reply = await replies.wait(worker.worker_id, 1, request.reply_wait)
        return await self._result(worker, reply)

    async def _result(self, worker: m.WorkerRef, reply: ClaimReply | None) -> m.ClaimResult:
        result = _result(worker, reply)
        if result.status == m.ClaimStatus.ACTIVE:
            await self._canaries.served(worker.pool, worker.version)
        return result

    async def _assign(self, request: m.ClaimRequest) -> _ClaimedWorker:
        """Epoch, worker and accounts in one transaction; a repeat of the claim id gets the same ones."""
        avoid = await self._canaries.to_avoid(request.pool, request.failed)
        avoided = avoid.version if avoid else ""
        async with self._database.session() as session:
            try:
                assigned = await worker_sessions.assign_epoch(
                    session,
                    user_id=request.user_id,
                    claim_id=request.claim_id,
                    pool=request.pool,
                    crash_limit=BACK_OFF_FROM if request.check_crashes else 0,
                    crash_window=m.CRASH_WINDOW,
                )
            except UserNotFound:
                assigned = worker_sessions.AssignmentResult(epoch=0)
            epoch = assigned.epoch
            gone = await self._to_end_first(request, assigned)
            if gone is not None:
                return _ClaimedWorker(found=entries.PoolEntry(status="gone"), worker=gone)
            accounts: Sequence[StoredCredentials] = ()
            open_orders: list[PlaceOrder] = []
            if epoch:
                accounts, open_orders = await open_orders_table.open_orders_with_accounts(
                    session, request.user_id
                )
            if accounts:
                found = await entries.claim_entry(
                    self._client, request.pool, request.claim_id, request.user_id, avoid=avoided
                )
            else:  # no account to log in with, or too many crashes: no worker is claimed
                found = entries.PoolEntry(status="refused")
            worker = m.WorkerRef(
                worker_id=found.worker_id,
                task_id=found.task_id,
                epoch=epoch,
                claim_id=request.claim_id,
                pool=request.pool,
                version=found.version,
                warm=not found.worker_id.startswith(COLD_PREFIX),
                public_key=found.public_key.hex(),
            )
            if found.public_key:
                await worker_sessions.set_worker(
                    session,
                    claim_id=request.claim_id,
                    worker_id=worker.worker_id,
                    task_id=worker.task_id,
                    warm=worker.warm,
                )
        return _ClaimedWorker(
            found=found, worker=worker, accounts=accounts, open_orders=open_orders, crashes=assigned.crashes
        )

    async def _to_end_first(
        self, request: m.ClaimRequest, assigned: worker_sessions.AssignmentResult
    ) -> m.WorkerRef | None:
        """A worker that may be logged in and has to end before another one starts (one-owner)."""
        other = assigned.unended
        if other is not None:
            log.error("claim_while_another_unended", user_id=request.user_id, worker_id=other.worker_id)
            return m.WorkerRef(
                worker_id=other.worker_id or "",
                task_id=other.task_id or "",
                epoch=other.epoch,
                claim_id=other.claim_id,
                pool=other.pool,
                warm=False,
            )
        own, claim_id, pool = assigned.worker_id, request.claim_id, request.pool
        lost = bool(own) and await entries.worker_of_claim(self._client, pool, claim_id) != own  # by Valkey
        if not lost and not assigned.ended:
            return None
        return m.WorkerRef(
            worker_id=own,
            task_id=assigned.task_id,
            epoch=assigned.epoch,
            claim_id=claim_id,
            pool=pool,
            warm=bool(own),
        )

    async def _claim_message(
        self, request: m.ClaimRequest, claimed: _ClaimedWorker, generation: str
    ) -> Claim:
        worker = claimed.worker
        return Claim(
            claim_id=request.claim_id,
            worker_id=worker.worker_id,
            user_id=request.user_id,
            epoch=worker.epoch,
            generation=generation,
            connect_timeout=request.connect_timeout,
            open_orders=claimed.open_orders,
            accounts=await seal_accounts(
                claimed.accounts, self._unwrapper, claimed.found.public_key, worker, request.claim_id
            ),
        )

    @activity.defn
    async def await_connected(self, request: m.ConnectRequest) -> m.ClaimResult:
        """Waits for the answer to a login that has begun."""
        worker, deadline = request.worker, time.monotonic() + request.timeout
        replies = ClaimReplies(self._client, worker.pool, worker.claim_id)
        while (left := deadline - time.monotonic()) > 0:
            reply = await replies.wait(worker.worker_id, request.attempt, min(left, WAIT_SLICE))
            if reply is not None:
                return await self._result(worker, reply)
            activity.heartbeat()
            if not await entries.is_alive(
                self._client, worker.pool, worker.worker_id, request.user_id, worker.epoch
            ):
                return _gone(worker, "the worker ended before it connected")
        # Confirming and releasing exclude each other: a worker that has not confirmed by now never connects.
        settled = await entries.release_claim(self._client, worker.pool, worker.worker_id, worker.claim_id)
        if settled == "released":
            return _gone(worker, "the worker did not confirm the claim in time")
        return m.ClaimResult(
            status=m.ClaimStatus.FAILED,
            worker=worker,
            failure_code=errors.BrokerUnreachable.code,
            failure_detail=f"no broker login within {request.timeout:.0f} s",
        )

    @activity.defn
    async def connect_again(self, request: m.ConnectRequest) -> m.ClaimResult:
        """Asks the worker for a further login; it knows a repeated message by its attempt."""
        worker = request.worker
        replies = ClaimReplies(self._client, worker.pool, worker.claim_id)
        inbox = keys.pool_inbox(worker.pool, worker.worker_id)
        answered = await replies.present(worker.worker_id, request.attempt)
        if answered is None and not await reply_of(self._client.llen(inbox)):
            message = Connect(
                claim_id=worker.claim_id,
                worker_id=worker.worker_id,
                attempt=request.attempt,
                connect_timeout=request.timeout,
            )
            await push_signed(self._client, inbox, message, self._keys.signing_key)
        return await self.await_connected(request)


def _no_account(request: m.ClaimRequest, worker: m.WorkerRef) -> m.ClaimResult:
    """The user is unknown or has stored no credentials."""
    unknown = UserNotFound(f"there is no user {request.user_id}")
    error = errors.UnknownAccount() if worker.epoch else unknown
    return m.ClaimResult(
        status=m.ClaimStatus.FAILED, failure_code=error.code, failure_detail=error.detail, retryable=False
    )


def _gone(worker: m.WorkerRef, why: str) -> m.ClaimResult:
    return m.ClaimResult(status=m.ClaimStatus.GONE, worker=worker, failure_detail=why)


def _result(worker: m.WorkerRef, reply: ClaimReply | None) -> m.ClaimResult:
    if reply is None:
        return m.ClaimResult(status=m.ClaimStatus.CONNECTING, worker=worker)
    failure = reply.failure
    if failure is None:
        return m.ClaimResult(
            status=m.ClaimStatus.ACTIVE,
            worker=worker,
            claimed_at=reply.claimed_at_ms / 1000,
            connected_at=reply.connected_at_ms / 1000,
        )
    if failure.code == errors.ClaimRefused.code:
        return _gone(worker, "the worker refused the claim")
    if failure.code == errors.InvalidSeal.code:
        # Sealed to the key of a session that was replaced meanwhile: no fault of the user's credentials.
        return _gone(worker, "the worker's session was replaced during the claim")
    return m.ClaimResult(
        status=m.ClaimStatus.FAILED,
        worker=worker,
        claimed_at=reply.claimed_at_ms / 1000,
        failure_code=failure.code,
        failure_detail=failure.detail,
        retryable=failure.retryable,
    )
