"""Holds what the steps of a user's workflow share: the state, interruptions, a worker's stop.

`ClaimWorkerGone`, `WorkOutdated` and `StartFailed` end a step and never leave the workflow.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Generic, NoReturn, TypeVar, cast

from temporalio import workflow
from temporalio.exceptions import ApplicationError, FailureError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from worker_runtime.protocol import errors
    from worker_runtime.protocol.launch import ExitCode
    from worker_runtime.protocol.messages import Failure
    from workflows import names
    from workflows.entity import continue_as_new, copied_fields, wait_until
    from workflows.user_worker.events import apply_event
    from workflows.user_worker.messages import (
        ActiveWorker,
        ReloadResult,
        StopWorker,
        UserWorkerInput,
        WorkerEventSignal,
        WorkerRef,
        WorkerState,
        WorkerUnmarked,
    )
    from workflows.user_worker.state import UserWorkerState
    from workflows.user_worker.visibility import attribute_changes, details
    from workflows.worker_pool.messages import WorkerLeft

from workflows import calls
from workflows.user_worker.visibility import Timeline

#: Longest pause, in seconds, between two tries to have a worker's end confirmed.
MAX_STOP_RETRY_INTERVAL_S = 60.0
#: Ended workers and early events that are remembered, because they may come before the claim's
#: answer says which worker it got.
MAX_EARLY_EVENTS = 16

T = TypeVar("T")


class ClaimWorkerGone(Exception):
    """This claim's worker is dead, lost or unusable: confirm its end, then take a new claim id."""


class WorkOutdated(Exception):
    """The step waits for something that will not come any more: begin it again."""


class StartFailed(Exception):
    """The start failed; its callers get the reason."""

    def __init__(self, code: str, detail: str, *, retryable: bool) -> None:
        super().__init__(detail)
        self.failure = Failure(
            code=code or errors.BerthError.code, detail=detail, retryable=retryable
        )


class SharedFuture(Generic[T]):
    """A result that several callers wait for."""

    def __init__(self) -> None:
        self._outcome: T | Failure | None = None

    def settle(self, outcome: T | Failure) -> None:
        self._outcome = outcome

    async def result(self) -> T:
        """Waits; raises `ApplicationError` of the failure's code."""
        await workflow.wait_condition(lambda: self._outcome is not None)
        failure = self._outcome
        if isinstance(failure, Failure):
            raise ApplicationError(
                failure.detail, type=failure.code, non_retryable=not failure.retryable
            )
        return cast("T", self._outcome)


