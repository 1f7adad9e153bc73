"""Brings back long-lived workflows and schedules that somebody ended, and reports those that are
paused.

Anyone who reaches Temporal can cancel, terminate or delete anything there. Temporal notices
nothing: a loop of the orchestrators does, in one process at a time for each pool. One of these
looks after what belongs to no pool, too. Every `entity_period` seconds it reads the pool's workflow
and the schedules by their ids, and lists all open runs with one query of Temporal's index. It
compares that list with the assignments and orders in PostgreSQL:

| what is missing | what follows |
|---|---|
| the pool's workflow | it is started; it reads what operators had set from PostgreSQL |
| a schedule | it is made anew |
| the workflow of a user with a worker | it is started, and continues with the same worker |
| a user's workflow with another worker than PostgreSQL's: it was reset | it checks its worker |
| the workflow of an order that is followed | the order is due at once: the sweeper starts it |
| a run of a schedule, or a rollout, that was ended | it is reported; a rollout's extra workers go |

The index lags: what seems to be missing is looked at once more, by its id, `CONFIRM_AFTER_S`
seconds later. A pause is somebody's wish. It is reported, and never undone.
"""

import asyncio
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client, WorkflowQueryFailedError, WorkflowUpdateFailedError
from temporalio.service import RPCError

from activities.pool.sizing import ensure_pool
from infra import tasks
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.entities import (
    Finding,
    FindingState,
    finding_of,
    record_finding,
    resume_entities,
    resume_others,
)
from infra.database.locks import MAX_SILENCE_S, lead, send_sign_of_life, try_lock
from infra.database.orders import watch as order_watch
from infra.database.workers import pools
from infra.database.workers import sessions as worker_sessions
from infra.database.workers.sessions import LiveAssignment
from infra.settings import Settings
from infra.temporal.client import RPC_TIMEOUT, signal_workflow, unless_missing
from infra.temporal.executions import ExecutionState, explain_end, list_open, read_execution
from infra.temporal.schedules import SCHEDULES, ensure_schedules
from infra.temporal.starter import WorkerStarter
from worker_runtime.protocol.errors import BerthError
from workflows import names
from workflows.user_worker.messages import Examine, UserWorkerView
from workflows.worker_pool.messages import PoolView, SetRelease

#: Names the restorer's locks among PostgreSQL's advisory locks: one for each pool.
LOCK_ID_BASE = 0x6265_0000_0000
#: One of the restorers holds it, too, and looks at what belongs to no pool.
SHARED_LOCK_ID = 0x6264_0000_0000
#: Seconds until what seems to be missing is looked at once more.
CONFIRM_AFTER_S = 10.0
#: Seconds between two tries while PostgreSQL is away.
RETRY_INTERVAL_S = 1.0
#: Workflows that are looked at, and started, at the same time.
MAX_CONCURRENT_REPAIRS = 20
#: Orders that are given to the sweeper in one look.
MAX_ORDERS_PER_LOOK = 1000
#: Runs that nobody starts again by themselves when somebody ended them.
RUNS = (names.MORNING, names.STATEMENTS, names.DAILY_REPORT, names.ROLLOUT)
#: Runs that come again by themselves: only a pause is reported, which holds the next ones up.
_REPEATED_RUNS = (
    names.MAINTENANCE,
    names.MAINTENANCE_BATCH,
    names.INSTRUMENTS,
    names.INSTRUMENT_LOAD,
)
_KINDS = {
    names.USER_WORKER: "user",
    names.ORDER: "order",
    **dict.fromkeys(RUNS + _REPEATED_RUNS, "run"),
}
#: Ends that somebody caused. Failures are dead letters.
_BY_HAND = ("cancelled", "terminated", "")

log = structlog.get_logger()


@dataclass(frozen=True)
class _Gaps:
    """Holds what one comparison of Temporal and PostgreSQL shows, before it is confirmed."""

    #: Users with a worker and without a workflow.
    missing: dict[str, LiveAssignment]
    #: Users whose workflow names another worker.
    outdated: dict[str, LiveAssignment]
    #: The pool has more workers than it wants, for a rollout that does not run.
    surplus: bool


