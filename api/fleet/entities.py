"""Long-lived workflows and schedules, as `berth servers` and the page of servers show them.

An orchestrator brings back what somebody ended (`activities/orchestrator/restorer.py`). This reads
how each is now, and what was found of late.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from temporalio.client import Client

from api.fleet.schemas import ServerView
from api.http.errors import PoolRebuilding
from infra.database.engine import Database
from infra.database.entities import FindingState, present_findings
from infra.database.models import EntityFinding
from infra.database.workers import pools
from infra.settings import Settings
from infra.temporal.client import RPC_TIMEOUT, temporal_errors, unless_missing
from infra.temporal.executions import explain_end, read_execution
from infra.temporal.schedules import SCHEDULES
from workflows import names

#: The words that an operator reads for the workflows of users and orders, which are counted.
_COUNTED = {"user": "workflows of users", "order": "workflows of orders", "run": "runs"}
_WORST_FIRST = (FindingState.MISSING, FindingState.PAUSED, FindingState.ENDED, FindingState.REBUILT)


@dataclass(frozen=True, eq=False)
class EntityProbe:
    database: Database
    client: Client
    settings: Settings

    async def list_entities(self) -> dict[str, ServerView]:
        """Lists the pool's workflow, each schedule, and what was found of all others. Raises
        `TemporalUnavailable`, `DatabaseUnavailable`."""
        findings = await self.database.fetch(present_findings)
        known = {finding.entity: finding for finding in findings}
        configured = [name for name, make in SCHEDULES.items() if make(self.settings) is not None]
        with temporal_errors(server_only=True):
            pool, *schedules = await asyncio.gather(
                self._pool(known), *(self._schedule(name, known) for name in configured)
            )
        rows = {f"pool {self.settings.pool}": pool}
        rows |= {f"schedule {name}": view for name, view in zip(configured, schedules, strict=True)}
        return rows | _counted(findings)

    async def _pool(self, known: dict[str, EntityFinding]) -> ServerView:
        entity = names.worker_pool_id(self.settings.pool)
        seen = await read_execution(self.client, entity)
        if seen is None or not seen.is_open:
            why = await explain_end(self.client, entity, seen)
            return ServerView(state="down", reason=f"its workflow was {why}; it is being rebuilt")
        if seen.is_paused:
            return ServerView(state="paused", reason="its workflow is paused in Temporal")
        return _up(known.get(entity), "its workflow runs")

    async def _schedule(self, name: str, known: dict[str, EntityFinding]) -> ServerView:
        seen = await unless_missing(
            self.client.get_schedule_handle(name).describe(rpc_timeout=RPC_TIMEOUT)
        )
        if seen is None:
            return ServerView(state="down", reason="it was deleted; it is being made anew")
        state = seen.schedule.state
        if state.paused:
            return ServerView(state="paused", reason=state.note or "paused in Temporal")
        return _up(known.get(f"schedule:{name}"), "")


def _up(finding: EntityFinding | None, reason: str) -> ServerView:
    if finding is None or finding.state != FindingState.REBUILT:
        return ServerView(state="up", reason=reason)
    return ServerView(
        state="up", reason=f"rebuilt: it was {finding.reason}", seen_at=finding.seen_at
    )


def _counted(findings: Sequence[EntityFinding]) -> dict[str, ServerView]:
    """Returns one row for each kind and state of what there are many of."""
    rows: dict[str, ServerView] = {}
    for kind, name in _COUNTED.items():
        counts = Counter(finding.state for finding in findings if finding.kind == kind)
        for state in _WORST_FIRST:
            if not counts[state]:
                continue
            last = next(
                finding for finding in findings if (finding.kind, finding.state) == (kind, state)
            )
            rows[f"{name}, {state}"] = ServerView(
                state="paused" if state == FindingState.PAUSED else "up",
                reason=f"{counts[state]}; the last: {last.entity}, {last.reason}",
                seen_at=last.seen_at,
            )
    return rows


async def missing_pool(client: Client, database: Database, pool: str) -> PoolRebuilding | None:
    """Says what became of a pool's workflow that does not run; None: there never was such a
    pool."""
    entity = names.worker_pool_id(pool)
    seen = await read_execution(client, entity)
    if seen is None and await database.fetch(pools.read_pool, pool) is None:
        return None
    if seen is not None and seen.is_open:  # it was rebuilt just now
        return PoolRebuilding(f"the workflow of pool {pool} was rebuilt just now; repeat the call")
    why = await explain_end(client, entity, seen)
    return PoolRebuilding(f"the workflow of pool {pool} was {why}; it is being rebuilt")
