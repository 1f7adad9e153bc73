"""Signals, events and calls in any order, on a real server: the workflow stays within its table.

A step that the table does not know raises in the workflow, fails its task again and again, and
leaves the user stuck; so what is looked for is a failed task, a life with a gap, and two workers of
one user.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random

import pytest
from temporalio.api.enums.v1 import WorkflowTaskFailedCause
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.service import RPCError

from tests.support.workflows.fakes import (
    FakeFleet,
    ensure_active,
    failed_tasks,
    handle,
    serving,
    until,
)
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import WorkerEventKind
from workflows.user_worker.messages import (
    ClaimStatus,
    ReloadResult,
    WorkerEventSignal,
    WorkerHealth,
    WorkerLostSignal,
    WorkerState,
    WorkerUnmarked,
)
from workflows.user_worker.state import ALLOWED

UNHANDLED_COMMAND = WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_UNHANDLED_COMMAND
STEPS = 40
#: Reloads, as workers answer them.
ANSWERS = (
    ReloadResult(ok=True),
    ReloadResult(ok=False, failure_code="WORKER_UNAVAILABLE", failure_detail="no answer in time"),
    ReloadResult(ok=False, failure_code="BROKER_UNREACHABLE", failure_detail="refused"),
    ReloadResult(ok=False, failure_code="INVALID_SEAL", failure_detail="another key"),
)


class SignalStorm:
    """Does random things to one user, the same ones for the same seed."""

    def __init__(self, client: Client, fleet: FakeFleet, user: str, seed: int) -> None:
        self.client, self.fleet, self.user = client, fleet, user
        self.dice = random.Random(seed)  # noqa: S311 — a repeatable storm, no secret
        self.calls: set[asyncio.Task[None]] = set()
        self.sequences = itertools.count(2)

    async def step(self) -> None:
        step = self.dice.choice(
            (
                self.event,
                self.event,
                self.event,
                self.old_event,
                self.lost,
                self.unmarked,
                self.call,
                self.plain,
            )
        )
        await step()
        if self.dice.random() < 0.5:
            # Lets some of it happen between the signals.
            await asyncio.sleep(self.dice.random() * 0.03)

    def newest(self) -> int:
        return max(len(dict.fromkeys(self.fleet.claims)), 1)

    async def signal(self, name: str, *args: object) -> None:
        try:
            await handle(self.client, self.user).signal(name, args=args)
        except RPCError:  # the run has ended: the next call starts another
            await self.call()

    async def tell(self, number: int, sequence: int) -> None:
        kind = self.dice.choice([str(kind) for kind in WorkerEventKind])
        if kind == WorkerEventKind.FAILED and self.dice.random() < 0.8:
            kind = str(WorkerEventKind.CONNECTED)  # or runs would end too soon
        await self.signal(
            "worker_event",
            WorkerEventSignal(
                worker_id=f"w{number}",
                epoch=number,
                sequence=sequence,
                kind=kind,
                at=0.0,
                detail="why",
            ),
        )

    async def event(self) -> None:
        await self.tell(self.newest(), next(self.sequences))

    async def old_event(self) -> None:
        await self.tell(self.dice.randint(1, self.newest()), self.dice.randint(0, 10))

    async def lost(self) -> None:
        number = self.dice.randint(max(self.newest() - 1, 1), self.newest())
        code = self.dice.choice([-9, int(ExitCode.BROKER_FAILED), None, 0])
        await self.signal(
            "worker_lost", WorkerLostSignal(task_id="t", worker_id=f"w{number}", exit_code=code)
        )

    async def unmarked(self) -> None:
        number = self.newest()
        await self.signal(
            "worker_unmarked", WorkerUnmarked(worker_id=f"w{number}", epoch=number, generation="g1")
        )

    async def plain(self) -> None:
        names = ["reload_credentials", "resume", "renew", "renew", "nobody_knows_this"]
        await self.signal(
            self.dice.choice([*names, "shutdown"] if self.dice.random() < 0.2 else names)
        )

    async def call(self) -> None:
        missing = self.dice.random() < 0.5
        task = asyncio.create_task(self._call(missing))
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)

    async def _call(self, missing: bool) -> None:
        try:
            await ensure_active(self.client, self.user, mark_missing=missing)
        except (WorkflowUpdateFailedError, RPCError):  # refused with a code, or its run has ended
            return

    def mishaps(self) -> None:
        fleet, dice = self.fleet, self.dice
        fleet.reload_script = dice.choices(ANSWERS, k=10)
        fleet.claim_script = dice.choices(
            [ClaimStatus.ACTIVE, ClaimStatus.CONNECTING, ClaimStatus.EMPTY, ClaimStatus.GONE], k=6
        )
        fleet.health = [
            WorkerHealth(
                marked=dice.random() < 0.5,
                running=dice.choice([True, None, False]),
                generation="g1",
            )
            for _ in range(8)
        ]
        fleet.stop_failures = dice.randint(0, 2)
        fleet.reload_failures = dice.randint(0, 1)


@pytest.mark.parametrize("seed", range(8))
async def test_no_storm_leads_out_of_the_table_or_leaves_a_user_stuck(
    temporal: Client, fleet: FakeFleet, seed: int
) -> None:
    user = f"storm-{os.getpid()}-{seed}"
    storm = SignalStorm(temporal, fleet, user, seed)
    storm.mishaps()
    async with serving(temporal, fleet.activities()):
        await storm.call()
        await until(lambda: bool(fleet.claims))
        for _ in range(STEPS):
            await storm.step()

        async def over() -> bool:
            """Asked to end until it has: what waits in the queue may have begun another life."""
            try:
                await handle(temporal, user).signal("shutdown")
            except RPCError:
                return not storm.calls
            await asyncio.sleep(0.1)
            return False

        await until(over)
        await assert_no_task_failed(temporal, user)
    assert_lives_are_whole(fleet)


async def assert_no_task_failed(client: Client, user: str) -> None:
    query = f"WorkflowId = 'user-worker-{user}'"
    runs = [execution.run_id async for execution in client.list_workflows(query)]
    assert runs
    for run_id in runs:
        history = await client.get_workflow_handle(
            f"user-worker-{user}", run_id=run_id
        ).fetch_history()
        failed = failed_tasks(history)
        assert all("UnhandledCommand" in event or "UNHANDLED_COMMAND" in event for event in failed)


def assert_lives_are_whole(fleet: FakeFleet) -> None:
    """Each chain of runs: no gap, every step in the table, one worker after the other, an end."""
    for chain in {batch.chain for batch in fleet.written}:
        batches = [batch for batch in fleet.written if batch.chain == chain]
        rows = {item.number: item for batch in batches for item in batch.transitions}
        steps = [rows[number] for number in sorted(rows)]
        assert [step.number for step in steps] == list(range(1, len(steps) + 1))
        for before, after in itertools.pairwise(steps):
            assert before.after == after.before
        assert all(WorkerState(step.after) in ALLOWED[WorkerState(step.before)] for step in steps)
        assert (steps[0].before, steps[-1].after) == (WorkerState.POOL_IDLE, WorkerState.TERMINATED)
        epochs = [step.epoch for step in steps if step.epoch]
        assert epochs == sorted(epochs)
