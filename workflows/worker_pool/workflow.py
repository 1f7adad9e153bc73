"""The workflow of one pool, `worker-pool-{name}`: keeps exactly the wanted number of workers ready.

It counts the workers after every claim, launch or end of a worker, when a window begins or ends,
and every `check_period`. A count leaves out the workers of launches under way, so that each is
counted once (exact-pool): missing = wanted - ready - starting - launches under way. A launch whose
outcome is unknown stays under way until it is settled under its own token.

What operators have set is kept in PostgreSQL, too. A run that was started anew, because somebody
ended the one before, begins with that, and so does one that was reset to an earlier event.
"""

import asyncio
from dataclasses import asdict, replace
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from workflows import names
    from workflows.entity import (
        carried_state,
        continue_as_new,
        copied_fields,
        raise_cancellation,
        wait_until,
    )
    from workflows.worker_pool.messages import (
        NEVER_READY,
        NOTHING_RUNS,
        POOL_CHANGED,
        CountPool,
        KeepPool,
        KeptPool,
        LaunchPoolWorker,
        PoolInput,
        PoolView,
        SetPolicy,
        SetRelease,
        SetTarget,
        StopPoolWorkers,
    )
    from workflows.worker_pool.policy import PoolPolicy, PoolPolicyInvalid, check_policy
    from workflows.worker_pool.state import (
        FAILURES_UNTIL_REPORT,
        MAX_BACKOFF_S,
        PoolState,
        pool_details,
    )

from workflows import calls

#: Most free workers that one call stops: each may take its grace of some seconds.
MAX_STOPS_PER_CALL = 50
#: Seconds that an operator's change waits until PostgreSQL has it, or until a new run knows what it
#: has.
KEEP_TIMEOUT_S = 5.0
#: The patch since which PostgreSQL keeps what operators have set.
KEEP_PATCH = "what operators set is kept in PostgreSQL"
#: Events after which the run continues as new, when no launch is under way.
MAX_EVENTS_PER_RUN = 500