class WorkerLifecycle:
    """Holds one user's worker as the workflow knows it, and what callers asked for."""

    def __init__(
        self, state: UserWorkerState, timeline: Timeline, stop: Mapping[str, Any] | None = None
    ) -> None:
        self._state = state
        self.timeline = timeline
        #: The stop that the previous run had begun and this one has to continue; None if there is
        #: none.
        self.stop = stop
        #: Somebody asked for a new run.
        self.renew = False
        #: Reason of a shutdown that was asked for and has not begun; empty: none.
        self.shutdown: str = (stop or {}).get("shutdown", "")
        #: The start that callers of `ensure_active` share.
        self.start: SharedFuture[ActiveWorker] | None = None
        #: The reload of credentials that was asked for and has not begun, and who asked first.
        self.reload: SharedFuture[ReloadResult] | None = None
        self.reload_cause = ""
        #: The worker has to be checked.
        self.suspect = False
        #: True if what this run knows of its worker may be old: it was adopted, or the run was
        #: reset to an earlier event. It is checked at once, and a start that waits is answered
        #: after the check.
        self.unsure = False
        #: The report of the watcher when it saw the mark expire; None: it did not.
        self.unmarked: WorkerUnmarked | None = None
        #: Why the worker cannot get its broker back, as it reported; empty: it did not.
        self.given_up = ""
        #: Times in a row that nobody could give a fresh session its credentials.
        self.restore_failures = 0
        #: True if the pending stop counts as a crash, even if a shutdown is requested meanwhile.
        self._crashed: bool = (stop or {}).get("crashed", False)
        #: Workers that have ended, with their exit code; None: not known.
        self._ended: dict[str, int | None] = {}
        #: The workers in `_ended` that somebody stopped, or that ended with their host.
        self._planned: set[str] = set()
        self._early: list[WorkerEventSignal] = []
        self._shown: UserWorkerState | None = None
        self._signalling: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> UserWorkerState:
        return self._state

    @state.setter
    def state(self, state: UserWorkerState) -> None:
        """Changes the state, in this place alone, so that the timeline misses no transition."""
        self.timeline.record(self._state, state)
        self._state = state

    def now(self) -> float:
        return workflow.time()

    # --- events and ends --------------------------------------------------------------------------

    def take_event(self, event: WorkerEventSignal) -> None:
        """Applies an event, or keeps it until the claim knows which worker it got."""
        if self.state.worker is None and self.state.state == WorkerState.CLAIMED:
            self._early = [*self._early[-MAX_EARLY_EVENTS + 1 :], event]
            return
        result = apply_event(self.state, event, self.now())
        self.state = result.state
        self.suspect = self.suspect or result.check
        self.given_up = self.given_up or result.given_up
        if result.lost:
            self.worker_ended(event.worker_id, None)

    def assigned(self, worker: WorkerRef) -> None:
        """Records the worker that the claim found. It may have sent events already."""
        self.state = self.state.assigned(worker)
        self._take_early_events()

    def adopted(self, worker: WorkerRef, crashes: Sequence[float]) -> None:
        """Records a worker that the user has already, though this run did not claim it."""
        self.state = self.state.adopted(worker, crashes, self.now())
        self.unsure = True
        self._take_early_events()

    def was_reset(self, seed: int) -> None:
        """Records that somebody reset the run to an earlier event."""
        self.unsure = True
        self.suspect = self.suspect or self.state.serving
        self.timeline.branch(seed)

    def _take_early_events(self) -> None:
        early, self._early = self._early, []
        for event in early:
            self.take_event(event)

    def worker_ended(self, worker_id: str, exit_code: int | None, *, planned: bool = False) -> None:
        """Notes that a worker has ended. `planned`: somebody stopped it, or it ended with its
        host. If the worker counted as missing, its end is now known as planned or not."""
        self._ended[worker_id] = exit_code
        while len(self._ended) > MAX_EARLY_EVENTS:
            del self._ended[next(iter(self._ended))]
        self._planned = (
            {*self._planned, worker_id} & self._ended.keys() if planned else self._planned
        )
        waiting = self.state.unreported
        if worker_id not in waiting:
            return
        # Runs without the patch reported only one case: the planned end of the latest of these.
        last = planned and worker_id == max(waiting, key=lambda worker: waiting[worker])
        if last or workflow.patched("each report of a missing worker counts"):
            self.state = self.state.reported(worker_id, planned=planned)

    # --- interruptions ----------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """The launcher reported the end of the present worker."""
        return self.state.worker is not None and self.state.worker.worker_id in self._ended

    @property
    def ended_as_planned(self) -> bool:
        """The present worker ended because somebody asked for it, or with its host. That is not a
        crash."""
        return self.state.worker is not None and self.state.worker.worker_id in self._planned

    @property
    def ending(self) -> bool:
        """The present worker has ended or is about to, so callers must not get it."""
        return self.lost or bool(self.given_up)

    @property
    def broker_failed(self) -> str:
        """Why the present worker ends or ended without its broker; empty: it does not."""
        worker = self.state.worker
        if (
            not self.given_up
            and worker
            and self._ended.get(worker.worker_id) == ExitCode.BROKER_FAILED
        ):
            return f"{errors.BrokerError.code}: the worker could not get its broker back"
        return self.given_up

    @property
    def interrupted(self) -> bool:
        return bool(self.shutdown) or self.ending

    def _raise_interruption(self) -> None:
        if self.shutdown:
            raise StartFailed(errors.Draining.code, errors.Draining.title(), retryable=True)
        if self.lost:
            raise ClaimWorkerGone("the worker ended")
        if self.given_up:
            raise ClaimWorkerGone(self.given_up)

    async def unless_interrupted(
        self, work: Awaitable[T], outdated: Callable[[], bool] = lambda: False
    ) -> T:
        """Returns the result of `work`; raises `StartFailed`, `ClaimWorkerGone`, or
        `WorkOutdated`."""
        task = asyncio.ensure_future(work)
        await workflow.wait_condition(lambda: task.done() or self.interrupted or outdated())
        if not task.done():
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            task.cancel()
            self._raise_interruption()
            raise WorkOutdated
        return await task

    async def pause(self, seconds: float, summary: str) -> None:
        """Waits; raises as `unless_interrupted` does."""
        workflow.set_current_details(details(self.state))
        if await wait_until(lambda: self.interrupted, seconds, summary):
            self._raise_interruption()

    def note_cancellation(self, error: FailureError) -> None:
        """Notes a cancellation of the workflow, which shows as the failure of the activity that it
        awaits."""
        if is_cancelled_exception(error):
            self.shutdown = self.shutdown or "cancelled"

    # --- callers who wait -------------------------------------------------------------------------

    def answer(self) -> ActiveWorker:
        shown = copied_fields(self.state, ActiveWorker)
        return ActiveWorker(**shown | {"state": str(self.state.state)})

    def settle_start(self, outcome: ActiveWorker | Failure) -> None:
        """Answers those who wait for the start."""
        if self.start:
            self.start.settle(outcome)
        self.start = None

    # --- the end of a worker ----------------------------------------------------------------------

    async def confirm_stop(
        self, reason: str, *, grace: float, crashed: bool = False, reopen: bool = False
    ) -> int:
        """Waits until the worker's end is certain: confirmed by the launcher, or fenced long
        enough. Returns more than 0 if orders or jobs are still queued.

        Asks again until the end is certain, in later runs if necessary: before that, no other
        worker may connect (one-owner). With `crashed`, the end counts for the backoff of later
        starts.
        """
        state, pause = self.state, 1.0
        self._crashed = crashed = crashed or self._crashed
        if state.worker is None and not state.claim_id:
            return 0
        unknown = WorkerRef(
            worker_id="", task_id="", epoch=0, claim_id=state.claim_id, pool=state.pool
        )
        request = StopWorker(
            user_id=state.user_id,
            worker=state.worker or unknown,
            reason=reason,
            grace=grace,
            crashed=crashed,
        )
        while True:
            try:
                stopped = await calls.stop_worker(request)
                break
            except FailureError as error:
                self.note_cancellation(error)
                why = f"the end of the worker is not confirmed: {calls.cause(error)}"
                self.settle_start(
                    Failure(code=errors.WorkerUnavailable.code, detail=why, retryable=True)
                )
                self.state = self.state.with_note(why).postponed(self.now() + pause)
                self.show()
                options = {"crashed": crashed, "reopen": reopen, "shutdown": self.shutdown}
                await self.renew_within_step(why, options)
                await workflow.sleep(pause, summary="until the launcher is asked again")
                pause = min(pause * 2, MAX_STOP_RETRY_INTERVAL_S)
        self.state = self.state.stopped().with_note("")
        self.suspect, self.unmarked, self.given_up, self._crashed = False, None, "", False
        return stopped.waiting

    # --- the next run -----------------------------------------------------------------------------

    @property
    def renewal_due(self) -> bool:
        """Returns True if continue-as-new is due and cuts off no signal."""
        return self.settled and (self.renew or workflow.info().is_continue_as_new_suggested())

    async def renew_within_step(self, why: str, stop: Mapping[str, Any] | None = None) -> None:
        """Continues as new if that is due: an outage of days would fill the history.

        Callers that wait for a reload get the reason `why` first. The next run continues `stop`.
        """
        if not self.renewal_due or not workflow.patched("a step goes on in the next run"):
            return
        if self.reload:
            code = errors.WorkerUnavailable.code
            self.reload.settle(ReloadResult(ok=False, failure_code=code, failure_detail=why))
            self.reload = None
        await workflow.wait_condition(lambda: True)  # so that callers are answered
        if workflow.all_handlers_finished():
            self.continue_as_new(stop)

    def continue_as_new(self, stop: Mapping[str, Any] | None = None) -> NoReturn:
        state = self.state
        carried = {**asdict(state), "timeline": self.timeline.carried(), "stop": stop}
        user, pool, settings = state.user_id, state.pool, state.settings
        continue_as_new(
            UserWorkerInput(user_id=user, pool=pool, settings=settings, carried=carried)
        )

    # --- showing and signalling -------------------------------------------------------------------

    def show(self) -> None:
        """Updates current details, search attributes and timeline as far as they changed."""
        self.timeline.flush()
        if self.state == self._shown:
            return
        changes = attribute_changes(self.state, self._shown)
        if changes:
            workflow.upsert_search_attributes(changes)
        workflow.set_current_details(details(self.state))
        self._shown = self.state

    def signal_pool(self, worker: WorkerRef) -> None:
        """Signals the pool in the background that a worker left it."""
        task = asyncio.create_task(self._signal_pool(worker))
        self._signalling.add(task)
        task.add_done_callback(self._signalling.discard)

    async def _signal_pool(self, worker: WorkerRef) -> None:
        pool = workflow.get_external_workflow_handle(names.worker_pool_id(worker.pool))
        try:
            await pool.signal("claimed", WorkerLeft(worker_id=worker.worker_id))
        except FailureError as error:
            # No such workflow: the pool's periodic check will see the gap.
            workflow.logger.warning("pool_not_signalled", extra={"reason": str(error)})

    @property
    def settled(self) -> bool:
        """Returns True if no signal is under way that a closing run would cut off."""
        return not self._signalling
