"""Maintenance with real servers: each anomaly is cleaned up by the second pass, and nothing else
touched."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.maintenance.anomalies import AnomalyKind
from infra.database.workers import assignments, passes
from infra.database.workers import sessions as worker_sessions
from infra.local.servers import TemporalServer
from infra.valkey.client import reply_of
from tests.support.activities.harness import ActivityHarness
from tests.support.activities.listener import ListenerWorkflow, listening
from tests.support.activities.maintenance import MaintainedFleet
from tests.support.workers.pool_worker import POOL
from worker_runtime.protocol import keys
from workflows import names
from workflows.maintenance.messages import Batch


@pytest.fixture
async def fleet(harness: ActivityHarness, temporal_server: TemporalServer) -> MaintainedFleet:
    made = MaintainedFleet(harness, await Client.connect(temporal_server.address))
    await made.fill(serving=4, free=2)
    await made.quiet()
    return made


async def mark_of_nobody(fleet: MaintainedFleet) -> Callable[[], Awaitable[bool]]:
    user = await fleet.harness.user()
    await reply_of(fleet.harness.client.set(keys.mark(user), "7:p-gone"))
    await reply_of(fleet.harness.client.hset(keys.metadata(user), "state", "Active"))

    async def gone() -> bool:
        return not await reply_of(fleet.harness.client.exists(keys.mark(user), keys.metadata(user)))

    return gone


async def mark_of_another_worker(fleet: MaintainedFleet) -> Callable[[], Awaitable[bool]]:
    """Its worker is dead, and nobody has noticed yet: the watcher's business. The mark is ours."""
    worker = fleet.serving[0]
    await reply_of(fleet.harness.client.set(keys.mark(worker.user), "7:p-gone"))

    async def gone() -> bool:
        return bool(await reply_of(fleet.harness.client.get(keys.mark(worker.user))) != b"7:p-gone")

    return gone


async def metadata_without_a_mark(fleet: MaintainedFleet) -> Callable[[], Awaitable[bool]]:
    user = await fleet.harness.user()
    await reply_of(fleet.harness.client.hset(keys.metadata(user), "state", "Active"))

    async def gone() -> bool:
        return not await reply_of(fleet.harness.client.exists(keys.metadata(user)))

    return gone


async def free_worker_that_does_not_run(fleet: MaintainedFleet) -> Callable[[], Awaitable[bool]]:
    await reply_of(fleet.harness.client.zadd(keys.pool_ready(POOL), {"p-gone": 1}))

    async def gone() -> bool:
        return await reply_of(fleet.harness.client.zscore(keys.pool_ready(POOL), "p-gone")) is None

    return gone


async def task_that_announces_nothing(fleet: MaintainedFleet) -> Callable[[], Awaitable[bool]]:
    task = await fleet.launched("p-silent")

    async def gone() -> bool:
        return task.task_id not in await fleet.running()

    return gone


async def task_whose_assignment_is_over(fleet: MaintainedFleet) -> Callable[[], Awaitable[bool]]:
    worker = fleet.serving.pop()
    async with fleet.harness.database.session() as session:
        await worker_sessions.end_session(session, claim_id=worker.ref.claim_id, reason="by hand")
    await reply_of(fleet.harness.client.delete(keys.pool_worker(POOL, worker.ref.worker_id)))

    async def gone() -> bool:
        remaining_keys = await reply_of(
            fleet.harness.client.exists(keys.mark(worker.user), keys.metadata(worker.user))
        )
        return worker.ref.task_id not in await fleet.running() and not remaining_keys

    return gone


async def worker_claimed_for_nobody(fleet: MaintainedFleet) -> Callable[[], Awaitable[bool]]:
    worker = await fleet.harness.worker("p-claimed")
    entry = keys.pool_worker(POOL, "p-claimed")
    await reply_of(fleet.harness.client.hset(entry, mapping={"state": "claimed", "claim": "lost"}))
    await reply_of(fleet.harness.client.zrem(keys.pool_ready(POOL), "p-claimed"))

    async def gone() -> bool:
        return worker.task_id not in await fleet.running() and not await reply_of(
            fleet.harness.client.exists(entry)
        )

    return gone


async def two_workers_of_a_user(fleet: MaintainedFleet) -> Callable[[], Awaitable[bool]]:
    """Of the earlier epoch, and by the books not over."""
    older = fleet.serving.pop()
    await fleet.execute("update users set epoch = epoch + 1 where id = :id", id=older.user)

    async def gone() -> bool:
        return older.ref.task_id not in await fleet.running() and await ended(
            fleet, older.ref.claim_id
        )

    return gone


