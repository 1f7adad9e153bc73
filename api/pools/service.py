"""Pools and their rollouts, as operators see and change them: calls of their workflows."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowQueryRejectedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import QueryRejectCondition, WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError

from api.fleet.entities import missing_pool
from api.http.errors import NoPool, NoRollout, OrchestratorUnavailable, PoolChanged, RolloutUnderWay
from infra.database.engine import Database
from infra.temporal.client import temporal_errors
from infra.temporal.executions import explain_end, read_execution
from worker_runtime.protocol.errors import BerthError
from workflows.names import BULK_QUEUE, ROLLOUT, rollout_id, worker_pool_id
from workflows.rollout.messages import (
    ENDED,
    AbortRollout,
    Release,
    RolloutInput,
    RolloutPhase,
    RolloutView,
)
from workflows.worker_pool.messages import POOL_CHANGED, PoolView
from workflows.worker_pool.policy import PoolPolicyInvalid

HALF_WAY = "The pool may be half way: start it again, or the one to the version before."
#: Limits the wait for one answer. A count, or a query of a large pool, may hold the workflow's task
#: up.
ANSWER_TIMEOUT = timedelta(seconds=10)
_REFUSALS: dict[str | None, type[BerthError]] = {
    PoolPolicyInvalid.code: PoolPolicyInvalid,
    POOL_CHANGED: PoolChanged,
}


@dataclass(frozen=True, eq=False)
class PoolControl:
    """Every method raises `NoPool`, `PoolRebuilding`, `TemporalUnavailable`,
    `OrchestratorUnavailable`.

    Those that read the view also raise `WorkflowPaused`.
    """

    client: Client
    database: Database

    async def view(self, pool: str) -> PoolView:
        handle = self.client.get_workflow_handle(worker_pool_id(pool))
        try:
            with temporal_errors(missing=NoPool()):
                view: PoolView = await handle.query(
                    "view",
                    result_type=PoolView,
                    reject_condition=QueryRejectCondition.NOT_OPEN,
                    rpc_timeout=ANSWER_TIMEOUT,
                )
        except (NoPool, WorkflowQueryRejectedError):  # ended by hand: a pool never ends by itself
            raise await self._missing(pool) from None
        return view

    async def _missing(self, pool: str) -> BerthError:
        with temporal_errors(server_only=True):
            error = await missing_pool(self.client, self.database, pool)
        return error or NoPool(f"there is no pool {pool}")

    async def update(self, pool: str, name: str, *args: object) -> PoolView:
        """Sends the update `name`: `set_policy`, `pause`, `resume` or `drain`. Also raises
        `PoolPolicyInvalid`, `PoolChanged`."""
        handle = self.client.get_workflow_handle(worker_pool_id(pool))
        try:
            with temporal_errors(missing=NoPool()):
                async with asyncio.timeout(ANSWER_TIMEOUT.total_seconds()):
                    view: PoolView = await handle.execute_update(
                        name, args=args, result_type=PoolView
                    )
        except NoPool:
            raise await self._missing(pool) from None
        except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError):
            raise OrchestratorUnavailable from None
        except WorkflowUpdateFailedError as failed:
            cause = failed.cause
            kind = cause.type if isinstance(cause, ApplicationError) else None
            if kind in _REFUSALS:
                raise _REFUSALS[kind](str(cause)) from None
            # It closed under the update, or is still
            # on a release without it: a moment later it is not.
            raise OrchestratorUnavailable(f"the pool did not take it: {cause}") from None
        return view


@dataclass(frozen=True, eq=False)
class RolloutControl:
    """Every method raises `TemporalUnavailable`, `OrchestratorUnavailable`."""

    client: Client

    async def start(self, given: RolloutInput, before: Release) -> RolloutView:
        """Starts a rollout and returns what it begins with. Raises `RolloutUnderWay` while another
        one of the pool continues.

        `before`: what the pool's new workers are now.
        """
        to = given.release.version or "of the settings"
        try:
            with temporal_errors(server_only=True):
                await self.client.start_workflow(
                    ROLLOUT,
                    given,
                    id=rollout_id(given.pool),
                    task_queue=BULK_QUEUE,
                    id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                    id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                    rpc_timeout=ANSWER_TIMEOUT,
                    static_summary=f"pool {given.pool} to version {to}",
                )
        except WorkflowAlreadyStartedError:
            raise RolloutUnderWay(f"a rollout of pool {given.pool} is under way") from None
        now = time.time()
        return RolloutView(
            pool=given.pool,
            phase=RolloutPhase.REPLACING,
            release=given.release,
            before=before,
            began_at=now,
            deadline=now + given.deadline,
        )

    async def view(self, pool: str) -> RolloutView:
        """Returns the rollout that continues, or the last one. Raises `NoRollout`."""
        handle = self.client.get_workflow_handle(rollout_id(pool), result_type=RolloutView)
        try:
            with temporal_errors(missing=_no_rollout(pool)):
                run = await read_execution(self.client, handle.id)
                if run is None:
                    raise _no_rollout(pool)
                if run.end == "completed":
                    # Not queried: the release that ran it may be gone,
                    # and its result says the same.
                    ended: RolloutView = await handle.result(rpc_timeout=ANSWER_TIMEOUT)
                    return ended
                if not run.is_open:
                    why = await explain_end(self.client, handle.id, run)
                    raise NoRollout(f"the last rollout of pool {pool} was {why}. {HALF_WAY}")
                view: RolloutView = await handle.query(
                    "view", result_type=RolloutView, rpc_timeout=ANSWER_TIMEOUT
                )
        except WorkflowFailureError:
            raise OrchestratorUnavailable("the rollout did not answer") from None
        return view

    async def abort(self, pool: str, reason: str) -> RolloutView:
        """Aborts a rollout: the version before is put back; the view may not show it yet. Raises
        `NoRollout`."""
        with suppress(OrchestratorUnavailable):  # it hears of the abort when it is back
            # One that has ended still runs until its end is recorded, and would take a signal.
            if (await self.view(pool)).phase in ENDED:
                raise _no_rollout(pool)
        handle = self.client.get_workflow_handle(rollout_id(pool))
        with temporal_errors(missing=_no_rollout(pool)):
            await handle.signal("abort", AbortRollout(reason=reason), rpc_timeout=ANSWER_TIMEOUT)
        return await self.view(pool)


def _no_rollout(pool: str) -> NoRollout:
    return NoRollout(f"no rollout of pool {pool} is under way")
