"""The activities of a claim: from a claim id to a connected worker.

All are idempotent by the claim id.
"""

import asyncio
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import structlog
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncSession
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.claims.handshake import (
    MAX_BLOCKING_WAIT_S,
    AssignmentSealer,
    ClaimReplies,
    admit_worker,
    push_signed,
)
from activities.pool import entries
from activities.pool.entries import EntryStatus
from activities.pool.launch import COLD_PREFIX
from activities.rollout.canary import CanaryRegistry
from infra.database.accounts import record_logins, split_rejected
from infra.database.engine import Database
from infra.database.models import StoredCredentials, WorkerLaunch, WorkerSession
from infra.database.orders import listing as open_orders_table
from infra.database.trading import switches
from infra.database.users import UserNotFound
from infra.database.workers import sessions as worker_sessions
from infra.process_metrics import CLAIM_SECONDS, count_claim_failure
from infra.tracing import Traces
from infra.valkey import client as valkey
from infra.valkey.switch_fanout import SwitchSigner
from infra.valkey.worker_users import WorkerUsers
from worker_runtime.protocol import errors, keys
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Claim, ClaimReply, Connect, PlaceOrder
from workflows.user_worker.messages import (
    CRASH_WINDOW_S,
    ClaimRequest,
    ClaimResult,
    ClaimStatus,
    ConnectRequest,
    WorkerRef,
)

#: Recent crashes after which a start is held back. After the first one, the user gets a new worker
#: at once.
MAX_CRASHES_WITHOUT_BACKOFF = 2
#: Entries that one claim tries. Each one refused costs it about 5 ms; after that, a launch helps.
MAX_ENTRIES_TRIED = 5

log = structlog.get_logger()


class _EntryRefused(Exception):
    """The entry that `claim.lua` returned may not be claimed."""

    def __init__(self, worker_id: str, why: str) -> None:
        super().__init__(why)
        self.worker_id = worker_id


@dataclass(frozen=True)
class _ClaimedWorker:
    """The worker, the accounts and the open orders that a claim got in its transaction."""

    entry: entries.PoolEntry
    worker: WorkerRef
    accounts: Sequence[StoredCredentials] = ()
    open_orders: list[PlaceOrder] = field(default_factory=list)
    crashes: tuple[float, ...] = ()
    #: The assignment whose worker keeps its user.
    adopted: WorkerSession | None = None
    #: Why one or all of the accounts may not log in.
    rejection: BerthError | None = None


