"""On the server that `berth up` runs: what the time-skipping one cannot show."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import pytest
from temporalio.client import (
    Client,
    WithStartWorkflowOperation,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
)
from temporalio.common import WorkflowIDConflictPolicy

from tests.support.workflows.fakes import (
    FakeFleet,
    FakePool,
    failed_tasks,
    handle,
    serving,
    tell,
    until,
)
from workflows import names
from workflows.user_worker.messages import (
    ActiveWorker,
    ClaimResult,
    ClaimStatus,
    EnsureActive,
    ReloadResult,
    UserWorkerInput,
    WorkerState,
)
from workflows.user_worker.workflow import UserWorkerWorkflow
from workflows.worker_pool.messages import PoolInput
from workflows.worker_pool.policy import PoolPolicy
from workflows.worker_pool.workflow import WorkerPoolWorkflow

_numbers = itertools.count(1)


@pytest.fixture
def user() -> str:
    """The server keeps what other tests did: each uses a user of its own."""
    return f"dev-{os.getpid()}-{next(_numbers)}"


async def ensure(client: Client, user: str, *, pool: str = "default") -> ActiveWorker:
    operation: WithStartWorkflowOperation[object, object] = WithStartWorkflowOperation(
        names.USER_WORKER,
        UserWorkerInput(user_id=user, pool=pool),
        id=names.user_worker_id(user),
        task_queue=names.LIFECYCLE_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
    )
    answer: ActiveWorker = await client.execute_update_with_start_workflow(
        "ensure_active",
        EnsureActive(),
        start_workflow_operation=operation,
        result_type=ActiveWorker,
    )
    return answer


async def test_update_with_start_makes_one_claim_for_many_callers(
    temporal: Client, fleet: FakeFleet, user: str
) -> None:
    async with serving(temporal, fleet.activities()):
        answers = await asyncio.gather(*(ensure(temporal, user) for _ in range(4)))
        await handle(temporal, user).signal("shutdown")
        await handle(temporal, user).result()
    assert len(fleet.claims) == 1
    assert len({answer.worker.claim_id for answer in answers}) == 1


async def test_a_warm_start_is_one_workflow_task(
    temporal: Client, fleet: FakeFleet, user: str
) -> None:
    """Update, claim and answer in one task: what keeps a claim below 60 ms."""
    async with serving(temporal, fleet.activities()):
        await ensure(temporal, user)
        history = await handle(temporal, user).fetch_history()
        await handle(temporal, user).signal("shutdown")
        await handle(temporal, user).result()
    kinds = [event.WhichOneof("attributes") or "" for event in history.events]
    answered = kinds.index("workflow_execution_update_completed_event_attributes")
    assert kinds[:answered].count("workflow_task_completed_event_attributes") == 1
    assert "activity_task_scheduled_event_attributes" not in kinds[:answered]


async def test_operators_find_a_user_by_search_attributes_and_read_details(
    temporal: Client, fleet: FakeFleet, user: str
) -> None:
    async with serving(temporal, fleet.activities()):
        await ensure(temporal, user)

        async def listed() -> bool:
            query = (
                f"UserId = '{user}' and State = 'Active' and WorkerId = 'w1' and Pool = 'default'"
            )
            return [execution.id async for execution in temporal.list_workflows(query)] == [
                f"user-worker-{user}"
            ]

        await until(listed)
        details = str(await handle(temporal, user).query("__temporal_workflow_metadata"))
        await handle(temporal, user).signal("shutdown")
        await handle(temporal, user).result()
    assert "Active since" in details
    assert "w1" in details


async def test_the_details_tell_an_operator_what_is_what(
    temporal: Client, fleet: FakeFleet, user: str
) -> None:
    fleet.reload_script = [
        ReloadResult(ok=False, failure_code="LOGIN_REJECTED", failure_detail="wrong key")
    ]
    async with serving(temporal, fleet.activities()):
        await ensure(temporal, user)
        await tell(temporal, user, "degraded", 2, "connection refused")
        await handle(temporal, user).execute_update(
            "reload_credentials_now", result_type=ReloadResult
        )
        details = str(await handle(temporal, user).query("__temporal_workflow_metadata"))
        await handle(temporal, user).signal("shutdown")
        await handle(temporal, user).result()
    for words in (
        "Reconnecting since",
        "tries the broker again by itself, by 20",
        "connection refused",
        "`w1`, task `t1`, epoch 1, from the pool",
        "attempt 1",
        "degraded: connection refused, known since",
        "credentials refused: LOGIN_REJECTED: wrong key",
        "Last known use",
    ):
        assert words in details, words


SIGNALS = (
    "reload_credentials",
    "shutdown",
    "resume",
    "renew",
    "worker_lost",
    "worker_event",
    "worker_unmarked",
)
GARBAGE = (["--input", "7"], ["--input", '"x"', "--input", "{}"], ["--input", '{"epoch": "seven"}'])


async def signal_by_program(client: Client, user: str, name: str, *inputs: str) -> None:
    """What an operator types; `more` are inputs."""
    program = str(Path(sys.executable).with_name("temporal"))
    words = [
        "workflow",
        "signal",
        "--workflow-id",
        names.user_worker_id(user),
        "--name",
        name,
        *inputs,
    ]
    address = ["--address", client.service_client.config.target_host]
    process = await asyncio.create_subprocess_exec(
        program, *words, *address, stdout=DEVNULL, stderr=PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 0, said


async def test_a_plain_signal_without_payload_reloads_credentials(
    temporal: Client, fleet: FakeFleet, user: str
) -> None:
    async with serving(temporal, fleet.activities()):
        await ensure(temporal, user)
        await signal_by_program(temporal, user, "reload_credentials")
        await until(lambda: len(fleet.reloads) == 1)
        await signal_by_program(temporal, user, "shutdown")
        await handle(temporal, user).result()
    assert [request.cause for request in fleet.reloads] == ["signal"]


@pytest.mark.parametrize("garbage", GARBAGE, ids=["a number", "two values", "a wrong field"])
async def test_signals_with_garbage_are_dropped_with_a_line_in_the_log(
    temporal: Client,
    fleet: FakeFleet,
    user: str,
    garbage: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A handler that raised would block its user's workflow for good."""
    async with serving(temporal, fleet.activities()):
        await ensure(temporal, user)
        unharmed = [name for name in SIGNALS if name != "shutdown" or "epoch" not in str(garbage)]
        for name in unharmed:
            await signal_by_program(temporal, user, name, *garbage)
        again = await ensure(temporal, user)
        history = await handle(temporal, user).fetch_history()
        await handle(temporal, user).signal("shutdown")
        await handle(temporal, user).result()
    assert failed_tasks(history) == []
    assert again.state == WorkerState.ACTIVE
    assert not fleet.reloads
    dropped = [
        record for record in caplog.records if record.getMessage().startswith("signal_dropped")
    ]
    assert {getattr(record, "signal", "") for record in dropped} == set(unharmed)


