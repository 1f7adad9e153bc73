"""The runs that schedules start, ended in each way that Temporal's UI offers while half of their
work is done. The next run does the rest, and nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from temporalio.client import Client, ScheduleHandle, WorkflowHandle
from temporalio.common import WorkflowIDReusePolicy

from activities.maintenance.failures import FailureCollector
from api.fleet.entities import EntityProbe
from infra import tasks
from infra.database.entities import FindingState
from infra.market.calendar import HOME_ZONE
from infra.temporal import executions
from infra.temporal.client import unless_missing
from infra.temporal.schedules import SCHEDULES, ensure_schedules
from tests.support.activities.orchestrator import (
    OrchestratorHarness,
    cancelled,
    deleted,
    pause,
    reset_to,
    terminated,
    unpause,
    until,
)
from tests.support.activities.scheduled_work import (
    BulkHarness,
    Evening,
    InstrumentLook,
    LoadOfInstruments,
    Maintenance,
    Morning,
    Report,
    ScheduledWork,
    Statements,
    serve_pool,
    settings_of_schedules,
)
from workflows import names

#: Types of all workflows that schedules start, and of their children.
KINDS = (
    names.MAINTENANCE,
    names.MAINTENANCE_BATCH,
    names.MORNING,
    names.STATEMENTS,
    names.DAILY_REPORT,
    names.INSTRUMENTS,
    names.INSTRUMENT_LOAD,
)
NO_SCHEDULES = {
    "maintenance_period": 0.0,
    "morning_at": "",
    "evening_at": "",
    "report_at": "",
    "statements": "off",
    "instruments_lead": 0.0,
}
#: Seconds around midnight in which no test begins: the work of a day is named after it.
MIDNIGHT_MARGIN_S = 30


async def reset(temporal: Client, handle: WorkflowHandle[Any, Any]) -> None:
    await reset_to(temporal, handle)


WAYS = {"cancel": cancelled, "terminate": terminated, "delete": deleted, "reset": reset}


@dataclass(frozen=True)
class Case:
    """A workflow that somebody ends."""

    work: type[ScheduledWork]
    #: `run`: what the schedule started; `day`: its child, which does the work of a day.
    part: str
    #: An end by hand is reported, and is a dead letter. Others come again within minutes.
    reported: bool = True


CASES = {
    "maintenance": Case(Maintenance, "run", reported=False),
    "morning": Case(Morning, "run"),
    "morning-of-day": Case(Morning, "day"),
    "evening-of-day": Case(Evening, "day"),
    "report": Case(Report, "run"),
    "statements": Case(Statements, "run"),
    "statements-of-day": Case(Statements, "day"),
    "instruments": Case(InstrumentLook, "run", reported=False),
    "instrument-load": Case(LoadOfInstruments, "day", reported=False),
}


class EndedRunScenario:
    """The work of a case, and its schedule on Temporal's server."""

    def __init__(self, bulk: BulkHarness, case: Case) -> None:
        self.orchestrator, self.temporal = bulk.orchestrator, bulk.orchestrator.temporal
        self.case, self.work = case, case.work(bulk)

    @property
    def schedule(self) -> ScheduleHandle:
        return self.temporal.get_schedule_handle(self.work.schedule)

    async def open_runs(self) -> dict[str, executions.ExecutionState]:
        return {run.workflow_id: run for run in await executions.list_open(self.temporal, KINDS)}

    async def none_is_open(self) -> bool:
        return not await self.open_runs()

    async def begun(self) -> set[str]:
        """The runs that the schedule has begun."""
        actions = (await self.schedule.describe()).info.recent_actions
        return {str(getattr(each.action, "workflow_id", "")) for each in actions}

    async def begin(self) -> str:
        """Has the schedule begin a run, as soon as it counts none as under way; returns its id."""
        before = await self.begun()

        async def another() -> str:
            await self.schedule.trigger()  # it does nothing while a run is under way
            for _ in range(20):
                if new := await self.begun() - before:
                    return new.pop()
                await asyncio.sleep(0.05)
            return ""

        run: str = await until(another, "run of the schedule")
        return run

    async def finish(self) -> None:
        """Waits for the end of all runs, and has the schedule begin a last one."""
        await until(self.none_is_open, "end of all runs")
        last = await self.begin()

        async def ended() -> bool:
            run = await executions.read_execution(self.temporal, last)
            return run is not None and not run.is_open

        await until(ended, "end of the last run")

    async def begin_half(self) -> WorkflowHandle[Any, Any]:
        """Begins the work and returns what somebody ends once half of it is done."""
        run = await self.begin()
        await until(self.work.is_half_done, "half of the work")
        entity = run if self.case.part == "run" else self.work.day_id()

        async def listed() -> bool:
            return entity in await self.open_runs()

        await until(listed, "run in Temporal's index")
        return self.temporal.get_workflow_handle(entity)


@pytest.fixture
async def bulk(harness: OrchestratorHarness) -> AsyncIterator[BulkHarness]:
    now = datetime.now(HOME_ZONE)
    until_midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0) - now
    if until_midnight < timedelta(seconds=MIDNIGHT_MARGIN_S):
        await asyncio.sleep(until_midnight.total_seconds() + 1)
    settings = harness.settings.model_copy(update=settings_of_schedules())
    harness.settings = harness.restorer.settings = settings
    made = BulkHarness.of(harness)
    temporal = harness.temporal
    await ensure_schedules(temporal, settings)
    async with made.worker, tasks.running(serve_pool(harness)):
        yield made
        await ensure_schedules(temporal, settings.model_copy(update=NO_SCHEDULES))
        await until(lambda: _none_left(temporal), "end of all runs")
        for work in (Morning, Evening, Statements):
            await _let_begin_again(temporal, work(made).day_id())


