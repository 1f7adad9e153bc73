"""Cleans up anomalies that two scans and a last check have found.

A user's workflow is the only writer of that user's lifecycle: if one runs and knows the worker, it
is signalled to check it, and nothing else is done. A worker that no workflow knows is stopped here,
and has ended only when the launcher confirms it (one-owner). No worker with an order in hand is
stopped.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Collection, Iterable, Sequence
from typing import TypeVar

import structlog
from redis.asyncio import Redis
from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from activities.claims.stop import WorkerTerminator
from activities.maintenance.anomalies import AnomalyKind, FleetSnapshot
from activities.pool import entries
from infra.database.engine import Database
from infra.database.workers import assignments
from infra.database.workers.passes import Suspect
from infra.launchers.port import Launcher
from infra.temporal.client import RPC_TIMEOUT
from infra.temporal.executions import read_execution
from infra.worker_task import StopFailed
from worker_runtime.protocol import keys
from workflows import names
from workflows.user_worker.messages import Examine, UserWorkerView, WorkerRef, WorkerState

#: Anomalies that are cleaned up together: a stop waits up to `LOGOUT_GRACE_S` seconds.
MAX_CONCURRENT_CLEANUPS = 20
#: Seconds that a worker gets to log out.
LOGOUT_GRACE_S = 10.0
#: States in which a workflow is busy with its worker, each with a deadline.
BUSY = frozenset(
    {
        WorkerState.CLAIMED,
        WorkerState.CONNECTING,
        WorkerState.FAILED,
        WorkerState.IDLE_TIMEOUT,
        WorkerState.DRAINING,
    }
)

T = TypeVar("T")

log = structlog.get_logger()


class AnomalyCleaner:
    """`clean` may be called again with the same anomalies."""

    def __init__(
        self,
        client: Redis,
        database: Database,
        launcher: Launcher,
        ends: WorkerTerminator,
        temporal: Client,
    ) -> None:
        self._client = client
        self._database = database
        self._launcher = launcher
        self._ends = ends
        self._temporal = temporal

    async def clean(self, suspects: Sequence[Suspect], seen: FleetSnapshot) -> dict[str, int]:
        """Cleans up after the suspects and counts the outcomes. Raises `RedisError` or
        `LauncherUnreachable` when it cannot continue."""
        outcomes: Counter[str] = Counter()
        for start in range(0, len(suspects), MAX_CONCURRENT_CLEANUPS):
            done = await self._clean(suspects[start : start + MAX_CONCURRENT_CLEANUPS], seen)
            for suspect, outcome in done.items():
                outcomes[outcome] += 1
                log.info(
                    "anomaly",
                    kind=suspect.kind,
                    why=suspect.why,
                    outcome=outcome,
                    user_id=suspect.user_id,
                    worker_id=suspect.worker_id,
                    task_id=suspect.task_id,
                )
        return dict(outcomes)

    async def _clean(self, suspects: Sequence[Suspect], seen: FleetSnapshot) -> dict[Suspect, str]:
        bare = [
            suspect
            for suspect in suspects
            if suspect.kind in (AnomalyKind.ORPHAN_MARK, AnomalyKind.STALE_MARK)
        ]
        done = dict(zip(bare, await _all(self._delete(suspect) for suspect in bare), strict=True))
        users = [suspect for suspect in suspects if suspect.user_id and suspect not in done]
        known = await _all(self._known_to_its_workflow(suspect) for suspect in users)
        done |= {
            suspect: "signalled" for suspect, is_known in zip(users, known, strict=True) if is_known
        }
        remaining = [suspect for suspect in suspects if suspect not in done]
        whose = {suspect: _users(suspect, seen) for suspect in remaining}
        busy = await self._with_orders_in_flight(
            {user for user_ids in whose.values() for user in user_ids}
        )
        done |= {suspect: "in_flight" for suspect in remaining if busy & whose[suspect]}
        remaining = [suspect for suspect in remaining if suspect not in done]
        ended: list[Suspect] = []
        try:
            outcomes = await _all(
                self._end(suspect, seen, ended) if suspect.user_id else self._stop(suspect)
                for suspect in remaining
            )
        finally:
            await self._close(ended)
        return done | dict(zip(remaining, outcomes, strict=True))

    async def _close(self, ended: Sequence[Suspect]) -> None:
        reasons = {suspect.claim_id: f"maintenance: {suspect.why}"[:200] for suspect in ended}
        if reasons:
            await self._database.fetch(assignments.close_assignments, reasons)

    async def _with_orders_in_flight(self, users: Collection[str]) -> set[str]:
        """Returns the users whose worker has an order in hand, or may be submitting one."""
        asked = sorted(users)
        if not asked:
            return set()
        orders = await self._database.fetch(assignments.unanswered_orders, asked)
        async with self._client.pipeline(transaction=False) as pipe:
            for user in asked:
                pipe.llen(keys.processing(user))
            for user, order in orders:
                pipe.exists(keys.journal(user, order))
            counts = await pipe.execute()
        whose = [*asked, *(user for user, _ in orders)]
        return {user for user, count in zip(whose, counts, strict=True) if count}

    async def _delete(self, suspect: Suspect) -> str:
        if not suspect.user_id:
            await entries.remove_entry(self._client, suspect.pool, suspect.worker_id)
            return "deleted"
        gone = await entries.remove_mark(self._client, suspect.user_id, suspect.value)
        return "deleted" if gone else "healed"

    async def _known_to_its_workflow(self, suspect: Suspect) -> bool:
        """Returns True if the user's workflow knows this worker and was signalled, or cannot be
        queried."""
        handle = self._temporal.get_workflow_handle(names.user_worker_id(suspect.user_id))
        try:
            run = await read_execution(self._temporal, handle.id)
            if run is None or not run.is_open:
                return False
            if run.is_paused:  # it does nothing until somebody resumes it
                return True
            view = await handle.query("view", result_type=UserWorkerView, rpc_timeout=RPC_TIMEOUT)
            worker = view.worker
            if worker is None or worker.worker_id != suspect.worker_id:
                # With another worker it does not know this one; while it gets one, that may be this
                # one.
                return worker is None and view.state in BUSY
            examine = Examine(worker_id=suspect.worker_id, epoch=suspect.epoch, reason=suspect.why)
            await handle.signal("examine", examine, rpc_timeout=RPC_TIMEOUT)
        except (RPCError, WorkflowQueryFailedError) as error:
            if isinstance(error, RPCError) and error.status == RPCStatusCode.NOT_FOUND:
                return False
            log.warning("workflow_not_asked", user_id=suspect.user_id, reason=str(error)[:200])
        return True

    async def _stop(self, suspect: Suspect) -> str:
        """Stops a task that serves nobody."""
        if suspect.kind == AnomalyKind.OVERDUE:
            state = await entries.release_claim(
                self._client, suspect.pool, suspect.worker_id, suspect.claim_id
            )
            if state == "confirmed":  # else its worker cannot confirm the claim any more
                return "healed"
        try:
            await self._launcher.stop(
                suspect.task_id, f"maintenance: {suspect.why}", grace=LOGOUT_GRACE_S
            )
        except StopFailed as error:
            log.warning("task_not_stopped", task_id=suspect.task_id, reason=error.detail)
            return "failed"
        if suspect.kind != AnomalyKind.DUPLICATE:  # of one that runs twice the other is alive
            await entries.remove_entry(self._client, suspect.pool, suspect.worker_id)
        return "stopped"

    async def _end(self, suspect: Suspect, seen: FleetSnapshot, ended: list[Suspect]) -> str:
        """Stops a user's worker that no workflow knows, and adds it to `ended` when it has
        ended."""
        if suspect.worker_id:
            await entries.release_claim(
                self._client, suspect.pool, suspect.worker_id, suspect.claim_id
            )
            worker = WorkerRef(
                worker_id=suspect.worker_id,
                task_id=suspect.task_id,
                epoch=suspect.epoch,
                claim_id=suspect.claim_id,
                pool=suspect.pool,
            )
            try:
                await self._ends.end(
                    suspect.user_id, worker, f"maintenance: {suspect.why}", grace=LOGOUT_GRACE_S
                )
            except StopFailed as error:
                log.warning("worker_not_ended", worker_id=suspect.worker_id, reason=error.detail)
                return "failed"
        ended.append(suspect)
        if suspect.worker_id:
            await entries.remove_entry(self._client, suspect.pool, suspect.worker_id)
            await entries.remove_mark(
                self._client, suspect.user_id, f"{suspect.epoch}:{suspect.worker_id}"
            )
        return "stopped" if suspect.worker_id in seen.running else "closed"


def _users(suspect: Suspect, seen: FleetSnapshot) -> set[str]:
    """Returns the users whom its worker serves or may serve."""
    if suspect.user_id:
        return {suspect.user_id}
    return {row.user_id for row in seen.by_worker.get(suspect.worker_id, ())}


async def _all(steps: Iterable[Awaitable[T]]) -> list[T]:
    """Returns the results of all steps; if one fails, the others end first."""
    done = await asyncio.gather(*steps, return_exceptions=True)
    results: list[T] = []
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results
