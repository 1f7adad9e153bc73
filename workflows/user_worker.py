"""The workflow of one user's worker, `user-worker-{user_id}`: the only writer of that user's lifecycle.

Handlers only note what is wanted; `run` does one thing after the other (requirement W3). What a state
means and what may follow it stands in `user_worker_state.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import NoReturn

from temporalio import workflow
from temporalio.exceptions import ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from worker_runtime.protocol import errors
    from worker_runtime.protocol.messages import Failure, WorkerEventKind
    from workflows import messages as m
    from workflows import names
    from workflows.user_worker_state import UserWorkerState

from workflows import calls
from workflows.calls import cause
from workflows.user_worker_life import Gone, Life, StartFailed, Ticket
from workflows.user_worker_start import start_worker

#: Seconds until the next look at a worker of which nothing certain is known: 6 looks an hour at the most.
LOOK_AGAIN = 600.0

S = m.WorkerState


@workflow.defn(name=names.USER_WORKER)
class UserWorkerWorkflow:
    @workflow.init
    def __init__(self, given: m.UserWorkerInput) -> None:
        if given.carried is None:
            fresh = UserWorkerState(user_id=given.user_id, pool=given.pool, settings=given.settings)
            self._life = Life(fresh.opened(workflow.time()))
        else:
            self._life = Life(UserWorkerState.from_carried(given.carried, given.settings))
        self._suspect = False
        self._resume = False
        self._renew = False
        self._reload: Ticket[m.ReloadResult] | None = None

    @workflow.run
    async def run(self, given: m.UserWorkerInput) -> None:
        life = self._life
        while not life.state.ended:
            try:
                if not self._something_to_do():
                    life.show()
                    await self._sleep()
                await self._step()
            except asyncio.CancelledError:  # `temporal workflow cancel`: the worker must not be left alone
                life.shutdown = "cancelled"
        life.show()
        await workflow.wait_condition(lambda: workflow.all_handlers_finished() and life.settled)

    # --- what others ask ------------------------------------------------------------------------------

    @workflow.update(name="ensure_active")
    async def ensure_active(self, request: m.EnsureActive) -> m.ActiveWorker:
        """Returns when the worker is Active. Callers at the same time share one start.

        Fails with an `ApplicationError` whose type is the reason's code.
        """
        life = self._life
        if life.state.serving and not life.lost:
            if not request.mark_missing:
                return life.answer()
            self._suspect = True
        life.start = life.start or Ticket()
        return await life.start.result()

    @ensure_active.validator
    def _may_ensure_active(self, request: m.EnsureActive) -> None:
        state = self._life.state
        if state.draining or self._life.shutdown:
            raise ApplicationError(errors.Draining.title(), type=errors.Draining.code)
        if state.state == S.PARKED and not self._resume:
            raise ApplicationError(
                f"parked: {state.reason}; the signal `resume` lets it start again",
                type=errors.Parked.code,
                non_retryable=True,
            )

    @workflow.update(name="reload_credentials_now")
    async def reload_credentials_now(self) -> m.ReloadResult:
        """Like the signal `reload_credentials`, and answers when the worker has done it."""
        if self._life.state.ended:  # nobody would serve the ticket any more
            return m.ReloadResult(ok=True, failure_detail="no worker: the next one loads them")
        self._reload = self._reload or Ticket()
        return await self._reload.result()

    @workflow.signal(name="reload_credentials")
    def reload_credentials(self) -> None:
        self._reload = self._reload or Ticket()

    @workflow.signal(name="shutdown")
    def shutdown(self, request: m.ShutdownRequest | None = None) -> None:
        self._life.shutdown = (request or m.ShutdownRequest()).reason or "requested"

    @workflow.signal(name="resume")
    def resume(self) -> None:
        """Lets a parked user start again."""
        self._resume = self._life.state.state == S.PARKED

    @workflow.signal(name="renew")
    def renew(self) -> None:
        """Goes on in a new run with the same worker: after a release, or to shorten the history."""
        self._renew = True

    @workflow.signal(name="worker_lost")
    def worker_lost(self, lost: m.WorkerLost) -> None:
        """The launcher saw a worker end; whether it is this user's is decided where the worker is known."""
        self._life.worker_ended(lost.worker_id)

    @workflow.signal(name="worker_event")
    def worker_event(self, event: m.WorkerEventSignal) -> None:
        life = self._life
        worker, state, now = life.state.worker, life.state, life.now()
        if worker is None or (worker.worker_id, worker.epoch) != (event.worker_id, event.epoch):
            return
        if event.sequence <= state.sequence:
            return
        life.state = state.heard(event.sequence)
        if event.kind == WorkerEventKind.RECONNECTING and state.state == S.ACTIVE:
            life.state = life.state.reconnecting(event.detail or "broker connection lost", now)
        elif event.kind == WorkerEventKind.CONNECTED and state.state == S.RECONNECTING:
            life.state = life.state.reconnected(now)
        elif event.kind == WorkerEventKind.OWNER_MISSING and state.serving:
            self._suspect = True  # the check puts the owner key back

    @workflow.query(name="view")
    def view(self) -> m.UserWorkerView:
        return self._life.state.view()

    # --- one thing after the other --------------------------------------------------------------------

    def _something_to_do(self) -> bool:
        life = self._life
        state = life.state
        return bool(
            life.shutdown
            or (state.serving and (life.lost or self._suspect))
            or (state.state == S.POOL_IDLE and life.start)
            or (state.state == S.PARKED and self._resume)
            or self._reload
            or self._may_renew()
        )

    def _may_renew(self) -> bool:
        """A quiet moment to continue as new, when that is due."""
        life = self._life
        due = self._renew or workflow.info().is_continue_as_new_suggested()
        quiet = life.state.serving or life.state.state == S.PARKED
        return due and quiet and life.settled and workflow.all_handlers_finished()

    async def _sleep(self) -> None:
        before = self._life.state
        left = None if before.deadline is None else max(before.deadline - self._life.now(), 0.0)
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self._something_to_do() or self._life.state is not before,
                timeout=left,
                timeout_summary=f"deadline of {before.state}",
            )

    async def _step(self) -> None:
        life, state = self._life, self._life.state
        if life.shutdown:
            await self._drain(life.shutdown, reopen=state.serving)
        elif state.serving and life.lost:
            await self._replace("the worker ended")
        elif state.serving and self._suspect:
            await self._check()
        elif state.state == S.PARKED and self._resume:
            self._resume = False
            life.state = state.resumed(life.now())
        elif state.state == S.POOL_IDLE and life.start:
            await self._begin()
        elif self._reload:
            await self._reload_now(self._reload)
        elif self._may_renew():
            self._continue_as_new()
        elif state.deadline is not None and life.now() >= state.deadline:
            if state.serving:
                await self._look()
            else:
                await self._drain(f"nobody came while {state.state}", reopen=False)

    async def _begin(self) -> None:
        """Starts a worker; when that fails for good, the run ends."""
        life = self._life
        try:
            await start_worker(life)
        except StartFailed as failed:
            failure = failed.failure
            life.state = life.state.failed(f"{failure.code}: {failure.detail}", life.now())
            life.start_failed(failure)
            await self._drain(life.shutdown or failure.code, reopen=False)
        else:
            self._suspect = False
            life.start_succeeded()

    async def _replace(self, reason: str) -> None:
        """A new worker for one that died in service. Its end is confirmed first (one-owner)."""
        life = self._life
        self._suspect = False
        life.state = life.state.crashed(reason, life.now())
        life.show()
        await life.confirm_stop(reason, grace=0.0)
        if life.state.crashes_too_often:
            life.state = life.state.parked(life.now())
            life.start_failed(Failure(code=errors.Parked.code, detail=life.state.reason))
            return
        backoff = life.state.crash_backoff()
        if backoff:
            # Only a shutdown cuts this short, and the next step takes care of it.
            with contextlib.suppress(StartFailed):
                await life.pause(backoff, "until the crashed worker is replaced")
        if not life.shutdown:
            await self._begin()

    async def _check(self) -> None:
        """Somebody saw no mark. A worker that runs keeps its user: only its end lets another one in."""
        health = await self._health()
        self._suspect = False
        if health is not None and health.running is False:
            await self._replace("the worker was gone")
        elif self._life.state.serving:
            self._life.start_succeeded()

    async def _look(self) -> None:
        """The deadline of a serving worker: idle long enough to end, or used since?"""
        life = self._life
        health = await self._health()
        state, now = life.state, life.now()
        last = max(state.last_activity, health.last_activity if health else 0.0)
        if health is None or (not health.marked and health.running is not False):
            life.state = state.postponed(now + LOOK_AGAIN)
        elif last + state.settings.idle_timeout <= now:
            life.state = state.idle(now)
            await self._drain("idle", reopen=True)
        elif health.running is False:
            await self._replace("the worker was gone")
        elif state.state == S.RECONNECTING:
            life.state = state.postponed(now + LOOK_AGAIN)
        else:
            life.state = state.used(last)

    async def _health(self) -> m.WorkerHealth | None:
        """None when nobody could say: then nothing is done (no-healthy-kill)."""
        state = self._life.state
        if state.worker is None:
            return None
        try:
            return await calls.check_worker(m.CheckWorker(user_id=state.user_id, worker=state.worker))
        except FailureError:
            return None

    async def _reload_now(self, ticket: Ticket[m.ReloadResult]) -> None:
        state = self._life.state
        self._reload = None
        if not state.serving or state.worker is None:
            ticket.succeed(m.ReloadResult(ok=True, failure_detail="no worker: the next one loads them"))
            return
        request = m.ReloadRequest(user_id=state.user_id, worker=state.worker, reload_id=str(workflow.uuid4()))
        try:
            result = await self._life.unless_interrupted(calls.reload_credentials(request))
        except (FailureError, Gone, StartFailed) as error:
            why = cause(error) if isinstance(error, FailureError) else str(error)
            code = errors.WorkerUnavailable.code
            result = m.ReloadResult(ok=False, failure_code=code, failure_detail=why)
        ticket.succeed(result)

    async def _drain(self, reason: str, *, reopen: bool) -> None:
        """Ends the worker, then the run; with `reopen`, orders still queued get another worker."""
        life = self._life
        life.shutdown = ""
        life.state = life.state.drains(reason, life.now())
        life.start_failed(Failure.of(errors.Draining()))
        life.show()
        waiting = await life.confirm_stop(reason, grace=life.state.settings.drain_timeout)
        life.shutdown = ""
        if reopen and waiting:
            life.state = life.state.reopened(life.now())
            life.start = life.start or Ticket()
            return
        life.state = life.state.terminated(life.now())
        if self._reload:
            await self._reload_now(self._reload)

    def _continue_as_new(self) -> NoReturn:
        state = self._life.state
        workflow.continue_as_new(
            m.UserWorkerInput(
                user_id=state.user_id, pool=state.pool, settings=state.settings, carried=state.carried()
            )
        )
