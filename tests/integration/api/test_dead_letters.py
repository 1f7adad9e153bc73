"""What failed for good is on one list, leaves it when it went through, and can be redriven or
dismissed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import text
from temporalio import activity, workflow
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionRequest
from temporalio.client import (
    Client,
    FetchWorkflowHistoryEventsInput,
    Interceptor,
    OutboundInterceptor,
    WorkflowFailureError,
    WorkflowHistoryEventAsyncIterator,
)
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode, ServiceClient
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.maintenance.failures import RUNS_QUERY, FailureCollector
from activities.maintenance.kept_jobs import KeptJobSweeper
from infra.database import dead_letters
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from tests.support.api.operators import act_on_letter, list_dead_letters
from tests.support.jobs.keeper import NotingStarter
from tests.support.systems.api import ServedApi, an_order
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.protocol.messages import encode
from workflows.names import user_worker_id

QUEUE = "dead-letters"


@workflow.defn(name="FailingWorkflow")
class FailingWorkflow:
    @workflow.run
    async def run(self, given: dict[str, Any]) -> dict[str, Any]:
        done: dict[str, Any] = await workflow.execute_activity(
            "step",
            given,
            start_to_close_timeout=timedelta(seconds=10),
            retry_policy=RetryPolicy(maximum_attempts=1),
        )
        return done


class Step:
    """The activity `step`; fails while `broken`."""

    def __init__(self) -> None:
        self.broken = True

    @activity.defn
    async def step(self, given: dict[str, Any]) -> dict[str, Any]:
        if self.broken:
            raise ApplicationError("the disk is full", type="DISK_FULL")
        return given


@pytest.fixture
async def step(whole_api: ServedApi) -> AsyncIterator[Step]:
    failing = Step()
    temporal = await Client.connect(whole_api.settings.temporal_address)
    async with Worker(
        temporal,
        task_queue=QUEUE,
        workflows=[FailingWorkflow],
        activities=[failing.step],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        yield failing


def collector_of(api: ServedApi) -> FailureCollector:
    services = api.services
    return FailureCollector(services.database, services.control.client, days=14)


async def fail(temporal: Client, workflow_id: str, given: dict[str, Any]) -> None:
    with pytest.raises(WorkflowFailureError):
        await temporal.execute_workflow("FailingWorkflow", given, id=workflow_id, task_queue=QUEUE)


async def until_listed(
    collector: FailureCollector, client: httpx.AsyncClient, subject: str, count: int | None
) -> dict[str, Any]:
    """Temporal's index is a moment behind. `count` None: until it is not listed."""
    async with asyncio.timeout(20):
        while True:
            await collector.collect_runs()
            listed = [
                row
                for row in await list_dead_letters(client, kind="workflow")
                if row["subject"] == subject
            ]
            if [row["count"] for row in listed] == ([] if count is None else [count]):
                return listed[0] if listed else {}
            await asyncio.sleep(0.05)


async def test_a_failed_run_is_listed_once_and_started_again_with_the_same_input(
    whole_api: ServedApi, staff: httpx.AsyncClient, step: Step
) -> None:
    temporal, collector = whole_api.services.control.client, collector_of(whole_api)
    workflow_id = f"failing-{uuid4().hex}"
    await fail(temporal, workflow_id, {"day": "2026-11-20", "users": [1, 2]})
    letter = await until_listed(collector, staff, workflow_id, 1)
    assert letter["reason"] == "FailingWorkflow: DISK_FULL: the disk is full"
    await asyncio.gather(*(collector.collect_runs() for _ in range(3)))
    assert await until_listed(collector, staff, workflow_id, 1) == letter

    assert (await act_on_letter(staff, letter, "redrive")).json()["closed_at"] is not None
    await until_listed(collector, staff, workflow_id, 2)  # it failed again

    step.broken = False
    assert (await act_on_letter(staff, letter, "redrive")).status_code == 200
    done = await temporal.get_workflow_handle(workflow_id).result()
    assert done == {"day": "2026-11-20", "users": [1, 2]}
    await until_listed(collector, staff, workflow_id, None)
    again = await act_on_letter(staff, letter, "redrive")
    assert (again.status_code, again.json()["code"]) == (409, "DEAD_LETTER_REFUSED")
    trail = (await staff.get("/audit", params={"action": "dead_letter."})).json()["entries"]
    assert [(entry["action"], entry["data"]["of"], entry["data"]["reason"]) for entry in trail] == [
        ("dead_letter.redrive_requested", workflow_id, "tried")
    ] * 2


