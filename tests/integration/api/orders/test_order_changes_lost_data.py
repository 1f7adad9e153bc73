"""Orders taken back from a Valkey that lost data or went back in time: not final while a worker has
them."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import httpx

from api.orders.schemas import CancelRequest
from infra.database.models import Order
from infra.database.orders import recording
from infra.valkey import client as valkey
from tests.support.api.orders import set_order_columns
from tests.support.systems.api import ServedApi, StartWorker, an_order, running_api
from tests.support.workers.api_worker import silent
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import OrderEvent, OrderState


async def row_of(api: ServedApi, order_id: str) -> Order:
    async with api.services.database.session() as session:
        return await recording.get_order(session, UUID(order_id))


async def queued(api: ServedApi, user: httpx.AsyncClient) -> str:
    """An order in the queue of a worker that never looks."""
    await api.services.valkey.set(keys.mark(api.user), "1:scripted", ex=30)
    made = await user.post(f"/users/{api.user}/orders?wait=0", json=an_order())
    while not await api.services.valkey.llen(keys.requests(api.user)):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return str(made.json()["id"])


async def test_a_cancel_right_after_a_flush_leaves_an_order_alive_that_a_worker_has(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user, silent)
    made = await user.post(f"/users/{api.user}/orders?wait=0", json=an_order())
    order_id = str(made.json()["id"])
    await worker.taken.wait()
    await api.services.valkey.flushall()  # neither answer, nor journal, nor the id that was seen
    answer = await user.post(f"/orders/{order_id}/cancel?wait=0", json={"request_id": "x"})
    assert (answer.status_code, answer.json()["state"]) == (202, "accepted")
    row = await row_of(api, order_id)
    assert row.state == "accepted"
    assert row.verify_at is not None
    told = OrderEvent(
        event_id=f"{order_id}:e1",
        order_id=order_id,
        user_id=api.user,
        epoch=1,
        state=OrderState.SUBMITTED,
        at_ms=1_795_410_000_000,
    )
    async with api.services.database.session() as session:
        await recording.record_event(session, told)
    assert (await row_of(api, order_id)).state == "submitted"


async def promoted(api: ServedApi, ahead: int = 0) -> None:
    """Valkey's server is another one since now, or in so many seconds: what it knows of orders
    until then may be an older copy."""
    client = api.services.valkey
    note: dict[Any, Any] = {
        "server": await valkey.read_server_id(client),
        "at_ms": ((await client.time())[0] + ahead) * 1000,
    }
    async with client.pipeline() as pipe:
        pipe.hset(keys.SERVER_SINCE, mapping=note)
        await pipe.execute()


async def test_a_cancel_does_not_trust_a_queue_that_may_be_an_older_copy(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    order_id = await queued(api, user)
    await promoted(api)
    answer = await user.post(f"/orders/{order_id}/cancel?wait=0", json={"request_id": "x"})
    assert (answer.status_code, answer.json()["state"]) == (202, "accepted")
    row = await row_of(api, order_id)
    assert (row.state, row.reason) == ("accepted", None)
    # The cancel goes the way of one that a worker has, behind the order; its caller did not wait
    # for that.
    while await api.services.valkey.llen(keys.requests(api.user)) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await api.services.valkey.llen(keys.requests(api.user)) == 2


async def test_an_overdue_order_in_a_queue_that_may_be_an_older_copy_is_left_to_the_sweeper(
    api: ServedApi,
) -> None:
    settings = api.settings.model_copy(update={"order_deadline": 1.0})
    async with running_api(settings) as quick, quick.client(quick.key) as user:
        await quick.services.valkey.set(keys.mark(quick.user), "1:scripted", ex=30)
        await promoted(quick, ahead=60)  # so the order is one of before, however late it comes
        answer = await user.post(f"/users/{quick.user}/orders?wait=20", json=an_order())
        assert (answer.status_code, answer.json()["state"]) == (202, "accepted")
        row = await row_of(quick, answer.json()["id"])
        assert row.state == "accepted"
        assert row.verify_at is not None


async def test_a_cancel_that_finds_a_submitted_order_in_its_queue_does_not_settle_it(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    order_id = await queued(api, user)
    before = await row_of(api, order_id)
    await set_order_columns(
        api, order_id, state="submitting"
    )  # and the queue is that of a moment before
    changed = await api.services.changes.cancel(before, CancelRequest(request_id="x"), 0, "key:1")
    assert (changed.order.state, changed.order.final, changed.answered) == (
        OrderState.UNKNOWN,
        False,
        False,
    )
    row = await row_of(api, order_id)
    assert row.state == "unknown"
    assert row.verify_at is not None
    # The answer that the withdrawal left behind says "cancelled": it does not count either.
    assert (await user.get(f"/orders/{order_id}")).json()["state"] == "unknown"


async def test_a_cancel_of_an_order_that_no_queue_has_answers_who_waits_for_it(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    await api.services.valkey.set(keys.mark(api.user), "1:scripted", ex=30)
    waiting = asyncio.create_task(user.post(f"/users/{api.user}/orders?wait=20", json=an_order()))
    while not await api.services.valkey.llen(keys.requests(api.user)):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    (order,) = (await user.get(f"/users/{api.user}/orders")).json()["orders"]
    await api.services.valkey.delete(keys.requests(api.user))
    cancelled = await user.post(f"/orders/{order['id']}/cancel", json={"request_id": "x"})
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert (await waiting).json()["state"] == "cancelled"


async def test_an_order_given_up_in_a_queue_that_went_back_in_time_is_unknown(
    api: ServedApi,
) -> None:
    settings = api.settings.model_copy(update={"order_deadline": 5.0})  # for what is done meanwhile
    async with running_api(settings) as quick, quick.client(quick.key) as user:
        await quick.services.valkey.set(keys.mark(quick.user), "1:scripted", ex=30)
        waiting = asyncio.create_task(
            user.post(f"/users/{quick.user}/orders?wait=20", json=an_order())
        )
        while not await quick.services.valkey.llen(keys.requests(quick.user)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (order,) = (await user.get(f"/users/{quick.user}/orders")).json()["orders"]
        await set_order_columns(quick, order["id"], state="submitting")
        answer = await waiting
        assert (answer.status_code, answer.json()["state"]) == (202, "unknown")
        assert await quick.services.valkey.llen(keys.requests(quick.user)) == 0
        assert (await row_of(quick, order["id"])).state == "unknown"
        assert (await user.get(f"/orders/{order['id']}")).json()["state"] == "unknown"
