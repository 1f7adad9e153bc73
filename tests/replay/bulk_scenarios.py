"""The runs of maintenance, the morning and rollouts whose histories are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from temporalio.client import Client, WorkflowHandle, WorkflowHistory

from tests.support.workflows.bulk_fakes import DAY, FakeMaintenance, FakeMorning, FakeRollout
from tests.support.workflows.fakes import until
from workflows import names
from workflows.maintenance.messages import MaintenanceInput, Scanned
from workflows.maintenance.workflow import MaintenanceWorkflow
from workflows.morning.messages import Connected, MorningInput
from workflows.morning.workflow import MorningWorkflow
from workflows.rollout.messages import AbortRollout, Release, RolloutInput, RolloutView
from workflows.rollout.workflow import RolloutWorkflow

#: Histories by name: one scenario may be of several runs.
Histories = dict[str, WorkflowHistory]
Scenario = Callable[[Client], Awaitable[Histories]]
Rolling = WorkflowHandle[RolloutWorkflow, RolloutView]


async def maintenance(client: Client) -> Histories:
    """Two batches, of which one fails; and a pass that may not act."""
    fake = FakeMaintenance(Scanned(number=7, workers=900, found=150, confirmed=150))
    fake.failing = {100}

    async def one_pass(id: str) -> WorkflowHistory:
        handle = await client.start_workflow(
            MaintenanceWorkflow.run, MaintenanceInput(), id=id, task_queue=names.BULK_QUEUE
        )
        await handle.result()
        return await handle.fetch_history()

    async with fake.worker(client):
        histories = {"maintenance_cleans_up": await one_pass("replay-maintenance")}
        batch = client.get_workflow_handle("replay-maintenance-0")
        histories["maintenance_batch"] = await batch.fetch_history()
        fake.scanned = Scanned(number=8, found=9, guarded="an outage")
        histories["maintenance_held_still"] = await one_pass("replay-maintenance-guarded")
    return histories


async def morning(client: Client) -> Histories:
    """Three users in two pages, one of whom fails twice; started by the clock, and once more."""
    fake = FakeMorning(3, bell_in=-1.0)
    later = Connected(ok=False, code="WORKER_UNAVAILABLE", retryable=True)
    fake.script = {"u0001": [later, later]}
    given = MorningInput(page=2, rate=50.0)

    async def started(id: str, given: MorningInput = given) -> tuple[str, WorkflowHistory]:
        handle = await client.start_workflow(
            MorningWorkflow.run, given, id=id, task_queue=names.BULK_QUEUE
        )
        await handle.result()
        run_id = handle.first_execution_run_id or ""
        return run_id, await client.get_workflow_handle(id, run_id=run_id).fetch_history()

    async with fake.serving(client):
        _, by_the_clock = await started("replay-morning")
        _, again = await started("replay-morning-again")
        _, first_page = await started(
            "replay-morning-by-hand", MorningInput(day=DAY, page=2, rate=50.0)
        )
        last_page = await client.get_workflow_handle("replay-morning-by-hand").fetch_history()
        fake.holiday = f"{DAY} is not a trading day"
        _, holiday = await started("replay-morning-holiday")
    return {
        "morning_by_the_clock": by_the_clock,
        "morning_started_again": again,
        "morning_first_page": first_page,
        "morning_last_page": last_page,
        "morning_on_a_holiday": holiday,
    }


async def rollout(client: Client) -> Histories:
    """One that ends well, one whose version is bad, one that is aborted, one that goes on in a new
    run."""
    histories: Histories = {}
    for name, run in (
        ("done", _done),
        ("rolled_back", _rolled_back),
        ("aborted", _aborted),
        ("renewed", _renewed),
    ):
        fake = FakeRollout(2, users=1)
        async with fake.worker(client):
            handle = await client.start_workflow(
                RolloutWorkflow.run,
                RolloutInput(
                    pool=name, release=Release(version="2"), batch=1, pause=0.02, moving_pause=0.02
                ),
                id=names.rollout_id(f"replay-{name}"),
                task_queue=names.BULK_QUEUE,
            )
            histories[f"rollout_{name}"] = await run(client, handle, fake)
    return histories


async def _done(client: Client, handle: Rolling, fake: FakeRollout) -> WorkflowHistory:
    fake.blind = 1
    await handle.result()
    return await handle.fetch_history()


async def _rolled_back(client: Client, handle: Rolling, fake: FakeRollout) -> WorkflowHistory:
    fake.bad = {"2"}
    await handle.result()
    return await handle.fetch_history()


async def _aborted(client: Client, handle: Rolling, fake: FakeRollout) -> WorkflowHistory:
    fake.quiet.clear()
    await fake.asked.wait()
    await handle.signal(RolloutWorkflow.abort, AbortRollout(reason="not today"))
    await until(lambda: "is rolled back" in fake.recorded)
    fake.quiet.set()
    await handle.result()
    return await handle.fetch_history()


async def _renewed(client: Client, handle: Rolling, fake: FakeRollout) -> WorkflowHistory:
    """The second run: what continue-as-new carried is in its first event."""
    fake.quiet.clear()
    await fake.asked.wait()
    await handle.signal(RolloutWorkflow.renew)
    latest = client.get_workflow_handle(handle.id)
    while (await latest.describe()).run_id == handle.first_execution_run_id:  # noqa: ASYNC110 — only asking tells
        await asyncio.sleep(0.02)
    fake.quiet.set()
    await latest.result()
    return await latest.fetch_history()


BULK_SCENARIOS: tuple[Scenario, ...] = (maintenance, morning, rollout)


async def run_bulk(client: Client) -> Histories:
    """Every scenario once; name → history."""
    histories: Histories = {}
    for scenario in BULK_SCENARIOS:
        histories |= await scenario(client)
    return histories
