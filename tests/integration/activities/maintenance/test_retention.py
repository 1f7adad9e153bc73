"""Launches and assignments of workers that ended long ago are removed; what they rule out stays
ruled out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from sqlalchemy import func, select, text
from temporalio.client import Client

from activities.events.recorder import LATE_NEWS, Recorder
from infra.database.models import WorkerLaunch, WorkerSession
from infra.database.orders import recording
from infra.database.workers import launches
from infra.database.workers import sessions as worker_sessions
from infra.valkey.client import text_of
from tests.support.activities.event_streams import accept_new_order, load_order, make_fill_event
from tests.support.activities.harness import ActivityHarness
from tests.support.activities.maintenance import MaintainedFleet
from tests.support.workers.pool_worker import POOL


async def end(harness: ActivityHarness, claim_id: str, days: int) -> None:
    """The assignment, and the launch of its worker, are so old."""
    async with harness.database.session() as session:
        await session.execute(
            text(
                "update worker_sessions set ended_at = now() - make_interval(days => :d) where "
                "claim_id = :c"
            ),
            {"d": days, "c": claim_id},
        )
        await session.execute(
            text(
                "update worker_launches set launched_at = now() - make_interval(days => :d) "
                "where worker_id = (select worker_id from worker_sessions where claim_id = :c)"
            ),
            {"d": days + 1, "c": claim_id},
        )


async def assignment(harness: ActivityHarness, user: str, claim_id: str, days: int) -> str:
    """An ended assignment of a worker that is gone."""
    worker_id = f"w-{claim_id}"
    async with harness.database.session() as session:
        await launches.record_launch(
            session, worker_id=worker_id, pool=POOL, version="1", task_id="t"
        )
        await worker_sessions.assign_epoch(session, user_id=user, claim_id=claim_id, pool=POOL)
        await worker_sessions.assign_worker(
            session, claim_id=claim_id, worker_id=worker_id, warm=True
        )
    await end(harness, claim_id, days)
    return worker_id


async def claims(harness: ActivityHarness, user: str) -> set[str]:
    async with harness.database.session() as session:
        return set(
            await session.scalars(
                select(WorkerSession.claim_id).where(WorkerSession.user_id == user)
            )
        )


async def test_what_ended_long_ago_goes_but_for_a_users_latest(
    harness: ActivityHarness, temporal: Client
) -> None:
    fleet = MaintainedFleet(harness, temporal)
    await fleet.fill(serving=0, free=0)
    await fleet.quiet()
    user, other = await harness.user(), await harness.user()
    gone = [await assignment(harness, user, f"{user}-{days}", days) for days in (100, 91)]
    kept = [await assignment(harness, user, f"{user}-{days}", days) for days in (89, 1)]
    kept.append(await assignment(harness, other, f"{other}-200", 200))
    async with harness.database.session() as session:
        await launches.record_launch(session, worker_id="never-used", pool=POOL, version="1")
        await session.execute(
            text(
                "update worker_launches set launched_at = '2020-01-01' where worker_id = "
                "'never-used'"
            )
        )
    await fleet.quiet()
    assert await claims(harness, user) == {f"{user}-89", f"{user}-1"}
    assert await claims(harness, other) == {f"{other}-200"}
    async with harness.database.session() as session:
        known = set(await session.scalars(select(WorkerLaunch.worker_id)))
        assert (known >= set(kept), known & {*gone, "never-used"}) == (True, set())
        # Nothing of it can be assigned again, although its launch token is as valid as ever.
        assert await launches.never_assigned(session, POOL, gone) == {}
        await worker_sessions.assign_epoch(session, user_id=other, claim_id="again", pool=POOL)
        with pytest.raises(worker_sessions.NotAssignable):
            await worker_sessions.assign_worker(
                session, claim_id="again", worker_id=gone[0], warm=True
            )
    # What comes from it is as late as before, and epochs go on.
    async with harness.database.session() as session:
        now = datetime.now(UTC)
        late = [
            await worker_sessions.ended_before(session, user, n, now - timedelta(1))
            for n in (1, 3, 5)
        ]
        assert late == [True, True, False]
        assert (
            await worker_sessions.assign_epoch(session, user_id=user, claim_id="n", pool=POOL)
        ).epoch == 5


async def test_what_still_runs_is_remembered_with_all_that_came_after(
    harness: ActivityHarness,
) -> None:
    user = await harness.user()
    first, *later = [
        await assignment(harness, user, f"{user}-{days}", days) for days in (100, 95, 1)
    ]
    async with harness.database.session() as session:
        await launches.record_launch(session, worker_id="free", pool=POOL, version="1")
        await session.execute(text("update worker_launches set launched_at = '2020-01-01'"))
        await launches.purge_ended(session, 90, [first, "free"])
    assert len(await claims(harness, user)) == 3
    async with harness.database.session() as session:
        assert await session.scalar(select(func.count()).select_from(WorkerLaunch)) == 4
        assert list(await launches.never_assigned(session, POOL, [first, "free"])) == ["free"]
        await launches.purge_ended(session, 90, [])
        assert set(await session.scalars(select(WorkerLaunch.worker_id))) == {later[-1]}


async def test_a_fill_from_an_assignment_that_is_purged_is_late(harness: ActivityHarness) -> None:
    user = await harness.user()
    order_id = await accept_new_order(harness, user)
    for days in (100, 0):
        await assignment(harness, user, f"{user}-{days}", days)
    async with harness.database.session() as session:
        await launches.purge_ended(session, 90, [])
    await Recorder(harness.database).handle([make_fill_event(user, order_id)])
    assert ((await load_order(harness, order_id)).attention or "").startswith(LATE_NEWS)


async def test_an_event_of_ours_is_never_late(harness: ActivityHarness) -> None:
    user = await harness.user()
    order_id = await accept_new_order(harness, user)
    await assignment(harness, user, f"{user}-0", 0)
    ours = msgspec.structs.replace(make_fill_event(user, order_id), epoch=0)
    async with harness.database.session() as session:
        await recording.record_events(session, [ours])
    recorded = await load_order(harness, order_id)
    assert (recorded.state, recorded.attention) == (ours.state, None)


async def test_a_pass_deletes_the_valkey_user_of_a_launch_that_failed(
    harness: ActivityHarness, temporal: Client
) -> None:
    fleet = MaintainedFleet(harness, temporal)
    # Of the server, which tests share.
    others = {text_of(name) for name in await harness.client.acl_users()}
    await fleet.fill(serving=1, free=1)
    there = {task.worker_id for task in await harness.launcher.list()}
    await harness.database.fetch(
        launches.record_launch, worker_id="c-failed", pool=POOL, version="1"
    )
    for worker_id in (*there, "c-failed"):
        await fleet.users.create(worker_id, POOL)
    async with harness.database.session() as session:
        await session.execute(
            text("update worker_launches set launched_at = now() - interval '2 hours'")
        )
    for _ in range(2):
        await fleet.run()
    remaining = {text_of(name) for name in await harness.client.acl_users()} - others
    for worker_id in remaining:
        await fleet.users.delete(worker_id)
    assert remaining == there
