"""Scans the fleet, or some workers: assignments, tasks, marks, metadata and pool entries.

PostgreSQL and the launcher name the keys to read. Only a mark that neither knows needs a SCAN, of
at most `MAX_KEYS_PER_PASS` keys a pass; the next pass continues where this one ended. So in a
Valkey with millions of other keys a pass costs no more, and an orphan mark is found some passes
later.
"""

import asyncio
import re
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from activities.maintenance.anomalies import EntryState, FleetSnapshot, ReportedState
from activities.pool.entries import remove_mark
from infra.database.engine import Database
from infra.database.workers import assignments
from infra.database.workers.passes import PassBasis, Suspect
from infra.jobs.metrics import collect_user_counts
from infra.launchers.port import Launcher
from infra.valkey import client as valkey
from infra.valkey.client import reply_of, seconds_of, text_of
from infra.vault.message_secret import MessageSecrets
from infra.worker_task import Task
from worker_runtime.protocol import keys
from worker_runtime.protocol.worker_reports import read_metadata

#: Keys of one SCAN, which takes Valkey about 0.1 ms, and of all SCANs of one pass.
KEYS_PER_SCAN = 500
MAX_KEYS_PER_PASS = 200_000
#: Commands of one pipeline; other tasks run between two.
COMMANDS_PER_PIPELINE = 500
#: Questions to the launcher at the same time.
MAX_CONCURRENT_LOOKUPS = 20
#: Seconds for which the number of listed tasks counts in the clean-up of one pass: a pass over
#: 10,000 workers takes 3 s.
COUNT_MAX_AGE_S = 5.0
#: Members of a pool's list of free workers that a pass reads. Only forged ones are more, and the
#: pool's own count removes them.
MAX_FREE_WORKERS_READ = 20_000
#: Matches `worker:active:…` and `worker:metadata:…`.
_PATTERN = "worker:[am][ce]t*"
#: Ids of users, workers and claims, and marks. Workers write them, and PostgreSQL refuses a text
#: with a NUL.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_MARK_VALUE = re.compile(rf"[0-9]{{1,18}}:{_ID.pattern}")
_MARK, _METADATA = (key("\0").partition("\0")[0].encode() for key in (keys.mark, keys.metadata))