async def _none_left(temporal: Client) -> bool:
    runs = await executions.list_open(temporal, KINDS)
    for run in runs:
        await unless_missing(temporal.get_workflow_handle(run.workflow_id).terminate())
    return not runs


async def _let_begin_again(temporal: Client, entity: str) -> None:
    """Lets the next test begin the work of the same day: what was terminated may be started anew.

    A deletion of what has completed takes 20 s.
    """
    handle = await temporal.start_workflow(
        names.MAINTENANCE_BATCH,  # whose end is no dead letter
        id=entity,
        task_queue="nobody-serves-it",
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
    )
    await handle.terminate()


@pytest.fixture
def scenario(bulk: BulkHarness, request: pytest.FixtureRequest) -> EndedRunScenario:
    return EndedRunScenario(bulk, CASES[request.param])


async def reports(orchestrator: OrchestratorHarness) -> dict[str, str]:
    """What `berth servers` says of runs and schedules."""
    probe = EntityProbe(orchestrator.harness.database, orchestrator.temporal, orchestrator.settings)
    rows = await probe.list_entities()
    return {name: f"{row.state}: {row.reason}" for name, row in rows.items()}


async def dead_letters(orchestrator: OrchestratorHarness) -> set[str]:
    database = orchestrator.harness.database
    await FailureCollector(database, orchestrator.temporal, days=30.0).collect_runs()
    rows = await orchestrator.harness.sql(
        "select subject from dead_letters where closed_at is null"
    )
    return {subject for (subject,) in rows}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scenario", CASES, indirect=True)
async def test_what_was_ended_half_way_is_done_by_the_next_run_and_nothing_twice(
    scenario: EndedRunScenario, way: str
) -> None:
    orchestrator, work = scenario.orchestrator, scenario.work
    await work.prepare()
    async with work.held():
        handle = await scenario.begin_half()
        await orchestrator.restorer.look_at_runs()
        before = await executions.read_execution(orchestrator.temporal, handle.id)
        assert before is not None
        await WAYS[way](orchestrator.temporal, handle)

        async def ended() -> bool:
            now = (await scenario.open_runs()).get(handle.id)
            return now is None or now.run_id != before.run_id

        await until(ended, "end in Temporal's index")
        await orchestrator.restorer.look_at_runs()
        finding = await orchestrator.finding(handle.id)
        shown = await reports(orchestrator)
        if scenario.case.reported and way != "reset":
            assert finding is not None
            assert finding[0] == FindingState.ENDED
            assert finding[1].startswith({"delete": "deleted"}.get(way, way.rstrip("e")))
            # Of a run and its child, which ended together, the last one is named.
            assert shown["runs, ended"].endswith(finding[1])
            assert (handle.id in await dead_letters(orchestrator)) is (way != "delete")
        else:
            assert finding is None
            assert "runs, ended" not in shown
        await scenario.schedule.trigger()  # while what was under way may still be held
    if not await work.is_done():
        await scenario.begin()
    await until(work.is_done, "whole work")
    await scenario.finish()
    await work.check()


@pytest.mark.parametrize("scenario", CASES, indirect=True)
async def test_a_paused_run_is_reported_and_continues_where_it_was(
    scenario: EndedRunScenario,
) -> None:
    orchestrator, work = scenario.orchestrator, scenario.work
    await work.prepare()
    async with work.held():
        handle = await scenario.begin_half()
        await pause(orchestrator.temporal, handle.id)

        async def listed() -> bool:
            return (await scenario.open_runs())[handle.id].is_paused

        await until(listed, "pause in Temporal's index")
        for _ in range(2):
            await orchestrator.restorer.look_at_runs()
        assert await orchestrator.finding(handle.id) == (FindingState.PAUSED, "paused in Temporal")
        assert handle.id in (await reports(orchestrator))["runs, paused"]
    paused = await executions.read_execution(orchestrator.temporal, handle.id)
    assert paused is not None
    assert paused.is_paused
    await unpause(orchestrator.temporal, handle.id)
    await until(work.is_done, "whole work")
    await scenario.finish()
    await orchestrator.restorer.look_at_runs()
    finding = await orchestrator.finding(handle.id)
    assert finding is not None
    assert finding[0] == FindingState.RESUMED
    await work.check()


async def test_every_deleted_schedule_is_made_anew_and_every_paused_one_stays_paused(
    bulk: BulkHarness,
) -> None:
    orchestrator, temporal = bulk.orchestrator, bulk.orchestrator.temporal
    for schedule_id in SCHEDULES:
        await temporal.get_schedule_handle(schedule_id).delete()
    assert (await reports(orchestrator))["schedule morning"] == (
        "down: it was deleted; it is being made anew"
    )
    await orchestrator.restorer.look_at_schedules()
    shown = await reports(orchestrator)
    assert [shown[f"schedule {schedule_id}"] for schedule_id in SCHEDULES] == [
        "up: rebuilt: it was deleted"
    ] * len(SCHEDULES)
    for schedule_id in SCHEDULES:
        await temporal.get_schedule_handle(schedule_id).pause(note="by an operator")
    for _ in range(2):
        await orchestrator.restorer.look_at_schedules()
    shown = await reports(orchestrator)
    assert [shown[f"schedule {schedule_id}"] for schedule_id in SCHEDULES] == [
        "paused: by an operator"
    ] * len(SCHEDULES)
    for schedule_id in SCHEDULES:
        description = await temporal.get_schedule_handle(schedule_id).describe()
        assert description.schedule.state.paused
