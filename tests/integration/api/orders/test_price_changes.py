"""Another price of a working order passes what a new order passes; a smaller quantity always
passes."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import httpx
import pytest

from infra.database.models import OrderEventRow
from infra.database.orders.changes import find_change, note_change
from infra.database.orders.recording import get_order
from infra.database.trading import limits as trading_limits
from infra.database.trading import quantity_changes
from infra.database.trading.models import AccountLimits
from tests.support.api.accounts import switch_body
from tests.support.api.orders import place_order, set_order_columns, start_working_order
from tests.support.systems.api import ServedApi, StartWorker, running_api
from tests.support.workers.api_worker import ScriptedWorker
from worker_runtime.protocol.order_terms import OrderLot
from worker_runtime.protocol.requests import QuantityMeaning, ReplaceOrder


class Resting:
    """An order at the broker, of 10 lots at 1000."""

    def __init__(
        self, api: ServedApi, user: httpx.AsyncClient, worker: ScriptedWorker, order: str
    ) -> None:
        self.api, self.worker, self.order = api, worker, order
        self._user, self._asked = user, 0

    async def change(self, **fields: Any) -> tuple[int, str]:
        """Asks for it under a new request id; status and code or state."""
        self._asked += 1
        body = {"request_id": f"r{self._asked}", **fields}
        answer = await self._user.post(f"/orders/{self.order}/replace", json=body)
        reply = answer.json()
        if answer.status_code >= 400:
            assert reply["order"]["id"] == self.order
            async with self.api.services.database.session() as session:
                assert await find_change(session, UUID(self.order), body["request_id"]) is None
        return answer.status_code, reply.get("code") or reply["state"]

    async def switch(self, state: str) -> None:
        async with self.api.client(self.api.admin_key) as admin:
            answer = await admin.put(
                "/switches", json=switch_body(state=state, user_id=self.api.user)
            )
            assert answer.is_success, answer.text


@pytest.fixture
async def resting(api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker) -> Resting:
    worker, order = await start_working_order(api, user, start_worker)
    return Resting(api, user, worker, order)


async def test_no_price_is_changed_while_halted_and_a_quantity_still_falls(
    resting: Resting,
) -> None:
    await resting.switch("halted")
    assert await resting.change(price="999") == (423, "TRADING_HALTED")
    assert await resting.change(price="999", quantity=5) == (423, "TRADING_HALTED")
    assert resting.worker.asked == []
    assert await resting.change(quantity=5) == (200, "submitted")
    await resting.switch("open")
    assert await resting.change(price="999") == (200, "submitted")


async def test_while_reducing_only_the_price_of_what_reduces_is_changed(resting: Resting) -> None:
    await resting.switch("reducing")
    assert await resting.change(price="999") == (423, "REDUCING_ONLY")
    assert await resting.change(quantity=5) == (200, "submitted")
    await set_order_columns(resting.api, resting.order, reduce_only=True)
    assert await resting.change(price="998") == (200, "submitted")
    assert [
        request.reduce_only for request in resting.worker.asked if hasattr(request, "reduce_only")
    ] == [
        False,
        True,
    ]


async def test_another_price_stays_within_the_accounts_limits(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    async with api.services.database.session() as session:
        limits = AccountLimits(max_notional=Decimal(10_000_000), max_daily_orders=1)
        await trading_limits.put_limits(session, api.user, "main", limits, actor="key:1")
    worker, order = await start_working_order(api, user, start_worker)
    resting = Resting(api, user, worker, order)
    assert await resting.change(price="1000.01") == (422, "NOTIONAL_LIMIT")
    assert await resting.change(price="1250", quantity=9) == (422, "NOTIONAL_LIMIT")
    assert worker.asked == []
    # No second order of the day.
    assert await resting.change(price="1250", quantity=8) == (200, "submitted")


async def test_an_order_of_unknown_outcome_keeps_prices_as_they_are(
    resting: Resting, user: httpx.AsyncClient
) -> None:
    other = await place_order(resting.api, user, 2)
    await set_order_columns(resting.api, other, state="unknown")
    assert await resting.change(price="999") == (409, "SYMBOL_BLOCKED")
    assert await resting.change(quantity=5) == (200, "submitted")


async def test_a_repeat_of_a_change_is_answered_though_it_would_be_refused_now(
    resting: Resting, user: httpx.AsyncClient
) -> None:
    assert await resting.change(price="999") == (200, "submitted")
    await resting.switch("halted")
    body = {"request_id": "r1", "price": "999"}
    again = await user.post(f"/orders/{resting.order}/replace", json=body)
    assert (again.status_code, len(resting.worker.asked)) == (200, 1)


async def test_a_repeat_of_a_change_that_nobody_sent_keeps_the_band_of_its_price(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    async with api.services.database.session() as session:
        limits = AccountLimits(price_band=Decimal("0.02"))
        await trading_limits.put_limits(session, api.user, "main", limits, actor="key:1")
    worker, order = await start_working_order(api, user, start_worker)
    resting = Resting(api, user, worker, order)
    assert await resting.change(price="999") == (200, "submitted")
    async with api.services.database.session() as session:
        first = await find_change(session, UUID(order), "r1")
        assert first is not None
        row = await get_order(session, UUID(order))
        # As by a process that died, or met no Valkey, before it could send it.
        await note_change(session, row, "r2", replace(first, price=Decimal(998)), actor="key:1")
    body = {"request_id": "r2", "price": "998"}
    answer = await user.post(f"/orders/{order}/replace", json=body)
    assert (answer.status_code, answer.json()["price"]) == (200, "998")
    sent = [
        (request.price, request.price_band)
        for request in worker.asked
        if isinstance(request, ReplaceOrder)
    ]
    assert sent == [(Decimal(999), Decimal("0.02")), (Decimal(998), Decimal("0.02"))]


async def _age_change(api: ServedApi, order_id: str, request_id: str, seconds: float) -> None:
    """As if the deadline of a change had passed `seconds` ago."""
    passed = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
    async with api.services.database.session() as session:
        row = await session.get_one(OrderEventRow, f"{order_id}:replace:{request_id}")
        row.data = {**row.data, "deadline_at": passed}


async def test_a_repeat_of_a_change_that_came_to_nothing_ends_and_is_not_reported_as_made(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker, order_id = await start_working_order(api, user, start_worker)
    await worker.stop()
    settings = api.settings.model_copy(update={"order_deadline": 1.0})
    async with running_api(settings) as quick, quick.client(api.key) as elsewhere:
        for request_id, change in (("r-1", {"quantity": 4}), ("r-2", {"price": "999"})):
            path, body = f"/orders/{order_id}/replace", {"request_id": request_id, **change}
            answer = await elsewhere.post(f"{path}?wait=20", json=body)
            assert (answer.status_code, answer.json()["code"]) == (504, "NO_ANSWER")
            await _age_change(api, order_id, request_id, 1.0)
            soon = await elsewhere.post(path, json=body)  # its event may be on its way
            assert (soon.status_code, soon.json()["quantity"]) == (202, 10)
            await _age_change(api, order_id, request_id, 10.0)
            again = (await elsewhere.post(path, json=body)).json()
            assert (again["status"], again["code"], again["retryable"]) == (
                409,
                "CHANGE_UNCONFIRMED",
                False,
            )
            assert (again["order"]["quantity"], again["order"]["price"]) == (10, "1000")
        await set_order_columns(api, order_id, state="filled", filled_quantity=10)
        ended = await elsewhere.post(path, json=body)
        assert (ended.status_code, ended.json()["code"]) == (409, "ORDER_SETTLED")
    assert worker.asked == []


async def test_a_repeat_of_a_change_that_was_made_stays_made_after_later_ones(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker, order_id = await start_working_order(api, user, start_worker)
    path = f"/orders/{order_id}/replace"
    for request_id, price in (("r-1", "999"), ("r-2", "998")):
        answer = await user.post(path, json={"request_id": request_id, "price": price})
        assert (answer.status_code, answer.json()["price"]) == (200, price)
    await _age_change(api, order_id, "r-1", 10.0)
    again = await user.post(path, json={"request_id": "r-1", "price": "999"})
    assert (again.status_code, again.json()["price"]) == (200, "998")
    assert len(worker.asked) == 2


async def test_a_a_quantity_change_carries_what_is_confirmed_for_its_account(
    resting: Resting,
) -> None:
    assert await resting.change(quantity=5) == (200, "submitted")
    seen = quantity_changes.SeenQuantityChange(
        broker="paper",
        sdk_version="1",
        lot=OrderLot.COMMON,
        futures=False,
        simulation=True,
        meaning=QuantityMeaning.REDUCE_BY,
        evidence={},
    )
    async with resting.api.services.database.session() as session:
        await quantity_changes.store_confirmation(session, seen, actor="cli")
    assert await resting.change(quantity=4) == (200, "submitted")
    sent = [
        request.confirmed for request in resting.worker.asked if isinstance(request, ReplaceOrder)
    ]
    assert [[change.meaning for change in known] for known in sent] == [
        [],
        [QuantityMeaning.REDUCE_BY],
    ]
