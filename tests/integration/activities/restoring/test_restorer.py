"""What somebody ends in Temporal, a long-lived workflow or a schedule, comes back with what it
had."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from temporalio import workflow
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowHandle
from temporalio.common import RawValue
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from infra.database.entities import (
    Finding,
    FindingState,
    present_findings,
    record_finding,
)
from infra.temporal import executions
from infra.temporal.schedules import ensure_schedules
from tests.support.activities.orchestrator import (
    End,
    OrchestratorHarness,
    cancelled,
    deleted,
    pause,
    reset_to,
    terminated,
    unpause,
    until,
)
from tests.support.workers.pool_worker import POOL
from workflows import names
from workflows.user_worker.messages import (
    ShutdownRequest,
    UserWorkerView,
    WorkerLostSignal,
    WorkerRef,
    WorkerState,
)
from workflows.worker_pool.messages import PoolView, SetPolicy, SetRelease
from workflows.worker_pool.policy import PoolPolicy


@pytest.mark.parametrize(
    ("end", "reason"),
    [(terminated, "terminated by"), (cancelled, "cancelled"), (deleted, "deleted")],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_pool_comes_back_with_what_operators_had_set(
    harness: OrchestratorHarness, end: End, reason: str
) -> None:
    await harness.change_pool(
        "set_policy", SetPolicy(policy=PoolPolicy(target=3, shrink_after=7.0))
    )
    before = await harness.pool_is_filled(3)
    await harness.change_pool("pause")
    handle: WorkflowHandle[Any, Any] = harness.temporal.get_workflow_handle(
        names.worker_pool_id(POOL)
    )
    await end(harness.temporal, handle)
    await until(lambda: harness.is_gone(handle.id), "end")
    await harness.restorer.look_at_pool()
    after = await until(lambda: _known_pool(harness, 3), "pool as it was")
    assert (after.policy, after.revision, after.mode) == (before.policy, before.revision, "paused")
    finding = await harness.finding(handle.id)
    assert finding is not None
    assert finding[0] == FindingState.REBUILT
    assert finding[1].startswith(reason)
    audit = await harness.harness.sql(
        "select action, actor from audit_trail where subject = 'pool:default'"
    )
    assert ("workflow.rebuilt", "orchestrator") in audit
    await harness.change_pool("resume")
    await harness.pool_is_filled(3)
    assert len(harness.harness.launcher.launched) == 3  # none was launched twice, none was stopped
    assert harness.harness.launcher.stops == []


async def _known_pool(harness: OrchestratorHarness, target: int) -> PoolView | None:
    view = await harness.pool_view()
    return view if view.target == target and view.ready == target else None


async def test_a_pool_that_came_back_without_its_report_is_no_longer_missing(
    harness: OrchestratorHarness,
) -> None:
    """The workflow was started, and did not answer in time; or the process died then."""
    pool = names.worker_pool_id(POOL)
    missing = Finding(
        entity=pool,
        kind="pool",
        state=FindingState.MISSING,
        reason="terminated by a test",
        subject=f"pool:{POOL}",
    )
    async with harness.harness.database.session() as session:
        await record_finding(session, missing)
    for _ in range(2):
        await harness.restorer.look_at_pool()
    assert await harness.finding(pool) == (FindingState.REBUILT, "terminated by a test")
    audit = await harness.harness.sql(
        f"select action from audit_trail where subject = 'pool:{POOL}' order by id"  # noqa: S608
    )
    assert audit == [("workflow.missing",), ("workflow.rebuilt",)]


async def test_a_pool_that_was_reset_to_its_first_event_keeps_what_was_set_since(
    harness: OrchestratorHarness,
) -> None:
    await harness.change_pool("set_policy", SetPolicy(policy=PoolPolicy(target=3)))
    await harness.pool_is_filled(3)
    await harness.change_pool("pause")
    handle = harness.temporal.get_workflow_handle(names.worker_pool_id(POOL))
    await reset_to(harness.temporal, handle)
    view = await until(lambda: _known_pool(harness, 3), "pool as it was")
    assert view.mode == "paused"
    await harness.change_pool("set_policy", SetPolicy(policy=PoolPolicy(target=4)))
    await harness.change_pool("resume")
    await harness.pool_is_filled(4)
    workers = [spec.config.worker_id for spec in harness.harness.launcher.launched]
    assert len(workers) == len(set(workers)) == 4


@pytest.mark.parametrize("end", [terminated, deleted], ids=lambda end: end.__name__)
async def test_a_users_workflow_comes_back_and_continues_with_the_same_worker(
    harness: OrchestratorHarness, end: End
) -> None:
    user, worker = await harness.active_user()
    handle: WorkflowHandle[Any, Any] = harness.temporal.get_workflow_handle(
        names.user_worker_id(user)
    )
    await end(harness.temporal, handle)
    await until(lambda: _unlisted(harness, handle.id), "end in Temporal's index")
    await harness.restorer.look_at_runs()

    async def adopted() -> UserWorkerView | None:
        view = await harness.user_view(user)
        return view if view.state == WorkerState.ACTIVE else None

    view = await until(adopted, "adopted worker")
    assert view.worker is not None
    assert (view.worker.worker_id, view.worker.epoch) == (worker.worker_id, worker.epoch)
    assert harness.harness.launcher.stops == []
    assert await harness.harness.sql("select count(*) from worker_sessions") == [(1,)]
    finding = await harness.finding(handle.id)
    assert finding is not None
    assert finding[0] == FindingState.REBUILT
    # What it adopted it can end, too.
    await handle.signal("shutdown", ShutdownRequest(reason="test"))
    await harness.let_end(worker)
    await until(lambda: harness.is_gone(handle.id), "end")


async def _unlisted(harness: OrchestratorHarness, workflow_id: str) -> bool:
    listed = await executions.list_open(harness.temporal, (names.USER_WORKER,))
    return workflow_id not in {run.workflow_id for run in listed}


async def test_an_order_that_comes_first_adopts_the_worker_too(
    harness: OrchestratorHarness,
) -> None:
    user, worker = await harness.active_user()
    await harness.temporal.get_workflow_handle(names.user_worker_id(user)).terminate()
    answer = await harness.restorer.starter.ensure(user, check_worker=False)
    assert (answer.worker.worker_id, answer.worker.epoch) == (worker.worker_id, worker.epoch)
    assert harness.harness.launcher.stops == []


async def test_a_cancelled_users_workflow_ends_its_worker_and_stays_away(
    harness: OrchestratorHarness,
) -> None:
    """A cancellation asks for an orderly end, as `shutdown` does."""
    user, worker = await harness.active_user()
    handle: WorkflowHandle[Any, Any] = harness.temporal.get_workflow_handle(
        names.user_worker_id(user)
    )
    await handle.cancel()
    await harness.let_end(worker)
    await until(lambda: harness.is_gone(handle.id), "end")
    await until(lambda: _unlisted(harness, handle.id), "end in Temporal's index")
    await harness.restorer.look_at_runs()
    assert await harness.is_gone(handle.id)
    assert await harness.finding(handle.id) is None


async def test_a_users_workflow_that_was_reset_behind_its_worker_adopts_the_present_one(
    harness: OrchestratorHarness,
) -> None:
    user, first = await harness.active_user()
    handle: WorkflowHandle[Any, Any] = harness.temporal.get_workflow_handle(
        names.user_worker_id(user)
    )
    view = await harness.user_view(user)
    assert view.state == WorkerState.ACTIVE
    run_id = (await handle.describe()).run_id
    tasks = [
        event
        async for event in harness.temporal.get_workflow_handle(
            handle.id, run_id=run_id
        ).fetch_history_events()
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
    ]
    # The first worker dies; the second one takes its place.
    second = asyncio.create_task(_serve_next(harness))
    harness.harness.launcher.end(first.task_id)
    lost = WorkerLostSignal(
        task_id=first.task_id, worker_id=first.worker_id, exit_code=1, reason="killed"
    )
    await handle.signal("worker_lost", lost)

    async def replaced() -> WorkerRef | None:
        now = await harness.user_view(user)
        worker = now.worker if now.state == WorkerState.ACTIVE else None
        return worker if worker is not None and worker.worker_id != first.worker_id else None

    present: WorkerRef = await until(replaced, "second worker")
    second.cancel()
    await harness.harness.sql(
        "update worker_sessions set connected_at = now() where connected_at is null"
    )
    await harness.harness.renew_mark(user, present.worker_id, present.epoch, state="Active")
    stops = len(harness.harness.launcher.stops)

    await reset_to(harness.temporal, handle, len(tasks) - 1)

    async def adopted() -> bool:
        now = await harness.user_view(user)
        return now.state == WorkerState.ACTIVE and now.worker is not None and now.worker.epoch == 2

    await until(adopted, "adopted worker")
    now = await harness.user_view(user)
    assert now.worker is not None
    assert now.worker.worker_id == present.worker_id
    # Nothing that lives was stopped, and nothing was claimed for the user.
    assert present.task_id not in {task for task, _ in harness.harness.launcher.stops[stops:]}
    assert await harness.harness.sql("select max(epoch) from worker_sessions") == [(2,)]


async def _serve_next(harness: OrchestratorHarness) -> None:
    while True:
        await asyncio.gather(
            *(worker.serve(patience=1.0) for worker in list(harness.harness.made.values())),
            return_exceptions=True,
        )


async def test_a_worker_that_died_while_nobody_knew_it_is_closed(
    harness: OrchestratorHarness,
) -> None:
    user, worker = await harness.active_user()
    handle = harness.temporal.get_workflow_handle(names.user_worker_id(user))
    await handle.terminate()
    harness.harness.launcher.end(worker.task_id)
    await harness.harness.client.delete(f"user:{{{user}}}:mark")
    await until(lambda: _unlisted(harness, handle.id), "end in Temporal's index")
    serving_next = asyncio.create_task(_serve_next(harness))
    await harness.restorer.look_at_runs()

    async def over() -> bool:
        rows = await harness.harness.sql(
            "select ended_at is not null from worker_sessions where worker_id = "  # noqa: S608
            f"'{worker.worker_id}'"
        )
        return rows == [(True,)]

    await until(over, "end of the assignment")
    serving_next.cancel()


async def test_a_schedule_that_was_deleted_comes_back_and_one_that_is_paused_stays_so(
    harness: OrchestratorHarness,
) -> None:
    await ensure_schedules(harness.temporal, harness.settings)
    handle = harness.temporal.get_schedule_handle(names.MAINTENANCE_SCHEDULE)
    entity = f"schedule:{names.MAINTENANCE_SCHEDULE}"
    await harness.restorer.look_at_schedules()
    assert await harness.finding(entity) is None
    await handle.delete()
    await harness.restorer.look_at_schedules()
    assert await harness.finding(entity) == (FindingState.REBUILT, "deleted")
    await handle.pause(note="by an operator")
    for _ in range(2):
        await harness.restorer.look_at_schedules()
    assert (await handle.describe()).schedule.state.note == "by an operator"
    assert (await handle.describe()).schedule.state.paused
    assert await harness.finding(entity) == (FindingState.PAUSED, "by an operator")
    audit = await harness.harness.sql(
        f"select action from audit_trail where subject = '{entity}' order by id"  # noqa: S608
    )
    assert audit == [("schedule.rebuilt",), ("schedule.paused",)]
    await handle.unpause()
    await harness.restorer.look_at_schedules()
    finding = await harness.finding(entity)
    assert finding is not None
    assert finding[0] == FindingState.RESUMED


async def test_a_paused_schedule_that_is_switched_off_is_no_longer_reported(
    harness: OrchestratorHarness,
) -> None:
    await ensure_schedules(harness.temporal, harness.settings)
    await harness.temporal.get_schedule_handle(names.MAINTENANCE_SCHEDULE).pause()
    await harness.restorer.look_at_schedules()
    paused = await harness.harness.database.fetch(present_findings)
    assert [finding.entity for finding in paused] == [f"schedule:{names.MAINTENANCE_SCHEDULE}"]
    # As after a restart with the setting changed.
    harness.restorer.settings = harness.settings.model_copy(update={"maintenance_period": 0.0})
    await ensure_schedules(harness.temporal, harness.restorer.settings)
    await harness.restorer.look_at_schedules()
    assert await harness.harness.database.fetch(present_findings) == []


async def test_a_rollout_that_was_ended_is_reported_and_leaves_no_extra_workers(
    harness: OrchestratorHarness,
) -> None:
    release = (await harness.pool_view()).release
    rollout = await harness.temporal.start_workflow(
        names.ROLLOUT, id=names.rollout_id(POOL), task_queue="nobody-serves-it"
    )

    async def listed() -> bool:
        return any(
            run.workflow_id == rollout.id
            for run in await executions.list_open(harness.temporal, (names.ROLLOUT,))
        )

    await until(listed, "rollout in Temporal's index")
    await harness.change_pool("set_release", SetRelease(release=release, surge=2))
    await harness.pool_is_filled(4)
    await harness.restorer.look_at_runs()
    assert (await harness.pool_view()).surge == 2  # while it is under way
    await rollout.terminate(reason="by a test")

    async def unlisted() -> bool:
        return not await listed()

    await until(unlisted, "end in Temporal's index")
    await harness.restorer.look_at_runs()
    finding = await harness.finding(rollout.id)
    assert finding is not None
    assert finding[0] == FindingState.ENDED
    assert finding[1].startswith("terminated by")
    assert (await harness.pool_view()).surge == 0


@workflow.defn(dynamic=True)
class WaitsForEver:
    """Stands for the run of a schedule: only that it is open matters, and how it ends."""

    @workflow.run
    async def run(self, args: Sequence[RawValue]) -> None:
        await workflow.wait_condition(lambda: False)


#: The runs that schedules start, by the prefix of their ids. Morning and evening are one type.
SCHEDULED_RUNS = {
    names.MORNING_SCHEDULE: names.MORNING,
    names.EVENING_SCHEDULE: names.MORNING,
    names.REPORT_SCHEDULE: names.DAILY_REPORT,
    names.STATEMENTS_SCHEDULE: names.STATEMENTS,
}


async def test_runs_of_schedules_that_were_ended_are_reported_each_with_its_end(
    harness: OrchestratorHarness,
) -> None:
    ends: dict[End, str] = {
        terminated: "terminated by ",
        cancelled: "cancelled",
        deleted: "deleted",
    }
    expected: dict[str, tuple[End, str]] = {}
    async with Worker(
        harness.temporal,
        task_queue="runs-of-schedules",
        workflows=[WaitsForEver],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        for schedule, kind in SCHEDULED_RUNS.items():
            for end, reason in ends.items():
                run_id = f"{schedule}-2027-01-15T00:40:00Z-{end.__name__}"
                await harness.temporal.start_workflow(
                    kind, id=run_id, task_queue="runs-of-schedules"
                )
                expected[run_id] = (end, reason)

        async def listed() -> set[str]:
            runs = await executions.list_open(harness.temporal, tuple(set(SCHEDULED_RUNS.values())))
            return {run.workflow_id for run in runs}

        async def all_listed() -> bool:
            return await listed() == set(expected)

        await until(all_listed, "runs in Temporal's index")
        await harness.restorer.look_at_runs()
        assert await harness.harness.sql("select entity from entity_findings") == []
        for run_id, (end, _) in expected.items():
            await end(harness.temporal, harness.temporal.get_workflow_handle(run_id))

        async def none_listed() -> bool:
            return not await listed()

        await until(none_listed, "ends in Temporal's index")
    await harness.restorer.look_at_runs()
    for run_id, (_, reason) in expected.items():
        finding = await harness.finding(run_id)
        assert finding is not None, run_id
        state, why = finding
        assert state == FindingState.ENDED
        assert why.startswith(reason)


async def test_a_terminated_pass_of_maintenance_does_not_hold_up_the_next_one(
    harness: OrchestratorHarness,
) -> None:
    await ensure_schedules(harness.temporal, harness.settings)
    schedule = harness.temporal.get_schedule_handle(names.MAINTENANCE_SCHEDULE)

    async def open_passes() -> dict[str, str]:
        runs = await executions.list_open(harness.temporal, (names.MAINTENANCE,))
        return {run.run_id: run.workflow_id for run in runs}

    async def no_pass_is_open() -> bool:
        return not await open_passes()

    seen = set[str]()
    for _ in range(2):
        await schedule.trigger()
        passes = await until(open_passes, "pass of maintenance")
        assert not passes.keys() & seen
        seen |= passes.keys()
        for run_id, workflow_id in passes.items():
            await harness.temporal.get_workflow_handle(workflow_id, run_id=run_id).terminate(
                reason="by a test"
            )
        await until(no_pass_is_open, "end of the pass")


async def test_a_paused_workflow_is_reported_and_stays_paused(harness: OrchestratorHarness) -> None:
    user, worker = await harness.active_user()
    entity = names.user_worker_id(user)
    pool = names.worker_pool_id(POOL)
    for workflow_id in (entity, pool):
        await pause(harness.temporal, workflow_id)

    async def is_listed_as_paused() -> bool:
        runs = await executions.list_open(harness.temporal, (names.USER_WORKER,))
        return [run.workflow_id for run in runs if run.is_paused] == [entity]

    await until(is_listed_as_paused, "pause in Temporal's index")
    for _ in range(2):
        await harness.restorer.look_at_pool()
        await harness.restorer.look_at_runs()
    for workflow_id in (entity, pool):
        assert await harness.finding(workflow_id) == (FindingState.PAUSED, "paused in Temporal")
        state = await executions.read_execution(harness.temporal, workflow_id)
        assert state is not None
        assert state.is_paused
        await unpause(harness.temporal, workflow_id)

    async def is_listed_as_running() -> bool:
        runs = await executions.list_open(harness.temporal, (names.USER_WORKER,))
        return [run.is_paused for run in runs if run.workflow_id == entity] == [False]

    await until(is_listed_as_running, "end of the pause in Temporal's index")
    await harness.restorer.look_at_pool()
    await harness.restorer.look_at_runs()
    for workflow_id in (entity, pool):
        finding = await harness.finding(workflow_id)
        assert finding is not None
        assert finding[0] == FindingState.RESUMED
    assert (await harness.user_view(user)).worker == worker


@pytest.mark.parametrize("kind", [names.MAINTENANCE, names.INSTRUMENT_LOAD])
async def test_a_paused_pass_of_maintenance_is_reported(
    harness: OrchestratorHarness, kind: str
) -> None:
    run = await harness.temporal.start_workflow(
        kind, id=f"{kind}-of-a-test", task_queue="nobody-serves-it"
    )
    await pause(harness.temporal, run.id)

    async def is_listed_as_paused() -> bool:
        runs = await executions.list_open(harness.temporal, (kind,))
        return [seen.workflow_id for seen in runs if seen.is_paused] == [run.id]

    await until(is_listed_as_paused, "pause in Temporal's index")
    await harness.restorer.look_at_runs()
    assert await harness.finding(run.id) == (FindingState.PAUSED, "paused in Temporal")
    await run.terminate()

    async def is_unlisted() -> bool:
        return not await executions.list_open(harness.temporal, (kind,))

    await until(is_unlisted, "end in Temporal's index")
    await harness.restorer.look_at_runs()
    finding = await harness.finding(run.id)
    assert finding is not None
    assert finding[0] == FindingState.RESUMED


async def test_a_paused_pool_is_not_resumed_by_the_restorer_of_another_pool(
    harness: OrchestratorHarness,
) -> None:
    await ensure_schedules(harness.temporal, harness.settings)
    schedule = harness.temporal.get_schedule_handle(names.MAINTENANCE_SCHEDULE)
    await schedule.pause(note="by an operator")
    pool = names.worker_pool_id(POOL)
    await pause(harness.temporal, pool)
    other = harness.another_pools_restorer()
    for restorer in (harness.restorer, other) * 2:
        await restorer.look_at_pool()
        await restorer.look_at_schedules()
        await restorer.look_at_runs()
    audit = await harness.harness.sql("select action, subject from audit_trail order by id")
    assert audit == [
        ("workflow.paused", f"pool:{POOL}"),
        ("schedule.paused", f"schedule:{names.MAINTENANCE_SCHEDULE}"),
    ]
    await unpause(harness.temporal, pool)


async def test_of_the_restorers_of_two_pools_one_reports_a_run_that_was_ended(
    harness: OrchestratorHarness,
) -> None:
    await ensure_schedules(harness.temporal, harness.settings)
    run = await harness.temporal.start_workflow(
        names.MORNING, id="morning-2027-01-15", task_queue="nobody-serves-it"
    )
    restorers = (harness.restorer, harness.another_pools_restorer())
    loops = [asyncio.create_task(restorer.run()) for restorer in restorers]

    async def seen_by(count: int) -> bool:
        return [restorer.watches(run.id) for restorer in restorers].count(True) == count

    await until(lambda: seen_by(2), "look of both restorers")
    await run.terminate(reason="by a test")
    await until(lambda: seen_by(0), "look of both restorers")
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    audit = await harness.harness.sql("select action, subject from audit_trail")
    assert audit == [("workflow.ended", f"workflow:{run.id}")]


async def test_nothing_is_reported_while_everything_runs(harness: OrchestratorHarness) -> None:
    await ensure_schedules(harness.temporal, harness.settings)
    await harness.active_user()

    async def listed() -> bool:
        runs = await executions.list_open(harness.temporal, (names.USER_WORKER,))
        return bool(runs) and all(run.worker_id for run in runs)

    await until(listed, "user in Temporal's index")
    for look in (
        harness.restorer.look_at_pool,
        harness.restorer.look_at_schedules,
        harness.restorer.look_at_runs,
    ):
        await look()
    assert await harness.harness.sql("select entity from entity_findings") == []
