"""Workflows that run now must go on after a release: their histories still fit the code."""

from __future__ import annotations

from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from tests.replay.record import HISTORIES
from tests.replay.scenes import USER_SCENES
from workflows.sandbox import workflow_runner
from workflows.user_worker import UserWorkerWorkflow
from workflows.worker_pool import WorkerPoolWorkflow

FILES = sorted(HISTORIES.rglob("*.json"))


def read(path: Path) -> WorkflowHistory:
    return WorkflowHistory.from_json(path.stem, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
async def test_a_kept_history_still_fits_the_code(path: Path) -> None:
    replayer = Replayer(workflows=[UserWorkerWorkflow, WorkerPoolWorkflow], workflow_runner=workflow_runner())
    result = await replayer.replay_workflow(read(path), raise_on_replay_failure=False)
    assert result.replay_failure is None


def test_every_scene_has_a_history() -> None:
    names = {path.stem for path in FILES}
    assert {getattr(scene, "__name__", "") for scene in USER_SCENES} <= names
    assert "pool_filled_and_refilled" in names


async def test_a_history_that_does_not_fit_is_noticed() -> None:
    """So that the tests above mean something: one activity's name is changed."""
    path = next(path for path in FILES if path.stem == "cold_then_shut_down")
    changed = path.read_text(encoding="utf-8").replace("launch_for_claim", "another_activity")
    result = await Replayer(workflows=[UserWorkerWorkflow]).replay_workflow(
        WorkflowHistory.from_json("changed", changed), raise_on_replay_failure=False
    )
    assert result.replay_failure is not None
