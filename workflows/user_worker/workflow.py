"""The workflow of one user's worker, `user-worker-{user_id}`: the only writer of that user's
lifecycle.

Handlers only note what is asked for; `run` does one step after the other. `state.py` has the table
of what may follow a state, and every state's deadline.

| state | the run waits for | what ends the state |
|---|---|---|
| PoolIdle | `ensure_active`, or a worker to adopt | `_begin`; `_drain` at the deadline |
| Claimed | `claim_worker`, then `launch_for_claim` if the pool is empty | Connecting, or Failed |
| Connecting | `await_connected`, then `connect_again` if the login failed | Active, or Failed |
| Failed | a pause; `stop_worker` of the old worker | next try, `_park`, or `_drain` to give up |
| Active | an event, a signal, or the deadline | `_apply` a decision; an event; `_drain` |
| Reconnecting | the event `connected`, or credentials | as Active; `restore_credentials` |
| IdleTimeout | nothing | `_drain`, in the same step |
| Draining | `stop_worker` | `_end`: Terminated, or PoolIdle if another worker is needed |
| Parked | the signal `resume` | `_leave_parked`: PoolIdle; `_drain` at the deadline |
| Terminated | callers' answers, and the rows of the timeline | `_may_close`: the run ends |

The steps of Claimed, Connecting and Failed are in `startup.py`, those of a worker in service in
`supervision.py`. A shutdown ends every state with `_drain`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from worker_runtime.protocol import errors
    from worker_runtime.protocol.messages import Failure
    from workflows import names
    from workflows.entity import carried_state, is_empty_payload, read_payload, wait_until
    from workflows.user_worker.messages import (
        WAS_GONE,
        ActiveWorker,
        EnsureActive,
        Examine,
        MoveWhenQuiet,
        ReloadResult,
        ShutdownRequest,
        UserWorkerInput,
        UserWorkerView,
        WorkerEventSignal,
        WorkerLostSignal,
        WorkerState,
        WorkerUnmarked,
    )
    from workflows.user_worker.state import UserWorkerState

from workflows.user_worker import supervision
from workflows.user_worker.lifecycle import SharedFuture, StartFailed, WorkerLifecycle
from workflows.user_worker.startup import CrashedTooOften, NothingToAdopt, start_worker
from workflows.user_worker.visibility import Timeline

#: What `run` does next: one transition, or one check, of the lifecycle.
Step = Callable[[], Coroutine[Any, Any, None]]

#: Characters of a reason that somebody gives.
MAX_REASON_LENGTH = 200
#: Why a worker ends that a rollout replaces: its user gets another one at once.
MOVE_REASON = "moves to another version"


@workflow.defn(name=names.USER_WORKER)
class UserWorkerWorkflow:
    @workflow.init
    def __init__(self, given: UserWorkerInput) -> None:
        if given.carried is None:
            fresh = UserWorkerState(user_id=given.user_id, pool=given.pool, settings=given.settings)
            self._life = WorkerLifecycle(fresh.opened(workflow.time()), Timeline(given.user_id))
        else:
            carried = carried_state(UserWorkerState, given.carried)
            timeline = Timeline(given.user_id, given.carried.get("timeline"))
            self._life = WorkerLifecycle(carried, timeline, given.carried.get("stop"))
        self._resume = False
        #: The run was started anew, and has not looked yet whether the user has a worker.
        self._adopt = given.adopt and given.carried is None
        workflow.register_random_seed_callback(self._reset)

    def _reset(self, seed: int) -> None:
        """Handles a reset of the run to an earlier event. What the run knows may be outdated, so it
        asks PostgreSQL first."""
        self._life.was_reset(seed)
        self._adopt = self._life.state.state == WorkerState.POOL_IDLE

    @workflow.run
    async def run(self, given: UserWorkerInput) -> None:
        life = self._life
        while not life.state.ended:
            try:
                if self._next_step(timed=False) is None:
                    life.show()
                    await self._sleep()
                if step := self._next_step(timed=True):
                    await step()
            except asyncio.CancelledError:
                # `temporal workflow cancel`: the worker must not be left alone.
                life.shutdown = "cancelled"
        life.show()
        while not self._may_close():
            with contextlib.suppress(asyncio.CancelledError):  # it is ending already
                await workflow.wait_condition(self._may_close)

    def _may_close(self) -> bool:
        """Returns True if nobody waits for an answer and the timeline is written, or was given up
        after an hour."""
        return (
            workflow.all_handlers_finished() and self._life.settled and self._life.timeline.settled
        )

    # --- updates, signals, query ------------------------------------------------------------------

    @workflow.update(name="ensure_active")
    async def ensure_active(self, request: EnsureActive) -> ActiveWorker:
        """Returns when the worker is Active; callers share one start. Fails with the reason's
        code."""
        life = self._life
        life.state = life.state.stays(request.stay_until, life.now())
        if life.state.serving and not life.ending:
            if not request.mark_missing:
                return life.answer()
            life.suspect = True
        life.start = life.start or SharedFuture()
        return await life.start.result()

    @ensure_active.validator
    def _may_ensure_active(self, request: EnsureActive) -> None:
        state = self._life.state
        if state.draining or self._life.shutdown:
            raise ApplicationError(errors.Draining.title(), type=errors.Draining.code)
        if state.state == WorkerState.PARKED and not self._resume:
            raise ApplicationError(
                f"parked: {state.reason}; the signal `resume` lets it start again",
                type=errors.Parked.code,
                non_retryable=True,
            )

    @workflow.update(name="reload_credentials_now")
    async def reload_credentials_now(self) -> ReloadResult:
        """Reloads the credentials like the signal `reload_credentials`, but returns the result."""
        if self._life.state.ended:  # nobody would serve it any more
            return ReloadResult(ok=True, failure_detail="no worker: the next one loads them")
        return await self._want_reload("update").result()

    def _want_reload(self, cause: str) -> SharedFuture[ReloadResult]:
        life = self._life
        if life.reload is None:
            life.reload, life.reload_cause = SharedFuture(), cause
        return life.reload

    @workflow.signal(name="reload_credentials")
    def reload_credentials(self, *payload: Any) -> None:
        if is_empty_payload("reload_credentials", payload):
            self._want_reload("signal")

    @workflow.signal(name="shutdown")
    def shutdown(self, *payload: Any) -> None:
        """Carries a `ShutdownRequest`, or nothing."""
        given = payload not in ((), (None,))
        request = read_payload("shutdown", payload, ShutdownRequest) if given else ShutdownRequest()
        if request is not None:
            self._life.shutdown = request.reason[:MAX_REASON_LENGTH] or "requested"

    @workflow.signal(name="resume")
    def resume(self, *payload: Any) -> None:
        """Lets a parked user start again."""
        if is_empty_payload("resume", payload):
            self._resume = self._life.state.state == WorkerState.PARKED

    @workflow.signal(name="renew")
    def renew(self, *payload: Any) -> None:
        """Continues in a new run with the same worker: after a release, to shorten the history."""
        if is_empty_payload("renew", payload):
            self._life.renew = True

    @workflow.signal(name="worker_lost")
    def worker_lost(self, *payload: Any) -> None:
        """Carries a `WorkerLostSignal`: the launcher saw a worker end, perhaps an earlier one."""
        lost = read_payload("worker_lost", payload, WorkerLostSignal)
        if lost is not None:
            self._life.worker_ended(lost.worker_id, lost.exit_code, planned=lost.planned)

    @workflow.signal(name="worker_unmarked")
    def worker_unmarked(self, *payload: Any) -> None:
        """Carries a `WorkerUnmarked`: the watcher saw a worker's mark expire."""
        unmarked = read_payload("worker_unmarked", payload, WorkerUnmarked)
        if unmarked is not None and self._serves(unmarked.worker_id, unmarked.epoch):
            self._life.unmarked = unmarked

    def _serves(self, worker_id: str, epoch: int) -> bool:
        """Returns True if this worker is the user's present one and in service."""
        state = self._life.state
        worker = state.worker if state.serving else None
        return worker is not None and (worker.worker_id, worker.epoch) == (worker_id, epoch)

    @workflow.signal(name="move_when_quiet")
    def move_when_quiet(self, *payload: Any) -> None:
        """Carries a `MoveWhenQuiet`: a rollout wants the worker replaced by one of another
        version."""
        asked, life = read_payload("move_when_quiet", payload, MoveWhenQuiet), self._life
        worker = life.state.worker
        if asked and worker and life.state.serving and worker.worker_id == asked.worker_id:
            life.state = life.state.to_move(asked.quiet, asked.deadline, life.now())

    @workflow.signal(name="examine")
    def examine(self, *payload: Any) -> None:
        """Carries an `Examine`: maintenance found an anomaly of a worker."""
        asked = read_payload("examine", payload, Examine)
        if asked is not None and self._serves(asked.worker_id, asked.epoch):
            self._life.suspect = True

    @workflow.signal(name="worker_event")
    def worker_event(self, *payload: Any) -> None:
        """Carries a `WorkerEventSignal`: an event from a worker's stream."""
        event = read_payload("worker_event", payload, WorkerEventSignal)
        if event is not None:
            self._life.take_event(event)

    @workflow.query(name="view")
    def view(self) -> UserWorkerView:
        return self._life.state.view()

    # --- one step after the other -----------------------------------------------------------------

    def _next_step(self, *, timed: bool) -> Step | None:
        """Returns the most urgent step that is due; None if none is.

        With `timed`, steps that are due because a time has come count, too. They are left out
        while the run sleeps: its timer alone wakes it for them, so a replay sees the same timers.
        """
        life, state = self._life, self._life.state
        if life.stop:
            return self._continue_stop
        if life.shutdown:
            return self._shut_down
        if state.serving and (step := self._next_step_in_service(timed=timed)):
            return step
        if state.state == WorkerState.PARKED and self._resume:
            return self._leave_parked
        if state.state == WorkerState.POOL_IDLE and (life.start or self._adopt):
            return self._begin
        if life.reload:
            return partial(supervision.serve_reload, life, life.reload)
        if self._may_renew():
            return self._renew
        if timed and state.deadline is not None and life.now() >= state.deadline:
            return self._meet_deadline
        return None

    def _next_step_in_service(self, *, timed: bool) -> Step | None:
        """Returns what a worker in service needs most urgently; None if it needs nothing."""
        life, state = self._life, self._life.state
        if life.broker_failed:
            return partial(self._apply, supervision.WorkerDecision(give_up=life.broker_failed))
        if life.lost:
            return partial(self._apply, supervision.WorkerDecision(replace="the worker ended"))
        if life.suspect or life.unmarked:
            return partial(self._check, supervision.check_suspect)
        if state.needs_credentials:
            return partial(self._check, supervision.restore_credentials)
        if timed and 0.0 < state.move_at <= life.now():
            return partial(self._check, supervision.check_quiet)
        return None

    def _may_renew(self) -> bool:
        """Returns True if continue-as-new is due and nothing is under way."""
        life = self._life
        settled = life.state.serving or life.state.state == WorkerState.PARKED
        return settled and life.renewal_due and workflow.all_handlers_finished()

    async def _sleep(self) -> None:
        """Waits until a step is due, the state changes, or the next time limit has come."""
        before = self._life.state
        until = before.deadline
        if before.serving and before.move_at and until is not None:
            until = min(until, before.move_at)
        remaining = None if until is None else max(until - self._life.now(), 0.0)
        await wait_until(
            lambda: self._next_step(timed=False) is not None or self._life.state is not before,
            remaining,
            f"deadline of {before.state}",
        )

    async def _shut_down(self) -> None:
        await self._drain(self._life.shutdown, reopen=self._life.state.serving)

    async def _leave_parked(self) -> None:
        self._resume = False
        self._life.state = self._life.state.resumed(self._life.now())

    async def _renew(self) -> None:
        self._life.continue_as_new()

    async def _meet_deadline(self) -> None:
        state = self._life.state
        if state.serving:
            await self._check(supervision.check_deadline)
        else:
            await self._drain(f"nobody came while {state.state}", reopen=False)

    async def _check(
        self, check: Callable[[WorkerLifecycle], Awaitable[supervision.WorkerDecision]]
    ) -> None:
        """Checks the worker in service, and does what the check decides."""
        await self._apply(await check(self._life))

    async def _apply(self, decision: supervision.WorkerDecision) -> None:
        life = self._life
        if decision.replace:
            await self._replace(decision.replace, outage=decision.outage, over=decision.over)
        elif decision.give_up:
            await self._give_up(decision.give_up)
        elif decision.idle:
            life.state = life.state.idle(life.now())
            await self._drain("idle", reopen=True)
        elif decision.move:
            await self._drain(MOVE_REASON, reopen=True)

    async def _begin(self) -> None:
        """Starts a worker; when that fails for good, the run ends."""
        life = self._life
        adopt, self._adopt = self._adopt, False
        try:
            await start_worker(life, adopt_only=adopt)
        except CrashedTooOften:
            self._park()
        except NothingToAdopt:
            await self._drain("the user has no worker", reopen=True)
        except StartFailed as failed:
            failure = failed.failure
            life.state = life.state.failed(f"{failure.code}: {failure.detail}", life.now())
            life.settle_start(failure)
            await self._drain(life.shutdown or failure.code, reopen=False)
        else:
            life.suspect = life.unsure
            if not life.unsure:
                life.settle_start(life.answer())

    async def _replace(self, reason: str, *, outage: bool, over: bool = False) -> None:
        """Confirms the end of a worker that died in service (one-owner), then starts another one.

        With a planned stop, or `over` (an earlier run handled the end), no crash is counted. A
        crash that the infrastructure caused (`outage`) delays the next start, but never parks the
        user.
        """
        life = self._life
        planned = life.ended_as_planned or over
        if planned:
            life.state = life.state.failed(reason, life.now())
        else:
            missing = outage and reason == WAS_GONE and life.state.worker is not None
            life.state = life.state.crashed(
                reason,
                life.now(),
                outage=outage,
                unreported=life.state.worker.worker_id if missing and life.state.worker else "",
            )
        life.show()
        await life.confirm_stop(reason, grace=0.0, crashed=not (planned or outage))
        await self._begin_again(0.0 if planned else life.state.crash_backoff())

    async def _begin_again(self, backoff: float) -> None:
        life = self._life
        if life.state.crashes_too_often:
            self._park()
            return
        if backoff > 0.0:
            # Only a shutdown interrupts this; the next step handles it.
            with contextlib.suppress(StartFailed):
                await life.pause(backoff, "until the crashed worker is replaced")
        if not life.shutdown:
            await self._begin()

    async def _continue_stop(self) -> None:
        """Continues the stop that the previous run had begun."""
        life = self._life
        stop, life.stop = life.stop or {}, None
        if life.state.state == WorkerState.FAILED:
            await life.confirm_stop(life.state.reason, grace=0.0)
            await self._begin_again(life.state.retry_at - life.now())
        else:
            await self._end(life.state.reason, reopen=bool(stop.get("reopen")))

    def _park(self) -> None:
        life = self._life
        life.state = life.state.parked(life.now())
        life.settle_start(Failure(code=errors.Parked.code, detail=life.state.reason))

    async def _give_up(self, reason: str) -> None:
        """Ends the worker and the run, because the broker refuses. The next order starts a new
        run."""
        life = self._life
        code, _, detail = reason.partition(": ")
        error = errors.from_code(code, detail)
        life.settle_start(Failure(code=code, detail=detail or reason, retryable=error.retryable))
        life.state = life.state.gave_up(reason, life.now())
        await self._end(reason, crashed=True)

    async def _drain(self, reason: str, *, reopen: bool) -> None:
        """Ends the worker. Ends the run too, unless `reopen` and work is waiting."""
        life = self._life
        life.shutdown = ""
        life.state = life.state.drains(reason, life.now())
        life.settle_start(Failure.of(errors.Draining()))
        await self._end(reason, reopen=reopen)

    async def _end(self, reason: str, *, reopen: bool = False, crashed: bool = False) -> None:
        life = self._life
        life.show()
        grace = life.state.settings.drain_timeout
        waiting = await life.confirm_stop(reason, grace=grace, crashed=crashed, reopen=reopen)
        # Unless somebody stopped it, or disabled its user, meanwhile.
        moves = reason == MOVE_REASON and not (
            life.shutdown and workflow.patched("a shutdown ends a move")
        )
        life.shutdown = ""
        if reopen and (waiting or moves):
            life.state = life.state.reopened(
                life.now(), reason if not waiting else "work is waiting"
            )
            life.start = life.start or SharedFuture()
            return
        life.state = life.state.terminated(life.now())
        if life.reload:
            await supervision.serve_reload(life, life.reload)
