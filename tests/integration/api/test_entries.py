"""An entry opens nothing next to an order that works in its account and symbol: it may be filled,
too."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from api.http.errors import IntentExpired
from api.orders.placer import ParentRequest
from api.orders.schemas import OrderRequest
from api.positions.closer import QuietRule
from infra.database.orders import checks as order_checks
from tests.support.api.orders import send_intent, start_worker_holding, submitted_orders
from tests.support.api.scripted_answers import answer_submitted
from tests.support.systems.api import ServedApi, StartWorker, an_order, running_api
from tests.support.waiting import until


@pytest.mark.parametrize("intent", ["long_entry", "short_entry", "long_exit"])
async def test_nothing_is_opened_while_an_order_works(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker, intent: str
) -> None:
    worker = await start_worker_holding(api, start_worker, 0, answer_submitted)
    first = await send_intent(user, api, "short_entry", quantity=1)
    assert first.json()["legs"][0]["state"] == "submitted", first.text
    answer = await send_intent(user, api, intent, 2, quantity=1)
    assert (answer.status_code, answer.json()["code"]) == (409, "POSITION_BUSY")
    again = await send_intent(user, api, "short_entry", quantity=1)
    assert again.json() == first.json()
    assert submitted_orders(worker) == [("sell", 1, False)]


async def test_nothing_is_reversed_while_an_order_works(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -3, answer_submitted)
    order = an_order(7, symbol="MXFA6", side="sell", quantity=1)
    assert (await user.post(f"/users/{api.user}/orders", json=order)).status_code == 201
    answer = await send_intent(user, api, "long_entry", quantity=1)
    assert (answer.status_code, answer.json()["code"]) == (409, "POSITION_BUSY")
    assert len(worker.popped) == 1


async def test_of_many_entries_at_once_one_is_sent(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 0, answer_submitted)
    async with running_api(api.settings) as other, other.client(api.key) as elsewhere:
        # None has its answer before all have asked: each finds no position, and no order.
        reply, worker.reply = worker.reply, lambda question: None
        intents = ["long_entry", "short_entry"] * 3
        entries = [
            asyncio.create_task(send_intent(caller, api, intent, number, quantity=1))
            for number, (intent, caller) in enumerate(
                zip(intents, [user, elsewhere] * 3, strict=True)
            )
        ]
        await until(lambda: len(worker.asked) == len(entries))
        for question in worker.asked:
            answer = reply(question)
            assert answer is not None
            await worker.answer(b"", answer, question.reply_to)
        answers = await asyncio.gather(*entries)
    codes = sorted(answer.json().get("code") or "sent" for answer in answers)
    assert codes == ["POSITION_BUSY"] * 5 + ["sent"]
    assert len(worker.popped) == 1


async def test_an_order_of_another_symbol_is_not_in_the_way_of_an_entry(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 0, answer_submitted)
    order = an_order(7, symbol="TXFA6", side="sell", quantity=1)
    assert (await user.post(f"/users/{api.user}/orders", json=order)).status_code == 201
    answer = await send_intent(user, api, "long_entry", quantity=1)
    assert answer.json()["legs"][0]["state"] == "submitted", answer.text
    assert len(worker.popped) == 2


@pytest.mark.parametrize(
    ("intent", "position", "orders"),
    [
        ("long_entry", -3, []),
        ("long_exit", 3, []),
        ("long_entry", 3, [("buy", 1, False)]),
        ("long_entry", 0, [("buy", 1, False)]),
    ],
)
async def test_a_rolling_code_neither_opens_next_to_nor_closes_a_contract_that_it_may_stand_for(
    api: ServedApi,
    user: httpx.AsyncClient,
    start_worker: StartWorker,
    intent: str,
    position: int,
    orders: list[tuple[str, int, bool]],
) -> None:
    worker = await start_worker_holding(
        api, start_worker, position
    )  # of MXFA6: the broker names real contracts
    answer = await send_intent(user, api, intent, symbol="MXFR1", quantity=1)
    assert submitted_orders(worker) == orders
    if not orders:
        assert (answer.status_code, answer.json()["code"]) == (422, "CLOSE_INVALID"), answer.text
        assert "MXFA6" in answer.json()["detail"]


async def test_after_its_deadline_no_order_is_written_however_long_its_turn_took(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker(api.user)
    services = api.services
    body = OrderRequest.model_validate(an_order(symbol="MXFA6"))
    leg = ParentRequest(fingerprint="a leg", origin="a test")
    async with services.database.session() as session:
        # Another process is at the position.
        await order_checks.lock_symbol(session, api.user, "main", "MXFA6")
        since = await order_checks.database_clock(session)
        opening = asyncio.create_task(
            services.closer.place_alone(
                api.user,
                body,
                leg,
                5,
                "test",
                quiet=QuietRule(since),
                not_after=time.monotonic() + 0.2,
            )
        )
        await asyncio.wait({opening}, timeout=0.3)
        assert not opening.done()
    with pytest.raises(IntentExpired):
        await opening
    async with services.database.session() as session:
        assert (
            await order_checks.orders_by_client_ids(session, api.user, [body.client_order_id]) == {}
        )
    assert worker.popped == []
