"""A fleet of scripted workers under maintenance, with real Valkey, PostgreSQL and Temporal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from uuid import uuid4

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import text
from temporalio.client import Client

from activities.maintenance.cleanup import AnomalyCleaner
from activities.maintenance.passes import MaintenanceActivities
from activities.maintenance.scan import FleetScanner
from infra import tasks
from infra.database.workers import sessions as worker_sessions
from infra.local.process import HOST
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.valkey.worker_users import WorkerUsers
from infra.worker_task import LaunchSpec, Task
from tests.support.activities.harness import ActivityHarness
from tests.support.launchers.fake import FakeLauncher
from tests.support.workers.pool_worker import POOL
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import WorkerConfig
from workflows.maintenance.messages import Batch, FinishPass, MaintenanceInput, Scanned
from workflows.user_worker.messages import WorkerRef


@dataclass(frozen=True, kw_only=True)
class ServingUser:
    """A user with a connected worker."""

    harness: ActivityHarness
    user: str
    ref: WorkerRef

    async def renew(self, state: str = "Active", idle: float = 0.0) -> str:
        """As its supervisor does; `idle`: seconds since its last order."""
        used_ms = int((time.time() - idle) * 1000)
        return await self.harness.renew_mark(
            self.user, self.ref.worker_id, self.ref.epoch, last_activity_ms=used_ms, state=state
        )


class MaintainedFleet:
    """Healthy workers, and passes of maintenance over them."""

    def __init__(self, harness: ActivityHarness, temporal: Client) -> None:
        self.harness = harness
        self.temporal = temporal
        self.serving: list[ServingUser] = []
        self.use(harness.client)

    def use(self, client: Redis, confirm: float = 0.0, launch_timeout: float = -1.0) -> None:
        """Maintenance takes this way to Valkey from now on.

        It reads whole seconds of Valkey's clock, so a task may be up to a second younger than no
        time.
        """
        harness = self.harness
        settings = harness.settings.model_copy(update={"launch_timeout": launch_timeout})
        scanner = FleetScanner(
            client, harness.database, harness.launcher, harness.secrets, pool=POOL
        )
        cleaning = AnomalyCleaner(
            client, harness.database, harness.launcher, harness.ends, self.temporal
        )
        self.users = WorkerUsers(client, harness.database, harness.keys)
        self.maintenance = MaintenanceActivities(
            scanner, cleaning, harness.database, settings, self.users, confirm
        )

    async def fill(self, serving: int, free: int) -> None:
        for _ in range(serving):
            self.serving.append(await self.serve())
        for _ in range(free):
            await self.harness.worker(f"p-{uuid4().hex[:8]}")
        await reply_of(self.harness.client.set(keys.GENERATION, "g", nx=True))

    async def serve(self) -> ServingUser:
        harness = self.harness
        user, worker = await harness.user(), await harness.worker(f"p-{uuid4().hex[:8]}")
        claim_id = f"claim-{user}"
        result, _ = await asyncio.gather(
            harness.run(harness.claiming.claim_worker, harness.claim(user, claim_id)),
            worker.serve(),
        )
        assert result.worker is not None
        async with harness.database.session() as session:
            await worker_sessions.set_connected(session, claim_id=claim_id, at=1_000.0)
        serving_user = ServingUser(harness=harness, user=user, ref=result.worker)
        assert await serving_user.renew() == "ok"
        return serving_user

    async def scan(self, *, override: bool = False) -> Scanned:
        return await self.harness.run(
            self.maintenance.scan_fleet, MaintenanceInput(override_guard=override)
        )

    async def run(self, *, override: bool = False) -> tuple[Scanned, dict[str, int]]:
        """One pass, as the workflow does it."""
        scanned = await self.scan(override=override)
        cleaned = await self.harness.run(self.maintenance.clean_up, self.batch(scanned))
        await self.harness.run(
            self.maintenance.finish_pass,
            FinishPass(number=scanned.number, outcomes=cleaned.outcomes),
        )
        return scanned, cleaned.outcomes

    def batch(self, scanned: Scanned) -> Batch:
        return Batch(number=scanned.number, first=0, count=scanned.confirmed)

    async def quiet(self) -> None:
        """A pass that finds nothing: the first one only scans."""
        scanned, outcomes = await self.run()
        assert (scanned.found, outcomes) == (0, {}), scanned

    async def running(self) -> set[str]:
        return {task.task_id for task in await self.harness.launcher.list()}

    async def launched(self, worker_id: str) -> Task:
        """A task that announces nothing."""
        harness = self.harness
        config = WorkerConfig(
            worker_id=worker_id,
            pool=POOL,
            valkey_url="",
            launch_token=harness.keys.launch_token(worker_id),
            orchestrator_keys=harness.keys.public_keys,
        )
        task = await harness.launcher.launch(LaunchSpec(config=config), f"token-{worker_id}")
        await reply_of(harness.client.delete(keys.pool_worker(POOL, worker_id)))
        await reply_of(harness.client.zrem(keys.pool_ready(POOL), worker_id))
        del harness.made[worker_id]
        return task

    async def execute(self, statement: str, **values: object) -> None:
        async with self.harness.database.session() as session:
            await session.execute(text(statement), values)


class ForgetfulLauncher(FakeLauncher):
    """Lists only a part of what runs."""

    forgets = False

    async def list(self) -> list[Task]:
        return [] if self.forgets else await super().list()


class ValkeyLine:
    """A way to Valkey that can be cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: set[asyncio.StreamWriter] = set()
        self.cut = False
        self.port = 0

    async def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.cut:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(HOST, self._target)
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            for stream_writer in (writer, far_writer):
                stream_writer.transport.abort()
                self._writers.discard(stream_writer)

    def break_off(self) -> None:
        self.cut = True
        for stream_writer in list(self._writers):
            stream_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.transport.abort()


@asynccontextmanager
async def own_line(port: int) -> AsyncIterator[tuple[ValkeyLine, Redis]]:
    line = ValkeyLine(port)
    server = await asyncio.start_server(line.accepted, HOST, 0)
    client = valkey.connect_valkey(f"redis://{HOST}:{server.sockets[0].getsockname()[1]}/0")
    try:
        yield line, client
    finally:
        await client.aclose()
        line.break_off()
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def renewing(fleet: MaintainedFleet) -> AsyncIterator[None]:
    """All workers renew their marks and entries, as often as they can."""

    async def renew() -> None:
        while True:
            with suppress(OSError, RedisError):
                for serving_user in fleet.serving:
                    await serving_user.renew()
                for worker in list(fleet.harness.made.values()):
                    if worker.worker_id not in {
                        serving_user.ref.worker_id for serving_user in fleet.serving
                    }:
                        await worker.announce()
            await asyncio.sleep(0.05)

    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        await tasks.cancel_tasks(task)
