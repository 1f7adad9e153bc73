"""Cleans up anomalies that two scans and a last check have found.

A user's workflow is the only writer of that user's lifecycle: if one runs and knows the worker, it is
signalled to check it, and nothing else is done. A worker that no workflow knows is stopped here, and has
ended only when the launcher confirms it (one-owner). No worker with an order in hand is stopped.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Collection, Iterable, Sequence
from typing import TypeVar

import structlog
from redis.asyncio import Redis
from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from activities.claims.stop import EndConfirmer
from activities.maintenance.anomalies import AnomalyKind, FleetSnapshot
from activities.pool import entries
from infra.database.engine import Database
from infra.database.workers import assignments
from infra.database.workers.passes import Suspect
from infra.launchers.port import Launcher
from infra.temporal.client import CALL
from infra.temporal.executions import read_execution
from infra.worker_task import StopFailed
from worker_runtime.protocol import keys
from workflows import names
from workflows.user_worker import messages as m

S = m.WorkerState

#: Anomalies that are cleaned up together: a stop waits up to `GRACE` seconds.
ABREAST = 20
#: Seconds that a worker gets to log out.
GRACE = 10.0
#: States in which a workflow is busy with its worker, each with a deadline.
BUSY = frozenset({S.CLAIMED, S.CONNECTING, S.FAILED, S.IDLE_TIMEOUT, S.DRAINING})

T = TypeVar("T")

log = structlog.get_logger()


class AnomalyCleaner:
    """`clean` may be called again with the same anomalies."""

    def __init__(
        self, client: Redis, database: Database, launcher: Launcher, ends: EndConfirmer, temporal: Client
    ) -> None:
        self._client = client
        self._database = database
        self._launcher = launcher
        self._ends = ends
        self._temporal = temporal

    async def clean(self, suspects: Sequence[Suspect], seen: FleetSnapshot) -> dict[str, int]:
        """Outcome → how often. Raises `RedisError` or `LauncherUnreachable` when it cannot go on."""
        outcomes: Counter[str] = Counter()
        for start in range(0, len(suspects), ABREAST):
            done = await self._clean(suspects[start : start + ABREAST], seen)
            for one, outcome in done.items():
                outcomes[outcome] += 1
                log.info(
                    "anomaly",
                    kind=one.kind,
                    why=one.why,
                    outcome=outcome,
                    user_id=one.user_id,
                    worker_id=one.worker_id,
                    task_id=one.task_id,
                )
        return dict(outcomes)

    async def _clean(self, suspects: Sequence[Suspect], seen: FleetSnapshot) -> dict[Suspect, str]:
        bare = [one for one in suspects if one.kind in (AnomalyKind.ORPHAN_MARK, AnomalyKind.STALE_MARK)]
        done = dict(zip(bare, await _all(self._delete(one) for one in bare), strict=True))
        users = [one for one in suspects if one.user_id and one not in done]
        known = await _all(self._known_to_its_workflow(one) for one in users)
        done |= {one: "signalled" for one, is_known in zip(users, known, strict=True) if is_known}
        left = [one for one in suspects if one not in done]
        whose = {one: _users(one, seen) for one in left}
        busy = await self._with_orders_in_flight({user for some in whose.values() for user in some})
        done |= {one: "in_flight" for one in left if busy & whose[one]}
        left = [one for one in left if one not in done]
        ended: list[Suspect] = []
        try:
            outcomes = await _all(
                self._end(one, seen, ended) if one.user_id else self._stop(one) for one in left
            )
        finally:
            await self._close(ended)
        return done | dict(zip(left, outcomes, strict=True))

    async def _close(self, ended: Sequence[Suspect]) -> None:
        reasons = {one.claim_id: f"maintenance: {one.why}"[:200] for one in ended}
        if reasons:
            await self._database.fetch(assignments.close_assignments, reasons)

    async def _with_orders_in_flight(self, users: Collection[str]) -> set[str]:
        """Users whose worker has an order in hand, or may be submitting one."""
        asked = sorted(users)
        if not asked:
            return set()
        orders = await self._database.fetch(assignments.unanswered_orders, asked)
        async with self._client.pipeline(transaction=False) as pipe:
            for user in asked:
                pipe.llen(keys.processing(user))
            for user, order in orders:
                pipe.exists(keys.journal(user, order))
            found = await pipe.execute()
        whose = [*asked, *(user for user, _ in orders)]
        return {user for user, some in zip(whose, found, strict=True) if some}

    async def _delete(self, one: Suspect) -> str:
        if not one.user_id:
            await entries.remove_entry(self._client, one.pool, one.worker_id)
            return "deleted"
        gone = await entries.remove_mark(self._client, one.user_id, one.value)
        return "deleted" if gone else "healed"

    async def _known_to_its_workflow(self, one: Suspect) -> bool:
        """Whether the user's workflow knows this worker, and was signalled; True if it cannot be queried."""
        handle = self._temporal.get_workflow_handle(names.user_worker_id(one.user_id))
        try:
            run = await read_execution(self._temporal, handle.id)
            if run is None or not run.is_open:
                return False
            if run.is_paused:  # it does nothing until somebody resumes it
                return True
            view = await handle.query("view", result_type=m.UserWorkerView, rpc_timeout=CALL)
            worker = view.worker
            if worker is None or worker.worker_id != one.worker_id:
                # With another worker it does not know this one; while it gets one, that may be this one.
                return worker is None and view.state in BUSY
            examine = m.Examine(worker_id=one.worker_id, epoch=one.epoch, reason=one.why)
            await handle.signal("examine", examine, rpc_timeout=CALL)
        except (RPCError, WorkflowQueryFailedError) as error:
            if isinstance(error, RPCError) and error.status == RPCStatusCode.NOT_FOUND:
                return False
            log.warning("workflow_not_asked", user_id=one.user_id, reason=str(error)[:200])
        return True

    async def _stop(self, one: Suspect) -> str:
        """Stops a task that serves nobody."""
        if one.kind == AnomalyKind.OVERDUE:
            state = await entries.release_claim(self._client, one.pool, one.worker_id, one.claim_id)
            if state == "confirmed":  # else its worker cannot confirm the claim any more
                return "healed"
        try:
            await self._launcher.stop(one.task_id, f"maintenance: {one.why}", grace=GRACE)
        except StopFailed as error:
            log.warning("task_not_stopped", task_id=one.task_id, reason=error.detail)
            return "failed"
        if one.kind != AnomalyKind.DUPLICATE:  # of one that runs twice the other is alive
            await entries.remove_entry(self._client, one.pool, one.worker_id)
        return "stopped"

    async def _end(self, one: Suspect, seen: FleetSnapshot, ended: list[Suspect]) -> str:
        """Stops a user's worker that no workflow knows, and adds it to `ended` when it has ended."""
        if one.worker_id:
            await entries.release_claim(self._client, one.pool, one.worker_id, one.claim_id)
            worker = m.WorkerRef(
                worker_id=one.worker_id,
                task_id=one.task_id,
                epoch=one.epoch,
                claim_id=one.claim_id,
                pool=one.pool,
            )
            try:
                await self._ends.end(one.user_id, worker, f"maintenance: {one.why}", grace=GRACE)
            except StopFailed as error:
                log.warning("worker_not_ended", worker_id=one.worker_id, reason=error.detail)
                return "failed"
        ended.append(one)
        if one.worker_id:
            await entries.remove_entry(self._client, one.pool, one.worker_id)
            await entries.remove_mark(self._client, one.user_id, f"{one.epoch}:{one.worker_id}")
        return "stopped" if one.worker_id in seen.running else "closed"


def _users(one: Suspect, seen: FleetSnapshot) -> set[str]:
    """The users whom its worker serves or may serve."""
    if one.user_id:
        return {one.user_id}
    return {row.user_id for row in seen.by_worker.get(one.worker_id, ())}


async def _all(steps: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all steps; if one fails, the others end first."""
    done = await asyncio.gather(*steps, return_exceptions=True)
    found: list[T] = []
    for one in done:
        if isinstance(one, BaseException):
            raise one
        found.append(one)
    return found
