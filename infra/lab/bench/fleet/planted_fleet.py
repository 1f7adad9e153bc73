"""A fleet of workers that exist in the servers' data alone,
some with an anomaly; written in bulk."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.engine import Database
from infra.worker_task import Task
from worker_runtime.protocol import keys

POOL = "planted"
#: Seconds that marks stand here without anybody who renews them: longer than the measurement.
_MARK_TTL_S = 3600
_ROWS_PER_INSERT = 1000


@dataclass
class PlantedFleet:
    """Anomalies are of five kinds, as many of each;
    what is left serves, but for a tenth that is free."""

    workers: int
    anomalies: int
    tasks: list[Task] = field(default_factory=list)
    #: claim, user, epoch, worker, task, state: `connected`, `ended` or `waiting`.
    rows: list[tuple[str, str, int, str, str, str]] = field(default_factory=list)
    #: user → mark.
    marks: dict[str, str] = field(default_factory=dict)
    bare: list[str] = field(default_factory=list)
    free: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        share = self.anomalies // 5
        healthy = self.workers - self.anomalies
        for number in range(healthy):
            if number % 10 == 0:
                self.free.append(f"free-{number}")
                self._task(f"free-{number}")
            else:
                self._serving(f"user-{number}", 1)
        for number in range(share):
            self.marks[f"left-{number}"] = f"3:gone-{number}"
            self.bare.append(f"bare-{number}")
            worker = self._task(f"over-{number}")
            self.rows.append(
                (f"over-{number}", f"over-{number}", 1, worker.worker_id, worker.task_id, "ended")
            )
            self._serving(f"twice-{number}", 1)
            self._serving(f"twice-{number}", 2)
            self.rows.append((f"stuck-{number}", f"stuck-{number}", 1, "", "", "waiting"))

    def _task(self, worker_id: str) -> Task:
        task = Task(
            task_id=f"task-{worker_id}",
            worker_id=worker_id,
            pool=POOL,
            version="0",
            launched_at=time.time(),
        )
        self.tasks.append(task)
        return task

    def _serving(self, user: str, epoch: int) -> None:
        task = self._task(f"{user}-{epoch}")
        self.rows.append(
            (f"{user}-{epoch}", user, epoch, task.worker_id, task.task_id, "connected")
        )
        self.marks[user] = f"{epoch}:{task.worker_id}"

    async def into_database(self, database: Database) -> None:
        async with database.session() as session:
            await _insert(session, self.rows)

    def into_valkey(self, client: Redis) -> None:
        with client.pipeline(transaction=False) as pipe:
            for user, mark in self.marks.items():
                epoch, _, worker = mark.partition(":")
                pipe.set(keys.mark(user), mark, ex=_MARK_TTL_S)
                metadata: dict[Any, Any] = {
                    "state": "Active",
                    "task": f"task-{worker}",
                    "epoch": epoch,
                }
                pipe.hset(
                    keys.metadata(user),
                    mapping={**metadata, "last_activity_ms": int(time.time() * 1000)},
                )
                owner: dict[Any, Any] = {"epoch": epoch, "worker": worker, "generation": "planted"}
                pipe.hset(keys.owner(user), mapping=owner)
                pipe.hset(keys.switch(user), mapping={"*version": 0, "*": "open"})
            for user in self.bare:
                pipe.hset(keys.metadata(user), mapping={"state": "Active"})
            for worker in self.free:
                pipe.hset(
                    keys.pool_worker(POOL, worker), mapping={"state": "ready", "public_key": "k"}
                )
                pipe.zadd(keys.pool_ready(POOL), {worker: 1})
            pipe.execute()


async def _insert(session: AsyncSession, rows: list[tuple[str, str, int, str, str, str]]) -> None:
    epochs: dict[str, int] = {}
    for _, user, epoch, *_ in rows:
        epochs[user] = max(epoch, epochs.get(user, 0))
    users = [{"id": user, "epoch": epoch} for user, epoch in epochs.items()]
    for start in range(0, len(users), _ROWS_PER_INSERT):
        await session.execute(
            text("insert into users (id, epoch) values (:id, :epoch)"),
            users[start : start + _ROWS_PER_INSERT],
        )
    values = [
        dict(zip(("claim", "user", "epoch", "worker", "task", "state"), row, strict=True))
        | {"pool": POOL}
        for row in rows
    ]
    for start in range(0, len(values), _ROWS_PER_INSERT):
        await session.execute(
            text(
                "insert into worker_sessions (claim_id, user_id, epoch, pool, worker_id, task_id, "
                "assigned_at, claimed_at, connected_at, ended_at) values (:claim, :user, "
                ":epoch, :pool, "
                "nullif(:worker, ''), nullif(:task, ''), now() - interval '1 h', "
                "case when :state <> 'waiting' then now() - interval '1 h' end, "
                "case when :state <> 'waiting' then now() - interval '1 h' end, "
                "case when :state = 'ended' then now() - interval '10 min' end)"
            ),
            values[start : start + _ROWS_PER_INSERT],
        )