async def test_a_run_that_another_one_followed_leaves_the_list_and_a_dismissed_one_stays_away(
    whole_api: ServedApi, staff: httpx.AsyncClient, step: Step
) -> None:
    temporal, collector = whole_api.services.control.client, collector_of(whole_api)
    followed, dismissed = f"followed-{uuid4().hex}", f"dismissed-{uuid4().hex}"
    for workflow_id in (followed, dismissed):
        await fail(temporal, workflow_id, {})
        await until_listed(collector, staff, workflow_id, 1)
    step.broken = False
    await temporal.execute_workflow("FailingWorkflow", {}, id=followed, task_queue=QUEUE)
    await until_listed(collector, staff, followed, None)
    letter = await until_listed(collector, staff, dismissed, 1)
    assert (await act_on_letter(staff, letter, "dismiss")).status_code == 200
    await collector.collect_runs()
    await until_listed(collector, staff, dismissed, None)
    shown = (await staff.get(f"/dead-letters/{letter['id']}")).json()
    assert (shown["subject"], shown["closed_at"] is None) == (dismissed, False)


class DeletedRun(Interceptor):
    """Temporal does not know the history of the run that is `gone`."""

    def __init__(self, gone: str) -> None:
        self.gone = gone

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        gone = self.gone

        class Deleted(OutboundInterceptor):
            def fetch_workflow_history_events(
                self, input: FetchWorkflowHistoryEventsInput
            ) -> WorkflowHistoryEventAsyncIterator:
                workflow_id = f"no-{input.id}" if input.id == gone else input.id
                return super().fetch_workflow_history_events(replace(input, id=workflow_id))

        return Deleted(next)


class ServiceWithoutRun:
    """Temporal's service, which does not know the run that is `gone` when it is asked to describe
    it."""

    def __init__(self, service: ServiceClient, gone: str) -> None:
        self._service, self._gone = service, gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    @property
    def workflow_service(self) -> ServiceWithoutRun:
        return ServiceWithoutRun(cast(ServiceClient, self._service.workflow_service), self._gone)

    async def describe_workflow_execution(
        self, request: DescribeWorkflowExecutionRequest, **options: Any
    ) -> Any:
        if request.execution.workflow_id == self._gone:
            raise RPCError("workflow not found", RPCStatusCode.NOT_FOUND, b"")
        service = cast(Any, self._service)
        return await service.describe_workflow_execution(request, **options)


@pytest.mark.parametrize("missing", ["run", "cause"])
async def test_a_run_that_is_deleted_meanwhile_keeps_no_other_from_the_list(
    whole_api: ServedApi, staff: httpx.AsyncClient, step: Step, missing: str
) -> None:
    services, gone, other = whole_api.services, f"gone-{uuid4().hex}", f"other-{uuid4().hex}"
    temporal = services.control.client
    for workflow_id in (other, gone):  # the newest is read first
        await fail(temporal, workflow_id, {})
        async with asyncio.timeout(20):
            while workflow_id not in [run.id async for run in temporal.list_workflows(RUNS_QUERY)]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    config = temporal.config()
    if missing == "cause":
        config["interceptors"] = [DeletedRun(gone)]
    else:
        config["service_client"] = cast(
            ServiceClient, ServiceWithoutRun(config["service_client"], gone)
        )
    collector = FailureCollector(services.database, Client(**config), days=14)
    await collector.collect_runs()
    assert {row["subject"] for row in await list_dead_letters(staff, kind="workflow")} & {
        other,
        gone,
    } == {other}


async def test_a_letter_stays_when_more_runs_have_failed_since_than_are_read(
    whole_api: ServedApi, staff: httpx.AsyncClient, step: Step
) -> None:
    services, first, last = whole_api.services, f"first-{uuid4().hex}", f"last-{uuid4().hex}"
    temporal = services.control.client
    collector = FailureCollector(services.database, temporal, days=14, most_runs=1)
    for workflow_id in (first, last):
        await fail(temporal, workflow_id, {})
        await until_listed(collector, staff, workflow_id, 1)
    await until_listed(collector, staff, first, 1)
    step.broken = False
    await temporal.execute_workflow("FailingWorkflow", {}, id=last, task_queue=QUEUE)
    await until_listed(collector, staff, last, None)