@dataclass(eq=False, repr=False)
class ClaimActivities:
    client: Redis
    database: Database
    sealer: AssignmentSealer
    #: None: workers log in to Valkey as we do.
    users: WorkerUsers | None = None
    traces: Traces | None = None

    def __post_init__(self) -> None:
        self._switches = SwitchSigner(self.sealer.secrets)
        self._canaries = CanaryRegistry(self.client)

    @activity.defn
    async def claim_worker(self, request: ClaimRequest) -> ClaimResult:
        """Gives the user a worker of the pool; waits up to `request.reply_wait` s for its login.

        The steps, and what is known after each:

        1. `_assign_worker` commits the assignment: the epoch and the one worker of this claim id.
           A repeat gets the same ones. Until here the worker has received nothing.
        2. `write_owner` makes that worker the owner: requests of a lower epoch are fenced.
        3. The claim, with sealed credentials, is in the worker's inbox. The worker may log in.
        4. A reply says whether it has. Without one the result is `CONNECTING`, and
           `await_connected` waits on.

        Fails with `MEMORY_SHORT` while Valkey refuses claims; raises `DatabaseUnavailable` and
        `RedisError`. All of these may be followed by a repeat.
        """
        if request.failed:
            await self._canaries.count_failed(request.pool, request.failed[-1], request.user_id)
        claimed = await self._assign_worker(request)
        early_result = _result_without_claim(request, claimed)
        if early_result is not None:
            return early_result
        worker = claimed.worker
        # Read after the commit of the assignment, so that no change of the switch is missed.
        (generation, server), switch = await asyncio.gather(
            valkey.read_generation_and_server(self.client, uuid.uuid4().hex),
            self.database.fetch(switches.switch_of_user, request.user_id),
        )
        words = self._switches.words(request.user_id, switch, server)
        if not await entries.write_owner(self.client, request.user_id, worker, generation, words):
            return _gone_result(worker, "a later assignment owns the user")
        replies = ClaimReplies(self.client, self.sealer.keys, worker)
        reply = None if claimed.entry.status == EntryStatus.CLAIMED else await replies.present(1)
        if reply is None:
            if not await self._send_claim(request, claimed, generation, switch.version):
                return _gone_result(worker, "the worker was cut off")
            reply = await replies.wait(1, request.reply_wait)
        return await self._record_result(request, worker, reply)

    async def _record_result(
        self,
        request: ClaimRequest | ConnectRequest,
        worker: WorkerRef,
        reply: ClaimReply | None,
    ) -> ClaimResult:
        """Returns the result of a reply, after its rejected logins are in PostgreSQL and it is
        counted for metrics and for the canary."""
        result = _result_of_reply(worker, reply)
        # Other failed logins have an event of their own.
        if reply is not None and any(login.rejected for login in reply.logins):
            async with self.database.session() as session:
                await record_logins(
                    session, request.user_id, worker.epoch, reply.at_ms, reply.logins
                )
        if result.failure_code:
            count_claim_failure(result.failure_code)
        if result.status == ClaimStatus.ACTIVE:
            if self.traces is not None:
                began, ended = result.claimed_at, result.connected_at
                self.traces.add("worker login", self.traces.context("claim"), began, ended)
            await self._canaries.count_served(worker.pool, worker.version)
        return result

    async def _assign_worker(self, request: ClaimRequest) -> _ClaimedWorker:
        """Assigns the first worker of the pool whose entry is valid.

        Skips at most `MAX_ENTRIES_TRIED` invalid entries, so that a forged one cannot block claims;
        then it returns the status `EMPTY`.
        """
        avoid = await self._canaries.find_to_avoid(request.pool, request.failed)
        refused: set[str] = set()
        while len(refused) < MAX_ENTRIES_TRIED:
            try:
                return await self._try_to_assign(request, avoid.version if avoid else "", refused)
            except _EntryRefused as error:
                if error.worker_id in refused:  # discarding had no effect
                    break
                refused.add(error.worker_id)
                log.error(
                    "pool_entry_refused",
                    worker_id=error.worker_id,
                    pool=request.pool,
                    reason=str(error),
                )
                await entries.discard_entry(
                    self.client, request.pool, error.worker_id, request.claim_id
                )
        return _ClaimedWorker(
            entry=entries.PoolEntry(status=EntryStatus.EMPTY), worker=_no_worker(request)
        )

    async def _try_to_assign(
        self, request: ClaimRequest, avoided: str, refused: Collection[str]
    ) -> _ClaimedWorker:
        """Writes the epoch and the worker of this claim and reads the accounts, in one transaction.
        A repeat of the claim id gets the same ones.

        Raises `_EntryRefused`, and fails with `MEMORY_SHORT` while Valkey refuses claims. Both roll
        the transaction back, so that it has no effect.
        """
        async with self.database.session() as session:
            assigned = await self._write_epoch(session, request)
            earlier = await self._find_earlier_worker(session, request, assigned)
            if earlier is not None:
                return earlier
            accounts: Sequence[StoredCredentials] = ()
            open_orders: list[PlaceOrder] = []
            rejection: BerthError | None = None
            if assigned.epoch:
                stored, open_orders = await open_orders_table.open_orders_with_accounts(
                    session, request.user_id
                )
                accounts, rejection = await split_rejected(session, stored, starts=True)
            if accounts:
                entry = await self._claim_entry(request, assigned, avoided, refused)
            else:  # no account to log in with, or too many crashes: no worker is claimed
                entry = entries.PoolEntry(status=EntryStatus.REFUSED)
            worker = WorkerRef(
                worker_id=entry.worker_id,
                task_id=assigned.task_id,
                epoch=assigned.epoch,
                claim_id=request.claim_id,
                pool=request.pool,
                warm=not entry.worker_id.startswith(COLD_PREFIX),
                public_key=entry.public_key.hex(),
            )
            if entry.status in (EntryStatus.CLAIMED, EntryStatus.AGAIN):
                worker = await self._record_worker(session, worker, entry)
        return _ClaimedWorker(
            entry, worker, accounts, open_orders, crashes=assigned.crashes, rejection=rejection
        )

    async def _write_epoch(
        self, session: AsyncSession, request: ClaimRequest
    ) -> worker_sessions.AssignmentResult:
        """Writes the assignment of this claim id, or reads it if it is there. Returns epoch 0 if it
        may not be written: for an unknown user, after too many crashes, while another assignment
        of the user may still have a running worker, or if the request may only adopt."""
        try:
            return await worker_sessions.assign_epoch(
                session,
                user_id=request.user_id,
                claim_id=request.claim_id,
                pool=request.pool,
                crash_limit=MAX_CRASHES_WITHOUT_BACKOFF if request.check_crashes else 0,
                crash_window=CRASH_WINDOW_S,
                adopt_only=request.adopt_only,
            )
        except UserNotFound:
            return worker_sessions.AssignmentResult(epoch=0)

    async def _find_earlier_worker(
        self,
        session: AsyncSession,
        request: ClaimRequest,
        assigned: worker_sessions.AssignmentResult,
    ) -> _ClaimedWorker | None:
        """Returns, by the entry's status: `ADOPTED`, the worker that the user keeps; `GONE`, the
        one that must end first; `NONE`, no worker, if the request may only adopt one. Returns None
        if a worker of the pool may be claimed."""
        adopted = await self._adopt_worker(session, request, assigned)
        if adopted is not None:
            return adopted
        gone = await self._find_worker_to_end(request, assigned)
        if gone is not None:
            return _ClaimedWorker(entry=entries.PoolEntry(status=EntryStatus.GONE), worker=gone)
        if request.adopt_only:
            return _ClaimedWorker(
                entry=entries.PoolEntry(status=EntryStatus.NONE), worker=_no_worker(request)
            )
        return None

    async def _claim_entry(
        self,
        request: ClaimRequest,
        assigned: worker_sessions.AssignmentResult,
        avoided: str,
        refused: Collection[str],
    ) -> entries.PoolEntry:
        """Takes a worker out of the pool in Valkey. Raises `_EntryRefused`; fails with
        `MEMORY_SHORT`."""
        entry = await entries.claim_entry(
            self.client,
            request.pool,
            request.claim_id,
            request.user_id,
            avoid=avoided,
            refused=refused,
        )
        if entry.status == EntryStatus.FULL:
            raise ApplicationError(
                errors.MemoryShort.title(), type=errors.MemoryShort.code, non_retryable=True
            )
        if entry.status == EntryStatus.GONE and entry.worker_id != assigned.worker_id:
            raise _EntryRefused(entry.worker_id, "its entry is gone")  # nothing was sent to it
        return entry

    async def _record_worker(
        self, session: AsyncSession, worker: WorkerRef, entry: entries.PoolEntry
    ) -> WorkerRef:
        """Records the worker of the claim in PostgreSQL: the only one that it ever has.

        Raises `_EntryRefused` if the entry does not prove its public key, or if the worker was not
        launched by us or had a user before.
        """
        if not entry.proven(self.sealer.keys):
            raise _EntryRefused(worker.worker_id, "its public key is not proven to be its own")
        try:
            launched = await worker_sessions.assign_worker(
                session, claim_id=worker.claim_id, worker_id=worker.worker_id, warm=worker.warm
            )
        except worker_sessions.NotAssignable as error:
            raise _EntryRefused(worker.worker_id, str(error)) from None
        if entry.status == EntryStatus.CLAIMED:  # a repeat (`AGAIN`) is not counted
            kind = "warm" if worker.warm else "cold"
            CLAIM_SECONDS.labels(worker.pool, kind).observe(launched.waited)
        return replace(worker, task_id=launched.task_id, version=launched.version)

    async def _adopt_worker(
        self,
        session: AsyncSession,
        request: ClaimRequest,
        assigned: worker_sessions.AssignmentResult,
    ) -> _ClaimedWorker | None:
        """Returns the worker that the user still has, though no run of the workflow knows it; None
        if there is none.

        Somebody ended the run that claimed it, or reset that run to an earlier event. A worker that
        had connected is adopted even if Valkey shows no mark, because the workflow asks its
        launcher. A worker that had not connected must have its mark or its pool entry.
        """
        other = assigned.unended
        if other is None or not assigned.adoptable:
            return None
        worker_id, user = other.worker_id or "", request.user_id
        alive = other.connected_at is not None or await entries.is_alive(
            self.client, other.pool, worker_id, user, other.epoch
        )
        if not alive:
            return None
        launched = await session.get(WorkerLaunch, worker_id)
        worker = WorkerRef(
            worker_id=worker_id,
            task_id=other.task_id or (launched and launched.task_id) or "",
            epoch=other.epoch,
            claim_id=other.claim_id,
            pool=other.pool,
            version=launched.version if launched else "",
            warm=bool(other.warm),
        )
        log.warning("worker_adopted", user_id=user, worker_id=worker_id, epoch=other.epoch)
        entry = entries.PoolEntry(status=EntryStatus.ADOPTED)
        return _ClaimedWorker(entry, worker, crashes=assigned.crashes, adopted=other)

    async def _find_worker_to_end(
        self, request: ClaimRequest, assigned: worker_sessions.AssignmentResult
    ) -> WorkerRef | None:
        """Returns the worker that must end before the user gets one, or None (one-owner).

        It is the worker of an earlier assignment that has not ended. Otherwise it is the worker
        that this claim got before, unless it is still to be used: its assignment has not ended, and
        Valkey has it under this claim.
        """
        unended = assigned.unended
        if unended is not None:
            worker_id = unended.worker_id or ""
            log.error("claim_while_another_unended", user_id=request.user_id, worker_id=worker_id)
            return WorkerRef(
                worker_id=worker_id,
                task_id=unended.task_id or "",
                epoch=unended.epoch,
                claim_id=unended.claim_id,
                pool=unended.pool,
                warm=False,
            )
        worker_id = assigned.worker_id or ""
        if not assigned.ended:
            if not worker_id:  # this claim has got none so far
                return None
            holder = await entries.worker_of_claim(self.client, request.pool, request.claim_id)
            if holder == worker_id:
                return None
        return WorkerRef(
            worker_id=worker_id,
            task_id=assigned.task_id or "",
            epoch=assigned.epoch,
            claim_id=request.claim_id,
            pool=request.pool,
            warm=bool(worker_id),
        )

    async def _send_claim(
        self,
        request: ClaimRequest,
        claimed: _ClaimedWorker,
        generation: str,
        switch_version: int,
    ) -> bool:
        """Pushes the claim, with sealed credentials, to the worker's inbox, unless it is there
        already. Returns False if the worker was cut off meanwhile."""
        inbox = keys.pool_inbox(request.pool, claimed.worker.worker_id)
        # A repeat is sent only if the first one is no longer in the inbox and there is no reply: it
        # may have been lost. A worker that had it answers the same again.
        is_first = claimed.entry.status == EntryStatus.CLAIMED
        if is_first or not await valkey.reply_of(self.client.llen(inbox)):
            claim = await self._claim_message(request, claimed, generation, switch_version)
            if claim is None:
                return False
            await push_signed(self.client, inbox, claim, self.sealer.keys.signing_keys)
        return True

    async def _claim_message(
        self,
        request: ClaimRequest,
        claimed: _ClaimedWorker,
        generation: str,
        switch_version: int,
    ) -> Claim | None:
        """Seals the user's accounts, and lets the worker reach the keys that it needs for them.

        Returns None if the worker was cut off meanwhile.
        """
        worker, planner = claimed.worker, self.sealer.budgets
        plan = await planner.plan(request.user_id, worker.epoch)
        accounts, sealed_keys = await self.sealer.seal(
            request.user_id,
            claimed.accounts,
            claimed.entry.public_key,
            worker,
            request.claim_id,
            plan,
        )
        permitted = await planner.record(plan)
        if not await admit_worker(self.users, self.database, worker, request.user_id, permitted):
            return None
        return Claim(
            claim_id=request.claim_id,
            worker_id=worker.worker_id,
            user_id=request.user_id,
            epoch=worker.epoch,
            generation=generation,
            switch_version=switch_version,
            connect_timeout=request.connect_timeout,
            open_orders=claimed.open_orders,
            accounts=accounts,
            sealed_keys=sealed_keys,
        )

    @activity.defn
    async def await_connected(self, request: ConnectRequest) -> ClaimResult:
        """Waits up to `request.timeout` seconds for the answer to a login that has begun.

        Releases the claim at the timeout. If the worker had not confirmed it by then, it never
        connects, and the result is `GONE`; if it had, the login failed (`FAILED`).
        """
        worker, deadline = request.worker, time.monotonic() + request.timeout
        replies = ClaimReplies(self.client, self.sealer.keys, worker)
        while (seconds_left := deadline - time.monotonic()) > 0:
            reply = await replies.wait(request.attempt, min(seconds_left, MAX_BLOCKING_WAIT_S))
            if reply is not None:
                return await self._record_result(request, worker, reply)
            activity.heartbeat()
            if not await entries.is_alive(
                self.client, worker.pool, worker.worker_id, request.user_id, worker.epoch
            ):
                return _gone_result(worker, "the worker ended before it connected")
        # Confirming and releasing exclude each other: a worker that has not confirmed by now
        # never connects.
        settled = await entries.release_claim(
            self.client, worker.pool, worker.worker_id, worker.claim_id
        )
        if settled == "released":
            return _gone_result(worker, "the worker did not confirm the claim in time")
        return ClaimResult(
            status=ClaimStatus.FAILED,
            worker=worker,
            failure_code=errors.BrokerUnreachable.code,
            failure_detail=f"no broker login within {request.timeout:.0f} s",
        )

    @activity.defn
    async def connect_again(self, request: ConnectRequest) -> ClaimResult:
        """Asks the worker for a further login, then waits as `await_connected` does.

        A repeat sends nothing if the worker has answered or the message waits in its inbox; the
        worker ignores a repeated attempt.
        """
        worker = request.worker
        replies = ClaimReplies(self.client, self.sealer.keys, worker)
        inbox = keys.pool_inbox(worker.pool, worker.worker_id)
        answered = await replies.present(request.attempt)
        if answered is None and not await valkey.reply_of(self.client.llen(inbox)):
            message = Connect(
                claim_id=worker.claim_id,
                worker_id=worker.worker_id,
                attempt=request.attempt,
                connect_timeout=request.timeout,
            )
            await push_signed(self.client, inbox, message, self.sealer.keys.signing_keys)
        return await self.await_connected(request)


