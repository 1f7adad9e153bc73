"""The runs whose histories are kept: together they take every branch that a release must not
break."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from temporalio.client import Client, WorkflowHistory, WorkflowUpdateFailedError

from tests.support.workflows.fakes import (
    FakeFleet,
    FakePool,
    ensure_active,
    handle,
    serving,
    tell,
    until,
    until_state,
)
from workflows import names
from workflows.user_worker.messages import (
    ActiveWorker,
    ClaimResult,
    ClaimStatus,
    ReloadResult,
    UserWorkerSettings,
    WorkerHealth,
    WorkerLostSignal,
    WorkerState,
    WorkerUnmarked,
)
from workflows.user_worker.workflow import UserWorkerWorkflow
from workflows.worker_pool.messages import PoolInput, PoolView, SetTarget, WorkerLeft
from workflows.worker_pool.policy import PoolPolicy
from workflows.worker_pool.workflow import WorkerPoolWorkflow

UNREACHABLE = ClaimResult(
    status=ClaimStatus.FAILED, failure_code="BROKER_UNREACHABLE", failure_detail="no route"
)
SILENT = ReloadResult(
    ok=False, failure_code="WORKER_UNAVAILABLE", failure_detail="no answer in time"
)
REJECTED = ClaimResult(status=ClaimStatus.FAILED, failure_code="LOGIN_REJECTED", retryable=False)


@dataclass
class ReplayHarness:
    """A server with fakes on it, and the user of one scenario."""

    client: Client
    fleet: FakeFleet
    user: str

    async def ensure(
        self, *, idle_timeout: float = 1800.0, mark_missing: bool = False
    ) -> ActiveWorker:
        settings = UserWorkerSettings(idle_timeout=idle_timeout)
        return await ensure_active(self.client, self.user, settings, mark_missing=mark_missing)

    async def shut_down(self) -> None:
        await handle(self.client, self.user).signal("shutdown")
        await self.ended()

    async def ended(self) -> None:
        await handle(self.client, self.user).result()

    async def history(self, run_id: str | None = None) -> WorkflowHistory:
        run_handle = self.client.get_workflow_handle(names.user_worker_id(self.user), run_id=run_id)
        return await run_handle.fetch_history()


async def warm_then_idle(harness: ReplayHarness) -> WorkflowHistory:
    await harness.ensure(idle_timeout=1.0)
    await harness.ended()
    return await harness.history()


async def cold_then_shut_down(harness: ReplayHarness) -> WorkflowHistory:
    harness.fleet.claim_script = [ClaimStatus.EMPTY, ClaimStatus.CONNECTING]
    await harness.ensure()
    await harness.shut_down()
    return await harness.history()


async def second_login(harness: ReplayHarness) -> WorkflowHistory:
    harness.fleet.claim_script = [ClaimStatus.FAILED]
    harness.fleet.connect_script = [UNREACHABLE]
    await harness.ensure()
    await harness.shut_down()
    return await harness.history()


async def rejected_login(harness: ReplayHarness) -> WorkflowHistory:
    harness.fleet.claim_script = [ClaimStatus.FAILED]
    harness.fleet.connect_script = [REJECTED]
    try:
        await harness.ensure()
    except WorkflowUpdateFailedError:
        await harness.ended()
    return await harness.history()


async def dead_worker_then_unconfirmed_stop(harness: ReplayHarness) -> WorkflowHistory:
    harness.fleet.claim_script = [ClaimStatus.GONE]
    harness.fleet.stop_failures = 1
    try:
        await harness.ensure()
    except WorkflowUpdateFailedError:
        await until_state(harness.client, harness.user, WorkerState.ACTIVE)
    await harness.shut_down()
    return await harness.history()


async def lost_while_connecting(harness: ReplayHarness) -> WorkflowHistory:
    harness.fleet.claim_script = [ClaimStatus.CONNECTING]
    harness.fleet.hold_connect.clear()
    call = asyncio.create_task(harness.ensure())
    await harness.fleet.connect_started.wait()
    lost = WorkerLostSignal(task_id="t1", worker_id="w1")
    await handle(harness.client, harness.user).signal(UserWorkerWorkflow.worker_lost, lost)
    await call
    harness.fleet.hold_connect.set()
    await harness.shut_down()
    return await harness.history()


async def crashes_reload_and_check(harness: ReplayHarness) -> WorkflowHistory:
    await harness.ensure()
    for number in (1, 2):
        lost = WorkerLostSignal(task_id=f"t{number}", worker_id=f"w{number}")
        await handle(harness.client, harness.user).signal(UserWorkerWorkflow.worker_lost, lost)
        await until(lambda number=number: len(harness.fleet.claims) == number + 1)  # type: ignore[misc]
        await until_state(harness.client, harness.user, WorkerState.ACTIVE)
    await handle(harness.client, harness.user).execute_update(
        "reload_credentials_now", result_type=ReloadResult
    )
    await harness.ensure(mark_missing=True)
    await harness.shut_down()
    return await harness.history()


async def session_replaced_then_broker_lost(harness: ReplayHarness) -> WorkflowHistory:
    harness.fleet.reload_script = [SILENT, ReloadResult(ok=True)]
    await harness.ensure()
    await tell(harness.client, harness.user, "session_replaced", 3, "frozen")
    await until(lambda: len(harness.fleet.reloads) == 2)
    await until_state(harness.client, harness.user, WorkerState.ACTIVE)
    await tell(harness.client, harness.user, "degraded", 4, "refused")
    await until_state(harness.client, harness.user, WorkerState.RECONNECTING)
    await tell(
        harness.client, harness.user, "failed", 6, "SESSION_DOWN: the SDK does not come back"
    )
    await harness.ended()
    return await harness.history()


async def mark_expired(harness: ReplayHarness) -> WorkflowHistory:
    harness.fleet.health = [WorkerHealth(marked=False, running=True, generation="g1")]
    harness.fleet.stop_failures = 1
    await harness.ensure()
    unmarked = WorkerUnmarked(worker_id="w1", epoch=1, generation="g1")
    await handle(harness.client, harness.user).signal(UserWorkerWorkflow.worker_unmarked, unmarked)
    await until(lambda: len(harness.fleet.claims) == 2)
    await until_state(harness.client, harness.user, WorkerState.ACTIVE)
    await harness.shut_down()
    return await harness.history()


async def held_back_by_earlier_crashes(harness: ReplayHarness) -> WorkflowHistory:
    harness.fleet.crashes = (time.time() - 1.0, time.time())
    await harness.ensure()
    await harness.shut_down()
    return await harness.history()


async def parked_and_resumed(harness: ReplayHarness) -> WorkflowHistory:
    harness.fleet.crashes = tuple(time.time() - ago for ago in range(5))
    with contextlib.suppress(WorkflowUpdateFailedError):
        await harness.ensure()
    await until_state(harness.client, harness.user, WorkerState.PARKED)
    await handle(harness.client, harness.user).signal(UserWorkerWorkflow.resume)
    await until_state(harness.client, harness.user, WorkerState.POOL_IDLE)
    await harness.ensure()
    await harness.shut_down()
    return await harness.history()


async def timeline_written_late(harness: ReplayHarness) -> WorkflowHistory:
    harness.fleet.record_failures = 2
    await harness.ensure()
    await harness.shut_down()
    return await harness.history()


async def garbage(harness: ReplayHarness) -> WorkflowHistory:
    await harness.ensure()
    worker = handle(harness.client, harness.user)
    for name in (
        "reload_credentials",
        "worker_lost",
        "worker_event",
        "worker_unmarked",
        "renew",
        "resume",
    ):
        await worker.signal(name, args=["x", {"epoch": "seven"}])
    await harness.ensure()
    await harness.shut_down()
    return await harness.history()


async def renewed(harness: ReplayHarness) -> WorkflowHistory:
    """The second run: what continue-as-new carried is in its first event."""
    await harness.ensure()
    worker = handle(harness.client, harness.user)
    first = (await worker.describe()).run_id
    await worker.signal("renew")

    async def is_renewed() -> bool:
        return (await worker.describe()).run_id != first

    await until(is_renewed)
    await harness.ensure()
    await harness.shut_down()
    return await harness.history()


async def pool_filled_and_refilled(client: Client, pool: FakePool) -> WorkflowHistory:
    pool.failures = 1
    running = await client.start_workflow(
        WorkerPoolWorkflow.run,
        PoolInput(policy=PoolPolicy(target=2), pool="replay"),
        id=names.worker_pool_id("replay"),
        task_queue=names.LIFECYCLE_QUEUE,
    )
    await until(lambda: len(pool.ready) == 2)
    pool.ready.pop()
    await running.signal(WorkerPoolWorkflow.claimed, WorkerLeft())
    await until(lambda: len(pool.ready) == 2)
    await running.execute_update("set_target", SetTarget(target=1), result_type=PoolView)
    await until(lambda: len(pool.ready) == 1)
    history = await running.fetch_history()
    await running.terminate()
    return history


USER_SCENARIOS: tuple[Callable[[ReplayHarness], Awaitable[WorkflowHistory]], ...] = (
    warm_then_idle,
    cold_then_shut_down,
    second_login,
    rejected_login,
    dead_worker_then_unconfirmed_stop,
    lost_while_connecting,
    crashes_reload_and_check,
    session_replaced_then_broker_lost,
    mark_expired,
    held_back_by_earlier_crashes,
    parked_and_resumed,
    timeline_written_late,
    garbage,
    renewed,
)


async def run_all(client: Client) -> dict[str, WorkflowHistory]:
    """Every scenario once; name → history."""
    histories: dict[str, WorkflowHistory] = {}
    for scenario in USER_SCENARIOS:
        name = getattr(scenario, "__name__", "scenario")
        fleet = FakeFleet()
        async with serving(client, fleet.activities()):
            histories[name] = await scenario(ReplayHarness(client, fleet, f"replay-{name}"))
    pool = FakePool()
    async with serving(client, pool.activities()):
        histories["pool_filled_and_refilled"] = await pool_filled_and_refilled(client, pool)
    return histories
