"""Somebody who can write to Temporal sends a bad payload to a workflow: it is dropped, and nothing
stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from temporalio import activity, workflow
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleSpec,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
)
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError, ChildWorkflowError
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from infra.local.servers import TemporalServer
from infra.process_metrics import REFUSED
from infra.settings import Settings
from infra.temporal import connection
from infra.vault.secret_versions import BOUND_PAYLOADS, create_versions

QUEUE = "altered-payloads"


@activity.defn
async def repeat(word: str) -> str:
    activity.heartbeat(word)
    if word == "fail":
        raise ApplicationError("words of an activity", type="SAID_SO")
    return word


@workflow.defn(name="AlteredChild")
class _Child:
    @workflow.run
    async def run(self, word: str) -> str:
        if word == "fail":
            raise ApplicationError("words of a child", type="CHILD_SAID_SO")
        return word


@workflow.defn(name="Altered")
class _Listens:
    """Uses every kind of payload that our workflows do."""

    @workflow.init
    def __init__(self, first: str) -> None:
        self.heard = [first]

    @workflow.run
    async def run(self, first: str) -> list[str]:
        if first == "scheduled":
            return [first, *(workflow.get_last_completion_result(list) or [])][:2]
        workflow.set_current_details("words of details")
        seen = 1
        while self.heard[-1] != "end":
            await workflow.wait_condition(lambda: len(self.heard) > seen)  # noqa: B023
            seen = len(self.heard)
            if self.heard[-1] == "again":
                workflow.continue_as_new("continued")
        limit = timedelta(seconds=10)
        for call in (workflow.execute_activity, workflow.execute_local_activity):
            self.heard.append(
                await call(repeat, "act", start_to_close_timeout=limit, summary="words")
            )
        child = f"{workflow.info().workflow_id}-child"
        self.heard.append(
            await workflow.execute_child_workflow(
                _Child.run, "child", id=child, static_summary="words"
            )
        )
        try:
            await workflow.execute_child_workflow(_Child.run, "fail", id=child)
        except ChildWorkflowError as error:
            self.heard.append(str(error.cause))
        return self.heard

    @workflow.update
    async def say(self, word: str) -> int:
        self.heard.append(word)
        return len(self.heard)

    @workflow.signal
    def hear(self, *words: Any) -> None:
        self.heard += words or ["nothing"]

    @workflow.query
    def all(self, *_: Any) -> list[str]:
        return self.heard


@dataclass
class Scenario:
    client: Client
    #: Whoever reaches Temporal and has no key.
    stranger: Client

    async def start(self, workflow_id: str, first: str = "one") -> WorkflowHandle[Any, Any]:
        return await self.client.start_workflow(
            "Altered",
            first,
            id=workflow_id,
            task_queue=QUEUE,
            memo={"note": "memo"},
            static_summary="summary",
        )

    async def send(self, workflow_id: str, payload: Payload) -> None:
        await self.stranger.get_workflow_handle(workflow_id).signal("hear", RawValue(payload))

    async def sent(self, handle: WorkflowHandle[Any, Any]) -> Payload:
        """The genuine payload with which the workflow was started, as it is stored."""
        first = await anext(handle.fetch_history_events())
        return first.workflow_execution_started_event_attributes.input.payloads[0]


def refusals() -> float:
    return float(REFUSED.labels("temporal payload")._value.get())


async def task_failures(handle: WorkflowHandle[Any, Any]) -> int:
    failed = EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED
    return len(
        [event async for event in handle.fetch_history_events() if event.event_type == failed]
    )


@pytest.fixture(scope="module")
def settings(temporal_server: TemporalServer, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    path = tmp_path_factory.mktemp("keys") / "temporal.key"
    create_versions(path, payload_format=BOUND_PAYLOADS)
    return Settings(temporal_address=temporal_server.address, temporal_codec_key_file=str(path))


@pytest.fixture
async def scenario(temporal_server: TemporalServer, settings: Settings) -> AsyncIterator[Scenario]:
    client = await connection.open_client(settings)
    # As ours: in the sandbox; this module is passed through, or pytest would be imported again.
    runner = SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_all_modules()
    )
    async with Worker(
        client,
        task_queue=QUEUE,
        workflows=[_Listens, _Child],
        activities=[repeat],
        workflow_runner=runner,
        max_cached_workflows=0,  # each task replays all
    ):
        yield Scenario(client, await Client.connect(temporal_server.address))
    await asyncio.sleep(0.1)


async def test_every_kind_of_payload_is_read_by_the_workflow_it_was_made_for(
    scenario: Scenario,
) -> None:
    before = refusals()
    handle = await scenario.start("all-kinds")
    assert await (await handle.describe()).static_summary() == "summary"
    assert await handle.execute_update("say", "again") == 2
    handle = scenario.client.get_workflow_handle("all-kinds")
    assert await handle.execute_update("say", "two") == 2
    assert await handle.query("all") == ["continued", "two"]
    assert await (await handle.describe()).memo() == {"note": "memo"}
    await handle.signal("hear", "end")
    heard = ["continued", "two", "end", "act", "act", "child", "CHILD_SAID_SO: words of a child"]
    assert await handle.result() == heard
    assert await task_failures(handle) == 0
    assert refusals() == before


async def test_the_runs_of_a_schedule_read_what_the_schedule_and_each_other_wrote(
    scenario: Scenario,
) -> None:
    before = refusals()
    action = ScheduleActionStartWorkflow("Altered", "scheduled", id="by-schedule", task_queue=QUEUE)
    schedule = await scenario.client.create_schedule(
        "by-schedule", Schedule(action=action, spec=ScheduleSpec())
    )

    async def run_once(count: int) -> Any:
        await schedule.trigger()
        async with asyncio.timeout(10):
            while len((await schedule.describe()).info.recent_actions) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        started = (await schedule.describe()).info.recent_actions[-1].action
        return await scenario.client.get_workflow_handle(started.workflow_id).result()  # type: ignore[attr-defined]

    assert await run_once(1) == ["scheduled"]
    assert await run_once(2) == ["scheduled", "scheduled"]
    assert refusals() == before
    await schedule.delete()


async def test_one_bad_signal_is_dropped_and_counted_and_the_workflow_continues(
    scenario: Scenario,
) -> None:
    handle, other = await scenario.start("victim"), await scenario.start("another")
    good, before = await scenario.sent(other), refusals()
    own = await scenario.sent(handle)
    altered = Payload(metadata=own.metadata, data=own.data[:-1] + bytes([own.data[-1] ^ 1]))
    renamed = Payload(metadata={**good.metadata, "workflow-id": b"victim"}, data=good.data)
    clear = Payload(metadata={"encoding": b"json/plain"}, data=b'"clear"')
    marker = Payload(metadata={"encoding": b"berth/refused"}, data=b"made up")
    for bad in (altered, good, renamed, clear, marker):
        await scenario.send("victim", bad)
    assert await handle.execute_update("say", "two") == 2
    assert refusals() >= before + 5
    assert await task_failures(handle) == 0
    # A payload of its own is one it may get again; that is the authorizer's to prevent.
    await scenario.send("victim", own)
    # What the command line sends without a key.
    await scenario.stranger.get_workflow_handle("victim").signal("hear")
    assert await handle.query("all") == ["one", "two", "one", "nothing"]


async def test_a_bad_update_is_rejected_and_a_bad_query_fails(scenario: Scenario) -> None:
    handle = await scenario.start("asked")
    stranger = scenario.stranger.get_workflow_handle("asked")
    clear = RawValue(Payload(metadata={"encoding": b"json/plain"}, data=b'"clear"'))
    with pytest.raises(WorkflowUpdateFailedError):
        await stranger.execute_update("say", clear)
    with pytest.raises(WorkflowQueryFailedError):
        await stranger.query("all", clear)
    assert await handle.execute_update("say", "end") == 2
    assert (await handle.result())[-1] == "CHILD_SAID_SO: words of a child"


async def test_a_workflow_started_with_the_payload_of_another_runs_nothing(
    scenario: Scenario,
) -> None:
    other = await scenario.start("owner-of-words")
    stolen = await scenario.sent(other)
    handle = await scenario.stranger.start_workflow(
        "AlteredChild",
        RawValue(stolen),
        id="thief",
        task_queue=QUEUE,
        execution_timeout=timedelta(seconds=3),
    )
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    assert await task_failures(handle) > 0
