"""Orders that PostgreSQL has lost, which was restored to an earlier state: no repeat is sent."""

import asyncio

import httpx
import pytest
from sqlalchemy import select, text

from infra.database.engine import Database
from infra.database.models import Order
from tests.support.systems.api import ServedApi, StartWorker, an_order


async def forget(database: Database, order_id: str) -> str:
    """Removes an order, as a restore does; returns its tag."""
    async with database.session() as session:
        tag = await session.scalar(select(Order.tag).where(Order.id == order_id))
        for table, column in (("order_events", "order_id"), ("orders", "id")):
            await session.execute(text(f"delete from {table} where {column} = '{order_id}'"))  # noqa: S608
    assert tag
    return tag


@pytest.mark.timeout(60)
async def test_a_repeat_of_a_lost_order_stands_for_the_first_and_is_never_sent(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    path = f"/users/{api.user}/orders"
    first = (await user.post(path, json=an_order(1))).json()
    tag = await forget(api.services.database, first["id"])
    again = await asyncio.gather(*(user.post(path, json=an_order(1)) for _ in range(5)))
    assert {answer.status_code for answer in again} <= {200, 202}
    assert {(answer.json()["state"], answer.json()["code"]) for answer in again} == {
        ("unknown", "OUTCOME_UNKNOWN")
    }
    assert first["id"] in again[0].json()["reason"]
    async with api.services.database.session() as session:
        assert (await session.scalars(select(Order.tag))).all() == [tag]
    assert [order.order_id for order in worker.popped] == [first["id"]]


async def test_the_numbers_of_a_restored_account_do_not_come_twice(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    path = f"/users/{api.user}/orders"
    first = (await user.post(path, json=an_order(1))).json()
    lost = await forget(api.services.database, first["id"])
    async with api.services.database.session() as session:
        await session.execute(text("delete from order_tags"))
    await asyncio.sleep(0.3)  # nine a second
    answer = await user.post(path, json=an_order(2))
    assert answer.status_code == 201
    async with api.services.database.session() as session:
        assert (await session.scalars(select(Order.tag))).one() > lost


async def test_a_lost_order_whose_tag_another_one_has_is_for_a_person(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    path = f"/users/{api.user}/orders"
    first = (await user.post(path, json=an_order(1))).json()
    tag = await forget(api.services.database, first["id"])
    await user.post(path, json=an_order(2))
    async with api.services.database.session() as session:
        await session.execute(text("update orders set tag = :tag"), {"tag": tag})
    again = (await user.post(path, json=an_order(1))).json()
    assert again["state"] == "needs_attention"
    assert tag in again["attention"]