async def claim_that_got_nowhere(fleet: MaintainedFleet) -> Callable[[], Awaitable[bool]]:
    user = await fleet.harness.user()
    async with fleet.harness.database.session() as session:
        await worker_sessions.assign_epoch(session, user_id=user, claim_id="nowhere", pool=POOL)
    await fleet.execute(
        "update worker_sessions set assigned_at = assigned_at - interval '1 h' where claim_id "
        "= 'nowhere'"
    )

    async def gone() -> bool:
        return await ended(fleet, "nowhere")

    return gone


async def worker_that_drains_for_ever(fleet: MaintainedFleet) -> Callable[[], Awaitable[bool]]:
    worker = fleet.serving.pop()
    await worker.renew("Draining")

    async def gone() -> bool:
        return worker.ref.task_id not in await fleet.running() and await ended(
            fleet, worker.ref.claim_id
        )

    return gone


async def worker_that_nobody_uses(fleet: MaintainedFleet) -> Callable[[], Awaitable[bool]]:
    worker = fleet.serving.pop()
    await worker.renew(idle=86_400.0)

    async def gone() -> bool:
        return worker.ref.task_id not in await fleet.running() and await ended(
            fleet, worker.ref.claim_id
        )

    return gone


async def worker_that_is_dead_by_the_books_alive(
    fleet: MaintainedFleet,
) -> Callable[[], Awaitable[bool]]:
    worker = fleet.serving.pop()
    fleet.harness.launcher.end(worker.ref.task_id)
    await reply_of(fleet.harness.client.delete(keys.mark(worker.user), keys.metadata(worker.user)))

    async def gone() -> bool:
        return await ended(fleet, worker.ref.claim_id)

    return gone


async def ended(fleet: MaintainedFleet, claim_id: str) -> bool:
    async with fleet.harness.database.session() as session:
        row = await worker_sessions.latest_session(session, claim_id=claim_id)
    return row is not None and row.ended_at is not None


ANOMALIES = [
    (mark_of_nobody, AnomalyKind.ORPHAN_MARK),
    (mark_of_another_worker, AnomalyKind.STALE_MARK),
    (metadata_without_a_mark, AnomalyKind.STALE_MARK),
    (free_worker_that_does_not_run, AnomalyKind.STALE_MARK),
    (task_that_announces_nothing, AnomalyKind.ORPHAN_TASK),
    (task_whose_assignment_is_over, AnomalyKind.ORPHAN_TASK),
    (two_workers_of_a_user, AnomalyKind.DUPLICATE),
    (worker_claimed_for_nobody, AnomalyKind.OVERDUE),
    (claim_that_got_nowhere, AnomalyKind.OVERDUE),
    (worker_that_drains_for_ever, AnomalyKind.OVERDUE),
    (worker_that_nobody_uses, AnomalyKind.OVERDUE),
    (worker_that_is_dead_by_the_books_alive, AnomalyKind.OVERDUE),
]


@pytest.mark.parametrize(
    ("plant", "kind"), ANOMALIES, ids=[plant.__name__ for plant, _ in ANOMALIES]
)
async def test_the_second_pass_cleans_it_up_and_nothing_else(
    fleet: MaintainedFleet,
    plant: Callable[[MaintainedFleet], Awaitable[Callable[[], Awaitable[bool]]]],
    kind: AnomalyKind,
) -> None:
    gone = await plant(fleet)
    first, nothing = await fleet.run()
    assert (first.found, first.confirmed, nothing) == (1, 0, {})
    assert not await gone()
    healthy = {worker.ref.task_id for worker in fleet.serving}
    second, outcomes = await fleet.run()
    assert (second.found, second.confirmed, second.guarded) == (1, 1, "")
    assert sum(outcomes.values()) == 1
    assert not {"failed", "healed", "in_flight", "outage"} & outcomes.keys(), outcomes
    assert await gone()
    assert healthy <= await fleet.running()
    async with fleet.harness.database.session() as session:
        shown = await passes.pass_summary(session)
    assert shown is not None
    assert (shown.found, shown.outcomes) == ({kind.value: 1}, outcomes)
    if plant is not mark_of_another_worker:  # that user's worker has no mark of its own now
        assert (await fleet.scan()).found == 0


async def test_a_worker_whose_launch_takes_long_is_left_alone(fleet: MaintainedFleet) -> None:
    fleet.use(fleet.harness.client, launch_timeout=60.0)
    task = await fleet.launched("p-slow")
    for _ in range(2):
        scanned, outcomes = await fleet.run()
        assert (scanned.found, scanned.guarded, outcomes) == (0, "", {})
    assert task.task_id in await fleet.running()


async def test_nobody_is_stopped_with_an_order_in_hand(fleet: MaintainedFleet) -> None:
    gone = await worker_that_drains_for_ever(fleet)
    user = next(
        iter(
            {row.user_id for row in await open_rows(fleet)}
            - {worker.user for worker in fleet.serving}
        )
    )
    await reply_of(fleet.harness.client.lpush(keys.processing(user), "an order"))
    await fleet.run()
    assert (await fleet.run())[1] == {"in_flight": 1}
    assert not await gone()
    await reply_of(fleet.harness.client.delete(keys.processing(user)))
    assert (await fleet.run())[1] == {"stopped": 1}
    assert await gone()


