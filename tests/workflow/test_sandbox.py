"""What a finalizer of redis-py does on a workflow's thread harms nobody else in the process."""

from __future__ import annotations

import contextlib

import hiredis
import pytest
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from workflows.sandbox import workflow_runner

#: What everybody who imported hiredis before compares with.
BEFORE = hiredis.ReplyError


@workflow.defn
class Finalizing:
    """Imports what the finalizer of an unused connection pool imports; the collector chooses the
    thread."""

    @workflow.run
    async def run(self) -> None:
        with contextlib.suppress(Exception):  # as the finalizer does
            from redis.observability import recorder

            assert recorder.__name__


def refused() -> object:
    reader = hiredis.Reader()
    reader.feed(b"-NOSCRIPT unknown\r\n")
    return reader.gets()


@pytest.mark.parametrize(
    "runner", [workflow_runner(), workflow_runner(passed=())], ids=["product", "suite"]
)
async def test_an_import_in_a_finalizer_leaves_the_errors_of_hiredis_as_they_are(
    temporal: Client, runner: SandboxedWorkflowRunner
) -> None:
    queue = f"finalizing-{id(runner)}"
    async with Worker(temporal, task_queue=queue, workflows=[Finalizing], workflow_runner=runner):
        await temporal.execute_workflow(Finalizing.run, id=queue, task_queue=queue)
    assert isinstance(refused(), BEFORE)
