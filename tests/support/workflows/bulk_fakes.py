"""Activities of maintenance, the morning and rollouts under the real names, with scripted
answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC
from itertools import accumulate

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from workflows import names
from workflows.maintenance.messages import Batch, Cleaned, FinishPass, MaintenanceInput, Scanned
from workflows.maintenance.workflow import MaintenanceBatchWorkflow, MaintenanceWorkflow
from workflows.morning.messages import (
    BellGroup,
    Connected,
    ConnectUser,
    MorningPlan,
    PlanMorning,
    RecentUsers,
)
from workflows.morning.workflow import MorningWorkflow
from workflows.rollout.messages import (
    AskToMove,
    CheckRelease,
    Release,
    ReleaseSnapshot,
    RetireWorkers,
    TellRollout,
)
from workflows.rollout.workflow import RolloutWorkflow
from workflows.sandbox import workflow_runner

DAY = "2026-11-23"


class FakeMaintenance:
    """Finds what a test tells it to find."""

    def __init__(self, scanned: Scanned) -> None:
        self.scanned = scanned
        self.batches: list[Batch] = []
        self.finished: list[FinishPass] = []
        #: First anomalies of the batches that fail.
        self.failing: set[int] = set()

    @activity.defn(name="scan_fleet")
    async def scan_fleet(self, request: MaintenanceInput) -> Scanned:
        return self.scanned

    @activity.defn(name="clean_up")
    async def clean_up(self, batch: Batch) -> Cleaned:
        if batch.first in self.failing:
            raise ApplicationError("told to fail", non_retryable=True)
        self.batches.append(batch)
        return Cleaned(outcomes={"stopped": batch.count})

    @activity.defn(name="finish_pass")
    async def finish_pass(self, request: FinishPass) -> float:
        self.finished.append(request)
        return 0.1

    def worker(self, client: Client) -> Worker:
        return Worker(
            client,
            task_queue=names.BULK_QUEUE,
            workflows=[MaintenanceWorkflow, MaintenanceBatchWorkflow],
            activities=[self.scan_fleet, self.clean_up, self.finish_pass],
            workflow_runner=workflow_runner(passed=()),
        )


class FakeMorning:
    """A trading day with users, some of whom fail."""

    def __init__(
        self, users: int, *, bell_in: float = 1200.0, holiday: str = "", later: Sequence[int] = ()
    ) -> None:
        """`later`: users of further bells, each 900 s after the one before."""
        sizes = [users, *later]
        self.users = [f"u{number:04}" for number in range(sum(sizes))]
        ends = list(accumulate(sizes))
        #: Market of a group → its users; '': all.
        self.groups = {
            f"market{n}" if later else "": self.users[end - size : end]
            for n, (size, end) in enumerate(zip(sizes, ends, strict=True))
        }
        self.bell_in = bell_in
        self.holiday = holiday
        #: User → what each try gives; a user who is not named is connected.
        self.script: dict[str, list[Connected]] = {}
        #: User and time (Unix seconds) of each try.
        self.tries: list[tuple[str, float]] = []
        #: Until when each is to stay.
        self.stays: dict[str, float] = {}
        self.plans = 0
        self.at_once = self.most_at_once = 0
        self.takes = 0.0
        #: No try of these users ends before; while one is under way, the server's clock does not
        #: jump.
        self.held: dict[str, asyncio.Event] = {}

    @activity.defn
    async def plan_morning(self, request: PlanMorning) -> MorningPlan:
        self.plans += 1
        day = request.day or DAY
        if self.holiday:
            return MorningPlan(day=day, reason=self.holiday)
        first = activity.info().current_attempt_scheduled_time.timestamp() + self.bell_in
        groups = tuple(
            BellGroup(bell=first + 900.0 * number, users=len(users), market=market)
            for number, (market, users) in enumerate(self.groups.items())
        )
        return MorningPlan(
            day=day, users=len(self.users), since=1.0, bell=groups[-1].bell, groups=groups
        )

    @activity.defn
    async def recent_users(self, request: RecentUsers) -> list[str]:
        return [user for user in self.groups[request.market] if user > request.after][
            : request.limit
        ]

    @activity.defn
    async def connect_user(self, request: ConnectUser) -> Connected:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.stays[request.user_id] = request.stay_until
        at = activity.info().current_attempt_scheduled_time
        self.tries.append((request.user_id, at.astimezone(UTC).timestamp()))
        await asyncio.sleep(self.takes)
        if request.user_id in self.held:
            await self.held[request.user_id].wait()
        self.at_once -= 1
        script = self.script.get(request.user_id)
        return script.pop(0) if script else Connected(ok=True)

    @asynccontextmanager
    async def serving(self, client: Client) -> AsyncIterator[None]:
        async with Worker(
            client,
            task_queue=names.BULK_QUEUE,
            workflows=[MorningWorkflow],
            activities=[self.plan_morning, self.recent_users, self.connect_user],
            workflow_runner=workflow_runner(passed=()),
        ):
            yield


class FakeRollout:
    """Free workers by version, refilled at each check, and users who move when they are asked."""

    def __init__(self, target: int, *, version: str = "1", users: int = 0) -> None:
        self.wanted = target
        self.before = Release(version=version)
        #: Version → free workers.
        self.free = {version: target}
        self.users = users
        #: Versions whose workers never become ready.
        self.bad: set[str] = set()
        self.never_ready = 0
        #: Events that were recorded, in order.
        self.recorded: list[str] = []
        #: Users move only while it is set.
        self.quiet = asyncio.Event()
        self.quiet.set()
        #: Users were asked to move.
        self.asked = asyncio.Event()
        #: Nothing is recorded until it is set.
        self.may_tell = asyncio.Event()
        self.may_tell.set()
        #: Checks that fail.
        self.blind = 0
        #: Checks that began; none of them ends until `may_check` is set.
        self.checks = 0
        self.may_check = asyncio.Event()
        self.may_check.set()

    @activity.defn
    async def check_release(self, request: CheckRelease) -> ReleaseSnapshot:
        self.checks += 1
        await self.may_check.wait()
        if self.blind:
            self.blind -= 1
            raise ApplicationError(
                "nothing is known", type="LAUNCHER_UNREACHABLE", non_retryable=True
            )
        version = request.release.version
        if request.change and self.before.version != version:
            self.before, self.never_ready = request.release, 0
        if request.change:
            gap = self.wanted + request.surge - sum(self.free.values())
            if version in self.bad:
                self.never_ready += gap > 0
            else:
                self.free[version] = self.free.get(version, 0) + max(gap, 0)
        new = self.free.get(version, 0)
        return ReleaseSnapshot(
            before=self.before,
            new=new,
            old=sum(self.free.values()) - new,
            users=self.users,
            wanted=self.wanted,
            never_ready=self.never_ready,
            last_failure="NEVER_READY: it ended" if self.never_ready else "",
        )

    @activity.defn
    async def retire_workers(self, request: RetireWorkers) -> int:
        ended = 0
        for version in self.free.keys() - {request.version}:
            retired = min(request.count - ended, self.free[version])
            self.free[version] -= retired
            ended += retired
        return ended

    @activity.defn
    async def ask_to_move(self, request: AskToMove) -> int:
        asked = self.users
        self.asked.set()
        if self.quiet.is_set():
            self.users = 0
        return asked

    @activity.defn
    async def tell_rollout(self, request: TellRollout) -> None:
        await self.may_tell.wait()
        self.recorded.append(request.event)

    def worker(self, client: Client) -> Worker:
        return Worker(
            client,
            task_queue=names.BULK_QUEUE,
            workflows=[RolloutWorkflow],
            activities=[
                self.check_release,
                self.retire_workers,
                self.ask_to_move,
                self.tell_rollout,
            ],
            workflow_runner=workflow_runner(passed=()),
        )
