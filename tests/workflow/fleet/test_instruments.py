"""Loads of instruments: begun for each broker that is due, once a day, and tried until they go
through or the day is over."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from temporalio.client import WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.instrument_fakes import DAY, LOADED, FakeInstruments
from workflows import names
from workflows.instruments.messages import (
    DueLoad,
    InstrumentLoadInput,
    InstrumentLoadResult,
    InstrumentsInput,
    InstrumentsResult,
    LoadNow,
    LoadOutcome,
)
from workflows.instruments.workflow import InstrumentLoadWorkflow, InstrumentsWorkflow

REFUSED = LoadOutcome(loaded=False, code="INSTRUMENT_LIST_REFUSED", detail="it is empty")
AWAY = LoadOutcome(loaded=False, code="WORKER_UNAVAILABLE", detail="no worker")


async def look(env: WorkflowEnvironment, id: str = "instruments-by-the-clock") -> InstrumentsResult:
    return await env.client.execute_workflow(
        InstrumentsWorkflow.run, InstrumentsInput(), id=id, task_queue=names.BULK_QUEUE
    )


async def due(env: WorkflowEnvironment, broker: str, hours: float = 8) -> DueLoad:
    now = (await env.get_current_time()).timestamp()
    return DueLoad(broker=broker, day=DAY, until=now + hours * 3600)


def handle_of(env: WorkflowEnvironment, broker: str) -> WorkflowHandle[Any, InstrumentLoadResult]:
    return env.client.get_workflow_handle(
        names.instrument_load_id(broker, DAY), result_type=InstrumentLoadResult
    )


async def begin(
    env: WorkflowEnvironment, hours: float
) -> WorkflowHandle[InstrumentLoadWorkflow, InstrumentLoadResult]:
    planned = await due(env, "paper", hours)
    # The clock jumps for the handle of a start only.
    return await env.client.start_workflow(
        InstrumentLoadWorkflow.run,
        InstrumentLoadInput(broker="paper", day=DAY, until=planned.until),
        id=names.instrument_load_id("paper", DAY),
        task_queue=names.BULK_QUEUE,
    )


async def test_each_broker_that_is_due_has_one_load_at_a_time(
    skipping: WorkflowEnvironment,
) -> None:
    fake = FakeInstruments()
    fake.loads = (await due(skipping, "paper"), await due(skipping, "quay"))
    async with fake.serving(skipping.client):
        assert (await look(skipping)).begun == ("paper", "quay")
        results = [await handle_of(skipping, broker).result() for broker in ("paper", "quay")]
    assert [result.outcome for result in results] == [LOADED, LOADED]
    assert sorted(request.broker for request, _ in fake.attempts) == ["paper", "quay"]


async def test_a_load_that_fails_is_tried_again_with_growing_pauses(
    skipping: WorkflowEnvironment,
) -> None:
    crash = ApplicationError("out of luck", type="SomeError")
    fake = FakeInstruments(AWAY, crash, REFUSED, AWAY, AWAY, AWAY, LOADED)
    async with fake.serving(skipping.client):
        result = await (await begin(skipping, hours=8)).result()
    assert (result.outcome, result.attempts) == (LOADED, 7)
    at = [at for _, at in fake.attempts]
    pauses = [round(later - sooner, -1) for sooner, later in pairwise(at)]
    assert pauses == [60, 120, 240, 480, 900, 900]


async def test_after_thousands_of_attempts_the_pause_is_still_the_longest(
    skipping: WorkflowEnvironment,
) -> None:
    """Operators may ask as often as they like; each wish counts as an attempt."""
    fake = FakeInstruments(AWAY, LOADED)
    planned = await due(skipping, "paper")
    given = InstrumentLoadInput(broker="paper", day=DAY, until=planned.until, attempts=5000)
    async with fake.serving(skipping.client):
        result: InstrumentLoadResult = await skipping.client.execute_workflow(
            InstrumentLoadWorkflow.run,
            given,
            id=names.instrument_load_id("paper", DAY),
            task_queue=names.BULK_QUEUE,
        )
    assert (result.outcome, result.attempts) == (LOADED, 5002)
    [first, second] = [at for _, at in fake.attempts]
    assert round(second - first, -1) == given.longest_retry


async def test_a_load_is_given_up_at_the_end_of_its_day(skipping: WorkflowEnvironment) -> None:
    fake = FakeInstruments(REFUSED)
    async with fake.serving(skipping.client):
        result = await (await begin(skipping, hours=1)).result()
    assert result.outcome == REFUSED
    assert result.attempts == len(fake.attempts) == 7


async def test_an_operators_wish_is_an_attempt_at_once(skipping: WorkflowEnvironment) -> None:
    fake = FakeInstruments(REFUSED, replace(LOADED, instruments=1))
    async with fake.serving(skipping.client):
        with skipping.auto_time_skipping_disabled():
            handle = await begin(skipping, hours=8)
            while not fake.attempts:
                await skipping.sleep(1)
            await handle.signal("load_now", LoadNow(accept_smaller=True))
            result = await handle.result()
    assert result.outcome.instruments == 1
    assert [request.accept_smaller for request, _ in fake.attempts] == [False, True]
    assert fake.attempts[1][1] - fake.attempts[0][1] < 30


@pytest.mark.parametrize("payload", [["x"], [3], [LoadNow(), LoadNow()]])
async def test_a_signal_of_another_form_is_dropped(
    skipping: WorkflowEnvironment, payload: list[object]
) -> None:
    fake = FakeInstruments(AWAY, LOADED)
    async with fake.serving(skipping.client):
        handle = await begin(skipping, hours=8)
        await handle.signal("load_now", args=payload)
        result = await handle.result()
    assert result.outcome == LOADED


async def test_a_load_that_gave_up_or_that_somebody_ended_is_begun_again_by_the_next_look(
    skipping: WorkflowEnvironment,
) -> None:
    fake = FakeInstruments(AWAY)
    async with fake.serving(skipping.client):
        assert not (await (await begin(skipping, hours=1)).result()).outcome.loaded
        with skipping.auto_time_skipping_disabled():
            handle = await begin(skipping, hours=8)
            fake.loads = (await due(skipping, "paper"),)
            assert (await look(skipping, "while-it-runs")).begun == ()
            await handle.terminate("by hand")
        fake.loads = (await due(skipping, "paper"),)
        assert (await look(skipping)).begun == ("paper",)
        await handle_of(skipping, "paper").terminate("the test is over")
