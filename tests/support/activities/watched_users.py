"""Contains users whose marks a watcher reads, and the watcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

from temporalio.client import Client

from activities.events.mark_watcher import MarkWatcher
from activities.events.valkey_restorer import ValkeyRestorer
from infra import tasks
from infra.database.workers import sessions as worker_sessions
from tests.support.activities.harness import ActivityHarness
from tests.support.activities.serving_users import renew_active_mark
from tests.support.message_signing import SECRETS
from worker_runtime.protocol import keys
from workflows.user_worker.messages import WorkerRef

WATCH_CONFIRM_S = 0.4
WATCH_SETTLE_S = 0.6


class WatchedUser:
    """A user with a connected worker; its mark is renewed until it dies."""

    def __init__(self, harness: ActivityHarness, user: str, ref: WorkerRef) -> None:
        self._harness = harness
        self.user = user
        self.ref = ref
        self._renewing: asyncio.Task[None] | None = None

    async def renew(self) -> str:
        return await renew_active_mark(
            self._harness, self.user, self._harness.made[self.ref.worker_id], self.ref.epoch
        )

    async def die(self) -> None:
        await self._harness.client.delete(keys.mark(self.user), keys.metadata(self.user))


async def start_watched_user(harness: ActivityHarness) -> WatchedUser:
    """Claims a worker for a new user, and connects it."""
    user, worker = await harness.user(), await harness.worker(f"p-{uuid4().hex[:8]}")
    claim_id = f"claim-{user}"
    result, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, claim_id)), worker.serve()
    )
    assert result.worker is not None
    async with harness.database.session() as session:
        await worker_sessions.set_connected(session, claim_id=claim_id, at=1_000.0)
    made = WatchedUser(harness, user, result.worker)
    assert await made.renew() == "ok"
    return made


@asynccontextmanager
async def run_mark_watcher(harness: ActivityHarness, temporal: Client) -> AsyncIterator[None]:
    """Runs the watcher of marks until the block ends."""
    settings = harness.settings.model_copy(update={"mark_ttl": WATCH_SETTLE_S})
    watcher = MarkWatcher(
        harness.client,
        temporal,
        settings,
        ValkeyRestorer(harness.client, SECRETS),
        interval=0.05,
        min_absence=WATCH_CONFIRM_S,
    )
    task = asyncio.create_task(watcher.run())
    try:
        yield
    finally:
        await tasks.cancel_tasks(task)
