"""Activities of the loads of instruments under the real names: attempts that end as a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from workflows import names
from workflows.instruments.messages import (
    DueLoad,
    InstrumentsPlan,
    LoadInstruments,
    LoadOutcome,
    PlanInstruments,
)
from workflows.instruments.workflow import InstrumentLoadWorkflow, InstrumentsWorkflow
from workflows.sandbox import workflow_runner

DAY = "2026-11-23"
LOADED = LoadOutcome(loaded=True, instruments=3, added=1)


class FakeInstruments:
    """`outcomes`: of the attempts in turn, the last one for ever; an exception is raised."""

    def __init__(
        self, *outcomes: LoadOutcome | ApplicationError, loads: Sequence[DueLoad] = ()
    ) -> None:
        self._outcomes = list(outcomes) or [LOADED]
        self.loads = tuple(loads)
        #: Each attempt with its time (Unix seconds).
        self.attempts: list[tuple[LoadInstruments, float]] = []

    @activity.defn
    async def plan_instruments(self, request: PlanInstruments) -> InstrumentsPlan:
        return InstrumentsPlan(loads=self.loads)

    @activity.defn
    async def load_instruments(self, request: LoadInstruments) -> LoadOutcome:
        at = activity.info().current_attempt_scheduled_time.timestamp()
        self.attempts.append((request, at))
        outcome = self._outcomes[min(len(self.attempts), len(self._outcomes)) - 1]
        if isinstance(outcome, ApplicationError):
            raise outcome
        return outcome

    @asynccontextmanager
    async def serving(self, client: Client) -> AsyncIterator[None]:
        async with Worker(
            client,
            task_queue=names.BULK_QUEUE,
            workflows=[InstrumentsWorkflow, InstrumentLoadWorkflow],
            workflow_runner=workflow_runner(passed=()),
            activities=[self.plan_instruments, self.load_instruments],
        ):
            yield
