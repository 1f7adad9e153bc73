"""Lists workflow runs that failed for good, or that somebody ended: they are in no table but
Temporal's.

Such a letter is dropped when another run of the workflow has followed, and when Temporal has
forgotten it.
"""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import structlog
from temporalio.client import Client, WorkflowExecution, WorkflowFailureError

from infra.database.dead_letters import DeadLetter, delete_open, last_times, put_letter
from infra.database.engine import Database
from infra.temporal.client import RPC_TIMEOUT, unless_missing
from infra.temporal.executions import read_execution
from workflows import names

#: Seconds between two rounds.
CHECK_INTERVAL_S = 60.0
#: Runs that are read: the newest. What a pass of maintenance left, the next one does.
MAX_RUNS = 500
_FAILED = (
    'ExecutionStatus IN ("Failed", "TimedOut")'
    f' AND WorkflowType != "{names.MAINTENANCE}" AND WorkflowType != "{names.MAINTENANCE_BATCH}"'
)
#: Somebody ended them by hand, and nobody starts them again. Pools, users and orders come back by
#: themselves.
_ENDED = 'ExecutionStatus IN ("Terminated", "Canceled") AND WorkflowType IN ({})'.format(
    ", ".join(
        f'"{kind}"' for kind in (names.MORNING, names.STATEMENTS, names.DAILY_REPORT, names.ROLLOUT)
    )
)
RUNS_QUERY = f"({_FAILED}) OR ({_ENDED})"

log = structlog.get_logger()


class FailureCollector:
    """A background loop. Several may run: a failure counts once."""

    def __init__(
        self, database: Database, temporal: Client, days: float, most_runs: int = MAX_RUNS
    ) -> None:
        """Keeps letters for `days`."""
        self._database = database
        self._temporal = temporal
        self._kept = timedelta(days=days)
        self._most_runs = most_runs

    async def run(self) -> None:
        while True:
            try:
                await self.collect_runs()
            except Exception as error:  # the boundary of a loop: a server is away
                log.warning(
                    "failures_not_collected", error=type(error).__name__, reason=str(error)[:200]
                )
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def collect_runs(self) -> None:
        """Raises `RPCError`, `DatabaseUnavailable`."""
        letters: dict[DeadLetter, WorkflowExecution] = {}
        runs = [
            run async for run in self._temporal.list_workflows(RUNS_QUERY, limit=self._most_runs)
        ]
        for run in runs:
            last = await read_execution(self._temporal, run.id)  # None: it was deleted meanwhile
            if last is not None and last.run_id == run.run_id:
                user_id = run.typed_search_attributes.get(names.SA_USER, "")
                letter = DeadLetter(
                    kind="workflow",
                    subject=run.id,
                    source=run.id,
                    user_id=user_id,
                    at=run.close_time,
                )
                letters[letter] = run
        ends = [run.close_time for run in runs if run.close_time is not None]
        #: Older failures were not read, and their letters stay.
        read_since = min(ends) if len(runs) == self._most_runs else None
        async with self._database.session(autocommit=True) as session:
            known = await last_times(session, "workflow")
        since = datetime.now(UTC) - self._kept  # what is older was purged
        new: list[DeadLetter] = []
        for letter, run in letters.items():
            if letter.at is not None and letter.at > max(since, known.get(letter.id, since)):
                reason = await unless_missing(self._cause_of_run(run))
                if reason is not None:
                    new.append(replace(letter, reason=reason))
        read = {
            letter_id for letter_id, at in known.items() if read_since is None or at >= read_since
        }
        over = read - {letter.id for letter in letters}
        async with self._database.session() as session:
            await delete_open(session, over)
            for letter in new:
                await put_letter(session, letter)

    async def _cause_of_run(self, run: WorkflowExecution) -> str:
        cause: BaseException | None = None
        try:
            await self._temporal.get_workflow_handle(run.id, run_id=run.run_id).result(
                rpc_timeout=RPC_TIMEOUT
            )
        except WorkflowFailureError as error:
            cause = error
        while deeper := getattr(cause, "cause", None):
            cause = deeper
        return f"{run.workflow_type}: {cause}"
