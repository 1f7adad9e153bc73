"""Ends and events reach the workflows concerned, on a real Temporal server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import structlog
from msgspec import structs
from temporalio.client import Client

from activities.events.exit_watcher import ExitWatcher
from activities.events.relay import MAX_SIGNALS_PER_WINDOW, Relay
from activities.events.stream import RELAY_GROUP, EventStream
from infra import tasks
from infra.database.workers import sessions as worker_sessions
from infra.valkey.client import reply_of
from tests.support.activities.harness import ActivityHarness
from tests.support.activities.listener import ListenerWorkflow, listening, signals
from tests.support.workers.pool_worker import POOL, ScriptedPoolWorker
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import WorkerEvent, WorkerEventKind
from workflows import names
from workflows.user_worker.messages import WAS_GONE


async def user_with_worker(harness: ActivityHarness, name: str) -> tuple[str, ScriptedPoolWorker]:
    worker = await harness.worker(f"p-{name}-{os.getpid()}")
    user = await harness.user()
    await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    return user, worker


def watch(harness: ActivityHarness, temporal: Client) -> ExitWatcher:
    return ExitWatcher(harness.client, harness.database, harness.launcher, temporal, pool=POOL)


async def test_the_end_of_a_users_worker_reaches_that_users_workflow(
    harness: ActivityHarness, temporal: Client
) -> None:
    user, worker = await user_with_worker(harness, "users")
    async with listening(temporal, names.user_worker_id(user)) as handle:
        task = asyncio.create_task(watch(harness, temporal).run())
        harness.launcher.end(worker.task_id, -9, "killed")
        heard = await signals(handle, 1)
        await tasks.cancel_tasks(task)
    assert heard[0][0] == "worker_lost"
    assert (heard[0][1]["worker_id"], heard[0][1]["exit_code"]) == (worker.worker_id, -9)


async def test_the_end_of_a_free_worker_reaches_its_pool_and_nobody_can_claim_it(
    harness: ActivityHarness, temporal: Client
) -> None:
    worker = await harness.worker()
    async with listening(temporal, names.worker_pool_id(POOL)) as handle:
        task = asyncio.create_task(watch(harness, temporal).run())
        harness.launcher.end(worker.task_id)
        heard = await signals(handle, 1)
        await tasks.cancel_tasks(task)
    assert heard == [("worker_gone", {"worker_id": worker.worker_id})]
    assert not await reply_of(
        harness.client.exists(keys.pool_ready(POOL), keys.pool_worker(POOL, worker.worker_id))
    )


class Busy:
    """Stands for a Temporal that is slow with the pool's workflow alone."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.signalled: list[str] = []
        self._id = ""

    def get_workflow_handle(self, workflow_id: str) -> Busy:
        self._id = workflow_id
        return self

    async def signal(self, name: str, *, args: Sequence[object], rpc_timeout: timedelta) -> None:
        self.signalled.append(self._id)
        if self._id == names.worker_pool_id(POOL):
            await self.free.wait()

    async def until(self, workflow_id: str, times: int) -> None:
        while self.signalled.count(workflow_id) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_users_worker_does_not_wait_behind_free_ones_and_these_share_a_signal(
    harness: ActivityHarness,
) -> None:
    user, worker = await user_with_worker(harness, "behind")
    first, *others = [await harness.worker() for _ in range(5)]
    busy, pool = Busy(), names.worker_pool_id(POOL)
    temporal: Any = busy
    task = asyncio.create_task(watch(harness, temporal).run())
    harness.launcher.end(first.task_id)
    await busy.until(pool, 1)
    for other in others:
        harness.launcher.end(other.task_id)
    harness.launcher.end(worker.task_id)
    await busy.until(names.user_worker_id(user), 1)
    assert busy.signalled.count(pool) == 1
    busy.free.set()
    await busy.until(pool, 2)
    last = await harness.worker()
    harness.launcher.end(last.task_id)
    await busy.until(pool, 3)
    await tasks.cancel_tasks(task)
    assert busy.signalled.count(pool) == 3


@pytest.mark.parametrize(("reason", "told"), [("idle", 0), (WAS_GONE, 1)])
async def test_an_end_that_the_workflow_ordered_is_not_reported_again_but_one_that_it_only_noticed(
    harness: ActivityHarness, temporal: Client, reason: str, told: int
) -> None:
    user, worker = await user_with_worker(harness, f"ordered{told}")
    async with harness.database.session() as session:
        row = await worker_sessions.latest_session(session, worker_id=worker.worker_id)
        assert row is not None
        await worker_sessions.end_session(session, claim_id=row.claim_id, reason=reason)
    async with listening(temporal, names.user_worker_id(user)) as handle:
        harness.launcher.end(worker.task_id)
        async for ended in harness.launcher.exits():
            await watch(harness, temporal).report(ended)
            break
        assert len(await handle.query(ListenerWorkflow.heard)) == told