@dataclass(eq=False, repr=False)
class FleetScanner:
    """Raises `RedisError`, `OSError`, `LauncherUnreachable`,
    `DatabaseUnavailable`: then nothing is known."""

    client: Redis
    database: Database
    launcher: Launcher
    message_secrets: MessageSecrets
    _: KW_ONLY
    #: A pool that is scanned even when nothing of it runs.
    pool: str

    def __post_init__(self) -> None:
        self._cursor = 0
        self._counting = asyncio.Lock()
        #: The pass that tasks were counted for, when (monotonic seconds), and how many there were.
        self._counted = (0, 0.0, 0)

    async def scan_all(self) -> FleetSnapshot:
        tasks = await self.launcher.list()
        place, now = await self._begin(len(tasks))
        rows = await self.database.write(assignments.open_assignments)
        marked = await self._marked_users()
        users = sorted({*marked, *(row.user_id for row in rows)})
        await collect_user_counts(self.client, users)
        pools = {self.pool, *(row.pool for row in rows), *(task.pool for task in tasks)}
        free = await self._free(pools)
        return await self._seen(place, now, rows, tasks, users, free)

    async def scan_suspects(self, suspects: Sequence[Suspect], number: int) -> FleetSnapshot:
        """Scans only the users and workers of these suspects,
        and believes no metadata but their worker's.

        The launcher is asked about each worker alone: a clean-up costs the same in a fleet of any
        size. `number`: of the pass that they are of.
        """
        place, now = await self._begin(await self._count_tasks(number))
        users = {suspect.user_id for suspect in suspects if suspect.user_id}
        workers = {suspect.worker_id for suspect in suspects if suspect.worker_id}
        async with self.database.session() as session:
            claims = {suspect.claim_id for suspect in suspects if suspect.claim_id}
            rows = await assignments.open_assignments_of(session, users, workers, claims)
        users |= {row.user_id for row in rows}
        workers |= {row.worker_id for row in rows if row.worker_id}
        tasks = await self._tasks_of(workers)
        free = await self._free_among(
            {suspect.pool for suspect in suspects if suspect.pool}, sorted(workers)
        )
        return await self._seen(place, now, rows, tasks, sorted(users), free, verified=True)

    async def _seen(
        self,
        place: PassBasis,
        now: float,
        rows: list[assignments.AssignmentRow],
        tasks: list[Task],
        users: list[str],
        free: dict[str, set[str]],
        *,
        verified: bool = False,
    ) -> FleetSnapshot:
        """Takes a snapshot of the fleet. With `verified`, metadata count only if their worker wrote
        them."""
        assigned = {row.worker_id for row in rows}
        own = {(task.pool, task.worker_id) for task in tasks if task.worker_id not in assigned}
        own |= {(pool, worker) for pool, worker_ids in free.items() for worker in worker_ids}
        entries = await self._entries(sorted(own))
        unassigned = {task.worker_id for task in tasks} - assigned
        unassigned -= {worker for worker, entry in entries.items() if entry.state == "ready"}
        last = await self.database.write(assignments.assignments_of_workers, unassigned)
        users = sorted({*users, *(row.user_id for row in last.values())})
        marks, reported = await self._marks(users, now if verified else None)
        if text_of(await self.client.get(keys.GENERATION)) != place.generation:
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

    async def _begin(self, tasks: int) -> tuple[PassBasis, float]:
        """Return the servers that are scanned,
        with the number of listed tasks, and Valkey's clock."""
        async with self.client.pipeline(transaction=False) as pipe:
            pipe.get(keys.GENERATION)
            pipe.info("server")
            pipe.time()
            generation, server, (seconds, _) = await pipe.execute()
        place = PassBasis(generation=text_of(generation), server=str(server["run_id"]), tasks=tasks)
        return place, float(seconds)

    async def _count_tasks(self, number: int) -> int:
        """Return how many tasks the launcher lists, for the guard.
        The batches of a pass share a listing."""
        async with self._counting:
            counted_for, counted_at, count = self._counted
            if counted_for != number or time.monotonic() - counted_at > COUNT_MAX_AGE_S:
                began = time.monotonic()
                count = len(await self.launcher.list())
                self._counted = number, began, count
            return count

    async def _tasks_of(self, workers: Collection[str]) -> list[Task]:
        tasks: list[Task] = []
        names = sorted(workers)
        for start in range(0, len(names), MAX_CONCURRENT_LOOKUPS):
            batch = names[start : start + MAX_CONCURRENT_LOOKUPS]
            for own in await asyncio.gather(
                *(self.launcher.find_tasks(worker) for worker in batch)
            ):
                tasks += own
        return tasks

    async def _free_among(
        self, pools: Collection[str], workers: Sequence[str]
    ) -> dict[str, set[str]]:
        """Return those of these workers that are on each pool's list of free ones."""
        if not workers:
            return {}
        names = sorted(pools)
        async with self.client.pipeline(transaction=False) as pipe:
            for pool in names:
                pipe.zmscore(keys.pool_ready(pool), list(workers))
            score_lists = await pipe.execute() if names else []
        return {
            pool: {
                worker for worker, score in zip(workers, scores, strict=True) if score is not None
            }
            for pool, scores in zip(names, score_lists, strict=True)
        }

    async def _free(self, pools: Collection[str]) -> dict[str, set[str]]:
        names = sorted(pools)
        async with self.client.pipeline(transaction=False) as pipe:
            for pool in names:
                pipe.zrange(keys.pool_ready(pool), 0, MAX_FREE_WORKERS_READ - 1)
            member_lists = await pipe.execute() if names else []
        return {
            pool: {_id_of(member) for member in members} - {""}
            for pool, members in zip(names, member_lists, strict=True)
        }

    async def _marked_users(self) -> set[str]:
        """Returns the users with a mark or metadata in Valkey, as far as the SCANs of this pass
        get."""
        user_ids: set[str] = set()
        for _ in range(MAX_KEYS_PER_PASS // KEYS_PER_SCAN):
            self._cursor, scanned = await reply_of(
                self.client.scan(self._cursor, match=_PATTERN, count=KEYS_PER_SCAN)
            )
            for key in scanned:
                for prefix in (_MARK, _METADATA):
                    if key.startswith(prefix):
                        user_ids.add(_id_of(key[len(prefix) : -1]))
            if not self._cursor:
                break
        return user_ids - {""}

    async def _marks(
        self, users: Sequence[str], verified_at: float | None
    ) -> tuple[dict[str, str], dict[str, ReportedState]]:
        """Returns marks and metadata; deletes what can be no mark. With a time (Valkey's), metadata
        of which that worker is not the author say nothing."""
        marks: dict[str, str] = {}
        reported: dict[str, ReportedState] = {}
        for start in range(0, len(users), COMMANDS_PER_PIPELINE):
            batch = users[start : start + COMMANDS_PER_PIPELINE]
            values = await valkey.read_strings(self.client, [keys.mark(user) for user in batch])
            metadata = await valkey.read_hashes(
                self.client, [keys.metadata(user) for user in batch]
            )
            for user, mark, fields in zip(batch, values, metadata, strict=True):
                if mark and not _MARK_VALUE.fullmatch(text_of(mark)):
                    with suppress(ResponseError):  # the key is of another kind by now
                        await remove_mark(self.client, user, mark)
                    continue
                if mark:
                    marks[user] = text_of(mark)
                if verified_at is None:
                    shown = {text_of(name): text_of(value) for name, value in fields.items()}
                else:
                    keys_of = self.message_secrets.assignment_keys
                    shown = read_metadata(fields, mark, user, int(verified_at * 1000), keys_of)
                if fields:
                    activity = seconds_of(shown.get("last_activity_ms"))
                    reported[user] = ReportedState(
                        state=shown.get("state", ""), last_activity=activity
                    )
        return marks, reported

    async def _entries(self, workers: Sequence[tuple[str, str]]) -> dict[str, EntryState]:
        entries: dict[str, EntryState] = {}
        for start in range(0, len(workers), COMMANDS_PER_PIPELINE):
            batch = workers[start : start + COMMANDS_PER_PIPELINE]
            names = [keys.pool_worker(pool, worker) for pool, worker in batch]
            hashes = await valkey.read_hashes(self.client, names)
            async with self.client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.pexpiretime(name)
                times = await pipe.execute()
            for (_, worker), entry, expires in zip(batch, hashes, times, strict=True):
                if known := _id_of(entry.get(b"state")):
                    claim = _id_of(entry.get(b"claim"))
                    entries[worker] = EntryState(state=known, claim=claim, expires=int(expires))
        return entries


def _id_of(value: Any) -> str:
    """Returns a value of Valkey as an id; '' for what can be none."""
    text = text_of(value)
    return text if _ID.fullmatch(text) else ""
