"""Orders through the API: once, in order, and never shown older than they were answered."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from msgspec import structs
from redis.asyncio import Redis
from sqlalchemy import text

from infra.database.engine import Database
from infra.database.orders import recording
from infra.valkey.client import reply_of
from tests.support.systems.api import ServedApi, StartWorker, an_order, running_api
from tests.support.waiting import until
from tests.support.workers.api_worker import failed, filled, silent
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import Failure, Fill, OrderEvent, OrderState


async def test_an_order_is_answered_with_its_outcome(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    answer = await user.post(f"/users/{api.user}/orders", json=an_order())
    body = answer.json()
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/v1/orders/{body['id']}"
    assert (body["state"], body["final"], body["filled_quantity"]) == ("filled", True, 1)
    assert (body["price"], body["average_price"]) == ("1005.5", "1005.5")
    (request,) = worker.popped
    assert (request.order_id, request.user_id, request.account_id) == (body["id"], api.user, "main")
    assert request.price == Decimal("1005.5")
    assert len(request.tag) == 6
    assert request.reply_to == api.services.answers.channels.name_of(api.user)


async def listeners(client: Redis, count: int) -> None:
    """Waits until `count` connections wait for a ring."""
    while sum(each["cmd"] == "blpop" for each in await reply_of(client.client_list())) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_a_ring_that_went_to_a_frozen_worker_is_repeated(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, valkey_client: Redis
) -> None:
    # The worker that was replaced still stands first in Valkey's line of those who wait for a ring.
    frozen = asyncio.create_task(
        reply_of(valkey_client.blpop([keys.doorbell(api.user)], timeout=4))
    )
    await listeners(api.services.answers.client, 1)
    worker = await start_worker(api.user)
    await listeners(api.services.answers.client, 2)
    answer = await user.post(f"/users/{api.user}/orders", json=an_order())
    assert (answer.status_code, answer.json()["state"]) == (201, "filled")
    assert await frozen is not None, "the ring went elsewhere"
    assert len(worker.popped) == 1


async def test_a_repeat_returns_the_first_outcome_and_places_nothing(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    first = await user.post(f"/users/{api.user}/orders", json=an_order(price="1005.50"))
    again = await user.post(f"/users/{api.user}/orders", json=an_order(price=1005.5))
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()
    assert len(worker.popped) == 1


async def test_two_equal_requests_at_once_are_one_order(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    answers = await asyncio.gather(
        *(user.post(f"/users/{api.user}/orders", json=an_order()) for _ in range(5))
    )
    assert {answer.json()["id"] for answer in answers} == {answers[0].json()["id"]}
    assert {answer.json()["state"] for answer in answers} == {"filled"}
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 200, 201]
    assert len(worker.popped) == 1


@pytest.mark.parametrize(
    "changes", [{"quantity": 2}, {"price": "1006"}, {"side": "sell"}, {"symbol": "2317"}]
)
async def test_a_client_order_id_is_not_taken_for_another_order(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, changes: dict[str, Any]
) -> None:
    worker = await start_worker(api.user)
    await user.post(f"/users/{api.user}/orders", json=an_order())
    other = await user.post(f"/users/{api.user}/orders", json=an_order(**changes))
    assert (other.status_code, other.json()["code"]) == (409, "CLIENT_ORDER_ID_REUSED")
    assert len(worker.popped) == 1


async def test_orders_reach_the_worker_in_the_order_in_which_they_were_sent(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    # Temporal is down: without a mark the orders would be taken back.
    await api.services.valkey.set(keys.mark(api.user), "1:scripted")
    for number in range(5):
        answer = await user.post(f"/users/{api.user}/orders?wait=0", json=an_order(number))
        assert answer.status_code == 202
    worker = await start_worker(api.user)
    await until(lambda: len(worker.popped) >= 4)
    numbers = [int(order.tag, 36) for order in worker.popped]
    assert numbers == sorted(numbers)


async def test_an_order_that_takes_longer_than_its_wait_is_accepted_and_found_later(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user, silent)
    answer = await user.post(f"/users/{api.user}/orders?wait=0.1", json=an_order())
    assert (answer.status_code, answer.json()["state"]) == (202, "accepted")
    where = answer.headers["location"].removeprefix("/v1")
    await worker.taken.wait()
    assert (await user.get(where)).json()["state"] == "accepted"
    async with api.services.database.session() as session:
        row = await recording.get_order(session, UUID(answer.json()["id"]))
        row.state = "submitting"  # as the recorder writes it
    again = await user.post(f"/users/{api.user}/orders?wait=0.1", json=an_order())
    assert (again.status_code, again.json()["state"]) == (202, "submitting")
    await worker.answer_later(filled(worker.popped[0]))
    later = await user.get(where)
    assert (later.status_code, later.json()["state"]) == (200, "filled")


async def test_an_order_that_nobody_waits_for_is_answered_as_it_is_found(
    api: ServedApi, user: httpx.AsyncClient, migrated_database: str
) -> None:
    await api.services.valkey.set(keys.mark(api.user), "1:scripted")
    owner = Database(migrated_database, pool_size=1)
    async with owner.session() as session:  # a recorder that is quicker than our answer
        for statement in (
            "create function recorded() returns trigger language plpgsql as "
            "'begin update orders set state = ''submitting'' where id = new.id; return null; end'",
            "create trigger recorded after insert on orders for each row execute function "
            "recorded()",
        ):
            await session.execute(text(statement))
    try:
        answer = await user.post(f"/users/{api.user}/orders?wait=0", json=an_order())
        assert (answer.status_code, answer.json()["state"]) == (202, "submitting")
        shown = (await user.get(answer.headers["location"].removeprefix("/v1"))).json()
        assert {name: shown[name] for name in answer.json()} == answer.json()
    finally:
        async with owner.session() as session:
            await session.execute(text("drop trigger recorded on orders"))
            await session.execute(text("drop function recorded"))
        await owner.close()


async def test_a_repeat_waits_for_the_first_ones_answer(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user, silent)
    await user.post(f"/users/{api.user}/orders?wait=0", json=an_order())
    again = asyncio.create_task(user.post(f"/users/{api.user}/orders?wait=10", json=an_order()))
    await worker.taken.wait()
    await worker.answer_later(filled(worker.popped[0]))
    answer = await again
    assert (answer.status_code, answer.json()["state"]) == (200, "filled")
    assert len(worker.popped) == 1


async def test_a_repeat_at_another_process_finds_the_answer(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user, silent)
    await user.post(f"/users/{api.user}/orders?wait=0", json=an_order())
    await worker.taken.wait()
    async with running_api(api.settings) as other, other.client(api.key) as elsewhere:
        again = asyncio.create_task(
            elsewhere.post(f"/users/{api.user}/orders?wait=10", json=an_order())
        )
        await until(lambda: other.services.answers.pending == 1)
        await worker.answer_later(filled(worker.popped[0]))
        answer = await again
    assert (answer.status_code, answer.json()["state"]) == (200, "filled")
    assert len(worker.popped) == 1


async def test_an_answer_that_was_never_announced_is_found_in_its_key(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker(api.user, announce=False)
    answer = await user.post(f"/users/{api.user}/orders?wait=10", json=an_order())
    assert (answer.status_code, answer.json()["state"]) == (201, "filled")


async def test_an_answer_given_while_the_subscription_was_broken_is_found_at_once(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, valkey_client: Redis
) -> None:
    worker = await start_worker(api.user, silent, announce=False)
    waiting = asyncio.create_task(user.post(f"/users/{api.user}/orders?wait=30", json=an_order()))
    await worker.taken.wait()
    # And one that no task waits for: only the reconnect finds its answer.
    (order,) = worker.popped
    unseen = filled(structs.replace(order, request_id=f"{order.request_id}-unseen"))
    with api.services.answers.expect(api.user, unseen.request_id, order.order_id, 0) as future:
        for answer in (unseen, filled(order)):
            await worker.answer(b"", answer, "")
        assert not future.done()
        await valkey_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")  # type: ignore[no-untyped-call]
        assert await asyncio.wait_for(future, 30) == unseen
    assert (await waiting).json()["state"] == "filled"


async def test_no_waiter_is_left_behind(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    for number in range(3):
        await user.post(f"/users/{api.user}/orders", json=an_order(number))
    worker.script = silent
    await user.post(f"/users/{api.user}/orders?wait=0", json=an_order(3))
    await until(lambda: len(worker.popped) == 4)
    assert api.services.answers.pending == 1
    await worker.answer_later(filled(worker.popped[-1]))
    await until(lambda: api.services.answers.pending == 0)


async def test_an_order_that_the_broker_rejects_is_answered_as_an_order(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    failure = Failure(code="ORDER_REJECTED", detail="price out of range")
    await start_worker(api.user, failed(OrderState.REJECTED, failure))
    answer = await user.post(f"/users/{api.user}/orders", json=an_order())
    body = answer.json()
    assert (answer.status_code, body["state"], body["code"]) == (201, "rejected", "ORDER_REJECTED")
    assert body["reason"] == "price out of range"


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        (OrderState.EXPIRED, "DEADLINE_EXCEEDED", 422),
        (OrderState.REJECTED, "LEASE_LOST", 503),
        (OrderState.REJECTED, "SESSION_DOWN", 503),
    ],
)
async def test_an_order_that_never_reached_the_broker_is_a_problem_each_time(
    api: ServedApi,
    user: httpx.AsyncClient,
    start_worker: StartWorker,
    state: OrderState,
    code: str,
    status: int,
) -> None:
    worker = await start_worker(api.user, failed(state, Failure(code=code, detail="why")))
    for _ in range(2):
        answer = await user.post(f"/users/{api.user}/orders", json=an_order())
        body = answer.json()
        assert (answer.status_code, body["code"], body["detail"]) == (status, code, "why")
        assert (body["order"]["state"], body["order"]["final"]) == (state.value, True)
    assert len(worker.popped) == 1
    seen = await user.get(f"/orders/{body['order']['id']}")
    assert (seen.status_code, seen.json()["state"], seen.json()["code"]) == (200, state.value, code)


async def test_an_unknown_outcome_is_accepted_but_not_settled(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    failure = Failure(code="OUTCOME_UNKNOWN", detail="no reply")
    await start_worker(api.user, failed(OrderState.UNKNOWN, failure))
    answer = await user.post(f"/users/{api.user}/orders", json=an_order())
    body = answer.json()
    assert (answer.status_code, body["state"], body["final"]) == (202, "unknown", False)
    assert body["code"] == "OUTCOME_UNKNOWN"


async def test_an_answer_reaches_postgresql_without_the_recorder(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    order_id = (await user.post(f"/users/{api.user}/orders", json=an_order())).json()["id"]
    await api.services.valkey.delete(keys.response(api.user, order_id))
    end = time.monotonic() + 30
    while (await user.get(f"/orders/{order_id}")).json()["state"] != "filled":
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


async def test_the_timeline_tells_each_step_with_its_time(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker(api.user)
    order_id = (await user.post(f"/users/{api.user}/orders", json=an_order())).json()["id"]
    database = Database(api.settings.database_url, pool_size=1)
    now = int(datetime.now(UTC).timestamp() * 1000)
    fill = Fill(fill_id="f1", quantity=1, price=Decimal("1005.5"), at_ms=now + 40)
    async with database.session() as session:
        for state, at in (("submitting", 10), ("submitted", 20), ("filled", 40)):
            event = OrderEvent(
                event_id=f"{order_id}:{state}",
                order_id=order_id,
                user_id=api.user,
                epoch=1,
                state=OrderState(state),
                at_ms=now + at,
                fill=fill if state == "filled" else None,
                filled_quantity=1 if state == "filled" else 0,
            )
            assert await recording.record_event(session, event)
    await database.close()
    body = (await user.get(f"/orders/{order_id}")).json()
    steps = [entry["step"] for entry in body["timeline"]]
    assert steps == ["accepted", "submitting", "submitted", "filled"]
    elapsed = [entry["elapsed_ms"] for entry in body["timeline"]]
    assert elapsed == sorted(elapsed)
    assert abs(elapsed[0]) < 0.001


async def test_an_unknown_account_is_refused_before_anything_is_written(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    answer = await user.post(f"/users/{api.user}/orders", json=an_order(account_id="other"))
    assert (answer.status_code, answer.json()["code"]) == (422, "UNKNOWN_ACCOUNT")
    assert "order" not in answer.json()


@pytest.mark.parametrize("wait", ["-1", "31", "nan", "inf", "soon"])
async def test_a_wait_out_of_bounds_is_refused(
    api: ServedApi, user: httpx.AsyncClient, wait: str
) -> None:
    answer = await user.post(f"/users/{api.user}/orders?wait={wait}", json=an_order())
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")


async def test_an_order_id_that_nobody_has_is_not_found(user: httpx.AsyncClient) -> None:
    answer = await user.get(f"/orders/{uuid4()}")
    assert (answer.status_code, answer.json()["code"]) == (404, "ORDER_NOT_FOUND")


async def test_an_order_past_its_deadline_is_taken_back_and_expires(
    api: ServedApi, start_worker: StartWorker
) -> None:
    settings = api.settings.model_copy(update={"order_deadline": 0.3})
    async with running_api(settings) as quick, quick.client(quick.key) as user:
        # A mark whose worker is gone: the order waits in the queue and nobody takes it.
        await quick.services.valkey.set(keys.mark(quick.user), "1:gone", ex=30)
        answer = await user.post(f"/users/{quick.user}/orders?wait=10", json=an_order())
        body = answer.json()
        assert (answer.status_code, body["code"]) == (422, "DEADLINE_EXCEEDED")
        assert body["order"]["state"] == "expired"
        assert await quick.services.valkey.llen(keys.requests(quick.user)) == 0