async def test_a_failed_start_reaches_the_caller_with_its_code(
    temporal: Client, fleet: FakeFleet, user: str
) -> None:
    fleet.claim_script = [ClaimStatus.FAILED]
    fleet.connect_script = [
        ClaimResult(status=ClaimStatus.FAILED, failure_code="LOGIN_REJECTED", retryable=False)
    ]
    async with serving(temporal, fleet.activities()):
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await ensure(temporal, user)
        await handle(temporal, user).result()
    assert getattr(failed.value.cause, "type", "") == "LOGIN_REJECTED"


async def test_the_view_stays_readable_after_the_end(
    temporal: Client, fleet: FakeFleet, user: str
) -> None:
    async with serving(temporal, fleet.activities()):
        await ensure(temporal, user)
        await handle(temporal, user).signal("shutdown")
        await handle(temporal, user).result()
        view = await handle(temporal, user).query(UserWorkerWorkflow.view)
        assert (view.state, view.worker) == (WorkerState.TERMINATED, None)
        with pytest.raises(WorkflowQueryFailedError):
            await handle(temporal, user).query("no_such_query")


async def test_a_warm_claim_tells_its_pool(
    temporal: Client, fleet: FakeFleet, pool: FakePool, user: str
) -> None:
    async with serving(temporal, [*fleet.activities(), *pool.activities()]):
        running = await temporal.start_workflow(
            WorkerPoolWorkflow.run,
            PoolInput(pool="default", policy=PoolPolicy(target=1)),
            id=names.worker_pool_id("default"),
            task_queue=names.LIFECYCLE_QUEUE,
        )
        await until(lambda: len(pool.ready) == 1)
        pool.ready.clear()
        await ensure(temporal, user)
        await until(lambda: len(pool.launched) == 2)
        await running.terminate()
        await handle(temporal, user).signal("shutdown")
        await handle(temporal, user).result()
    assert pool.highest == 1
