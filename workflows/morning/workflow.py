"""The morning: users who traded on recent days get their workers before their market's bell.

A Schedule starts it every day, another one the same for the evening session; without trading it
ends at once. The work of a day is one workflow, `morning-{day}`, so a second start on the same day
does nothing. Logins are spread over a window before each bell, with a limited rate and
concurrency; the workers keep the brokers' own limits. A failed login is tried again after 30, 60,
120 … s until the last bell, and at least once, while others have their turns. No worker counts as
idle before the last bell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from workflows import names
    from workflows.entity import carried_state, continue_as_new, delegate_day
    from workflows.morning.messages import (
        BellGroup,
        Connected,
        ConnectUser,
        LaterTry,
        MorningInput,
        MorningPlan,
        MorningResult,
        PlanMorning,
        RecentUsers,
    )

from workflows import calls
from workflows.calls import cause


@dataclass(frozen=True, kw_only=True)
class MorningProgress:
    """The progress of one morning. Times are Unix seconds."""

    day: str
    users: int
    since: float
    #: When the first user of the present group is due, and how many seconds lie between two.
    begins_at: float
    pause: float
    #: The last bell.
    stay_until: float = 0.0
    #: The market of the present group.
    market: str = ""
    later: tuple[BellGroup, ...] = ()
    #: Users whose turn has come; of them, in earlier groups.
    begun: int = 0
    before: int = 0
    after: str = ""
    connected: int = 0
    #: Code → users.
    codes: dict[str, int] = field(default_factory=dict)
    #: Users who wait for another try.
    again: tuple[LaterTry, ...] = ()

    @classmethod
    def planned(cls, plan: MorningPlan, given: MorningInput, now: float) -> MorningProgress:
        groups = plan.groups or (BellGroup(bell=plan.bell, users=plan.users),)
        before_all = cls(
            day=plan.day,
            users=plan.users,
            since=plan.since,
            begins_at=now,
            pause=0.0,
            stay_until=plan.bell,
            later=groups,
        )
        return before_all.next_group(given, now)

    def next_group(self, given: MorningInput, now: float) -> MorningProgress:
        """Spreads the next group's users over the window before its bell, or what is left of it."""
        group, *later = self.later
        begins_at = max(now, group.bell - given.window)
        remaining = max(group.bell - begins_at, 0.0)
        pause = max(remaining / group.users if group.users else 0.0, 1.0 / given.rate)
        return replace(
            self,
            begins_at=begins_at,
            pause=pause,
            market=group.market,
            later=tuple(later),
            before=self.begun,
            after="",
        )

    @property
    def due(self) -> float:
        """When the next user's turn comes."""
        return self.begins_at + (self.begun - self.before) * self.pause

    def began(self, user_id: str) -> MorningProgress:
        return replace(self, begun=self.begun + 1, after=user_id)

    def ended(self, outcomes: Sequence[Connected], again: Sequence[LaterTry]) -> MorningProgress:
        codes = dict(self.codes)
        for outcome in outcomes:
            if not outcome.ok:
                codes[outcome.code] = codes.get(outcome.code, 0) + 1
        connected = self.connected + sum(outcome.ok for outcome in outcomes)
        return replace(self, connected=connected, codes=codes, again=tuple(again))

    def result(self, now: float) -> MorningResult:
        return MorningResult(
            day=self.day,
            users=self.begun,
            connected=self.connected,
            failed=sum(self.codes.values()),
            codes=self.codes,
            ended_at=now,
        )


