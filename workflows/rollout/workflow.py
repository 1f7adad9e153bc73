"""Runs a rollout of a pool, `rollout-{pool}`: moves free workers and users to a version, or back.

Every few seconds it checks the pool and does what `state.py` says. It gives the pool the
version and a surge; the pool launches, and this workflow ends free workers of other
versions as new ones become ready. Users move when they are quiet, by their own workflow. A
pool has one rollout at a time.
"""

import contextlib
from dataclasses import asdict, replace
from typing import Any

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from workflows import names
    from workflows.entity import (
        carried_state,
        continue_as_new,
        raise_cancellation,
        read_payload,
        wait_until,
    )
    from workflows.rollout.messages import (
        AbortRollout,
        AskToMove,
        CheckRelease,
        RetireWorkers,
        RolloutInput,
        RolloutPhase,
        RolloutView,
        TellRollout,
    )
    from workflows.rollout.state import RolloutState, RolloutStep

from workflows import calls

#: Characters of a reason that somebody gives.
MAX_REASON_LENGTH = 200


@workflow.defn(name=names.ROLLOUT)
class RolloutWorkflow:
    @workflow.init
    def __init__(self, given: RolloutInput) -> None:
        self._given = given
        if given.carried is None:
            self._state = RolloutState.begun(given, workflow.time())
        else:
            self._state = carried_state(RolloutState, given.carried)
        #: Why an operator aborts it; empty: nobody does.
        self._abort = ""
        self._renew = False
        #: Why the last round failed; empty: it did not.
        self._check_failed = ""

    @workflow.run
    async def run(self, given: RolloutInput) -> RolloutView:
        workflow.upsert_search_attributes([names.SA_POOL.value_set(given.pool)])
        if given.carried is None:
            await self._record("begins", given.reason)
        while not self._state.ended:
            before = self._state
            await self._round()
            self._show()
            if self._state.going_back and not before.going_back:
                workflow.logger.error(
                    "rollout_rolled_back", extra={"pool": given.pool, "reason": self._state.reason}
                )
                await self._record("is rolled back", self._state.reason)
            # An abort that came meanwhile is in no carried state: the next round begins with it.
            elif (self._renew or workflow.info().is_continue_as_new_suggested()) and not (
                self._abort and workflow.patched("an abort comes first")
            ):
                continue_as_new(replace(self._given, carried=asdict(self._state)))
            elif self._state.phase == before.phase:
                await self._wait()
        await self._record(f"ends: {self._state.phase}", self._state.reason)
        return self._state.view()

    # --- signals, query ---------------------------------------------------------------------------

    @workflow.signal(name="abort")
    def abort(self, *payload: Any) -> None:
        """Carries an `AbortRollout`: what the pool had before is put back."""
        request = read_payload("abort", payload, AbortRollout)
        if request is not None:
            self._abort = request.reason[:MAX_REASON_LENGTH] or "an operator aborted it"

    @workflow.signal(name="renew")
    def renew(self, *payload: Any) -> None:
        """Continues in a new run, after a release of the orchestrator."""
        self._renew = True

    @workflow.query(name="view")
    def view(self) -> RolloutView:
        view = self._state.view()
        return replace(view, held=self._check_failed) if self._check_failed else view

    # --- rounds -----------------------------------------------------------------------------------

    async def _round(self) -> None:
        if self._abort:
            self._state, self._abort = self._state.rolled_back(self._abort), ""
        state = self._state
        request = CheckRelease(
            pool=state.pool,
            release=state.target,
            surge=state.surge,
            change=state.known,
            canary=state.release if state.known else None,
            before=state.before if state.known else None,
            since=state.began_at,
            condemned=state.condemned,
        )
        try:
            seen = await calls.check_release(request)
            self._state, step = state.after_check(seen, self._given)
            self._check_failed = ""
            await self._apply(step)
        except FailureError as error:  # nothing is known: nothing is changed
            raise_cancellation(error)
            self._check_failed = calls.cause(error)

    async def _apply(self, step: RolloutStep) -> None:
        state = self._state
        if step.retire:
            count = await calls.retire_workers(
                RetireWorkers(pool=state.pool, version=state.target.version, count=step.retire)
            )
            self._state = replace(self._state, retired=self._state.retired + count)
        if step.move:
            asked = await calls.ask_to_move(
                AskToMove(
                    pool=state.pool,
                    version=state.target.version,
                    deadline=state.deadline,
                    quiet=self._given.quiet,
                )
            )
            self._state = replace(self._state, asked=asked)

    async def _wait(self) -> None:
        moving = self._state.phase in (
            RolloutPhase.MOVING,
            RolloutPhase.MOVING_BACK,
        )
        pause = self._given.moving_pause if moving else self._given.pause
        await wait_until(lambda: bool(self._abort) or self._renew, pause, "until the next round")

    # --- audit trail and current details ----------------------------------------------------------

    async def _record(self, event: str, reason: str) -> None:
        request = TellRollout(
            pool=self._state.pool,
            rollout=workflow.info().first_execution_run_id,
            event=event,
            release=self._state.target,
            actor=self._given.actor,
            reason=reason,
        )
        with contextlib.suppress(FailureError):  # after an hour; the history holds it
            await calls.tell_rollout(request)

    def _show(self) -> None:
        view = self.view()
        text = (
            f"### {view.phase} · version {view.release.version or 'of the settings'}\n\n"
            f"{view.new} of {view.wanted} free workers are new, {view.old} of other versions are "
            f"left; {view.users} users are on other versions"
        )
        if view.reason:
            text += f"\n\n**Rolled back**: {view.reason}"
        if view.held:
            text += f"\n\n**Waits**: {view.held}"
        workflow.set_current_details(text)
