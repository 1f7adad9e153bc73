"""Brings running workflows to the current version, so that an old one is soon free of work.

While an orchestrator of the old version runs, entities are asked to `renew`: each finishes its step
on the old code, then continues as new on the current version. When no orchestrator serves the old
version any more, the run itself is handed over, and the current code replays its history;
`tests/replay` proves that it can.
"""

import asyncio
import time
from itertools import groupby

import structlog
from temporalio.service import RPCError

from activities.orchestrator.deployment import ENTITIES, Deployment, RunningWorkflow
from activities.orchestrator.promotion import Promotion
from infra.database import locks as turn
from infra.database.engine import Database
from worker_runtime.protocol.errors import BerthError

#: Seconds between two rounds while something is left on another version.
MOVE_INTERVAL_S = 1.0
#: Seconds between two rounds while nothing is left: two calls of Temporal, in each orchestrator.
CHECK_INTERVAL_S = 15.0
#: Workflows that move in a second: 5,000 take about 4 min, which leaves Temporal room for claims.
MAX_MOVES_PER_S = 20.0
#: Longest time in seconds for the runs of one version in a round, which keeps a database
#: connection.
MAX_ROUND_S = 5.0
#: Seconds until an entity is asked again. One that connects renews when it is Active.
RENEW_RETRY_INTERVAL_S = 30.0

LOCK_NAME = "berth move to the current version"

log = structlog.get_logger()


class WorkflowMover:
    """A background loop of each orchestrator; PostgreSQL lets one work at a time."""

    def __init__(
        self,
        database: Database,
        deployment: Deployment,
        promotion: Promotion,
    ) -> None:
        self._database = database
        self._deployment = deployment
        self._promotion = promotion
        #: (run id, handed over) → when it was done.
        self._done: dict[tuple[str, bool], float] = {}

    async def run(self) -> None:
        await self._promotion.decided.wait()
        while True:
            try:
                has_more = await self.round()
            except (RPCError, BerthError) as error:
                log.warning("move_failed", reason=str(error)[:200])
                has_more = True
            await asyncio.sleep(MOVE_INTERVAL_S if has_more else CHECK_INTERVAL_S)

    async def round(self) -> bool:
        """Moves for some seconds. Whether something is left that is ours to move."""
        seen = await self._deployment.describe()
        if seen is None or seen.current != self._deployment.build:
            return False
        runs = await self._deployment.running(other_than=self._deployment.build)
        if not runs:
            self._done.clear()
            return False
        async with self._database.session() as session:
            if await turn.take_turn(session, LOCK_NAME):
                await self._move(runs)
        return True

    async def _move(self, runs: list[RunningWorkflow]) -> None:
        # The pool first, because all users need it.
        runs.sort(key=lambda run: (run.build, run.kind == ENTITIES[0]))
        for build, group in groupby(runs, lambda run: run.build):
            same_build = list(group)
            served = await self._deployment.served(same_build)
            # Not before: a query without an answer takes almost as long.
            until = time.monotonic() + MAX_ROUND_S
            moved = 0
            for run in same_build:
                if time.monotonic() > until:
                    break
                if await self._move_one(run, handed_over=not served):
                    moved += 1
                    await asyncio.sleep(1.0 / MAX_MOVES_PER_S)
            if moved:
                log.info(
                    "moving",
                    build=build,
                    count=moved,
                    left=len(same_build) - moved,
                    handed_over=not served,
                )

    async def _move_one(self, run: RunningWorkflow, *, handed_over: bool) -> bool:
        """Moves one run and returns True if anything was done; a run that was asked a moment ago is
        left alone."""
        last = self._done.get((run.run_id, handed_over))
        entity = run.kind in ENTITIES
        if (last is not None and time.monotonic() - last < RENEW_RETRY_INTERVAL_S) or not (
            entity or handed_over
        ):
            return False
        # The signal first: it makes a workflow task, and the hand-over sends an open one to us at
        # once. An update that waits for a task of its own would wait for its time limit of 5 s.
        if entity:
            await self._deployment.renew(run)
        if handed_over:
            await self._deployment.hand_over(run)
        self._done[(run.run_id, handed_over)] = time.monotonic()
        return True