@pytest.fixture
def runner(whole_api: ServedApi) -> Any:
    """Starts a real runner of a tag."""
    with ExitStack() as stack:

        def start(tag: str) -> None:
            config = RunnerConfig(
                name="test",
                valkey_url=whole_api.settings.valkey_url,
                tag=tag,
                lease=30.0,
                message_keys=whole_api.services.message_secrets.job_keys(tag),
            )
            command = [sys.executable, "-m", "worker_runtime.jobs"]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
            )
            stack.callback(process.kill)
            assert process.stdin is not None
            process.stdin.write(encode(config))
            process.stdin.close()

        yield start


@pytest.mark.parametrize(
    ("whose", "job_id", "kind"),
    [("fleet", "j-1", "job"), ("fleet", "alert-1", "alert"), ("user", "alert-1", "job")],
)
async def test_a_failed_job_is_requeued_or_dismissed_and_leaves_the_list_if_requeued_elsewhere(
    whole_api: ServedApi, staff: httpx.AsyncClient, runner: Any, whose: str, job_id: str, kind: str
) -> None:
    client, kept = whole_api.services.valkey, whole_api.services.kept_jobs
    sweeper = KeptJobSweeper(client, kept, NotingStarter())
    user_id = whole_api.user if whose == "user" else ""
    tag = job_keys.tag_of(user_id)
    runner(tag)
    job = Job(job_id=job_id, name="nobody-knows-it", attempts=1)
    await kept.enqueue(job, user_id=user_id)

    async def look() -> None:
        async with whole_api.services.database.session() as session:  # the next check is due
            await session.execute(
                text("update kept_jobs set check_at = now() where check_at is not null")
            )
        await sweeper.sweep()

    async def listed(count: int) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while True:
                await look()
                listed = await list_dead_letters(staff, kind=kind)
                if [row["count"] for row in listed] == [count]:
                    return listed[0]
                await asyncio.sleep(0.05)

    letter = await listed(1)
    assert (letter["subject"], letter["user_id"]) == (job_id, user_id or None)
    assert letter["source"] == (user_id or "fleet jobs")
    assert letter["reason"].startswith("JOB_UNKNOWN: ")
    assert (await act_on_letter(staff, letter, "redrive")).status_code == 200
    await listed(2)
    if user_id:  # nobody else would start a worker for it
        await whole_api.services.control.client.get_workflow_handle(
            user_worker_id(user_id)
        ).describe()

    await valkey.run_script(client, *job_calls.suspend(tag=tag))
    await valkey.run_script(client, *job_calls.requeue([job_id], tag))
    refused = await act_on_letter(staff, letter, "redrive")
    assert (refused.status_code, refused.json()["code"]) == (409, "DEAD_LETTER_REFUSED")
    await look()
    assert await list_dead_letters(staff, kind=kind) == []

    await valkey.run_script(client, *job_calls.resume(tag=tag))
    letter = await listed(1)
    assert (await act_on_letter(staff, letter, "dismiss")).status_code == 200
    assert await reply_of(client.exists(job_keys.job(tag, job_id), job_keys.failed(tag))) == 0
    await look()
    assert await list_dead_letters(staff, kind=kind) == []


async def test_an_order_for_a_person_is_rechecked_and_never_dismissed(
    whole_api: ServedApi, staff: httpx.AsyncClient
) -> None:
    database = whole_api.services.database
    async with whole_api.client(whole_api.key) as user:
        placed = await user.post(
            f"/users/{whole_api.user}/orders", json=an_order(), params={"wait": 0}
        )
    order_id = placed.json()["id"]
    async with database.session() as session:
        await session.execute(
            text(
                "update orders set state = 'unknown', attention = 'look', verify_at = null "
                "where id = :id"
            ),
            {"id": UUID(order_id)},
        )
    [letter] = await list_dead_letters(staff, kind="order", user_id=whole_api.user)
    assert (letter["id"], letter["subject"], letter["reason"]) == (order_id, order_id, "look")
    assert (await act_on_letter(staff, letter, "dismiss")).json()["code"] == "DEAD_LETTER_REFUSED"
    assert (await act_on_letter(staff, letter, "redrive")).status_code == 200
    async with database.session() as session:
        due = await session.scalar(
            text("select verify_at from orders where id = :id"), {"id": UUID(order_id)}
        )
        counts = await dead_letters.count_letters(session)
    assert (due is not None, counts) == (True, {"order": 1})
    resolved = {"state": "cancelled", "reason": "the broker says so"}
    assert (await staff.post(f"/orders/{order_id}/resolve", json=resolved)).status_code == 200
    assert await list_dead_letters(staff, kind="order") == []
