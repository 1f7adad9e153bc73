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
from tests.support.activities.harness import Yard
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import OrderEvent, OrderState
from workflows.user_worker.messages import ClaimStatus, StopWorker, WorkerRef


async def test_a_claim_that_valkey_lost_takes_no_second_worker(yard: Yard) -> None:
    """*one-owner*: the first worker may be logged in; it has to end before another one begins."""
    user, worker = await yard.user(), await yard.worker()
    await asyncio.gather(yard.run(yard.claiming.claim_worker, yard.claim(user)), worker.serve())
    await yard.client.flushall()
    other = await yard.worker()
    again = await yard.run(yard.claiming.claim_worker, yard.claim(user))
    assert again.status == ClaimStatus.GONE
    assert again.worker is not None
    assert again.worker.worker_id == worker.worker_id
    assert await other.announce() == "ready"
    assert not await reply_of(yard.client.exists(keys.owner(user)))


async def test_a_claim_that_valkey_lost_is_stopped_by_its_claim_id_alone(yard: Yard) -> None:
    user, worker = await yard.user(), await yard.worker()
    await asyncio.gather(yard.run(yard.claiming.claim_worker, yard.claim(user)), worker.serve())
    await yard.client.flushall()
    unknown = WorkerRef(worker_id="", task_id="", epoch=0, claim_id="c1", pool="p")
    request = StopWorker(user_id=user, worker=unknown, reason="claim ran out", grace=0.0)
    await yard.run(yard.stopping.stop_worker, request)
    running: list[Task] = await yard.launcher.list()
    assert worker.worker_id not in {task.worker_id for task in running}


async def _accepted(yard: Yard, user: str, account: str) -> StoredOrder:
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
    async with yard.database.session() as session:
        return (await acceptance.accept_order(session, new)).order


def _event(order: StoredOrder, what: str, **fields: str) -> OrderEvent:
    return OrderEvent(
        event_id=f"{order.id}:{what}",
        order_id=str(order.id),
        user_id=order.user_id,
        epoch=1,
        state=OrderState.SUBMITTED,
        at_ms=1_795_410_000_000,
        **fields,  # type: ignore[arg-type]
    )


async def test_events_that_postgresql_refuses_for_now_come_again(
    yard: Yard, migrated_database: str
) -> None:
    user = await yard.user()
    async with yard.database.session() as session:
        [account] = [found.account_id for found in await accounts.accounts_of_user(session, user)]
    order = await _accepted(yard, user, account)
    event = _event(order, "told")
    owner = Database(migrated_database)
    async with owner.session() as session:
        await session.execute(text("alter table order_events rename to order_events_away"))
    with pytest.raises(asyncpg.UndefinedTableError):
        await Recorder(yard.database).handle([event])
    async with owner.session() as session:
        await session.execute(text("alter table order_events_away rename to order_events"))
    await owner.close()
    await Recorder(yard.database).handle([event])
    async with yard.database.session() as session:
        assert (await recording.get_order(session, order.id)).state == "submitted"


async def test_an_event_that_postgresql_refuses_does_not_stop_the_others(yard: Yard) -> None:
    user = await yard.user()
    async with yard.database.session() as session:
        [account] = [found.account_id for found in await accounts.accounts_of_user(session, user)]
    strange, good = await _accepted(yard, user, account), await _accepted(yard, user, account)
    events = [
        _event(strange, "nul", reason="a NUL \x00 in the broker's text"),
        _event(strange, "x" * 500),
        _event(good, "good", broker_order_id="b" * 500),
        _event(good, "better"),
    ]
    with pytest.raises(asyncpg.StringDataRightTruncationError) as refused:
        await Recorder(yard.database).handle(events)
    assert fails_for_good(refused.value)
    for event in events:
        with suppress(asyncpg.StringDataRightTruncationError):
            await Recorder(yard.database).handle([event])
    async with yard.database.session() as session:
        assert (
            await recording.get_order(session, strange.id)
        ).reason == "a NUL  in the broker's text"
        assert (await recording.get_order(session, good.id)).state == "submitted"
        assert {event.event_id for event in await recording.events_of_order(session, good.id)} == {
            f"{good.id}:accepted",
            f"{good.id}:better",
        }