def _result_without_claim(request: ClaimRequest, claimed: _ClaimedWorker) -> ClaimResult | None:
    """Returns the result if there is no worker to send a claim to, or if the user keeps the one
    they have; else None."""
    status = claimed.entry.status
    if claimed.adopted is not None:
        return _adopted_result(claimed, claimed.adopted)
    if status == EntryStatus.NONE:
        return ClaimResult(status=ClaimStatus.NONE)
    if claimed.crashes and not claimed.worker.epoch:
        return ClaimResult(status=ClaimStatus.BACK_OFF, crashes=claimed.crashes)
    if status == EntryStatus.EMPTY:
        return ClaimResult(status=ClaimStatus.EMPTY)
    if status == EntryStatus.GONE:
        return _gone_result(claimed.worker, "the claimed worker is gone")
    if status == EntryStatus.REFUSED:
        return _no_account_result(request, claimed)
    return None


def _no_account_result(request: ClaimRequest, claimed: _ClaimedWorker) -> ClaimResult:
    """Returns the failure of a user who is unknown, or has no credentials that the broker takes."""
    unknown = UserNotFound(f"there is no user {request.user_id}")
    error = claimed.rejection or (errors.UnknownAccount() if claimed.worker.epoch else unknown)
    return ClaimResult(
        status=ClaimStatus.FAILED,
        failure_code=error.code,
        failure_detail=error.detail,
        retryable=False,
    )


