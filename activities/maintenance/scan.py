"""Scans the fleet, or some workers: assignments, tasks, marks, metadata and pool entries.

PostgreSQL and the launcher name the keys to read. Only a mark that neither knows needs a SCAN, of at most
`SCANNED` keys a pass; the next pass goes on where this one ended. So in a Valkey with millions of other keys
a pass costs no more, and an orphan mark is found some passes later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from activities.maintenance.anomalies import EntryState, FleetSnapshot, ReportedState
from infra.database.engine import Database
from infra.database.workers import assignments
from infra.database.workers.assignments import AssignmentRow
from infra.database.workers.passes import PassBasis, Suspect
from infra.launchers.port import Launcher
from infra.valkey.client import reply_of, text_of
from infra.worker_task import Task
from worker_runtime.protocol import keys

#: Keys of one SCAN, which takes Valkey about 0.1 ms, and of all SCANs of one pass.
STEP = 500
SCANNED = 200_000
#: Commands of one pipeline; other tasks run between two.
CHUNK = 500
#: Matches `worker:active:…` and `worker:metadata:…`.
_PATTERN = "worker:[am][ce]t*"
_MARK, _METADATA = (key("\0").partition("\0")[0].encode() for key in (keys.mark, keys.metadata))


class FleetScanner:
    """Raises `RedisError`, `OSError`, `LauncherUnreachable`, `DatabaseUnavailable`: then nothing is known."""

    def __init__(self, client: Redis, database: Database, launcher: Launcher, *, pool: str) -> None:
        """`pool`: one that is scanned even when nothing of it runs."""
        self._client = client
        self._database = database
        self._launcher = launcher
        self._pool = pool
        self._cursor = 0

    async def scan_all(self) -> FleetSnapshot:
        place, now, tasks = await self._begin()
        async with self._database.session() as session:
            rows = await assignments.open_assignments(session)
        marked = await self._marked_users()
        users = sorted({*marked, *(one.user_id for one in rows)})
        pools = {self._pool, *(one.pool for one in rows), *(task.pool for task in tasks)}
        free = await self._free(pools)
        return await self._seen(place, now, rows, tasks, users, free)

    async def scan_suspects(self, suspects: Sequence[Suspect]) -> FleetSnapshot:
        """Scans only the users and workers of these suspects."""
        place, now, listed = await self._begin()
        users = {one.user_id for one in suspects if one.user_id}
        workers = {one.worker_id for one in suspects if one.worker_id}
        async with self._database.session() as session:
            claims = {one.claim_id for one in suspects if one.claim_id}
            rows = await assignments.open_assignments_of(session, users, workers, claims)
        users |= {one.user_id for one in rows}
        workers |= {one.worker_id for one in rows if one.worker_id}
        tasks = [task for task in listed if task.worker_id in workers]
        pools = {one.pool for one in suspects if one.pool}
        free = {pool: some & workers for pool, some in (await self._free(pools)).items()}
        return await self._seen(place, now, rows, tasks, sorted(users), free)

    async def _seen(
        self,
        place: PassBasis,
        now: float,
        rows: list[AssignmentRow],
        tasks: list[Task],
        users: list[str],
        free: dict[str, set[str]],
    ) -> FleetSnapshot:
        assigned = {one.worker_id for one in rows}
        own = {(task.pool, task.worker_id) for task in tasks if task.worker_id not in assigned}
        own |= {(pool, worker) for pool, some in free.items() for worker in some}
        entries = await self._entries(sorted(own))
        unassigned = {task.worker_id for task in tasks} - assigned
        unassigned -= {worker for worker, entry in entries.items() if entry.state == "ready"}
        async with self._database.session() as session:
            last = await assignments.last_assignments(session, unassigned)
        users = sorted({*users, *(one.user_id for one in last.values())})
        marks, reported = await self._marks(users)
        if text_of(await self._client.get(keys.GENERATION)) != place.generation:
            raise RedisError("the generation changed during a scan")
        return FleetSnapshot(
            place=place,
            open=rows,
            tasks=tasks,
            marks=marks,
            reported=reported,
            entries=entries,
            free=free,
            last=last,
            now=now,
        )

    async def _begin(self) -> tuple[PassBasis, float, list[Task]]:
        """The servers that are scanned, Valkey's clock, and the launcher's tasks."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.get(keys.GENERATION)
            pipe.info("server")
            pipe.time()
            generation, server, (seconds, _) = await pipe.execute()
        tasks = await self._launcher.list()
        place = PassBasis(generation=text_of(generation), server=str(server["run_id"]), tasks=len(tasks))
        return place, float(seconds), tasks

    async def _free(self, pools: Collection[str]) -> dict[str, set[str]]:
        names = sorted(pools)
        async with self._client.pipeline(transaction=False) as pipe:
            for pool in names:
                pipe.zrange(keys.pool_ready(pool), 0, -1)
            found = await pipe.execute() if names else []
        return {pool: {one.decode() for one in some} for pool, some in zip(names, found, strict=True)}

    async def _marked_users(self) -> set[str]:
        """Users with a mark or metadata in Valkey, as far as the SCANs of this pass get."""
        found: set[str] = set()
        for _ in range(SCANNED // STEP):
            self._cursor, some = await reply_of(self._client.scan(self._cursor, match=_PATTERN, count=STEP))
            for key in some:
                for prefix in (_MARK, _METADATA):
                    if key.startswith(prefix):
                        found.add(key[len(prefix) : -1].decode("utf-8", "replace"))
            if not self._cursor:
                break
        return found

    async def _marks(self, users: Sequence[str]) -> tuple[dict[str, str], dict[str, ReportedState]]:
        marks: dict[str, str] = {}
        reported: dict[str, ReportedState] = {}
        for start in range(0, len(users), CHUNK):
            some = users[start : start + CHUNK]
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.mget([keys.mark(user) for user in some])
                for user in some:
                    pipe.hmget(keys.metadata(user), ["state", "task", "last_activity_ms"])
                found, *metadata = await pipe.execute()
            for user, mark, (state, task, activity) in zip(some, found, metadata, strict=True):
                if mark:
                    marks[user] = text_of(mark)
                if state or task:
                    reported[user] = ReportedState(state=text_of(state), last_activity=_seconds(activity))
        return marks, reported

    async def _entries(self, workers: Sequence[tuple[str, str]]) -> dict[str, EntryState]:
        entries: dict[str, EntryState] = {}
        for start in range(0, len(workers), CHUNK):
            some = workers[start : start + CHUNK]
            async with self._client.pipeline(transaction=False) as pipe:
                for pool, worker in some:
                    pipe.hmget(keys.pool_worker(pool, worker), ["state", "claim"])
                    pipe.pexpiretime(keys.pool_worker(pool, worker))
                found = await pipe.execute()
            for (_, worker), (state, claim), expires in zip(some, found[::2], found[1::2], strict=True):
                if state:
                    entries[worker] = EntryState(
                        state=text_of(state), claim=text_of(claim), expires=int(expires)
                    )
        return entries


def _seconds(milliseconds: Any) -> float:
    try:
        return int(milliseconds or 0) / 1000
    except ValueError:
        return 0.0