async def test_an_end_without_a_workflow_is_no_error(
    harness: ActivityHarness, temporal: Client
) -> None:
    _, worker = await user_with_worker(harness, "alone")
    harness.launcher.end(worker.task_id)
    async for ended in harness.launcher.exits():
        await watch(harness, temporal).report(ended)
        break
    assert not await reply_of(harness.client.exists(keys.pool_worker(POOL, worker.worker_id)))


async def test_ends_that_no_orchestrator_saw_are_reported_once_at_the_next_start(
    harness: ActivityHarness, temporal: Client
) -> None:
    user, worker = await user_with_worker(harness, "unseen")
    free = await harness.worker()
    harness.launcher.end(free.task_id)
    harness.launcher.end(worker.task_id, 137, "oom_killed")
    async with (
        listening(temporal, names.user_worker_id(user)) as handle,
        listening(temporal, names.worker_pool_id(POOL)) as pool,
    ):
        for told in (3, 4):  # a launcher tells from its first end on, unless it is told from where
            harness.launcher._position = 0
            task = asyncio.create_task(watch(harness, temporal).run())
            heard = await signals(handle, 1)
            again = await harness.worker()
            harness.launcher.end(again.task_id)
            while again.worker_id not in str(await pool.query(ListenerWorkflow.heard)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            # Heard is not yet noted as told, and what is not is told again: that changes only the
            # count.
            while await reply_of(harness.client.get(keys.EXITS_HANDLED)) != f"fake:{told}".encode():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await tasks.cancel_tasks(task)
        gone = [said["worker_id"] for _, said in await pool.query(ListenerWorkflow.heard)]
        assert len(set(gone)) == len(gone)
        assert await signals(handle, 1) == heard
    assert [(name, said["exit_code"], said["reason"]) for name, said in heard] == [
        ("worker_lost", 137, "oom_killed")
    ]


async def test_the_end_of_a_worker_whose_user_has_no_workflow_closes_its_assignment(
    harness: ActivityHarness, temporal: Client
) -> None:
    _, worker = await user_with_worker(harness, "closes")
    harness.launcher.end(worker.task_id)
    async for ended in harness.launcher.exits():
        await watch(harness, temporal).report(ended)
        break
    async with harness.database.session() as session:
        assert (
            await worker_sessions.latest_session(session, worker_id=worker.worker_id, ended_at=None)
            is None
        )
        row = await worker_sessions.latest_session(session, worker_id=worker.worker_id)
    assert row is not None
    assert (row.end_reason, row.crashed) == ("killed, no workflow", True)


async def test_only_events_that_a_workflow_acts_on_are_relayed(
    harness: ActivityHarness, temporal: Client
) -> None:
    user = f"relay-{os.getpid()}"
    shared_state = SharedState()  # numbers the events, as it does in a worker
    kinds = [
        WorkerEventKind.CONNECTED,
        WorkerEventKind.RECONNECTING,
        WorkerEventKind.CONNECTED,
        WorkerEventKind.DEGRADED,
        WorkerEventKind.OWNER_MISSING,
        WorkerEventKind.SESSION_REPLACED,
        WorkerEventKind.CONNECTED,
        WorkerEventKind.FAILED,
        WorkerEventKind.FENCED,
        WorkerEventKind.CLOSED,
    ]
    by_supervisor = (WorkerEventKind.OWNER_MISSING, WorkerEventKind.FENCED)
    events = [
        WorkerEvent(
            worker_id="w1",
            user_id=user,
            epoch=1,
            sequence=shared_state.next_supervisor_event()
            if kind in by_supervisor
            else shared_state.next_session_event(),
            kind=kind,
            at_ms=1000,
            detail="why",
        )
        for kind in kinds
    ]
    async with listening(temporal, names.user_worker_id(user)) as handle:
        await Relay(temporal).handle(events)
        heard = await signals(handle, 8)
    relayed = [event for event in events[1:] if event.kind != WorkerEventKind.CLOSED]
    assert [(name, said["kind"], said["sequence"], said["detail"]) for name, said in heard] == [
        ("worker_event", event.kind, event.sequence, "why") for event in relayed
    ]


async def test_events_that_no_workflow_can_hear_are_logged_once_and_hold_up_nobody(
    temporal: Client,
) -> None:
    user = f"relay-late-{os.getpid()}"
    strange = ["nobody-at-all", "x" * 2000, "", "a\x00b"]

    def event(user_id: str) -> WorkerEvent:
        return WorkerEvent(
            worker_id="w1",
            user_id=user_id,
            epoch=1,
            sequence=4,
            kind=WorkerEventKind.RECONNECTING,
            at_ms=1,
        )

    async with listening(temporal, names.user_worker_id(user)) as handle:
        relay = Relay(temporal)
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                await relay.handle([*(event(name) for name in strange), event(user)])
        assert len(await signals(handle, 3)) == 3
    assert [line["event"] for line in logs] == ["event_of_no_workflow"] * len(strange)


def flapping(user: str, numbers: range) -> list[WorkerEvent]:
    """What a worker says whose broker comes and goes."""
    return [
        WorkerEvent(
            worker_id="w1",
            user_id=user,
            epoch=1,
            sequence=number,
            kind=WorkerEventKind.RECONNECTING if number % 2 else WorkerEventKind.CONNECTED,
            at_ms=1_795_410_000_000,
        )
        for number in numbers
    ]


async def test_a_worker_that_flaps_sends_few_signals_and_the_last_one_arrives(
    harness: ActivityHarness, temporal: Client
) -> None:
    user = f"relay-flaps-{os.getpid()}"
    events = flapping(user, range(10, 510))
    async with listening(temporal, names.user_worker_id(user)) as handle:
        relay = Relay(temporal, window=2.0)
        stream = EventStream(harness.client, RELAY_GROUP, relay, harness.secrets, abandoned_ms=300)
        await reply_of(
            harness.client.xgroup_create(keys.CHANGES, RELAY_GROUP, id="0", mkstream=True)
        )
        for event in events:
            await harness.send_event(event)
        async with tasks.running(stream.run()):
            heard = await signals(handle, MAX_SIGNALS_PER_WINDOW)
            assert heard[-1][1]["sequence"] == 9 + MAX_SIGNALS_PER_WINDOW
            group = {"lag": len(events)}
            while group["lag"]:
                await asyncio.sleep(0.05)
                (group,) = await reply_of(harness.client.xinfo_groups(keys.CHANGES))
        while (await reply_of(harness.client.xpending(keys.CHANGES, RELAY_GROUP)))["pending"]:
            await stream.upkeep()
            await asyncio.sleep(0.05)
        heard = await signals(handle, MAX_SIGNALS_PER_WINDOW + 1)
        other = [structs.replace(events[-1], user_id="another")]  # others have windows of their own
        assert await relay.handle(other) == []
    assert [said["sequence"] for _, said in heard] == [
        *range(10, 10 + MAX_SIGNALS_PER_WINDOW),
        events[-1].sequence,
    ]


async def test_a_held_signal_outlives_the_orchestrator_that_held_it(
    harness: ActivityHarness, temporal: Client
) -> None:
    """kill -9: nothing of the first one's memory is left."""
    user = f"relay-killed-{os.getpid()}"
    await reply_of(harness.client.xgroup_create(keys.CHANGES, RELAY_GROUP, id="0", mkstream=True))
    async with listening(temporal, names.user_worker_id(user)) as handle:
        for event in flapping(user, range(10, 50)):
            await harness.send_event(event)
        for name in ("killed", "next"):
            relay = Relay(temporal, window=300.0)
            stream = EventStream(
                harness.client, RELAY_GROUP, relay, harness.secrets, consumer=name, abandoned_ms=0
            )
            await (stream.step() if name == "killed" else stream.upkeep())
        heard = await signals(handle, MAX_SIGNALS_PER_WINDOW + 1)
    assert [said["sequence"] for _, said in heard] == [*range(10, 10 + MAX_SIGNALS_PER_WINDOW), 49]


async def test_what_was_held_back_before_newer_news_is_not_sent_after_it(temporal: Client) -> None:
    user = f"relay-older-{os.getpid()}"
    *first, older, newer = flapping(user, range(10, 12 + MAX_SIGNALS_PER_WINDOW))
    async with listening(temporal, names.user_worker_id(user)) as handle:
        relay = Relay(temporal, window=0.5)
        assert await relay.handle([*first, older], [1] * MAX_SIGNALS_PER_WINDOW + [2]) == [older]
        await asyncio.sleep(0.5)
        assert await relay.handle([newer], [3]) == []
        assert await relay.handle([older], [2]) == []
        heard = await signals(handle, MAX_SIGNALS_PER_WINDOW + 1)
    assert heard[-1][1]["sequence"] == newer.sequence
