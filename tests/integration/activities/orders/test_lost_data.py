"""Valkey loses what it knew, workers tell what PostgreSQL cannot store: nobody else suffers."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from datetime import date

import asyncpg
import pytest
from sqlalchemy import text

from activities.events.recorder import Recorder
from infra.database import accounts
from infra.database.dead_letters import fails_for_good
from infra.database.engine import Database
from infra.database.orders import acceptance, recording
from infra.database.orders.acceptance import StoredOrder
from infra.valkey.client import reply_of
from infra.worker_task import Task
from tests.support.activities.harness import ActivityHarness
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import OrderEvent, OrderState
from workflows.user_worker.messages import ClaimStatus, StopWorker, WorkerRef


async def test_a_claim_that_valkey_lost_takes_no_second_worker(harness: ActivityHarness) -> None:
    """*one-owner*: the first worker may be logged in; it has to end before another one begins."""
    user, worker = await harness.user(), await harness.worker()
    await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    await harness.client.flushall()
    other = await harness.worker()
    again = await harness.run(harness.claiming.claim_worker, harness.claim(user))
    assert again.status == ClaimStatus.GONE
    assert again.worker is not None
    assert again.worker.worker_id == worker.worker_id
    assert await other.announce() == "ready"
    assert not await reply_of(harness.client.exists(keys.owner(user)))


async def test_a_claim_that_valkey_lost_is_stopped_by_its_claim_id_alone(
    harness: ActivityHarness,
) -> None:
    user, worker = await harness.user(), await harness.worker()
    await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user)), worker.serve()
    )
    await harness.client.flushall()
    unknown = WorkerRef(worker_id="", task_id="", epoch=0, claim_id="c1", pool="p")
    request = StopWorker(user_id=user, worker=unknown, reason="claim ran out", grace=0.0)
    await harness.run(harness.stopping.stop_worker, request)
    running: list[Task] = await harness.launcher.list()
    assert worker.worker_id not in {task.worker_id for task in running}


async def _accepted(harness: ActivityHarness, user: str, account: str) -> StoredOrder:
    new = acceptance.NewOrder(
        user_id=user,
        account_id=account,
        client_order_id=uuid.uuid4().hex,
        fingerprint="f",
        symbol="2330",
        side="buy",
        quantity=1,
        price_type="MKT",
        price=None,
        time_in_force="IOC",
        generation="g",
        lifetime_s=0.0,
        trading_day=date(2026, 11, 23),
    )
    async with harness.database.session() as session:
        return (await acceptance.accept_order(session, new)).order


def _event(order: StoredOrder, suffix: str, **fields: str) -> OrderEvent:
    return OrderEvent(
        event_id=f"{order.id}:{suffix}",
        order_id=str(order.id),
        user_id=order.user_id,
        epoch=1,
        state=OrderState.SUBMITTED,
        at_ms=1_795_410_000_000,
        **fields,  # type: ignore[arg-type]
    )


async def test_events_that_postgresql_refuses_for_now_come_again(
    harness: ActivityHarness, migrated_database: str
) -> None:
    user = await harness.user()
    async with harness.database.session() as session:
        [account] = [stored.account_id for stored in await accounts.accounts_of_user(session, user)]
    order = await _accepted(harness, user, account)
    event = _event(order, "told")
    owner = Database(migrated_database)
    async with owner.session() as session:
        await session.execute(text("alter table order_events rename to order_events_away"))
    with pytest.raises(asyncpg.UndefinedTableError):
        await Recorder(harness.database).handle([event])
    async with owner.session() as session:
        await session.execute(text("alter table order_events_away rename to order_events"))
    await owner.close()
    await Recorder(harness.database).handle([event])
    async with harness.database.session() as session:
        assert (await recording.get_order(session, order.id)).state == "submitted"


async def test_an_event_that_postgresql_refuses_does_not_stop_the_others(
    harness: ActivityHarness,
) -> None:
    user = await harness.user()
    async with harness.database.session() as session:
        [account] = [stored.account_id for stored in await accounts.accounts_of_user(session, user)]
    strange, good = await _accepted(harness, user, account), await _accepted(harness, user, account)
    events = [
        _event(strange, "nul", reason="a NUL \x00 in the broker's text"),
        _event(strange, "x" * 500),
        _event(good, "good", broker_order_id="b" * 500),
        _event(good, "better"),
    ]
    with pytest.raises(asyncpg.StringDataRightTruncationError) as refused:
        await Recorder(harness.database).handle(events)
    assert fails_for_good(refused.value)
    for event in events:
        with suppress(asyncpg.StringDataRightTruncationError):
            await Recorder(harness.database).handle([event])
    async with harness.database.session() as session:
        assert (
            await recording.get_order(session, strange.id)
        ).reason == "a NUL  in the broker's text"
        assert (await recording.get_order(session, good.id)).state == "submitted"
        assert {event.event_id for event in await recording.events_of_order(session, good.id)} == {
            f"{good.id}:accepted",
            f"{good.id}:better",
        }
