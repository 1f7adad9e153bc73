"""Cancels and changes: taken out of the queue or sent behind the order, with reasons, never
twice."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import select

from api.orders.changes import MAX_NOTED_CANCELS
from infra.database.models import AuditEntry, OrderEventRow
from infra.database.workers import sessions as worker_sessions
from tests.support.api.orders import place_order, set_order_columns, start_working_order
from tests.support.api.scripted_answers import answer_change_done
from tests.support.systems.api import ServedApi, StartWorker, an_order, running_api
from tests.support.waiting import until
from tests.support.workers.api_worker import Question, silent
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import Answer, Failure, OrderOutcome, OrderState
from worker_runtime.protocol.requests import CancelOrder, Query, ReplaceOrder


def refused(code: str, state: OrderState | None = None, filled: int = 0) -> Any:
    def reply(question: Question) -> Answer:
        assert not isinstance(question, Query)
        outcome = None
        if state is not None:
            outcome = OrderOutcome(order_id=question.order_id, state=state, filled_quantity=filled)
        failure = Failure(code=code, detail="why")
        return Answer(request_id=question.request_id, outcome=outcome, failure=failure)

    return reply


async def test_a_working_order_is_cancelled_behind_it_in_the_queue(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker, order_id = await start_working_order(api, user, start_worker)
    answer = await user.post(f"/orders/{order_id}/cancel", json={"request_id": "x"})
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    (asked,) = worker.asked
    assert isinstance(asked, CancelOrder)
    assert (asked.order_id, asked.account_id, asked.symbol) == (order_id, "main", "2330")
    assert asked.tag == worker.popped[0].tag
    again = await user.post(f"/orders/{order_id}/cancel", json={"request_id": "x"})
    assert (again.status_code, again.json()["state"]) == (200, "cancelled")
    assert len(worker.asked) == 1


async def test_an_order_that_nobody_took_is_withdrawn_and_no_worker_ever_sees_it(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await api.services.valkey.set(keys.mark(api.user), "1:scripted", ex=30)
    waiting = asyncio.create_task(user.post(f"/users/{api.user}/orders?wait=20", json=an_order()))
    queue = keys.requests(api.user)
    end = time.monotonic() + 10
    while not await api.services.valkey.llen(queue):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    (order,) = (await user.get(f"/users/{api.user}/orders")).json()["orders"]
    answer = await user.post(f"/orders/{order['id']}/cancel", json={"request_id": "x"})
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert answer.json()["reason"] == "cancelled before it was sent to the broker"
    assert await api.services.valkey.llen(queue) == 0
    first = await waiting  # the request that placed it hears of it
    assert (first.status_code, first.json()["state"]) == (201, "cancelled")
    worker = await start_worker(api.user)
    await place_order(api, user, 2)
    assert [request.order_id for request in worker.popped] != [order["id"]]
    steps = [
        entry["step"] for entry in (await user.get(f"/orders/{order['id']}")).json()["timeline"]
    ]
    assert steps == ["accepted", "cancelled"]


async def test_of_a_cancel_and_a_worker_exactly_one_gets_a_queued_order(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await api.services.valkey.set(keys.mark(api.user), "1:scripted", ex=30)
    ids = []
    for number in range(12):
        answer = await user.post(
            f"/users/{api.user}/orders?wait=0", json=an_order(number, symbol=f"S{number}")
        )
        ids.append(answer.json()["id"])
    await until(lambda: api.services.answers.pending == len(ids))
    cancels = [
        user.post(f"/orders/{order_id}/cancel", json={"request_id": "x"})
        for order_id in reversed(ids)
    ]
    worker = await start_worker(api.user)  # it fills what it gets
    worker.reply = refused("ORDER_REJECTED", OrderState.FILLED, 1)
    answers = await asyncio.gather(*cancels)
    taken = {request.order_id for request in worker.popped}
    for order_id, answer in zip(reversed(ids), answers, strict=True):
        if order_id in taken:
            assert answer.json()["code"] in ("ORDER_SETTLED", "ORDER_REJECTED"), answer.text
            assert answer.json()["order"]["state"] == "filled"
        else:
            assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")


async def test_a_cancel_of_an_order_that_a_worker_has_taken_follows_it(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user, silent)
    worker.reply = answer_change_done
    answer = await user.post(f"/users/{api.user}/orders?wait=0", json=an_order())
    await worker.taken.wait()
    cancelled = await user.post(f"/orders/{answer.json()['id']}/cancel", json={"request_id": "x"})
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert len(worker.asked) == 1


@pytest.mark.parametrize("state", ["filled", "rejected", "expired"])
@pytest.mark.parametrize("action", ["cancel", "replace"])
async def test_a_final_order_is_neither_cancelled_nor_changed(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, action: str, state: str
) -> None:
    worker, order_id = await start_working_order(api, user, start_worker)
    await set_order_columns(api, order_id, state=state)
    body = {"request_id": "x", **({"quantity": 1} if action == "replace" else {})}
    answer = await user.post(f"/orders/{order_id}/{action}", json=body)
    assert (answer.status_code, answer.json()["code"]) == (409, "ORDER_SETTLED")
    assert answer.json()["order"]["state"] == state
    assert worker.asked == []


async def test_a_cancel_that_came_too_late_says_so(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    reply = refused("ORDER_REJECTED", OrderState.FILLED, 10)
    _, order_id = await start_working_order(api, user, start_worker, reply)
    answer = await user.post(f"/orders/{order_id}/cancel", json={"request_id": "x"})
    body = answer.json()
    assert (answer.status_code, body["code"], body["detail"]) == (422, "ORDER_REJECTED", "why")
    assert (body["order"]["state"], body["order"]["filled_quantity"]) == ("filled", 10)


async def test_a_cancel_without_an_answer_continues_after_its_wait(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker, order_id = await start_working_order(api, user, start_worker, lambda question: None)
    answer = await user.post(f"/orders/{order_id}/cancel?wait=0.1", json={"request_id": "x"})
    assert (answer.status_code, answer.json()["state"]) == (202, "submitted")
    await until(lambda: len(worker.asked) == 1)
    again = asyncio.create_task(user.post(f"/orders/{order_id}/cancel", json={"request_id": "x"}))
    await asyncio.sleep(0)
    await worker.answer(b"", answer_change_done(worker.asked[0]), worker.asked[0].reply_to)
    assert (await again).json()["state"] == "cancelled"
    assert len(worker.asked) == 1


async def test_cancels_of_one_order_do_not_fill_the_audit_trail_and_none_is_refused(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    _, order_id = await start_working_order(api, user, start_worker, lambda question: None)
    for number in range(MAX_NOTED_CANCELS + 5):
        answer = await user.post(
            f"/orders/{order_id}/cancel?wait=0", json={"request_id": f"x{number}"}
        )
        assert answer.status_code == 202, answer.text
    async with api.services.database.session() as session:
        noted = select(AuditEntry.id).where(AuditEntry.action == "order.cancel_requested")
        rows = (await session.scalars(noted.where(AuditEntry.subject == f"order:{order_id}"))).all()
    assert len(rows) == MAX_NOTED_CANCELS


async def test_a_cancel_that_came_to_nothing_is_sent_anew_by_a_repeat_under_the_same_id(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    """A worker that dies with a cancel in its hands leaves it to its successor, which does not send
    it."""
    worker, order_id = await start_working_order(
        api, user, start_worker, refused("OUTCOME_UNKNOWN")
    )
    for sent in (1, 2):
        answer = await user.post(f"/orders/{order_id}/cancel", json={"request_id": "x"})
        assert answer.json()["code"] == "OUTCOME_UNKNOWN"
        assert len(worker.asked) == sent
    worker.reply = answer_change_done
    answer = await user.post(f"/orders/{order_id}/cancel", json={"request_id": "x"})
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert len({request.request_id for request in worker.asked}) == 3


async def test_a_cancel_whose_answer_never_came_is_sent_anew_after_its_deadline(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker, order_id = await start_working_order(api, user, start_worker, lambda question: None)
    # Within which the worker takes it.
    settings = api.settings.model_copy(update={"order_deadline": 5.0})
    async with running_api(settings) as quick, quick.client(api.key) as elsewhere:
        answer = await elsewhere.post(
            f"/orders/{order_id}/cancel?wait=20", json={"request_id": "x"}
        )
        assert (answer.status_code, answer.json()["code"]) == (504, "NO_ANSWER")
    worker.reply = answer_change_done
    answer = await user.post(f"/orders/{order_id}/cancel?wait=20", json={"request_id": "x"})
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert len(worker.asked) == 2


async def test_an_order_that_an_earlier_cancel_took_back_is_cancelled_for_the_later_one(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    reply = refused("ORDER_REJECTED", OrderState.CANCELLED)
    _, order_id = await start_working_order(api, user, start_worker, reply)
    answer = await user.post(f"/orders/{order_id}/cancel", json={"request_id": "x"})
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")


async def test_a_change_that_no_worker_takes_is_taken_back(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker, order_id = await start_working_order(api, user, start_worker)
    await worker.stop()
    settings = api.settings.model_copy(update={"order_deadline": 1.0})
    async with running_api(settings) as quick, quick.client(api.key) as elsewhere:
        answer = await elsewhere.post(
            f"/orders/{order_id}/cancel?wait=20", json={"request_id": "x"}
        )
        body = answer.json()
        assert (answer.status_code, body["code"], body["retryable"]) == (504, "NO_ANSWER", True)
        assert body["order"]["state"] == "submitted"
        assert await quick.services.valkey.llen(keys.requests(api.user)) == 0


async def test_a_change_reaches_the_broker_once_and_the_order_shows_it(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker, order_id = await start_working_order(api, user, start_worker)
    body = {"request_id": "r-1", "quantity": 4, "price": "999.50"}
    answer = await user.post(f"/orders/{order_id}/replace", json=body)
    shown = answer.json()
    assert (answer.status_code, shown["quantity"], shown["price"]) == (200, 4, "999.5")
    (asked,) = worker.asked
    assert isinstance(asked, ReplaceOrder)
    assert (asked.quantity, asked.price) == (4, Decimal("999.50"))
    again = await user.post(f"/orders/{order_id}/replace", json=body | {"price": 999.5})
    assert (again.status_code, again.json()["quantity"]) == (200, 4)
    other = await user.post(f"/orders/{order_id}/replace", json=body | {"quantity": 3})
    assert (other.status_code, other.json()["code"]) == (409, "REQUEST_ID_REUSED")
    assert len(worker.asked) == 1
    seen = (await user.get(f"/orders/{order_id}")).json()
    assert (seen["quantity"], seen["price"], seen["state"]) == (4, "999.5", "submitted")
    assert "change asked for: quantity 4, price 999.50" in [
        entry["detail"] for entry in seen["timeline"]
    ]
    async with api.services.database.session() as session:
        rows = await session.scalars(
            select(AuditEntry.data).where(AuditEntry.action == "order.replace_requested")
        )
        assert [row["request_id"] for row in rows] == ["r-1"]


async def test_a_repeated_change_hears_what_the_worker_before_the_present_one_answered(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    for claim_id in ("c-1", "c-2"):
        async with api.services.database.session() as session:
            await worker_sessions.assign_epoch(
                session, user_id=api.user, claim_id=claim_id, pool="p"
            )
        if claim_id == "c-1":
            worker, order_id = await start_working_order(api, user, start_worker)
            body = {"quantity": 4, "request_id": "x"}
            first = await user.post(f"/orders/{order_id}/replace", json=body)
            assert (first.status_code, first.json()["quantity"]) == (200, 4)
            async with api.services.database.session() as session:
                await worker_sessions.end_session(session, claim_id=claim_id, reason="idle")
    again = await user.post(f"/orders/{order_id}/replace", json=body)
    assert (again.status_code, again.json()["quantity"]) == (200, 4)
    assert len(worker.asked) == 1


async def test_a_change_is_never_sent_again_after_its_deadline(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker, order_id = await start_working_order(api, user, start_worker)
    body = {"request_id": "r-1", "quantity": 4}
    assert (await user.post(f"/orders/{order_id}/replace", json=body)).status_code == 200
    # As if much time had passed: its deadline has, and all that Valkey knew of it is gone.
    passed = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    async with api.services.database.session() as session:
        row = await session.get_one(OrderEventRow, f"{order_id}:replace:r-1")
        row.data = {**row.data, "deadline_at": passed}
    for key in await api.services.valkey.keys("trading:*"):
        await api.services.valkey.delete(key)
    again = await user.post(f"/orders/{order_id}/replace", json=body)
    assert (again.status_code, again.json()["quantity"]) == (200, 4)
    assert len(worker.asked) == 1


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"quantity": 11}, "REPLACE_INVALID"),
        ({"quantity": 2}, "REPLACE_INVALID"),  # 3 are filled
        ({"quantity": 10}, "REPLACE_INVALID"),  # as it is
        ({"quantity": 10, "price": "1000.0"}, "REPLACE_INVALID"),
        ({"quantity": 0}, "INVALID_REQUEST"),
        ({"quantity": -1}, "INVALID_REQUEST"),
        ({"quantity": 1.5}, "INVALID_REQUEST"),
        ({"quantity": "5"}, "INVALID_REQUEST"),
        ({"price": "-1"}, "INVALID_REQUEST"),
        ({"price": 0}, "INVALID_REQUEST"),
        ({"price": "NaN"}, "INVALID_REQUEST"),
        ({"price": "1.00001"}, "INVALID_REQUEST"),
        ({}, "INVALID_REQUEST"),
        ({"quantity": None, "price": None}, "INVALID_REQUEST"),
        ({"quantity": 5, "symbol": "2317"}, "INVALID_REQUEST"),
        ({"quantity": 5, "request_id": "a b"}, "INVALID_REQUEST"),
        ({"quantity": 5, "request_id": ""}, "INVALID_REQUEST"),
        ({"quantity": 5, "request_id": "x" * 65}, "INVALID_REQUEST"),
        ({"quantity": 5, "request_id": None}, "INVALID_REQUEST"),
    ],
)
async def test_a_change_that_cannot_be_is_refused_and_not_sent(
    api: ServedApi,
    user: httpx.AsyncClient,
    start_worker: StartWorker,
    body: dict[str, Any],
    code: str,
) -> None:
    worker, order_id = await start_working_order(api, user, start_worker)
    await set_order_columns(api, order_id, filled_quantity=3, state="part_filled")
    answer = await user.post(f"/orders/{order_id}/replace", json={"request_id": "x", **body})
    assert (answer.status_code, answer.json()["code"]) == (422, code)
    assert worker.asked == []


async def test_a_market_order_gets_no_price(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker, _ = await start_working_order(api, user, start_worker)
    order_id = await place_order(api, user, 2, price_type="MKT", price=None, time_in_force="IOC")
    answer = await user.post(f"/orders/{order_id}/replace", json={"request_id": "x", "price": "5"})
    assert (answer.status_code, answer.json()["code"]) == (422, "REPLACE_INVALID")
    assert worker.asked == []


@pytest.mark.parametrize(
    ("state", "code"),
    [("accepted", "NOT_AT_BROKER"), ("submitting", "NOT_AT_BROKER"), ("unknown", "ORDER_UNKNOWN")],
)
async def test_an_order_that_is_not_surely_at_the_broker_is_not_changed(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, state: str, code: str
) -> None:
    worker = await start_worker(api.user, silent)
    order_id = (await user.post(f"/users/{api.user}/orders?wait=0", json=an_order())).json()["id"]
    await set_order_columns(api, order_id, state=state)
    answer = await user.post(f"/orders/{order_id}/replace", json={"request_id": "x", "price": "5"})
    assert (answer.status_code, answer.json()["code"]) == (409, code)
    assert answer.json()["order"]["state"] == state
    assert worker.asked == []


async def test_an_order_of_unknown_outcome_may_be_cancelled(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker, order_id = await start_working_order(api, user, start_worker)
    await set_order_columns(api, order_id, state="unknown")
    answer = await user.post(f"/orders/{order_id}/cancel", json={"request_id": "x"})
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert len(worker.asked) == 1


@pytest.mark.parametrize("action", ["cancel", "replace"])
async def test_an_order_of_somebody_else_is_not_found(
    api: ServedApi, user: httpx.AsyncClient, action: str
) -> None:
    body = {"request_id": "x", **({"quantity": 1} if action == "replace" else {})}
    answer = await user.post(f"/orders/{uuid4()}/{action}", json=body)
    assert (answer.status_code, answer.json()["code"]) == (404, "ORDER_NOT_FOUND")
    async with running_api(api.settings) as other, other.client(other.key) as stranger:
        await api.services.valkey.set(keys.mark(api.user), "1:scripted", ex=30)
        made = await user.post(f"/users/{api.user}/orders?wait=0", json=an_order())
        answer = await stranger.post(f"/orders/{made.json()['id']}/{action}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, "ORDER_NOT_FOUND")


@pytest.mark.parametrize("body", [{}, {"request_id": 5}, {"request_id": "x", "why": "y"}, [], "x"])
async def test_a_cancel_that_cannot_be_read_is_refused(
    api: ServedApi, user: httpx.AsyncClient, body: Any
) -> None:
    answer = await user.post(f"/orders/{uuid4()}/cancel", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")