@workflow.defn(name=names.WORKER_POOL)
class WorkerPoolWorkflow:
    @workflow.init
    def __init__(self, given: PoolInput) -> None:
        self._given = given
        self._state = carried_state(PoolState, given.carried)
        self._in_flight: dict[str, asyncio.Task[None]] = {}
        self._changed = True
        #: Counts in a row that failed.
        self._uncounted = 0
        self._renew = False
        self._shown = ""
        #: True if this run knows what PostgreSQL keeps: one that continues another does.
        self._known = given.carried is not None
        self._was_reset = False
        #: The settings that were last compared with the state, and the number under which
        #: PostgreSQL has them; -1: not known.
        self._compared = self._keepable()
        self._written = -1
        self._keeping: asyncio.Task[None] | None = None
        workflow.register_random_seed_callback(self._reset)
        #: Shown by the SDK's metrics, which leave out replays.
        self._wanted = workflow.metric_meter().create_gauge(
            "berth_pool_wanted", "Free workers wanted."
        )

    @workflow.run
    async def run(self, given: PoolInput) -> None:
        workflow.upsert_search_attributes([names.SA_POOL.value_set(given.pool)])
        while True:
            self._changed = False
            self._keep_changes()
            await self._until_known()
            await self._count()
            self._show()
            if self._due_to_renew():
                await workflow.wait_condition(
                    lambda: (
                        not self._in_flight
                        and self._keeping is None
                        and workflow.all_handlers_finished()
                    )
                )
                continue_as_new(replace(self._given, carried=asdict(self._state)))
            pause = self._seconds_until_count()
            await wait_until(lambda: self._changed, pause, "until the next count of the pool")

    # --- signals, updates, query
    # ---------------------------------------------------------------------- What a signal carries
    # is ignored: the pool counts by itself.

    @workflow.signal(name="claimed")
    def claimed(self, *payload: Any) -> None:
        self._changed = True

    @workflow.signal(name="worker_gone")
    def worker_gone(self, *payload: Any) -> None:
        self._changed = True

    @workflow.signal(name="renew")
    def renew(self, *payload: Any) -> None:
        """Continues in a new run, after a release."""
        self._renew = self._changed = True

    @workflow.update(name="set_target")
    async def set_target(self, request: SetTarget) -> PoolView:
        await self._until_known(required=True)
        return await self._resize(replace(self._given.policy, target=request.target))

    @set_target.validator
    def _check_target(self, request: SetTarget) -> None:
        _refuse_invalid(replace(self._given.policy, target=request.target))

    @workflow.update(name="set_policy")
    async def set_policy(self, request: SetPolicy) -> PoolView:
        if not self._known:
            await self._until_known(required=True)
            self._refuse_changed(request)
        if request.from_settings:
            self._given = replace(self._given, configured=request.policy)
        return await self._resize(request.policy)

    @set_policy.validator
    def _check_policy(self, request: SetPolicy) -> None:
        _refuse_invalid(request.policy)
        self._refuse_changed(request)

    def _refuse_changed(self, request: SetPolicy) -> None:
        revision = self._given.revision
        if request.revision not in (None, revision):
            raise ApplicationError(
                f"the policy was changed meanwhile: it is revision {revision}, not "
                f"{request.revision}",
                type=POOL_CHANGED,
                non_retryable=True,
            )

    async def _resize(self, policy: PoolPolicy) -> PoolView:
        self._given = replace(self._given, policy=policy, revision=self._given.revision + 1)
        self._state = replace(self._state.without_failures(), resized=True)
        self._changed = True
        return await self._kept_view()

    @workflow.update(name="set_release")
    async def set_release(self, request: SetRelease) -> PoolView:
        await self._until_known(required=True)
        self._state = self._state.with_release(request.release, request.surge)
        self._changed = True
        return await self._kept_view()

    @workflow.update(name="pause")
    async def pause(self) -> PoolView:
        await self._until_known(required=True)
        self._state = replace(self._state, paused=True, draining=False)
        return await self._kept_view()

    @workflow.update(name="drain")
    async def drain(self) -> PoolView:
        await self._until_known(required=True)
        self._state = replace(self._state, paused=False, draining=True)
        self._changed = True
        return await self._kept_view()

    @workflow.update(name="resume")
    async def resume(self) -> PoolView:
        """Resumes the pool and forgets failed launches, so that it tries again at once."""
        await self._until_known(required=True)
        self._state = replace(self._state.without_failures(), paused=False, draining=False)
        self._changed = True
        return await self._kept_view()

    @workflow.query(name="view")
    def view(self) -> PoolView:
        state, given = self._state, self._given
        shown = copied_fields(given, PoolView) | copied_fields(state, PoolView)
        return PoolView(
            **shown
            | {
                "starting": state.starting + len(self._in_flight) + len(state.unsettled),
                "changes_at": state.until,
                "next_launch": state.not_before or None,
                "target": given.policy.target,
            }
        )

    # --- what PostgreSQL keeps --------------------------------------------------------------------

    def _keepable(self) -> KeptPool:
        given, state = self._given, self._state
        return KeptPool(
            policy=given.policy,
            configured=given.configured,
            revision=given.revision,
            paused=state.paused,
            draining=state.draining,
            version=state.version,
            image=state.image,
            good_release=state.good_release,
        )

    def _reset(self, seed: int) -> None:
        """Records that the run begins anew at an earlier event: its state is old, and its next
        tokens were used before."""
        self._known, self._was_reset, self._changed = False, True, True
        self._state = replace(self._state, token_base=f"{seed & (2**64 - 1):x}")

    def _keep_changes(self) -> None:
        """Starts writing what changed since the last time, in the background."""
        if not workflow.patched(KEEP_PATCH):
            self._known = True
            return
        keepable = self._keepable()
        if self._known and keepable != self._compared:
            self._compared = keepable
            self._state = replace(self._state, kept_number=self._state.kept_number + 1)
        if self._keeping is None and not (self._known and self._written == self._state.kept_number):
            self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        try:
            while not (self._known and self._written == self._state.kept_number):
                number, was_reset = self._state.kept_number, self._was_reset
                request = KeepPool(
                    pool=self._given.pool, kept=replace(self._keepable(), number=number)
                )
                kept = await calls.keep_pool(request)
                if kept.number > number and self._state.kept_number == number:
                    self._take_over(kept)
                self._written = kept.number
                if self._was_reset == was_reset:
                    self._known, self._was_reset = True, False
        except FailureError as error:  # after an hour; the next count begins it again
            why = f"what operators set is not kept: {calls.cause(error)}"
            self._state = replace(self._state, last_failure=why)
        finally:
            self._keeping = None
            self._changed = True

    def _take_over(self, kept: KeptPool) -> None:
        """Takes over what an earlier run of the pool, or one that this run was reset behind,
        knew."""
        given = self._given
        if self._was_reset or given.configured in (None, kept.configured):
            given = replace(
                given, policy=kept.policy, configured=kept.configured, revision=kept.revision
            )
        else:  # the settings changed while there was no run: they replace what an operator had set
            given = replace(given, revision=kept.revision + 1)
        self._given = given
        self._state = replace(
            self._state,
            paused=kept.paused,
            draining=kept.draining,
            version=kept.version,
            image=kept.image,
            good_release=kept.good_release,
            kept_number=kept.number,
        )
        self._compared = replace(kept, number=0)
        workflow.logger.info(
            "pool_settings_recalled", extra={"pool": given.pool, "number": kept.number}
        )

    async def _until_known(self, *, required: bool = False) -> None:
        """Waits until this run knows what PostgreSQL keeps. With `required`, fails if that takes
        long."""
        known = self._known or await wait_until(
            lambda: self._known, KEEP_TIMEOUT_S, "until the pool's settings are read"
        )
        if required and not known:
            raise ApplicationError("the pool was started anew, and PostgreSQL does not answer")

    async def _kept_view(self) -> PoolView:
        """Answers when PostgreSQL has the change, or after some seconds: it is in force at once
        anyway."""
        self._keep_changes()
        if self._keeping is not None:
            number = self._state.kept_number
            await wait_until(
                lambda: self._written >= number, KEEP_TIMEOUT_S, "until the change is kept"
            )
        return self.view()

    # --- counts and launches ----------------------------------------------------------------------

    async def _count(self) -> None:
        # Those under way when the count begins: one that ends meanwhile would be in neither number.
        under_way = (*self._in_flight, *self._state.unsettled)
        busy, resized = bool(self._in_flight), self._state.resized
        self._state = replace(self._state, resized=False)
        request = CountPool(
            pool=self._given.pool,
            launching=under_way,
            launch_timeout=self._given.launch_timeout,
            policy=self._given.policy,
        )
        try:
            count = await calls.count_pool(request)
        except FailureError as error:  # nothing is known: nothing is launched
            raise_cancellation(error)
            self._uncounted += 1
            resized = resized or self._state.resized
            self._state = replace(
                self._state, resized=resized, last_failure=f"count: {calls.cause(error)}"
            )
            return
        self._uncounted = 0
        self._state = self._state.counted(count, self._given.policy)
        self._wanted.set(self._state.wanted, {"pool": self._given.pool})
        if self._state.paused:
            return
        gap = self._state.gap(len(under_way))
        if gap < 0:
            if busy:
                self._keep_resized(resized)
            else:
                await self._handle_surplus(-gap, at_once=resized)
            return
        self._state = replace(self._state, surplus_since=None)
        launches = gap + len(self._state.unsettled)
        for _ in range(
            min(launches, self._state.launches_allowed(len(self._in_flight), workflow.time()))
        ):
            self._launch()

    def _token(self) -> str:
        """Returns a token that is the same in a replay and never used again. The first run's id, or
        the base that a reset gives, survives continue-as-new."""
        number = self._state.number
        self._state = replace(self._state, number=number + 1)
        base = self._state.token_base or workflow.info().first_execution_run_id
        return f"{self._given.pool}-{base}-{number}"

    def _launch(self) -> None:
        unsettled = self._state.unsettled
        token = unsettled[0] if unsettled else self._token()
        self._state = replace(self._state, unsettled=unsettled[1:])
        self._in_flight[token] = asyncio.create_task(self._launch_one(token, again=bool(unsettled)))

    async def _launch_one(self, token: str, *, again: bool) -> None:
        request = LaunchPoolWorker(
            pool=self._given.pool,
            token=token,
            timeout=self._given.launch_timeout,
            again=again,
            release=self._state.release,
        )
        seen = self._state.failing
        try:
            await calls.launch_pool_worker(request)
            if self._state.failures_reported:
                workflow.logger.info("pool_launches_recovered", extra={"pool": self._given.pool})
            self._state = self._state.launched(request.release)
            self._keep_changes()
        except FailureError as error:
            self._failed(token, error, seen)
        finally:
            del self._in_flight[token]
            # Claims during the launch may have left a gap.
            self._changed = True

    def _failed(self, token: str, error: FailureError, seen: int) -> None:
        """Logs an episode of failures once, and once more when refilling stops."""
        why, before = calls.cause(error), self._state
        kind = why.partition(":")[0]
        state = before.failed(why, workflow.time(), seen=seen, never_ready=kind == NEVER_READY)
        if not _nothing_runs(error):
            state = replace(state, unsettled=(*state.unsettled, token))
        details = {"pool": self._given.pool, "rounds": state.failing, "reason": why}
        if state.circuit_open and not before.circuit_open:
            workflow.logger.error("pool_refilling_stopped", extra=details)
            state = replace(state, failures_reported=True)
        elif state.failing >= FAILURES_UNTIL_REPORT and not before.failures_reported:
            workflow.logger.error("pool_launches_fail", extra=details)
            state = replace(state, failures_reported=True)
        self._state = state

    async def _handle_surplus(self, surplus: int, *, at_once: bool) -> None:
        state = self._state = self._state.with_surplus(workflow.time())
        if state.unsettled:  # they may run or not: the next count shows
            self._state, self._changed = replace(state, unsettled=()), True
            self._keep_resized(at_once)
            return
        waited = workflow.time() - (state.surplus_since or 0.0)
        if at_once or state.draining or waited >= self._given.policy.shrink_after:
            count = min(surplus, state.ready)
            await self._shrink(min(count, MAX_STOPS_PER_CALL))
            if count > MAX_STOPS_PER_CALL:
                self._state, self._changed = replace(self._state, resized=at_once), True

    def _keep_resized(self, resized: bool) -> None:
        """Lets the next count stop a surplus at once if this one would have."""
        if resized and workflow.patched("a resize outlasts a count"):
            self._state = replace(self._state, resized=True)

    async def _shrink(self, count: int) -> None:
        if count <= 0:
            return
        try:
            stopped = await calls.shrink_pool(
                StopPoolWorkers(pool=self._given.pool, count=count, token=self._token())
            )
            self._state = replace(self._state, ready=max(0, self._state.ready - stopped))
        except FailureError as error:
            raise_cancellation(error)
            self._state = replace(self._state, last_failure=f"shrink: {calls.cause(error)}")

    def _seconds_until_count(self) -> float:
        """Returns the seconds until the next count when nothing is signalled."""
        if self._uncounted:
            return min(2.0 ** min(self._uncounted - 1, 10), MAX_BACKOFF_S, self._given.check_period)
        return self._state.seconds_until_count(
            workflow.time(), in_flight=len(self._in_flight), period=self._given.check_period
        )

    def _due_to_renew(self) -> bool:
        if self._renew or workflow.info().is_continue_as_new_suggested():
            return True
        # Earlier than Temporal suggests: an orchestrator that takes the pool over replays the whole
        # history before it refills anything. 2,300 events took a starved host 13 s.
        return (
            not self._in_flight
            and workflow.info().get_current_history_length() >= MAX_EVENTS_PER_RUN
        )

    def _show(self) -> None:
        text = pool_details(self.view())
        if text != self._shown:
            workflow.set_current_details(text)
            self._shown = text


def _refuse_invalid(policy: PoolPolicy) -> None:
    """Refuses an update before it is written into the history."""
    try:
        check_policy(policy)
    except PoolPolicyInvalid as error:
        raise ApplicationError(error.detail, type=error.code, non_retryable=True) from None


def _nothing_runs(error: FailureError) -> bool:
    """Returns True if the launch is known to have failed: no worker of its token runs."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ApplicationError) and NOTHING_RUNS in cause.details:
            return True
        cause = cause.__cause__
    return False
