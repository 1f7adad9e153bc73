"""A test of a signal says whether the signal would be a repeat, what it would wait for, and stores
nothing of it but the test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from infra.database.models import Order
from infra.database.trading.models import WebhookCall
from infra.settings import Settings
from tests.support.api.accounts import set_account_limits
from tests.support.api.orders import set_order_columns, start_worker_holding, submitted_orders
from tests.support.api.scripted_answers import answer_submitted
from tests.support.api.webhooks import (
    await_signal_outcome,
    create_webhook,
    make_signal,
    post_signal,
)
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, StartWorker, an_order, operator
from tests.support.waiting import until
from tests.support.workers.api_worker import filled, silent


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """An answer of 202 comes soon: here it means a signal that is under way."""
    return settings.model_copy(update={"webhook_wait": 0.3})


async def try_signal(
    api: ServedApi, made: dict[str, Any], signal: dict[str, Any], **body: Any
) -> httpx.Response:
    """Tests a signal as it would be sent, without its secret."""
    said = {name: value for name, value in signal.items() if name != "secret"}
    async with api.client(api.key) as user:
        path = f"/users/{api.user}/webhooks/{made['id']}/test"
        return await user.post(path, json={"signal": said, **body})


async def signals_of(api: ServedApi) -> list[WebhookCall]:
    async with api.services.database.session() as session:
        rows = select(WebhookCall).where(WebhookCall.test.is_(False)).order_by(WebhookCall.id)
        return list(await session.scalars(rows))


async def test_a_signal_that_came_before_is_tested_as_the_repeat_that_it_would_be(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 2)
    made = await create_webhook(api)
    signal = make_signal(made, action="long_exit", symbol="MXFA6", quantity=None, id="exit")
    fresh = await try_signal(api, made, signal)
    assert (fresh.status_code, fresh.json()["repeat_of"]) == (200, None), fresh.text
    await await_signal_outcome(api, made, signal)
    (first,) = await signals_of(api)

    again = (await try_signal(api, made, signal)).json()

    assert again["repeat_of"]["id"] == first.id
    assert datetime.fromisoformat(again["repeat_of"]["received_at"]) == first.received_at
    assert (again["symbol"], again["unit"], again["plan"]["orders"]) == ("MXFA6", "contracts", [])
    assert again["plan"]["outcome"] == "nothing_to_do"
    assert again["plan"]["note"].startswith(f"it is a repeat of signal {first.id} (long_exit MXFA6")
    assert "would get the outcome of that one (done, placed)" in again["plan"]["note"]
    other = (await try_signal(api, made, signal | {"id": "another"})).json()
    assert other["repeat_of"] is None
    assert [order["quantity"] for order in other["plan"]["orders"]] == [2]
    # Nothing of it is stored or counted, and the signal itself is as it was.
    (row,) = await signals_of(api)
    assert (row.id, row.repeats) == (first.id, first.repeats)
    assert len(worker.popped) == 1


async def test_a_repeat_of_a_refused_signal_says_what_the_first_was_refused_for(
    api: ServedApi,
) -> None:
    made = await create_webhook(api)
    signal = make_signal(made, quantity=500)
    refused = await await_signal_outcome(api, made, signal)
    assert refused.json()["code"] == "QUANTITY_LIMIT"
    async with api.client(api.key) as user:
        await user.post(f"/users/{api.user}/webhooks/{made['id']}/pause")
    # A pause does not change the answer of a repeat either.
    again = await try_signal(api, made, signal)
    assert again.status_code == 200, again.text
    assert "(refused, QUANTITY_LIMIT: " in again.json()["plan"]["note"]
    assert again.json()["repeat_of"]["outcome"] == "QUANTITY_LIMIT"


async def test_a_signal_behind_others_of_its_account_and_symbol_is_tested_as_waiting(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 2, silent)
    made = await create_webhook(api)
    exit_ = make_signal(made, action="long_exit", symbol="MXFA6", quantity=None, id="1")
    entry = make_signal(made, action="short_entry", symbol="MXFA6", quantity=1, id="2")
    for signal in (exit_, entry):
        assert (await post_signal(api, made, signal)).status_code == 202
    await until(lambda: len(worker.popped) == 1)
    running, queued = await signals_of(api)
    elsewhere = await create_webhook(api)  # another webhook of the same account

    third = make_signal(elsewhere, action="buy", symbol="MXFB6", quantity=1)
    tested = (await try_signal(api, elsewhere, third)).json()

    assert [(waiting["id"], waiting["state"]) for waiting in tested["waits_behind"]] == [
        (running.id, "running"),
        (queued.id, "queued"),
    ]
    note = tested["plan"]["note"]
    assert note.startswith(f"it would wait behind signal {running.id} (long_exit MXFA6), received")
    assert note.endswith("1 more signals come before it")
    unrelated = (await try_signal(api, elsewhere, third | {"symbol": "2330"})).json()
    assert (unrelated["waits_behind"], unrelated["plan"]["note"]) == ([], "")
    repeat = (await try_signal(api, made, entry)).json()
    assert (repeat["repeat_of"]["state"], repeat["waits_behind"]) == ("queued", [])
    # The queue is as it was.
    assert [row.id for row in await signals_of(api)] == [running.id, queued.id]
    assert submitted_orders(worker) == [("sell", 2, True)]
    worker.script = filled
    await worker.answer_later(filled(worker.popped[0]))


async def test_a_signal_that_an_order_is_in_the_way_of_is_tested_as_waiting(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker_holding(api, start_worker, 2, answer_submitted)
    made = await create_webhook(api)
    async with api.client(api.key) as user:
        order = an_order(7, symbol="MXFA6", side="sell", quantity=1)
        placed = (await user.post(f"/users/{api.user}/orders", json=order)).json()
    for position in ({}, {"position": 2}):
        exit_ = make_signal(made, action="long_exit", symbol="MXFA6", quantity=None)
        tested = (await try_signal(api, made, exit_, **position)).json()
        assert placed["id"] in tested["waits_for"]
        assert "it would wait, because order" in tested["plan"]["note"]
    # An order as it stands waits for no position.
    plain = (await try_signal(api, made, make_signal(made, symbol="MXFA6"))).json()
    assert (plain["waits_for"], plain["plan"]["note"]) == (None, "")


async def test_an_order_that_would_be_a_duplicate_is_refused_as_the_signal_would_be(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker_holding(api, start_worker, 0)
    await set_account_limits(api, duplicate_window_s=3600)
    made = await create_webhook(api)
    first = await await_signal_outcome(api, made, make_signal(made, id="1"))
    assert first.status_code == 201, first.text
    second = make_signal(made, id="2")
    tested = await try_signal(api, made, second)
    sent = await await_signal_outcome(api, made, second)
    assert (tested.status_code, tested.json()["code"]) == (409, "DUPLICATE_ORDER")
    assert sent.json()["detail"] == tested.json()["detail"]
    assert (await try_signal(api, made, second | {"id": "3", "quantity": 2})).is_success
    # The same order again is meant where a strategy adds to its position.
    target = make_signal(made, action="position", position_size=1, quantity=None)
    assert (await try_signal(api, made, target, position=0)).is_success
    # An order that ended unfilled has no duplicates.
    await set_order_columns(api, first.json()["id"], state="cancelled", filled_quantity=0)
    assert (await try_signal(api, made, second | {"id": "3"})).is_success
    async with api.services.database.session() as session:
        assert await session.scalar(select(func.count()).select_from(Order)) == 1


async def test_a_signal_of_another_time_is_planned_and_says_that_it_would_be_refused(
    api: ServedApi,
) -> None:
    made = await create_webhook(api)
    opened = (datetime.now(UTC) - timedelta(hours=4)).isoformat()
    tested = await try_signal(api, made, make_signal(made, time=opened), position=0)
    assert [order["quantity"] for order in tested.json()["plan"]["orders"]] == [1]
    assert "sent now it would be refused: the signal is 1440" in tested.json()["plan"]["note"]
    sent = await post_signal(api, made, make_signal(made, time=opened))
    assert "send {{timenow}}: {{time}} is when the bar opened" in sent.json()["detail"]


async def test_the_command_shows_what_a_tested_signal_would_repeat(
    api: ServedApi, start_worker: StartWorker, commands: CommandForker, tmp_path: Path
) -> None:
    await start_worker_holding(api, start_worker, 0)
    made = await create_webhook(api)
    now = datetime.now(UTC).isoformat()
    signal = make_signal(made, time=now, id="once")
    await await_signal_outcome(api, made, signal)
    words = f'{{"action": "buy", "symbol": "2330", "quantity": "1", "time": "{now}", "id": "once"}}'
    async with operator(api, commands, tmp_path) as berth:
        tried = await berth("webhooks", "test", api.user, made["id"], words)
    assert "2330: nothing_to_do (it is a repeat of signal" in tried.out, tried