def _no_worker(request: ClaimRequest) -> WorkerRef:
    """Returns the reference of a claim that got no worker; its epoch is 0."""
    return WorkerRef(
        worker_id="", task_id="", epoch=0, claim_id=request.claim_id, pool=request.pool
    )


def _adopted_result(claimed: _ClaimedWorker, assignment: WorkerSession) -> ClaimResult:
    """Returns the result for a worker that keeps its user; `connected_at` is 0 if it may still log
    in."""
    claimed_at, connected_at = assignment.claimed_at, assignment.connected_at
    if connected_at is None and claimed_at is not None:
        # The event of its connect may be lost.
        connected_at = (
            claimed_at
            if datetime.now(UTC) - claimed_at > worker_sessions.COUNTED_CONNECTED_AFTER
            else None
        )
    return ClaimResult(
        status=ClaimStatus.ADOPTED,
        worker=claimed.worker,
        claimed_at=claimed_at.timestamp() if claimed_at else 0.0,
        connected_at=connected_at.timestamp() if connected_at else 0.0,
        crashes=claimed.crashes,
    )


def _gone_result(worker: WorkerRef, why: str) -> ClaimResult:
    return ClaimResult(status=ClaimStatus.GONE, worker=worker, failure_detail=why)


def _result_of_reply(worker: WorkerRef, reply: ClaimReply | None) -> ClaimResult:
    if reply is None:
        return ClaimResult(status=ClaimStatus.CONNECTING, worker=worker)
    failure = reply.failure
    if failure is None:
        return ClaimResult(
            status=ClaimStatus.ACTIVE,
            worker=worker,
            claimed_at=reply.claimed_at_ms / 1000,
            connected_at=reply.connected_at_ms / 1000,
        )
    if failure.code == errors.ClaimRefused.code:
        return _gone_result(worker, "the worker refused the claim")
    if failure.code == errors.InvalidSeal.code:
        # Sealed to the key of a session that was replaced meanwhile: the credentials are right.
        return _gone_result(worker, "the worker's session was replaced during the claim")
    return ClaimResult(
        status=ClaimStatus.FAILED,
        worker=worker,
        claimed_at=reply.claimed_at_ms / 1000,
        failure_code=failure.code,
        failure_detail=failure.detail,
        retryable=failure.retryable,
    )
