"""Which brokers' instruments are due, and the load of one list on one trading day.

A Schedule starts `InstrumentsWorkflow` several times an hour. It starts a child for each designated
account whose broker trades today and opens soon, and whose list of today is not in force.
The child is named by broker, day and market, so a second start does nothing while one runs, and
one that somebody ended is started again.

The child makes one attempt after the other, with growing pauses, until a list is in force or the
day is over: a broker may list nothing before it opens, and a late list is better than none. An
attempt begins anew and changes nothing until it has the whole list, so a repeat is harmless.
"""

from __future__ import annotations

from dataclasses import replace

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import FailureError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from workflows import names
    from workflows.entity import continue_as_new, raise_cancellation, read_payload, wait_until
    from workflows.instruments.messages import (
        InstrumentLoadInput,
        InstrumentLoadResult,
        InstrumentsInput,
        InstrumentsResult,
        LoadInstruments,
        LoadNow,
        LoadOutcome,
        PlanInstruments,
    )

from workflows import calls
from workflows.calls import cause

#: After as many failed attempts the pause no longer grows; a power without a bound overflows.
MAX_DOUBLINGS = 16


@workflow.defn(name=names.INSTRUMENT_LOAD)
class InstrumentLoadWorkflow:
    def __init__(self) -> None:
        #: The request of an operator, until the next attempt begins.
        self._wanted_now: LoadNow | None = None

    @workflow.run
    async def run(self, given: InstrumentLoadInput) -> InstrumentLoadResult:
        attempts = given.attempts
        while True:
            wish, self._wanted_now = self._wanted_now or LoadNow(), None
            outcome = await self._attempt(given, wish)
            attempts += 1
            self._show(outcome, attempts)
            if outcome.loaded and self._wanted_now is None:
                return self._result(outcome, attempts)
            doublings = min(attempts - 1, MAX_DOUBLINGS)
            pause = min(given.retry * 2.0**doublings, given.longest_retry)
            if workflow.time() + pause >= given.until and self._wanted_now is None:
                return self._result(outcome, attempts)
            await wait_until(lambda: self._wanted_now is not None, pause, "until the next attempt")
            if workflow.info().is_continue_as_new_suggested() and self._wanted_now is None:
                continue_as_new(replace(given, attempts=attempts))

    @workflow.signal
    def load_now(self, *payload: LoadNow) -> None:
        self._wanted_now = read_payload("load_now", payload, LoadNow) or self._wanted_now

    async def _attempt(self, given: InstrumentLoadInput, wish: LoadNow) -> LoadOutcome:
        request = LoadInstruments(
            broker=given.broker,
            day=given.day,
            market=given.market,
            accept_smaller=wish.accept_smaller,
        )
        try:
            return await calls.load_instruments(request)
        except FailureError as error:  # no orchestrator, or it took too long
            raise_cancellation(error)
            code, _, detail = cause(error).partition(": ")
            return LoadOutcome(loaded=False, code=code, detail=detail)

    def _result(self, outcome: LoadOutcome, attempts: int) -> InstrumentLoadResult:
        return InstrumentLoadResult(outcome=outcome, attempts=attempts, ended_at=workflow.time())

    def _show(self, outcome: LoadOutcome, attempts: int) -> None:
        if outcome.loaded:
            text = f"### {outcome.instruments} instruments are in force"
            text += f"\n\n{outcome.added} new, {outcome.removed} no longer listed"
            if outcome.pending:
                text += f", {outcome.pending} changed lots wait for an operator"
        else:
            text = f"### Attempt {attempts} failed\n\n{outcome.code}: {outcome.detail}"
        workflow.set_current_details(text)


@workflow.defn(name=names.INSTRUMENTS)
class InstrumentsWorkflow:
    @workflow.run
    async def run(self, given: InstrumentsInput) -> InstrumentsResult:
        plan = await calls.plan_instruments(PlanInstruments(lead=given.lead, at=workflow.time()))
        begun = []
        for due in plan.loads:
            try:
                await workflow.start_child_workflow(
                    InstrumentLoadWorkflow.run,
                    InstrumentLoadInput(
                        broker=due.broker, day=due.day, until=due.until, market=due.market
                    ),
                    id=names.instrument_load_id(due.broker, due.day, due.market),
                    # Only what is not in force is due: an earlier run has given up, or was ended.
                    id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                    # This run ends at once, and the load continues.
                    parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                    static_summary=f"loads the instruments of {due.broker} for {due.day}",
                )
            except WorkflowAlreadyStartedError:
                continue
            begun.append(due.broker)
        workflow.set_current_details(f"### Loads begun: {', '.join(begun) or 'none'}")
        return InstrumentsResult(begun=tuple(begun))
