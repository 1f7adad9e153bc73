"""Closing and reversing positions: by the broker's own quantity, and nothing is opened that should
not be."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import httpx
import pytest
from sqlalchemy import func

from infra.database.orders import checks as order_checks
from tests.support.api.orders import (
    close_position,
    send_intent,
    set_order_columns,
    start_worker_holding,
    submitted_orders,
)
from tests.support.api.scripted_answers import (
    answer_positions,
    answer_state,
    answer_submitted,
    make_position,
)
from tests.support.systems.api import ServedApi, StartWorker, an_order, running_api
from tests.support.waiting import until
from tests.support.workers.api_worker import Script, filled, silent
from worker_runtime.protocol.messages import OrderState


@pytest.mark.parametrize(("quantity", "side"), [(3, "sell"), (-2, "buy")])
async def test_a_position_is_closed_by_the_brokers_quantity_and_only_once(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, quantity: int, side: str
) -> None:
    worker = await start_worker_holding(api, start_worker, quantity)
    answer = await close_position(user, api)
    body = answer.json()
    assert answer.status_code == 200, answer.text
    assert (body["state"], body["reduce_only"], body["origin"]) == ("filled", True, "close")
    assert (body["price_type"], body["time_in_force"]) == ("MKT", "IOC")
    again = await close_position(user, api)
    assert again.json() == body
    assert submitted_orders(worker) == [(side, abs(quantity), True)]
    assert len(worker.asked) == 1
    other = await close_position(user, api, quantity=1)
    assert (other.status_code, other.json()["code"]) == (409, "CLIENT_ORDER_ID_REUSED")


async def test_a_part_is_closed_with_a_limit(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 3, answer_submitted)
    answer = await close_position(user, api, quantity=2, price_type="LMT", price="99.5")
    assert (answer.status_code, answer.json()["state"]) == (200, "submitted")
    (order,) = worker.popped
    assert (order.quantity, order.price, order.time_in_force) == (2, Decimal("99.5"), "ROD")


async def test_what_is_not_held_is_not_closed(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 0)
    answer = await close_position(user, api)
    assert (answer.status_code, answer.json()["code"]) == (409, "NO_POSITION")
    worker.reply = answer_positions(make_position("MXFA6", 2))
    answer = await close_position(user, api, quantity=3)
    assert (answer.status_code, answer.json()["code"]) == (422, "CLOSE_INVALID")
    worker.reply = answer_positions(make_position("MXFA6", 20_000))
    answer = await close_position(user, api)
    assert (answer.status_code, answer.json()["code"]) == (422, "CLOSE_INVALID")
    assert worker.popped == []


async def test_of_many_closes_at_once_one_is_sent(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 2, answer_submitted)
    async with running_api(api.settings) as other, other.client(api.key) as elsewhere:
        closes = [
            close_position(caller, api, number)
            for number, caller in enumerate([user, elsewhere] * 4)
        ]
        answers = await asyncio.gather(*closes)
    codes = sorted(answer.json().get("code") or "sent" for answer in answers)
    assert codes == ["POSITION_BUSY"] * 7 + ["sent"]
    assert submitted_orders(worker) == [("sell", 2, True)]


async def test_a_user_whose_closes_wait_holds_up_nobody_else(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    symbols = ("MXFA6", "TXFA6", "2330", "2317")
    worker = await start_worker(api.user)
    worker.reply = answer_positions(*(make_position(symbol, 1) for symbol in symbols))
    async with api.client(api.admin_key) as admin:
        made = await admin.post("/users", json={"user_id": f"{api.user}-2"})
    other = ServedApi(api.app, api.settings, f"{api.user}-2", made.json()["api_key"], api.admin_key)
    async with other.client(other.key) as client:
        body = {"broker": "paper", "api_key": "canary-key", "secret_key": "canary-secret"}
        await client.put(f"/users/{other.user}/accounts/main/credentials", json=body)
        await start_worker_holding(other, start_worker, 2)
        async with api.services.database.session() as session:
            for symbol in symbols:  # another process works on all of their positions
                await order_checks.lock_symbol(session, api.user, "main", symbol)
            path = f"/users/{api.user}/accounts/main/positions"
            waiting = [
                asyncio.create_task(
                    user.post(f"{path}/{symbol}/close", json={"client_order_id": f"x-{symbol}"})
                )
                for symbol in symbols
            ]
            await until(lambda: len(worker.asked) == len(symbols))
            answer = await close_position(client, other)
            assert (answer.status_code, answer.json()["state"]) == (200, "filled"), answer.text
            assert worker.popped == []
        assert [(await pending).json()["state"] for pending in waiting] == ["filled"] * len(symbols)


@pytest.mark.parametrize(
    ("certain", "behind", "agree"), [(True, 60_000, True), (False, 0, False), (True, 0, False)]
)
async def test_a_position_that_may_not_show_the_last_fill_yet_is_not_closed(
    api: ServedApi,
    user: httpx.AsyncClient,
    start_worker: StartWorker,
    certain: bool,
    behind: int,
    agree: bool,
) -> None:
    worker = await start_worker_holding(api, start_worker, 2)
    order = an_order(7, symbol="MXFA6", side="sell", quantity=2)
    placed = (await user.post(f"/users/{api.user}/orders", json=order)).json()
    # The recorder is not there to do it.
    await set_order_columns(
        api, placed["id"], state="filled", filled_quantity=2, updated_at=func.clock_timestamp()
    )
    words: dict[str, Any] = {
        "absence_certain": certain,
        "behind_ms": behind,
        "positions_agree": agree,
    }
    worker.reply = answer_positions(make_position("MXFA6", 2), **words)
    answers = [await close_position(user, api)]
    worker.reply = answer_positions(**words)
    answers.append(await send_intent(user, api, "long_entry", quantity=1))
    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (409, "POSITION_BUSY")
    assert len(worker.popped) == 1


async def test_an_order_filled_since_the_look_makes_the_position_busy(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 2, answer_submitted)
    order = an_order(7, symbol="MXFA6", side="sell", quantity=2)
    order_id = (await user.post(f"/users/{api.user}/orders", json=order)).json()["id"]
    worker.reply = lambda question: None
    closing = asyncio.create_task(close_position(user, api))
    await until(lambda: len(worker.asked) == 1)
    await set_order_columns(
        api, order_id, state="filled", filled_quantity=2, updated_at=func.clock_timestamp()
    )
    answer = answer_positions(make_position("MXFA6", 2))(worker.asked[0])
    await worker.answer(b"", answer, worker.asked[0].reply_to)
    busy = await closing
    assert (busy.status_code, busy.json()["code"], busy.json()["retryable"]) == (
        409,
        "POSITION_BUSY",
        True,
    )
    assert len(worker.popped) == 1


@pytest.mark.parametrize(
    ("intent", "position", "orders"),
    [
        ("long_entry", 0, [("buy", 1, False)]),
        ("long_entry", 2, [("buy", 1, False)]),
        ("long_entry", -3, [("buy", 3, True), ("buy", 1, False)]),
        ("short_entry", 3, [("sell", 3, True), ("sell", 1, False)]),
        ("short_entry", -3, [("sell", 1, False)]),
    ],
)
async def test_an_entry_closes_the_other_side_first(
    api: ServedApi,
    user: httpx.AsyncClient,
    start_worker: StartWorker,
    intent: str,
    position: int,
    orders: list[tuple[str, int, bool]],
) -> None:
    worker = await start_worker_holding(api, start_worker, position)
    answer = await send_intent(user, api, intent, quantity=1)
    body = answer.json()
    assert answer.status_code == 200, answer.text
    assert submitted_orders(worker) == orders
    assert body["complete"] is True
    ids = ["i-1.close", "i-1.open"][-len(orders) :]
    assert [leg["client_order_id"] for leg in body["legs"]] == ids
    assert {leg["origin"] for leg in body["legs"]} == {f"{intent}:i-1"}
    again = await send_intent(user, api, intent, quantity=1)
    assert (again.status_code, again.json()) == (200, body)
    assert submitted_orders(worker) == orders


@pytest.mark.parametrize(
    ("intent", "position", "orders"),
    [
        ("long_exit", 3, [("sell", 3, True)]),
        ("short_exit", -3, [("buy", 3, True)]),
        ("long_exit", -3, []),
        ("short_exit", 3, []),
        ("long_exit", 0, []),
    ],
)
async def test_an_exit_closes_its_own_side_only(
    api: ServedApi,
    user: httpx.AsyncClient,
    start_worker: StartWorker,
    intent: str,
    position: int,
    orders: list[tuple[str, int, bool]],
) -> None:
    worker = await start_worker_holding(api, start_worker, position)
    answer = await send_intent(user, api, intent)
    assert submitted_orders(worker) == orders
    if orders:
        assert (answer.status_code, answer.json()["complete"]) == (200, True)
    else:
        assert (answer.status_code, answer.json()["code"]) == (409, "NO_POSITION")


async def test_an_order_under_a_rolling_code_makes_the_positions_of_its_product_busy(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 3, answer_submitted)
    order = an_order(7, symbol="MXFR1", side="sell", quantity=3)
    assert (await user.post(f"/users/{api.user}/orders", json=order)).status_code == 201
    answer = await close_position(user, api)
    assert (answer.status_code, answer.json()["code"]) == (409, "POSITION_BUSY"), answer.text
    assert submitted_orders(worker) == [("sell", 3, False)]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (answer_state(OrderState.CANCELLED, 1), "CLOSE_NOT_FILLED"),
        (answer_state(OrderState.CANCELLED), "CLOSE_NOT_FILLED"),
        (answer_state(OrderState.REJECTED), "CLOSE_NOT_FILLED"),
    ],
)
async def test_nothing_is_opened_when_the_close_is_not_filled(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, script: Script, code: str
) -> None:
    worker = await start_worker_holding(api, start_worker, -3, script)
    for _ in range(2):
        answer = await send_intent(user, api, "long_entry", quantity=1)
        assert (answer.status_code, answer.json()["code"]) == (409, code)
        (leg,) = answer.json()["legs"]
        assert leg["client_order_id"] == "i-1.close"
    assert submitted_orders(worker) == [("buy", 3, True)]


@pytest.mark.parametrize("script", [silent, answer_submitted, answer_state(OrderState.UNKNOWN)])
async def test_nothing_is_opened_by_itself_while_the_close_is_open(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, script: Script
) -> None:
    worker = await start_worker_holding(api, start_worker, -3, script)
    answer = await send_intent(user, api, "long_entry", quantity=1, wait=0.3)
    body = answer.json()
    assert (answer.status_code, body["complete"], len(body["legs"])) == (202, False, 1)
    worker.script = filled
    values = {"state": "filled", "filled_quantity": 3}
    # The close is filled after the request has ended.
    await set_order_columns(api, body["legs"][0]["id"], **values)
    await asyncio.sleep(0.7)
    assert submitted_orders(worker) == [("buy", 3, True)]
    again = await send_intent(user, api, "long_entry", quantity=1)
    assert (again.status_code, again.json()["complete"]) == (200, True)
    assert submitted_orders(worker) == [("buy", 3, True), ("buy", 1, False)]


async def test_a_close_that_fills_while_the_request_waits_is_followed_by_the_opening(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -3, answer_submitted)
    waiting = asyncio.create_task(send_intent(user, api, "long_entry", quantity=1))
    await until(lambda: len(worker.popped) == 1)
    worker.script = filled
    await set_order_columns(api, worker.popped[0].order_id, state="filled", filled_quantity=3)
    answer = await waiting
    assert (answer.status_code, answer.json()["complete"]) == (200, True)
    assert submitted_orders(worker) == [("buy", 3, True), ("buy", 1, False)]


async def test_an_intent_id_is_not_taken_for_another_intent(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -3)
    assert (await send_intent(user, api, "long_entry", quantity=1)).status_code == 200
    for intent, quantity in (("long_entry", 2), ("short_entry", 1), ("long_exit", None)):
        answer = await send_intent(user, api, intent, quantity=quantity)
        assert (answer.status_code, answer.json()["code"]) == (409, "CLIENT_ORDER_ID_REUSED")
    assert len(worker.popped) == 2


async def test_many_equal_intents_at_once_are_one(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -3)
    answers = await asyncio.gather(
        *(send_intent(user, api, "long_entry", quantity=1) for _ in range(5))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(submitted_orders(worker)) == [("buy", 1, False), ("buy", 3, True)]


@pytest.mark.parametrize(
    "body",
    [
        {"intent": "entry", "quantity": 1},
        {"intent": "long_entry"},
        {"intent": "long_entry", "quantity": 0},
        {"intent": "long_entry", "quantity": -1},
        {"intent": "long_entry", "quantity": 1.5},
        {"intent": "long_entry", "quantity": "1"},
        {"intent": "long_entry", "quantity": 1, "price_type": "LMT"},
        {"intent": "long_entry", "quantity": 1, "price": "5"},
        {"intent": "long_entry", "quantity": 1, "price_type": "LMT", "price": "-5"},
        {"intent": "long_entry", "quantity": 1, "time_in_force": "GTC"},
        {"intent": "long_entry", "quantity": 1, "symbol": "a b"},
        {"intent": "long_entry", "quantity": 1, "client_order_id": "x" * 49},
        {"intent": "long_entry", "quantity": 1, "client_order_id": ""},
        {"intent": "long_entry", "quantity": 1, "side": "buy"},
        {"quantity": 1},
    ],
)
async def test_an_intent_that_cannot_be_meant_is_refused(
    api: ServedApi, user: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    whole = {"client_order_id": "i-1", "symbol": "MXFA6", **body}
    answer = await user.post(f"/users/{api.user}/accounts/main/intents", json=whole)
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")


@pytest.mark.parametrize(
    "body",
    [
        {"quantity": 0},
        {"quantity": 1.5},
        {"quantity": 10_001},
        {"price_type": "LMT"},
        {"price": "5"},
        {"price_type": "STP"},
        {"client_order_id": "a b"},
        {"symbol": "MXFA6"},
    ],
)
async def test_a_close_that_cannot_be_meant_is_refused(
    api: ServedApi, user: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    answer = await close_position(user, api, **body)
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")


async def test_only_ones_own_positions_are_closed(api: ServedApi, user: httpx.AsyncClient) -> None:
    for path in ("positions/MXFA6/close", "intents"):
        body = {"client_order_id": "x"} if path != "intents" else {
            "client_order_id": "x", "intent": "long_exit", "symbol": "MXFA6"
        }  # fmt: skip
        foreign = await user.post(f"/users/somebody-else/accounts/main/{path}", json=body)
        assert (foreign.status_code, foreign.json()["code"]) == (404, "NOT_FOUND")
        unknown = await user.post(f"/users/{api.user}/accounts/other/{path}", json=body)
        assert (unknown.status_code, unknown.json()["code"]) == (404, "ACCOUNT_NOT_FOUND")
