"""The runs of the loads of instruments whose histories are kept."""

from __future__ import annotations

import time

from temporalio.client import Client, WorkflowHistory
from temporalio.exceptions import ApplicationError

from tests.support.workflows.instrument_fakes import DAY, LOADED, FakeInstruments
from workflows import names
from workflows.instruments.messages import (
    DueLoad,
    InstrumentLoadInput,
    InstrumentsInput,
    LoadNow,
    LoadOutcome,
)
from workflows.instruments.workflow import InstrumentLoadWorkflow, InstrumentsWorkflow

#: Names of what `run_instruments` gives.
INSTRUMENTS = {
    "instruments_by_the_clock",
    "instruments_started_again",
    "instrument_load",
    "instrument_load_tried_again",
    "instrument_load_given_up",
}


async def run_instruments(client: Client) -> dict[str, WorkflowHistory]:
    """A look that begins a load, and one that finds it begun; a load that fails, waits, and is
    hurried by an operator; and one whose day is over."""
    until = time.time() + 3600.0
    fake = FakeInstruments(loads=[DueLoad(broker="paper", day=DAY, until=until)])

    async def looked(id: str) -> WorkflowHistory:
        handle = await client.start_workflow(
            InstrumentsWorkflow.run, InstrumentsInput(), id=id, task_queue=names.BULK_QUEUE
        )
        await handle.result()
        return await handle.fetch_history()

    async with fake.serving(client):
        by_the_clock = await looked("replay-instruments")
        load = client.get_workflow_handle(names.instrument_load_id("paper", DAY))
        await load.result()
        again = await looked("replay-instruments-again")
        whole = await load.fetch_history()

    refused = LoadOutcome(loaded=False, code="INSTRUMENT_LIST_REFUSED", detail="it is empty")
    crash = ApplicationError("out of luck", type="SomeError", non_retryable=True)
    failing = FakeInstruments(refused, crash, LOADED)
    async with failing.serving(client):
        hurried = await client.start_workflow(
            InstrumentLoadWorkflow.run,
            InstrumentLoadInput(broker="quay", day=DAY, until=until, retry=0.2),
            id=names.instrument_load_id("quay", DAY),
            task_queue=names.BULK_QUEUE,
            start_signal="load_now",
            start_signal_args=[LoadNow(accept_smaller=True)],
        )
        await hurried.result()
        tried_again = await hurried.fetch_history()
    async with FakeInstruments(refused).serving(client):
        late = await client.start_workflow(
            InstrumentLoadWorkflow.run,
            InstrumentLoadInput(broker="late", day=DAY, until=time.time() + 10.0),
            id=names.instrument_load_id("late", DAY),
            task_queue=names.BULK_QUEUE,
        )
        await late.result()
        given_up = await late.fetch_history()
    return {
        "instruments_by_the_clock": by_the_clock,
        "instruments_started_again": again,
        "instrument_load": whole,
        "instrument_load_tried_again": tried_again,
        "instrument_load_given_up": given_up,
    }
