"""What an operator asks of a rollout while it is busy."""

from __future__ import annotations

from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.bulk_fakes import FakeRollout
from tests.support.workflows.fakes import until
from workflows import names
from workflows.rollout.messages import AbortRollout, Release, RolloutInput, RolloutPhase
from workflows.rollout.workflow import RolloutWorkflow


async def test_an_abort_that_comes_with_the_end_of_a_run_is_not_lost(
    skipping: WorkflowEnvironment,
) -> None:
    """A release of the orchestrator has each run go on in a new one, and a round may take a
    minute."""
    fake = FakeRollout(2, users=1)
    fake.quiet.clear()
    async with fake.worker(skipping.client):
        handle = await skipping.client.start_workflow(
            RolloutWorkflow.run,
            RolloutInput(pool="p", release=Release(version="2")),
            id=names.rollout_id("p"),
            task_queue=names.BULK_QUEUE,
        )
        fake.may_check.clear()
        begun = fake.checks
        await until(lambda: fake.checks > begun)
        await handle.signal(RolloutWorkflow.abort, AbortRollout(reason="not today"))
        await handle.signal(RolloutWorkflow.renew)
        fake.may_check.set()
        fake.quiet.set()
        ended = await handle.result()
    assert (ended.phase, ended.reason) == (RolloutPhase.ROLLED_BACK, "not today")
    assert fake.before.version == "1"
