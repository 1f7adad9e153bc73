"""The morning: users who traded on recent days get their workers before the market opens.

A Schedule starts it on weekdays; on a holiday it ends at once. The work of a day is one workflow,
`morning-{day}`, so a second start on the same day does nothing. Logins are spread over a window, with a
limited rate and concurrency; the workers keep the brokers' own limits. A failed login is tried once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from workflows import names
    from workflows.entity import carried_state, continue_as_new, day_elsewhere
    from workflows.morning import messages as mo

from workflows import calls
from workflows.calls import cause


@dataclass(frozen=True, kw_only=True)
class MorningProgress:
    """The progress of one morning. Times are Unix seconds."""

    day: str
    users: int
    since: float
    #: When the first user is due, and how many seconds lie between two.
    begins_at: float
    pause: float
    #: Users whose turn has come.
    begun: int = 0
    after: str = ""
    connected: int = 0
    #: Code → users.
    codes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def planned(cls, plan: mo.MorningPlan, given: mo.MorningInput, now: float) -> MorningProgress:
        """Spreads the users over the window before the bell, or what is left of it."""
        begins_at = max(now, plan.bell - given.window)
        left = max(plan.bell - begins_at, 0.0)
        pause = max(left / plan.users if plan.users else 0.0, 1.0 / given.rate)
        return cls(day=plan.day, users=plan.users, since=plan.since, begins_at=begins_at, pause=pause)

    @property
    def due(self) -> float:
        """When the next user's turn comes."""
        return self.begins_at + self.begun * self.pause

    def began(self, user_id: str) -> MorningProgress:
        return replace(self, begun=self.begun + 1, after=user_id)

    def ended(self, outcomes: Sequence[mo.Connected]) -> MorningProgress:
        codes = dict(self.codes)
        for one in outcomes:
            if not one.ok:
                codes[one.code] = codes.get(one.code, 0) + 1
        return replace(self, connected=self.connected + sum(one.ok for one in outcomes), codes=codes)

    def result(self, now: float) -> mo.MorningResult:
        return mo.MorningResult(
            day=self.day,
            users=self.begun,
            connected=self.connected,
            failed=sum(self.codes.values()),
            codes=self.codes,
            ended_at=now,
        )


@workflow.defn(name=names.MORNING)
class MorningWorkflow:
    @workflow.run
    async def run(self, given: mo.MorningInput) -> mo.MorningResult:
        if given.carried is not None:
            return await self._connect(given, carried_state(MorningProgress, given.carried))
        plan = await calls.plan_morning(mo.PlanMorning(day=given.day, days=given.days))
        done = await day_elsewhere(
            MorningWorkflow.run,
            given,
            plan,
            mo.MorningResult,
            id=names.morning_id(plan.day),
            begun="this day's morning has begun already",
            summary=f"connects the users of recent days ahead of the bell of {plan.day}",
        )
        return done or await self._connect(given, MorningProgress.planned(plan, given, workflow.time()))

    async def _connect(self, given: mo.MorningInput, progress: MorningProgress) -> mo.MorningResult:
        """One page of users, then the next in a new run."""
        users = await calls.recent_users(
            mo.RecentUsers(since=progress.since, after=progress.after, limit=given.page)
        )
        if not users:
            self._show(progress)
            return progress.result(workflow.time())
        abreast = asyncio.Semaphore(given.abreast)
        tasks = []
        for user_id in users:
            self._show(progress)
            wait = progress.due - workflow.time()
            if wait > 0:
                await workflow.sleep(wait, summary="until the next user's turn")
            progress = progress.began(user_id)
            # A wait here delays all later users.
            await abreast.acquire()
            tasks.append(asyncio.create_task(self._one(user_id, abreast)))
        outcomes = dict(zip(users, await asyncio.gather(*tasks), strict=True))
        for user_id in [user for user, one in outcomes.items() if not one.ok and one.retryable]:
            await workflow.sleep(1.0 / given.rate, summary="until the next second try")
            await abreast.acquire()
            outcomes[user_id] = await self._one(user_id, abreast)
        progress = progress.ended(list(outcomes.values()))
        self._show(progress)
        continue_as_new(replace(given, carried=asdict(progress)))

    async def _one(self, user_id: str, abreast: asyncio.Semaphore) -> mo.Connected:
        try:
            return await calls.connect_user(mo.ConnectUser(user_id=user_id))
        except FailureError as error:  # no orchestrator, or it took too long
            code, _, detail = cause(error).partition(": ")
            return mo.Connected(ok=False, code=code, detail=detail, retryable=True)
        finally:
            abreast.release()

    def _show(self, progress: MorningProgress) -> None:
        failed = sum(progress.codes.values())
        text = f"### {progress.begun} of {progress.users} users had their turn"
        text += f"\n\n{progress.connected} connected, {failed} failed in the pages that are done"
        if progress.codes:
            text += ": " + ", ".join(f"{count} {code}" for code, count in sorted(progress.codes.items()))
        workflow.set_current_details(text)
