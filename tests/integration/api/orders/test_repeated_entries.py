"""Entries that reverse and are repeated to go on: what has happened since their close."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import httpx
from sqlalchemy import func

from tests.support.api.orders import (
    send_intent,
    set_order_columns,
    start_worker_holding,
    submitted_orders,
)
from tests.support.api.scripted_answers import answer_submitted
from tests.support.systems.api import ServedApi, StartWorker, an_order
from tests.support.waiting import until
from tests.support.workers.api_worker import filled


async def test_an_entry_that_comes_back_opens_nothing_next_to_what_was_filled_since_its_close(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -3, answer_submitted)
    first = await send_intent(user, api, "long_entry", quantity=1, wait=0.1)
    await until(lambda: len(worker.popped) == 1)
    await set_order_columns(api, first.json()["legs"][0]["id"], state="filled", filled_quantity=3)
    worker.script = filled
    other = await user.post(f"/users/{api.user}/orders", json=an_order(symbol="MXFA6", side="sell"))
    assert other.json()["state"] == "filled"
    await set_order_columns(
        api,
        other.json()["id"],
        state="filled",
        filled_quantity=1,
        updated_at=func.clock_timestamp(),
    )
    answer = await send_intent(user, api, "long_entry", quantity=1)
    assert (answer.status_code, answer.json()["code"]) == (409, "POSITION_BUSY")
    assert len(answer.json()["legs"]) == 1
    assert submitted_orders(worker) == [("buy", 3, True), ("sell", 1, False)]


async def test_an_entry_that_comes_back_too_late_opens_nothing(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -3, answer_submitted)
    first = await send_intent(user, api, "long_entry", quantity=1, wait=0.1)
    assert first.status_code == 202
    await until(lambda: len(worker.popped) == 1)
    # As after a crash between the legs, a second more than an order's time ago.
    before = datetime.now(UTC) - timedelta(seconds=api.settings.order_deadline + 1)
    order_id = worker.popped[0].order_id
    await set_order_columns(api, order_id, state="filled", filled_quantity=3, created_at=before)
    answer = await send_intent(user, api, "long_entry", quantity=1)
    assert (answer.status_code, answer.json()["code"]) == (409, "INTENT_EXPIRED")
    assert submitted_orders(worker) == [("buy", 3, True)]
