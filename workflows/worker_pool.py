"""The workflow of one pool, `worker-pool-{name}`: keeps exactly so many workers ready (exact-pool).

It launches when a claim took one, when a launch or a worker ended, and looks every `check_period`. A
count leaves out the workers of launches under way, so that nobody is counted twice or not at all: what
may be launched is the target less the ready, the starting and the launches under way, never more.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from temporalio import workflow
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from workflows import messages as m
    from workflows import names

from workflows import calls
from workflows.calls import cause

#: Seconds between two launches while they fail: 1, 2, 4 … up to this.
BACKOFF_MAX = 60.0
#: Launches under way at most: a hundred fit well below Temporal's 2,000 pending activities.
IN_FLIGHT_MAX = 100

_POOL = SearchAttributeKey.for_keyword(names.SA_POOL)


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """What a pool knows between two looks."""

    target: int
    #: An operator holds the pool as it is: nothing is launched and nobody leaves but by a claim.
    paused: bool = False
    #: Number of the next launch: with the first run's id it makes a token.
    number: int = 0
    ready: int = 0
    starting: int = 0
    launches: int = 0
    failures: int = 0
    #: Failures since the last launch that went well.
    failing: int = 0
    #: Unix seconds before which nothing is launched.
    not_before: float = 0.0
    last_failure: str = ""

    def launched(self) -> PoolState:
        return replace(self, launches=self.launches + 1, failing=0, not_before=0.0)

    def failed(self, why: str, now: float) -> PoolState:
        failing = self.failing + 1
        pause = min(2.0 ** min(failing - 1, 10), BACKOFF_MAX)
        return replace(
            self,
            failures=self.failures + 1,
            failing=failing,
            not_before=now + pause,
            last_failure=why,
        )

    def gap(self, count: m.PoolCount, in_flight: int) -> int:
        """How many to launch now; negative: how many there are too many."""
        return self.target - count.ready - count.starting - in_flight

    def allowance(self, in_flight: int, now: float) -> int:
        """How many launches may begin now: one at a time while they fail, none within the backoff."""
        if not self.failing:
            return IN_FLIGHT_MAX - in_flight
        return 0 if in_flight or now < self.not_before else 1


@workflow.defn(name=names.WORKER_POOL)
class WorkerPoolWorkflow:
    @workflow.init
    def __init__(self, given: m.PoolInput) -> None:
        self._given = given
        carried: dict[str, Any] = dict(given.carried or {"target": given.target})
        known = {name: value for name, value in carried.items() if name in PoolState.__dataclass_fields__}
        self._state = PoolState(**known)
        self._in_flight: dict[str, asyncio.Task[None]] = {}
        self._changed = True
        #: Looks in a row that could not count.
        self._uncounted = 0
        self._renew = False
        self._shown = ""

    @workflow.run
    async def run(self, given: m.PoolInput) -> None:
        workflow.upsert_search_attributes([_POOL.value_set(given.pool)])
        while True:
            self._changed = False
            await self._look()
            self._show()
            if self._due_to_renew():
                await workflow.wait_condition(
                    lambda: not self._in_flight and workflow.all_handlers_finished()
                )
                self._continue_as_new()
            with contextlib.suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: self._changed,
                    timeout=self._nap(),
                    timeout_summary="until the next look at the pool",
                )

    # --- what others ask ------------------------------------------------------------------------------

    @workflow.signal(name="claimed")
    def claimed(self, claimed: m.Claimed) -> None:
        self._changed = True

    @workflow.signal(name="worker_gone")
    def worker_gone(self, gone: m.WorkerGone) -> None:
        self._changed = True

    @workflow.signal(name="renew")
    def renew(self) -> None:
        """Goes on in a new run, after a release."""
        self._renew = self._changed = True

    @workflow.update(name="set_target")
    def set_target(self, wanted: m.SetTarget) -> m.PoolView:
        self._state = replace(self._state, target=wanted.target)
        self._changed = True
        return self.view()

    @workflow.update(name="pause")
    def pause(self) -> m.PoolView:
        self._state = replace(self._state, paused=True)
        return self.view()

    @workflow.update(name="resume")
    def resume(self) -> m.PoolView:
        self._state = replace(self._state, paused=False)
        self._changed = True
        return self.view()

    @workflow.query(name="view")
    def view(self) -> m.PoolView:
        state = self._state
        return m.PoolView(
            pool=self._given.pool,
            target=state.target,
            ready=state.ready,
            starting=state.starting + len(self._in_flight),
            launches=state.launches,
            failures=state.failures,
            last_failure=state.last_failure,
            paused=state.paused,
        )

    # --- one look after the other ---------------------------------------------------------------------

    async def _look(self) -> None:
        under_way = tuple(self._in_flight)
        request = m.CountPool(
            pool=self._given.pool, launching=under_way, launch_timeout=self._given.launch_timeout
        )
        try:
            count = await calls.count_pool(request)
        except FailureError as error:  # nothing is known: nothing is launched
            self._uncounted += 1
            self._state = replace(self._state, last_failure=f"count: {cause(error)}")
            return
        self._uncounted = 0
        self._state = replace(self._state, ready=count.ready, starting=count.starting)
        if self._state.paused:
            return
        # Those under way when the count began, not now: one that ended since is in neither number.
        gap = self._state.gap(count, len(under_way))
        if gap < 0 and not under_way:
            await self._shrink(min(-gap, count.ready))
        for _ in range(min(gap, self._state.allowance(len(self._in_flight), workflow.time()))):
            self._launch()

    def _token(self) -> str:
        """The same in a replay, and never used again: the first run's id stays over continue-as-new."""
        number = self._state.number
        self._state = replace(self._state, number=number + 1)
        return f"{self._given.pool}-{workflow.info().first_execution_run_id}-{number}"

    def _launch(self) -> None:
        token = self._token()
        self._in_flight[token] = asyncio.create_task(self._launch_one(token))

    async def _launch_one(self, token: str) -> None:
        request = m.LaunchPoolWorker(pool=self._given.pool, token=token, timeout=self._given.launch_timeout)
        try:
            await calls.launch_pool_worker(request)
            self._state = self._state.launched()
        except FailureError as error:
            self._state = self._state.failed(cause(error), workflow.time())
        finally:
            del self._in_flight[token]
            # Another look: claims during the launch may have left a gap.
            self._changed = True

    async def _shrink(self, count: int) -> None:
        if count <= 0:
            return
        try:
            await calls.shrink_pool(
                m.StopPoolWorkers(pool=self._given.pool, count=count, token=self._token())
            )
        except FailureError as error:
            self._state = replace(self._state, last_failure=f"shrink: {cause(error)}")

    def _nap(self) -> float:
        """Seconds until the next look when nothing is signalled."""
        if self._uncounted:
            return min(2.0 ** min(self._uncounted - 1, 10), BACKOFF_MAX, self._given.check_period)
        wait = self._state.not_before - workflow.time()
        if self._state.failing and not self._in_flight:
            return min(max(wait, 0.1), self._given.check_period)
        return self._given.check_period

    def _due_to_renew(self) -> bool:
        return self._renew or workflow.info().is_continue_as_new_suggested()

    def _show(self) -> None:
        view = self.view()
        text = f"### {view.ready} of {view.target} workers ready, {view.starting} starting"
        if view.paused:
            text += "\n\n**Paused** by an operator: nothing is launched until the pool is resumed."
        if self._state.failing:
            text += f"\n\n**Launches fail** ({self._state.failing} in a row): {view.last_failure}"
        if text != self._shown:
            workflow.set_current_details(text)
            self._shown = text

    def _continue_as_new(self) -> NoReturn:
        workflow.continue_as_new(replace(self._given, carried=asdict(self._state)))