def _missing_pool(pool: str, reason: str) -> Finding:
    return Finding(
        entity=names.worker_pool_id(pool),
        kind="pool",
        state=FindingState.MISSING,
        reason=reason,
        subject=f"pool:{pool}",
    )


@dataclass(eq=False, repr=False)
class EntityRestorer:
    """A background loop of each orchestrator that hosts workflows of users and pools."""

    database: Database
    temporal: Client
    starter: WorkerStarter
    settings: Settings
    confirm_after: float = CONFIRM_AFTER_S

    def __post_init__(self) -> None:
        #: Runs of `RUNS` that were open at the last look.
        self._runs: dict[str, ExecutionState] = {}
        #: Reports what belongs to no pool: schedules, their runs, and all that is paused.
        self._reports_all = True

    def watches(self, workflow_id: str) -> bool:
        """Return True if the end of this run would be noticed: it was open at the last look."""
        return workflow_id in self._runs

    async def run(self) -> None:
        lock = LOCK_ID_BASE + zlib.crc32(self.settings.pool.encode())
        while True:
            try:
                await lead(self.settings.session_database_url, lock, self._run_while_leading)
            except DatabaseUnavailable as error:
                log.warning("restorer_waits", reason=error.detail)
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _run_while_leading(self, connection: AsyncConnection) -> None:
        self._runs.clear()
        self._reports_all = await try_lock(connection, SHARED_LOCK_ID)
        async with tasks.running(self._look_forever()):
            while True:
                if not self._reports_all:  # the restorer of another pool may have ended
                    self._reports_all = await try_lock(connection, SHARED_LOCK_ID)
                await send_sign_of_life(connection)
                await asyncio.sleep(MAX_SILENCE_S / 6)

    async def _look_forever(self) -> None:
        while True:
            # The first look comes later: a system that starts makes its pool and its schedules.
            await asyncio.sleep(self.settings.entity_period)
            for look in (self.look_at_pool, self.look_at_schedules, self.look_at_runs):
                try:
                    await look()
                except (
                    RPCError,
                    BerthError,
                    WorkflowQueryFailedError,
                    WorkflowUpdateFailedError,
                ) as error:
                    log.warning("entities_not_read", look=look.__name__, reason=str(error)[:200])
                except Exception:  # the boundary of a loop, which would end unseen
                    log.exception("entities_not_restored", look=look.__name__)

    # --- singletons -------------------------------------------------------------------------------

    async def look_at_pool(self) -> None:
        """Starts the pool's workflow anew if somebody ended it. Raises `RPCError`."""
        pool, entity = self.settings.pool, names.worker_pool_id(self.settings.pool)
        seen = await read_execution(self.temporal, entity)
        if seen is not None and seen.is_open:
            finding = await self.database.fetch(finding_of, entity)
            if finding is not None and finding[0] == FindingState.MISSING:
                # It was started, and its report failed; or somebody else has started it.
                await self._rebuilt(_missing_pool(pool, finding[1]))
            await self._report_pauses([seen], "pool", f"pool:{pool}")
            return
        if seen is None and await self.database.fetch(pools.read_pool, pool) is None:
            return  # it has never run: the start of the orchestrator is not over
        missing = _missing_pool(pool, await explain_end(self.temporal, entity, seen))
        await self._record(missing)
        await ensure_pool(self.temporal, self.settings, patience=RPC_TIMEOUT)
        await self._rebuilt(missing)

    async def look_at_schedules(self) -> None:
        """Makes schedules anew that somebody deleted. Raises `RPCError`."""
        if not self._reports_all:
            return
        for schedule_id, make_schedule in SCHEDULES.items():
            entity = f"schedule:{schedule_id}"
            if make_schedule(self.settings) is None:
                await self._resumed([entity])
                continue
            handle = self.temporal.get_schedule_handle(schedule_id)
            seen = await unless_missing(handle.describe(rpc_timeout=RPC_TIMEOUT))
            if seen is None:
                await ensure_schedules(self.temporal, self.settings, schedule_id, keep=True)
                await self._rebuilt(
                    Finding(
                        entity=entity,
                        kind="schedule",
                        state=FindingState.MISSING,
                        reason="deleted",
                        subject=entity,
                    )
                )
            state = None if seen is None else seen.schedule.state
            if state is not None and state.paused:
                await self._record(
                    Finding(
                        entity=entity,
                        kind="schedule",
                        state=FindingState.PAUSED,
                        reason=state.note or "paused",
                        subject=entity,
                    )
                )
            else:
                await self._resumed([entity])

    # --- all others -------------------------------------------------------------------------------

    async def look_at_runs(self) -> None:
        """Compares Temporal's list of open runs with PostgreSQL. Raises `RPCError`,
        `DatabaseUnavailable`."""
        # The list first: a user who gets a worker meanwhile has a workflow that it does not show.
        runs = await list_open(self.temporal, tuple(_KINDS))
        by_id = {run.workflow_id: run for run in runs}
        gaps = await self._compare(by_id)
        await self._report_ended_runs(by_id)
        await self._pass_on_orders(by_id)
        if self._reports_all:
            await self._report_paused_runs(runs)
        if gaps.missing or gaps.outdated or gaps.surplus:
            await asyncio.sleep(self.confirm_after)
            await self._close_gaps(gaps)

    async def _compare(self, by_id: Mapping[str, ExecutionState]) -> _Gaps:
        missing, outdated = {}, {}
        for live in await self.database.fetch(worker_sessions.live_assignments, self.settings.pool):
            run = by_id.get(names.user_worker_id(live.user_id))
            if run is None:
                missing[live.user_id] = live
            elif run.worker_id != live.worker_id:
                outdated[live.user_id] = live
        rollout = by_id.get(names.rollout_id(self.settings.pool))
        surplus = rollout is None and await self._surge() > 0
        return _Gaps(missing, outdated, surplus)

    async def _close_gaps(self, gaps: _Gaps) -> None:
        """Closes the gaps that are still there, each by the exact state of its workflow."""
        now = await self.database.fetch(worker_sessions.live_assignments, self.settings.pool)
        present = {live.user_id: live for live in now}
        turns = asyncio.Semaphore(MAX_CONCURRENT_REPAIRS)

        async def close(user_id: str, seen: LiveAssignment) -> None:
            if present.get(user_id) != seen:
                return
            async with turns:
                try:
                    await self._close_gap(seen)
                except (RPCError, BerthError, WorkflowQueryFailedError) as error:
                    # The gaps of the other users are closed all the same.
                    log.warning("gap_not_closed", user_id=user_id, reason=str(error)[:200])

        await asyncio.gather(*(close(*gap) for gap in (gaps.missing | gaps.outdated).items()))
        if gaps.surplus:
            await self._end_surge()

    async def _close_gap(self, live: LiveAssignment) -> None:
        user_id, entity = live.user_id, names.user_worker_id(live.user_id)
        run = await read_execution(self.temporal, entity)
        if run is not None and run.is_open:
            if run.worker_id != live.worker_id and not run.is_paused:
                await self._examine(live)
            return
        why = await explain_end(self.temporal, entity, run)
        await self.starter.adopt(user_id, self.settings.pool)
        await self._rebuilt(
            Finding(
                entity=entity,
                kind="user",
                state=FindingState.MISSING,
                reason=why,
                subject=f"user:{user_id}",
            )
        )

    async def _examine(self, live: LiveAssignment) -> None:
        """Has a workflow check its worker, which by PostgreSQL is not the user's."""
        entity = names.user_worker_id(live.user_id)
        handle = self.temporal.get_workflow_handle(entity)
        view: UserWorkerView = await handle.query(
            "view", result_type=UserWorkerView, rpc_timeout=RPC_TIMEOUT
        )
        worker = view.worker
        if worker is None or worker.worker_id == live.worker_id:
            return
        log.warning("workflow_outdated", user_id=live.user_id, worker_id=live.worker_id)
        wrong = Examine(
            worker_id=worker.worker_id, epoch=worker.epoch, reason="PostgreSQL names another"
        )
        await signal_workflow(self.temporal, entity, "examine", wrong)

    async def _pass_on_orders(self, by_id: Mapping[str, ExecutionState]) -> None:
        """Makes orders due whose workflow is gone: the sweeper starts it, or learns that it
        runs."""
        followed = await self.database.fetch(
            order_watch.followed_orders, self.settings.entity_period
        )
        gone = [order for order in followed if names.order_id(order) not in by_id][
            :MAX_ORDERS_PER_LOOK
        ]
        if gone:
            count = await self.database.fetch(order_watch.make_due, gone)
            log.warning("orders_without_workflow", count=count)

    async def _report_ended_runs(self, by_id: Mapping[str, ExecutionState]) -> None:
        ended = {key: run for key, run in self._runs.items() if key not in by_id}
        # One that has ended stays until it is reported, also if Temporal does not answer now.
        self._runs |= {key: run for key, run in by_id.items() if run.kind in RUNS}
        for entity, run in ended.items():
            now = await read_execution(self.temporal, entity)
            if now is not None and (
                now.run_id != run.run_id or now.end not in _BY_HAND or now.is_open
            ):
                self._runs.pop(entity, None)
                continue
            if self._reports_all:
                why = await explain_end(self.temporal, entity, now)
                log.error("run_ended_by_hand", workflow=entity, reason=why)
                await self._record(
                    Finding(
                        entity=entity,
                        kind="run",
                        state=FindingState.ENDED,
                        reason=why,
                        subject=f"workflow:{entity}",
                    )
                )
            self._runs.pop(entity, None)

    # --- a rollout that was ended -----------------------------------------------------------------

    async def _surge(self) -> int:
        """Return how many workers beyond its target the pool keeps; 0 also if it does not
        answer."""
        handle = self.temporal.get_workflow_handle(names.worker_pool_id(self.settings.pool))
        try:
            view: PoolView = await handle.query(
                "view", result_type=PoolView, rpc_timeout=RPC_TIMEOUT
            )
        except (RPCError, WorkflowQueryFailedError):
            return 0
        return view.surge

    async def _end_surge(self) -> None:
        pool = self.settings.pool
        rollout = await read_execution(self.temporal, names.rollout_id(pool))
        if rollout is not None and rollout.is_open:
            return
        handle = self.temporal.get_workflow_handle(names.worker_pool_id(pool))
        view: PoolView = await handle.query("view", result_type=PoolView, rpc_timeout=RPC_TIMEOUT)
        if view.surge:
            same = SetRelease(release=view.release, surge=0)
            await handle.execute_update(
                "set_release", same, result_type=PoolView, rpc_timeout=RPC_TIMEOUT
            )
            log.warning("rollout_surge_ended", pool=pool, surge=view.surge)

    # --- findings ---------------------------------------------------------------------------------

    async def _report_paused_runs(self, runs: Sequence[ExecutionState]) -> None:
        paused = [run for run in runs if run.is_paused]
        for run in paused:
            kind = _KINDS[run.kind]
            await self._report_pauses([run], kind, f"workflow:{run.workflow_id}")
        still = {run.workflow_id for run in paused}
        async with self.database.session() as session:
            for entity in await resume_others(session, still, kinds=frozenset(_KINDS.values())):
                log.info("entity_resumed", entity=entity)

    async def _report_pauses(self, runs: Iterable[ExecutionState], kind: str, subject: str) -> None:
        for run in runs:
            if run.is_paused:
                await self._record(
                    Finding(
                        entity=run.workflow_id,
                        kind=kind,
                        state=FindingState.PAUSED,
                        reason="paused in Temporal",
                        subject=subject,
                    )
                )
            else:
                await self._resumed([run.workflow_id])

    async def _resumed(self, entities: Sequence[str]) -> None:
        async with self.database.session() as session:
            for entity in await resume_entities(session, entities):
                log.info("entity_resumed", entity=entity)

    async def _record(self, finding: Finding) -> None:
        async with self.database.session() as session:
            news = await record_finding(session, finding)
        if news:
            log.error(
                "entity_found",
                entity=finding.entity,
                state=finding.state.value,
                reason=finding.reason,
            )

    async def _rebuilt(self, missing: Finding) -> None:
        rebuilt = Finding(
            entity=missing.entity,
            kind=missing.kind,
            state=FindingState.REBUILT,
            reason=missing.reason,
            subject=missing.subject,
        )
        await self._record(rebuilt)