@workflow.defn(name=names.MORNING)
class MorningWorkflow:
    def __init__(self) -> None:
        self._stay_until = self._retry = 0.0
        #: All users of this run had their turn: who failed is tried again by the next one.
        self._turns_over = False
        #: Users who wait for another try, and how it ended for the others of this run.
        self._again: list[LaterTry] = []
        self._outcomes: list[Connected] = []
        self._under_way: set[asyncio.Task[None]] = set()

    @workflow.run
    async def run(self, given: MorningInput) -> MorningResult:
        if given.carried is not None:
            return await self._connect(given, carried_state(MorningProgress, given.carried))
        request = PlanMorning(
            day=given.day, days=given.days, evening=given.evening, at=workflow.time()
        )
        plan = await calls.plan_morning(request)
        done = await delegate_day(
            MorningWorkflow.run,
            given,
            plan,
            MorningResult,
            id=names.morning_id(plan.day, given.evening),
            begun=f"this day's {'evening' if given.evening else 'morning'} has begun already",
            summary=f"connects the users of recent days ahead of the bell of {plan.day}",
        )
        return done or await self._connect(
            given, MorningProgress.planned(plan, given, workflow.time())
        )

    async def _connect(self, given: MorningInput, progress: MorningProgress) -> MorningResult:
        """Connects one page of users and those who are tried again, then continues in a new run."""
        while True:
            request = RecentUsers(
                since=progress.since,
                after=progress.after,
                limit=given.page,
                market=progress.market,
                evening=given.evening,
            )
            users = await calls.recent_users(request)
            if users or not progress.later:
                break
            progress = progress.next_group(given, workflow.time())
        self._again, self._stay_until = list(progress.again), progress.stay_until
        self._retry = given.retry
        abreast = asyncio.Semaphore(given.abreast)
        repeating = asyncio.create_task(self._repeat(1.0 / given.rate, abreast))
        for user_id in users:
            self._show(progress)
            wait = progress.due - workflow.time()
            if wait > 0:
                await workflow.sleep(wait, summary="until the next user's turn")
            progress = progress.began(user_id)
            await abreast.acquire()  # a wait here delays all later users
            self._begin(LaterTry(user_id=user_id), abreast)
        # Else repeats would follow one another,
        # and the next page wait for a moment without any under way.
        self._turns_over = bool(users) and workflow.patched("a page ends with its turns")
        if not users:  # nobody is left but those who are tried again
            self._show(progress)
            full = workflow.info().is_continue_as_new_suggested
            await workflow.wait_condition(lambda: not (self._again or self._under_way) or full())
        await workflow.wait_condition(lambda: not self._under_way)
        repeating.cancel()
        progress = progress.ended(self._outcomes, self._again)
        self._show(progress)
        if not users and not progress.again:
            return progress.result(workflow.time())
        continue_as_new(replace(given, carried=asdict(progress)))

    async def _repeat(self, pause: float, abreast: asyncio.Semaphore) -> None:
        """Tries again who failed, at most one each `pause` seconds, until cancelled."""
        while True:
            await workflow.wait_condition(lambda: bool(self._again))
            later_try = min(self._again, key=lambda later: later.due)
            await workflow.sleep(
                max(later_try.due - workflow.time(), pause), summary="until the next repeat"
            )
            await abreast.acquire()
            if self._turns_over:
                return
            self._again.remove(later_try)
            self._begin(later_try, abreast)

    def _begin(self, later_try: LaterTry, abreast: asyncio.Semaphore) -> None:
        task = asyncio.create_task(self._one(later_try, abreast))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _one(self, later_try: LaterTry, abreast: asyncio.Semaphore) -> None:
        try:
            request = ConnectUser(user_id=later_try.user_id, stay_until=self._stay_until)
            outcome = await calls.connect_user(request)
        except FailureError as error:  # no orchestrator, or it took too long
            code, _, detail = cause(error).partition(": ")
            outcome = Connected(ok=False, code=code, detail=detail, retryable=True)
        finally:
            abreast.release()
        due = workflow.time() + self._retry * 2.0**later_try.tries
        if outcome.ok or not outcome.retryable or (later_try.tries and due > self._stay_until):
            self._outcomes.append(outcome)
        else:
            self._again.append(replace(later_try, tries=later_try.tries + 1, due=due))

    def _show(self, progress: MorningProgress) -> None:
        failed = sum(progress.codes.values())
        text = f"### {progress.begun} of {progress.users} users had their turn"
        text += f"\n\n{progress.connected} connected, {failed} failed in the pages that are done"
        if progress.codes:
            text += ": " + ", ".join(
                f"{count} {code}" for code, count in sorted(progress.codes.items())
            )
        workflow.set_current_details(text)
