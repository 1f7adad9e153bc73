"""The keeper of jobs for the tests: PostgreSQL, Valkey, and sweeps when a test wants one.

As a process it sweeps until it is killed: `python -m tests.support.jobs.keeper <database>
<valkey>`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from redis.asyncio import Redis
from sqlalchemy import select, text

from activities.maintenance.kept_jobs import KeptJobSweeper
from infra.database.engine import Database
from infra.database.kept_jobs import KeptJob
from infra.jobs.client import JobClient
from infra.jobs.kept import KeptJobs
from infra.temporal.starter import WorkerStarter
from infra.valkey.client import connect_valkey, reply_of
from tests.support.jobs.scripted_program import JobScript
from tests.support.message_signing import SECRETS
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import Job


class NotingStarter(WorkerStarter):
    """Notes whose worker is wanted."""

    def __init__(self) -> None:
        self.wanted: list[str] = []

    def ensure(self, user_id: str, *, check_worker: bool) -> Any:
        self.wanted.append(user_id)


class JobKeeper:
    """A producer and a sweeper with clients of their own."""

    def __init__(self, database: Database, client: Redis) -> None:
        self.database, self.client = database, client
        self.starter = NotingStarter()
        self.jobs = KeptJobs(database, JobClient(client, SECRETS))
        self.sweeper = KeptJobSweeper(client, self.jobs, self.starter)

    async def add(self, job_id: str, script: JobScript | None = None, **fields: Any) -> bool:
        values: dict[str, Any] = {"name": "scripted", "idempotent": True, **fields}
        user_id = values.pop("user_id", "")
        arguments = msgspec.Raw(msgspec.json.encode(script or JobScript()))
        return await self.jobs.enqueue(
            Job(job_id=job_id, args=arguments, **values), user_id=user_id
        )

    async def sweep(self) -> None:
        """The next check of all jobs is due."""
        async with self.database.session() as session:
            await session.execute(
                text("update kept_jobs set check_at = now() where check_at is not null")
            )
        await self.sweeper.sweep()

    async def rows(self) -> dict[str, KeptJob]:
        async with self.database.session() as session:
            return {row.job_id: row for row in await session.scalars(select(KeptJob))}

    async def outcomes(self) -> dict[str, str | None]:
        return {job_id: row.outcome for job_id, row in (await self.rows()).items()}

    async def queued(self, tag: str = job_keys.FLEET_TAG) -> list[str]:
        """Ids of the jobs that wait in Valkey, in their order."""
        return [
            job_id.decode()
            for job_id in await reply_of(
                self.client.zrange(job_keys.subqueue(tag, "default", "scripted"), 0, -1)
            )
        ]

    async def until(self, expected: dict[str, str | None]) -> None:
        """Sweeps until the jobs have ended so."""
        async with asyncio.timeout(40):
            while (outcomes := await self.outcomes()) != expected:
                assert not (outcomes.keys() - expected.keys())
                await self.sweep()
                await asyncio.sleep(0.05)


@asynccontextmanager
async def job_keeper(database_url: str, valkey_url: str) -> AsyncIterator[JobKeeper]:
    database, client = Database(database_url), connect_valkey(valkey_url)
    try:
        yield JobKeeper(database, client)
    finally:
        await client.aclose()
        await database.close()


async def sweep_for_ever() -> None:
    async with job_keeper(sys.argv[1], sys.argv[2]) as keeper:
        await keeper.sweeper.run()


if __name__ == "__main__":
    asyncio.run(sweep_for_ever())