async def test_an_order_in_hand_keeps_its_worker_and_no_other(
    fleet: MaintainedFleet,
) -> None:
    kept, gone = fleet.serving[:2]
    for worker in (kept, gone):
        await worker.renew("Draining")
    deleted = await mark_of_nobody(fleet)
    await reply_of(fleet.harness.client.lpush(keys.processing(kept.user), "an order"))
    await fleet.run()
    assert (await fleet.run())[1] == {"in_flight": 1, "stopped": 1, "deleted": 1}
    assert await deleted()
    assert (await ended(fleet, kept.ref.claim_id), await ended(fleet, gone.ref.claim_id)) == (
        False,
        True,
    )
    assert gone.ref.task_id not in await fleet.running()


async def test_a_second_attempt_does_not_call_healed_what_the_first_cleaned_up(
    fleet: MaintainedFleet,
) -> None:
    gone = await worker_that_drains_for_ever(fleet)
    await fleet.run()
    scanned = await fleet.scan()
    first = await fleet.harness.run(fleet.maintenance.clean_up, fleet.batch(scanned))
    assert (first.outcomes, await gone()) == ({"stopped": 1}, True)
    again = ActivityEnvironment()
    again.info = replace(again.info, attempt=2)
    second = await again.run(fleet.maintenance.clean_up, fleet.batch(scanned))
    assert second.outcomes == {"earlier": 1}


async def open_rows(fleet: MaintainedFleet) -> list[assignments.AssignmentRow]:
    async with fleet.harness.database.session() as session:
        return await assignments.open_assignments(session)


async def test_a_worker_that_recovers_between_two_scans_is_left_alone(
    fleet: MaintainedFleet,
) -> None:
    worker = fleet.serving[0]
    await worker.renew("Draining")
    await fleet.run()
    scanned = await fleet.scan()
    assert scanned.confirmed == 1
    await worker.renew("Active")
    cleaned = await fleet.harness.run(fleet.maintenance.clean_up, fleet.batch(scanned))
    assert cleaned.outcomes == {"healed": 1}
    assert fleet.harness.launcher.stops == []


async def test_a_worker_that_its_workflow_knows_is_left_to_it(fleet: MaintainedFleet) -> None:
    worker = fleet.serving[0]
    await worker.renew("Draining")
    view = {
        "user_id": worker.user,
        "state": "Active",
        "since": 1.0,
        "worker": {
            "worker_id": worker.ref.worker_id,
            "task_id": worker.ref.task_id,
            "epoch": worker.ref.epoch,
            "claim_id": worker.ref.claim_id,
            "pool": POOL,
        },
        "attempts": 1,
        "reason": "",
        "next_step": "",
        "deadline": None,
    }
    async with listening(fleet.temporal, names.user_worker_id(worker.user)) as handle:
        await handle.signal("shows", view)
        await fleet.run()
        assert (await fleet.run())[1] == {"signalled": 1}
        heard = [
            said for said in await handle.query(ListenerWorkflow.heard) if said[0] == "examine"
        ]
    assert [said["worker_id"] for _, said in heard] == [worker.ref.worker_id]
    assert fleet.harness.launcher.stops == []


async def test_a_pass_that_follows_too_soon_does_not_count(fleet: MaintainedFleet) -> None:
    fleet.use(fleet.harness.client, confirm=60.0)
    assert (await fleet.scan()).number == 0


@pytest.mark.parametrize("anomalies", [2, 4])
async def test_a_clean_up_lists_the_fleet_once_and_asks_about_each_anomaly_by_its_id(
    fleet: MaintainedFleet, anomalies: int
) -> None:
    """A guard compares the number of all tasks; the batches of a pass share that listing."""
    launcher = fleet.harness.launcher
    running = len(await launcher.list())
    for serving in fleet.serving[:anomalies]:  # no workflow knows these workers
        ended = "update worker_sessions set ended_at = now() where user_id = :user"
        await fleet.execute(ended, user=serving.user)
    await fleet.scan()
    scanned = await fleet.scan(override=True)
    assert scanned.confirmed == anomalies
    launcher.calls.clear()
    launcher.tasks_shown = 0
    half = anomalies // 2
    for first in (0, half):
        batch = Batch(number=scanned.number, first=first, count=half)
        cleaned = await fleet.harness.run(fleet.maintenance.clean_up, batch)
        assert cleaned.outcomes == {"stopped": half}
    assert launcher.calls["list"] == 1
    assert launcher.calls["find_tasks"] == 2 * anomalies
    assert launcher.calls["stop"] == anomalies
    assert launcher.tasks_shown <= running + 2 * anomalies
