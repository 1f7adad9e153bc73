"""Workflows that run now must go on after a release: their histories still fit the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from tests.replay.instrument_scenarios import INSTRUMENTS
from tests.replay.order_scenarios import ORDER_SCENARIOS
from tests.replay.record import HISTORIES
from tests.replay.statement_scenarios import STATEMENTS
from tests.replay.worker_scenarios import USER_SCENARIOS
from workflows.instruments.workflow import InstrumentLoadWorkflow, InstrumentsWorkflow
from workflows.maintenance.workflow import MaintenanceBatchWorkflow, MaintenanceWorkflow
from workflows.morning.workflow import MorningWorkflow
from workflows.order.workflow import OrderWorkflow
from workflows.reports.workflow import DailyReportWorkflow, StatementsWorkflow
from workflows.rollout.workflow import RolloutWorkflow
from workflows.sandbox import workflow_runner
from workflows.user_worker.workflow import UserWorkerWorkflow
from workflows.worker_pool.workflow import WorkerPoolWorkflow

WORKFLOWS = [
    UserWorkerWorkflow,
    WorkerPoolWorkflow,
    OrderWorkflow,
    MaintenanceWorkflow,
    MaintenanceBatchWorkflow,
    MorningWorkflow,
    RolloutWorkflow,
    StatementsWorkflow,
    DailyReportWorkflow,
    InstrumentsWorkflow,
    InstrumentLoadWorkflow,
]
#: Of `bulk_scenarios.py`, whose scenarios are of several runs each.
BULK = {
    "maintenance_cleans_up",
    "maintenance_batch",
    "maintenance_held_still",
    "morning_by_the_clock",
    "morning_started_again",
    "morning_first_page",
    "morning_last_page",
    "morning_on_a_holiday",
    "rollout_done",
    "rollout_rolled_back",
    "rollout_aborted",
    "rollout_renewed",
}
FILES = sorted(HISTORIES.rglob("*.json"))


def read(path: Path) -> WorkflowHistory:
    text = path.read_text(encoding="utf-8")
    # A workflow may name its children by its own id.
    started = json.loads(text)["events"][0]["workflowExecutionStartedEventAttributes"]
    return WorkflowHistory.from_json(started.get("workflowId", path.stem), text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
async def test_a_kept_history_still_fits_the_code(path: Path) -> None:
    # Else a moment in which the machine stands still is taken for a workflow that does not yield
    # for 2 s.
    replayer = Replayer(workflows=WORKFLOWS, workflow_runner=workflow_runner(), debug_mode=True)
    result = await replayer.replay_workflow(read(path), raise_on_replay_failure=False)
    assert result.replay_failure is None


def test_every_scenario_has_a_history() -> None:
    names = {path.stem for path in FILES}
    assert {
        getattr(scenario, "__name__", "") for scenario in (*USER_SCENARIOS, *ORDER_SCENARIOS)
    } <= names
    assert {"pool_filled_and_refilled"} | BULK | STATEMENTS | INSTRUMENTS <= names


async def test_a_history_that_does_not_fit_is_noticed() -> None:
    """So that the tests above mean something: one activity's name is changed."""
    path = next(path for path in FILES if path.stem == "cold_then_shut_down")
    changed = path.read_text(encoding="utf-8").replace("launch_for_claim", "another_activity")
    result = await Replayer(
        workflows=[UserWorkerWorkflow], workflow_runner=workflow_runner(passed=())
    ).replay_workflow(WorkflowHistory.from_json("changed", changed), raise_on_replay_failure=False)
    assert result.replay_failure is not None
