"""What the steps of a user's workflow share: the present state, what cuts a step short, and the stop.

`Gone` and `StartFailed` end a step; neither ever leaves the workflow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Generic, TypeVar

from temporalio import workflow
from temporalio.exceptions import ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from worker_runtime.protocol import errors
    from worker_runtime.protocol.messages import Failure
    from workflows import messages as m
    from workflows import names
    from workflows.user_worker_display import attribute_changes, details
    from workflows.user_worker_state import UserWorkerState

from workflows import calls
from workflows.calls import cause

#: Longest pause, in seconds, between two tries to have a worker's end confirmed.
STOP_PAUSE_MAX = 60.0
#: Ended workers remembered, so that a report which comes before the claim's answer is not lost.
ENDED_KEPT = 16

T = TypeVar("T")


class Gone(Exception):
    """This claim's worker is dead, lost or unusable: confirm its end, then take a new claim id."""


class StartFailed(Exception):
    """The start is over, and its callers hear why."""

    def __init__(self, code: str, detail: str, *, retryable: bool) -> None:
        super().__init__(detail)
        self.failure = Failure(code=code or errors.BerthError.code, detail=detail, retryable=retryable)


class Ticket(Generic[T]):
    """One thing that several callers wait for together."""

    def __init__(self) -> None:
        self._result: T | None = None
        self._failure: Failure | None = None

    @property
    def settled(self) -> bool:
        return self._result is not None or self._failure is not None

    def succeed(self, result: T) -> None:
        self._result = result

    def fail(self, failure: Failure) -> None:
        self._failure = failure

    async def result(self) -> T:
        """Waits; raises `ApplicationError` of the failure's code."""
        await workflow.wait_condition(lambda: self.settled)
        if self._result is not None:
            return self._result
        failure = self._failure or Failure.of(errors.BerthError())
        raise ApplicationError(failure.detail, type=failure.code, non_retryable=not failure.retryable)


class Life:
    """One user's worker as the workflow sees it now."""

    def __init__(self, state: UserWorkerState) -> None:
        self.state = state
        #: Reason of a shutdown that was asked for and has not begun; empty: none.
        self.shutdown = ""
        #: The start that callers of `ensure_active` share.
        self.start: Ticket[m.ActiveWorker] | None = None
        self._ended: list[str] = []
        self._shown: UserWorkerState | None = None
        self._telling: set[asyncio.Task[None]] = set()

    def now(self) -> float:
        return workflow.time()

    # --- what cuts a step short -----------------------------------------------------------------------

    def worker_ended(self, worker_id: str) -> None:
        self._ended = [*self._ended[-ENDED_KEPT + 1 :], worker_id]

    @property
    def lost(self) -> bool:
        """The launcher reported the end of the present worker; reports of others do not matter."""
        return self.state.worker is not None and self.state.worker.worker_id in self._ended

    @property
    def _interrupted(self) -> bool:
        return bool(self.shutdown) or self.lost

    def _raise_interruption(self) -> None:
        if self.shutdown:
            raise StartFailed(errors.Draining.code, errors.Draining.title(), retryable=True)
        if self.lost:
            raise Gone("the worker ended")

    async def unless_interrupted(self, work: Awaitable[T]) -> T:
        """The result of `work`; raises `StartFailed` on a shutdown, `Gone` when the worker ends."""
        task = asyncio.ensure_future(work)
        await workflow.wait_condition(lambda: task.done() or self._interrupted)
        if not task.done():
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            task.cancel()
            self._raise_interruption()
        return await task

    async def pause(self, seconds: float, summary: str) -> None:
        """Waits; raises as `unless_interrupted` does."""
        try:
            await workflow.wait_condition(lambda: self._interrupted, timeout=seconds, timeout_summary=summary)
        except TimeoutError:
            return
        self._raise_interruption()

    # --- callers who wait -------------------------------------------------------------------------------

    def answer(self) -> m.ActiveWorker:
        state = self.state
        assert state.worker is not None  # noqa: S101 — Active has a worker
        return m.ActiveWorker(
            worker=state.worker,
            state=str(state.state),
            claimed_at=state.claimed_at,
            connected_at=state.connected_at,
        )

    def start_succeeded(self) -> None:
        if self.start:
            self.start.succeed(self.answer())
        self.start = None

    def start_failed(self, failure: Failure) -> None:
        if self.start:
            self.start.fail(failure)
        self.start = None

    # --- the end of a worker ----------------------------------------------------------------------------

    async def confirm_stop(self, reason: str, *, grace: float) -> int:
        """Returns the number of orders still queued, when the launcher has confirmed the end.

        It asks until it knows: without that, no other worker may connect (one-owner).
        """
        state, pause = self.state, 1.0
        if state.worker is None and not state.claim_id:
            return 0
        unknown = m.WorkerRef(worker_id="", task_id="", epoch=0, claim_id=state.claim_id, pool=state.pool)
        request = m.StopWorker(
            user_id=state.user_id, worker=state.worker or unknown, reason=reason, grace=grace
        )
        while True:
            try:
                stopped = await calls.stop_worker(request)
                break
            except FailureError as error:
                why = f"the end of the worker is not confirmed: {cause(error)}"
                self.start_failed(Failure(code=errors.WorkerUnavailable.code, detail=why, retryable=True))
                self.state = self.state.postponed(self.now() + pause)
                self.show()
                await workflow.sleep(pause, summary="until the launcher is asked again")
                pause = min(pause * 2, STOP_PAUSE_MAX)
        self.state = self.state.stopped()
        return stopped.waiting

    # --- telling ----------------------------------------------------------------------------------------

    def show(self) -> None:
        """Current details and search attributes, as far as they changed."""
        if self.state == self._shown:
            return
        changes = attribute_changes(self.state, self._shown)
        if changes:
            workflow.upsert_search_attributes(changes)
        workflow.set_current_details(details(self.state))
        self._shown = self.state

    def tell_pool(self, worker: m.WorkerRef) -> None:
        """Signals the pool that a worker left it; the user waits for nothing of this."""
        task = asyncio.create_task(self._tell_pool(worker))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell_pool(self, worker: m.WorkerRef) -> None:
        pool = workflow.get_external_workflow_handle(names.worker_pool_id(worker.pool))
        try:
            await pool.signal("claimed", m.Claimed(worker_id=worker.worker_id))
        except FailureError as error:  # no such workflow: the pool's periodic check will see the gap
            workflow.logger.warning("pool_not_told", extra={"reason": str(error)})

    @property
    def settled(self) -> bool:
        """Nothing is under way that a closing run would cut off."""
        return not self._telling
