"""Contains users whose workers serve, and what activities are asked about them."""

from __future__ import annotations

import asyncio

from tests.support.activities.harness import ActivityHarness
from tests.support.workers.pool_worker import ScriptedPoolWorker
from workflows.user_worker.messages import CheckWorker, StopWorker, WorkerRef


async def start_serving_user(harness: ActivityHarness) -> tuple[str, ScriptedPoolWorker, WorkerRef]:
    """Claims a worker for a new user and renews its mark; returns user, worker and reference."""
    user, worker = await harness.user(), await harness.worker()
    result, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, f"claim-{user}")),
        worker.serve(),
    )
    assert result.worker is not None
    await renew_active_mark(harness, user, worker, result.worker.epoch)
    return user, worker, result.worker


async def renew_active_mark(
    harness: ActivityHarness, user: str, worker: ScriptedPoolWorker, epoch: int
) -> str:
    return await harness.renew_mark(
        user,
        worker.worker_id,
        epoch,
        last_activity_ms=123_000,
        state="Active",
        public_key=worker.public_key.hex(),
        proof=worker.proof.hex(),
    )


def check_request(user: str, ref: WorkerRef) -> CheckWorker:
    return CheckWorker(user_id=user, worker=ref)


def stop_request(user: str, ref: WorkerRef, grace: float = 0.0) -> StopWorker:
    return StopWorker(user_id=user, worker=ref, reason="idle", grace=grace)
