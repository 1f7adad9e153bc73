"""Signals that wait, or whose process died or is slow: each is carried out once, or its end is
written."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import func, select, text

from api.webhooks.schemas import Signal
from infra.database.models import AuditEntry, Order
from infra.database.trading.models import Webhook, WebhookCall, WebhookDelivery
from infra.settings import Settings
from tests.support.api.orders import set_order_columns, start_worker_holding, submitted_orders
from tests.support.api.scripted_answers import (
    answer_positions,
    answer_state,
    answer_submitted,
    make_position,
)
from tests.support.api.webhooks import (
    await_signal_outcome,
    create_webhook,
    make_signal,
    post_signal,
)
from tests.support.systems.api import Serve, ServedApi, StartWorker, alive, an_order, running_api
from tests.support.waiting import until
from tests.support.workers.api_worker import ScriptedWorker, filled, silent
from worker_runtime.protocol.messages import OrderState


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """An answer of 202 comes soon: here it means a signal that continues after it."""
    return settings.model_copy(update={"webhook_wait": 0.3})


async def leave(api: ServedApi, **columns: str) -> None:
    """As if much time had passed for the signal: its columns are these."""
    async with api.services.database.session() as session:
        for name, value in columns.items():
            await session.execute(text(f"update webhook_calls set {name} = {value}"))  # noqa: S608


async def calls(api: ServedApi) -> list[WebhookCall]:
    async with api.services.database.session() as session:
        return list(await session.scalars(select(WebhookCall).order_by(WebhookCall.id)))


async def only_call(api: ServedApi) -> WebhookCall:
    (call,) = await calls(api)
    return call


async def completed(api: ServedApi, number: int = 1) -> list[WebhookCall]:
    """The calls, once this many are completed."""
    async with asyncio.timeout(40):
        while True:
            rows = await calls(api)
            if len([call for call in rows if call.completed_at is not None]) >= number:
                return rows
            await asyncio.sleep(0.05)


async def waiting_for(api: ServedApi, obstacle: str) -> WebhookCall:
    """The only call, once its reason names this obstacle."""
    async with asyncio.timeout(20):
        while True:
            call = await only_call(api)
            if obstacle in str(call.reason):
                return call
            await asyncio.sleep(0.05)


async def failures(api: ServedApi) -> list[AuditEntry]:
    """What the audit trail tells of signals whose senders were answered before."""
    async with api.services.database.session() as session:
        statement = select(AuditEntry).where(AuditEntry.action == "webhook.alert_failed")
        return list(await session.scalars(statement))


async def took_and_died(
    api: ServedApi, start_worker: StartWorker, **signal: Any
) -> tuple[ScriptedWorker, dict[str, Any], dict[str, Any]]:
    """A process takes an entry and answers 202 while the close is not filled yet; then it is
    gone."""
    worker = await start_worker_holding(api, start_worker, -2, silent)
    made = await create_webhook(api)
    said = make_signal(made, action="long_entry", symbol="MXFA6", quantity=3, **signal)
    async with running_api(api.settings) as dying:
        answer = await post_signal(dying, made, said)
        assert (answer.status_code, answer.json()["complete"]) == (202, False)
        await until(lambda: len(worker.popped) == 1)
        # Killed, it would neither renew its lease nor give it back.
        dying.services.signals._holders.clear()
        await leave(api, held_until="now() + interval '1 hour'")
    worker.script = filled
    await worker.answer_later(filled(worker.popped[0]))
    return worker, made, said


async def test_an_entry_whose_process_died_after_its_answer_is_carried_on_once(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker, made, said = await took_and_died(api, start_worker)
    begun = await only_call(api)
    assert begun.signal is not None
    assert made["secret"] not in f"{begun.signal} {begun.body}"
    assert await api.services.webhooks.keep_signals() == 0  # the one that took it may be alive
    assert submitted_orders(worker) == [("buy", 2, True)]
    worker.reply = answer_positions(make_position("MXFA6", -9))  # its plan was made before
    await leave(api, held_until="now()")
    await until(lambda: len(worker.popped) == 2)
    assert submitted_orders(worker) == [("buy", 2, True), ("buy", 3, False)]
    (done,) = await completed(api)
    answer = await await_signal_outcome(api, made, said)
    assert [leg["state"] for leg in answer.json()["legs"]] == ["filled", "filled"]
    assert (done.state, done.outcome, done.held_until, done.repeats) == ("done", "placed", None, 0)
    assert [str(order_id) for order_id in done.order_ids] == [
        leg["id"] for leg in answer.json()["legs"]
    ]


async def test_a_process_that_stops_gives_its_signals_to_another_at_once(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -2, silent)
    made = await create_webhook(api)
    said = make_signal(made, action="long_entry", symbol="MXFA6", quantity=3)
    async with running_api(api.settings) as stopping:
        assert (await post_signal(stopping, made, said)).status_code == 202
        await until(lambda: len(worker.popped) == 1)
    worker.script = filled
    await worker.answer_later(filled(worker.popped[0]))
    await completed(api)
    assert submitted_orders(worker) == [("buy", 2, True), ("buy", 3, False)]


async def test_a_process_that_lost_its_lease_writes_no_order(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -2, silent)
    made = await create_webhook(api)
    said = make_signal(made, action="long_entry", symbol="MXFA6", quantity=3)
    async with running_api(api.settings) as other:
        assert (await post_signal(other, made, said)).status_code == 202
        await until(lambda: len(worker.popped) == 1)
        # It was too slow to renew its lease, and lives; a third process holds the signal.
        await leave(api, held_by="gen_random_uuid()", held_until="now() + interval '1 hour'")
        worker.script = filled
        await worker.answer_later(filled(worker.popped[0]))
        await until(lambda: not other.services.signals.lanes_at_work)
        assert submitted_orders(worker) == [("buy", 2, True)]
        await leave(api, held_until="now()")  # the third one died
        await completed(api)
    assert submitted_orders(worker) == [("buy", 2, True), ("buy", 3, False)]


async def test_after_its_deadline_a_signal_opens_nothing_and_its_end_is_written(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker, made, said = await took_and_died(api, start_worker)
    await leave(api, deadline_at="now()", held_until="now()")
    (row,) = await completed(api)
    assert (row.state, row.outcome, row.held_until) == ("refused", "INTENT_EXPIRED", None)
    assert len(row.order_ids) == 1
    (entry,) = await failures(api)
    assert (entry.action, entry.subject) == ("webhook.alert_failed", f"webhook:{made['id']}")
    assert entry.data["code"] == "INTENT_EXPIRED"
    assert (await post_signal(api, made, said)).json()["code"] == "INTENT_EXPIRED"
    assert submitted_orders(worker) == [("buy", 2, True)]


@pytest.mark.parametrize("action", ["close", "short_exit"])
async def test_a_close_that_was_placed_is_done_whatever_became_of_its_process(
    api: ServedApi, start_worker: StartWorker, action: str
) -> None:
    worker = await start_worker_holding(api, start_worker, -2, silent)
    made = await create_webhook(api)
    said = make_signal(made, action=action, symbol="MXFA6", quantity=None)
    async with running_api(api.settings) as dying:
        assert (await post_signal(dying, made, said)).status_code == 202
        await until(lambda: len(worker.popped) == 1)
    await leave(api, deadline_at="now()", held_until="now()")
    (row,) = await completed(api)
    assert (row.state, row.outcome, len(row.order_ids)) == ("done", "placed", 1)
    assert submitted_orders(worker) == [("buy", 2, True)]


async def test_a_signal_waits_while_another_order_works_on_the_position(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 2, answer_submitted)
    made = await create_webhook(api)
    order = an_order(7, symbol="MXFA6", side="sell", quantity=1)
    async with api.client(api.key) as user:
        placed = (await user.post(f"/users/{api.user}/orders", json=order)).json()
    said = make_signal(made, action="long_exit", symbol="MXFA6", quantity=None)
    waiting = await post_signal(api, made, said)
    assert (waiting.status_code, waiting.json()["complete"]) == (202, False)
    row = await waiting_for(api, placed["id"])
    assert row.deadline_at is not None
    assert row.deadline_at - row.received_at <= timedelta(seconds=api.settings.order_deadline)
    await set_order_columns(api, placed["id"], state="cancelled")
    await until(lambda: len(worker.popped) == 2)
    (done,) = await completed(api)
    assert (done.state, done.reason) == ("done", None)
    assert submitted_orders(worker)[1:] == [("sell", 2, True)]


async def test_a_signal_leaves_the_queue_when_its_last_order_rests(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 0, silent)
    made = await create_webhook(api)
    limit = {"symbol": "MXFA6", "price_type": "LMT", "price": "20000"}
    for number in ("1", "2"):
        said = make_signal(made, id=number, **limit)
        assert (await post_signal(api, made, said)).status_code == 202
    await until(lambda: len(worker.popped) == 1)
    assert [(row.state, row.outcome) for row in await calls(api)] == [
        ("running", None),
        ("queued", None),
    ]
    worker.script = answer_submitted
    await worker.answer_later(answer_submitted(worker.popped[0]))
    rows = await completed(api, 2)
    assert [(row.state, row.outcome, row.reason) for row in rows] == [("done", "placed", None)] * 2
    async with api.client(api.key) as user:
        orders = (await user.get(f"/users/{api.user}/orders")).json()["orders"]
    assert [order["final"] for order in orders] == [False, False]


async def test_what_was_in_the_way_is_named_when_the_deadline_has_passed(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker_holding(api, start_worker, 2, answer_submitted)
    made = await create_webhook(api)
    order = an_order(7, symbol="MXFA6", side="sell", quantity=1)
    async with running_api(api.settings.model_copy(update={"order_deadline": 3.0})) as hasty:
        async with api.client(api.key) as user:
            placed = (await user.post(f"/users/{api.user}/orders", json=order)).json()
        first = make_signal(made, action="long_exit", symbol="MXFA6", quantity=None, id="1")
        second = make_signal(made, action="long_exit", symbol="MXFA6", quantity=1, id="2")
        for said in (first, second):
            assert (await post_signal(hasty, made, said)).status_code == 202
        rows = await completed(api, 2)
    assert [row.outcome for row in rows] == ["INTENT_EXPIRED"] * 2
    assert f"order {placed['id']} works on this position" in str(rows[0].reason)
    assert str(rows[0].id) in str(rows[1].reason) or placed["id"] in str(rows[1].reason)
    answer = await post_signal(api, made, first)
    assert (answer.status_code, answer.json()["code"]) == (409, "INTENT_EXPIRED")
    assert placed["id"] in answer.json()["detail"]
    assert len(await failures(api)) == 2


async def test_a_signal_behind_an_order_of_unknown_outcome_waits_and_is_refused_with_the_reason(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 0, answer_state(OrderState.UNKNOWN))
    made = await create_webhook(api)
    async with running_api(api.settings.model_copy(update={"order_deadline": 3.0})) as hasty:
        async with api.client(api.key) as user:
            body = an_order(7, symbol="MXFA6", quantity=1)
            unknown = (await user.post(f"/users/{api.user}/orders", json=body)).json()
        await set_order_columns(api, unknown["id"], state="unknown")
        worker.script = filled
        said = make_signal(made, action="buy", symbol="MXFA6", quantity=1)
        assert (await post_signal(hasty, made, said)).status_code == 202
        (row,) = await completed(api)
        assert row.outcome == "INTENT_EXPIRED"
        assert unknown["id"] in str(row.reason)
        later = make_signal(made, action="buy", symbol="MXFA6", quantity=1, id="later")
        assert (await post_signal(hasty, made, later)).status_code == 202
        await set_order_columns(api, unknown["id"], state="cancelled")  # it is settled in time
        await until(lambda: len(worker.popped) == 2)


async def test_what_refuses_the_second_half_of_a_reversal_is_written(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -2, silent)
    made = await create_webhook(api)
    said = make_signal(made, action="long_entry", symbol="MXFA6", quantity=3)
    assert (await post_signal(api, made, said)).status_code == 202
    await until(lambda: len(worker.popped) == 1)
    async with api.client(api.key) as user:
        await user.put("/switches", json={"scope": "user", "state": "halted", "reason": "a test"})
    await worker.answer_later(filled(worker.popped[0]))
    (row,) = await completed(api)
    assert (row.state, row.outcome) == ("refused", "TRADING_HALTED")
    (entry,) = await failures(api)
    assert (entry.action, entry.data["code"]) == ("webhook.alert_failed", "TRADING_HALTED")
    assert (await post_signal(api, made, said)).json()["code"] == "TRADING_HALTED"
    assert submitted_orders(worker) == [("buy", 2, True)]


async def test_no_order_of_a_signal_is_valid_beyond_its_deadline(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker, _, _ = await took_and_died(api, start_worker)
    await leave(api, deadline_at="now() + interval '12 seconds'", held_until="now()")
    await until(lambda: len(worker.popped) == 2)
    end = (await only_call(api)).deadline_at
    async with api.services.database.session() as session:
        opened = await session.get(Order, UUID(worker.popped[1].order_id))
    assert opened is not None
    assert end is not None
    # 30 s after now without the signal's own.
    assert opened.deadline_at < end + timedelta(seconds=5)
    assert worker.popped[1].lifetime_ms <= 12_000


async def test_a_signal_that_cannot_be_read_holds_up_no_other(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker, made, _ = await took_and_died(api, start_worker)
    async with api.services.database.session() as session:
        for digest, signal in (("1" * 64, {}), ("2" * 64, None)):
            row = WebhookCall(webhook_id=UUID(made["id"]), user_id=api.user, account_id="main")
            row.digest, row.signal, row.lane, row.state = digest, signal, f"X{digest[0]}", "queued"
            row.deadline_at = func.clock_timestamp() + timedelta(seconds=60)
            session.add(row)
    await leave(api, held_until="least(held_until, now())")
    rows = await completed(api, 3)
    assert [row.outcome for row in rows] == ["placed", "INVALID_REQUEST", "INVALID_REQUEST"]
    assert len(worker.popped) == 2


async def test_a_signal_of_a_revoked_webhook_is_not_taken_up_again(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker, made, _ = await took_and_died(api, start_worker)
    async with api.client(api.key) as user:
        await user.delete(f"/users/{api.user}/webhooks/{made['id']}")
    await leave(api, held_until="now()")
    (row,) = await completed(api)
    assert row.outcome == "WEBHOOK_UNKNOWN"
    assert len(row.order_ids) == 1
    assert [entry.data["code"] for entry in await failures(api)] == ["WEBHOOK_UNKNOWN"]
    assert submitted_orders(worker) == [("buy", 2, True)]


async def promised_by_release_before(
    api: ServedApi, made: dict[str, Any], said: dict[str, Any], **columns: Any
) -> WebhookDelivery:
    """A row of the release before: of a signal that it has promised, and whose lease is over."""
    signal = Signal.model_validate(said)
    words = signal.model_dump(mode="json", exclude={"secret", "position_size", "market_position"})
    async with api.services.database.session() as session:
        webhook = await session.get_one(Webhook, UUID(made["id"]))
        row = WebhookDelivery(webhook_id=webhook.id, digest=signal.digest(webhook), alert=words)
        row.until = func.clock_timestamp() + timedelta(seconds=30)
        row.held_until = func.clock_timestamp()
        for name, value in columns.items():
            setattr(row, name, value)
        session.add(row)
    return row


async def delivery(api: ServedApi) -> WebhookDelivery:
    async with api.services.database.session() as session:
        return (await session.scalars(select(WebhookDelivery))).one()


async def test_what_the_release_before_has_promised_is_carried_on(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -2)
    made = await create_webhook(api)
    said = make_signal(made, action="long_entry", symbol="MXFA6", quantity=3)
    await promised_by_release_before(api, made, said)
    await until(lambda: len(worker.popped) == 2)
    assert submitted_orders(worker) == [("buy", 2, True), ("buy", 3, False)]
    (row,) = await completed(api)
    assert row.state == "done"
    assert str((await delivery(api)).refused).startswith("WEBHOOK_BUSY")
    again = await await_signal_outcome(api, made, said, new=False)
    assert (again.status_code, len(again.json()["legs"])) == (200, 2)


async def test_a_reversal_that_the_release_before_has_begun_is_finished(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -2)
    made = await create_webhook(api)
    said = make_signal(made, action="long_entry", symbol="MXFA6", quantity=3)
    signal = Signal.model_validate(said)
    async with api.services.database.session() as session:
        webhook = await session.get_one(Webhook, UUID(made["id"]))
    name = signal.names(signal.digest(webhook)).close
    async with api.client(api.key) as user:
        path = f"/users/{api.user}/accounts/main/positions/MXFA6/close"
        placed = await user.post(path, json={"client_order_id": name})
    assert placed.status_code == 200, placed.text
    await promised_by_release_before(api, made, said)
    await until(lambda: len(worker.popped) == 2)
    await completed(api)
    assert submitted_orders(worker) == [("buy", 2, True), ("buy", 3, False)]


async def test_what_the_release_before_refused_stays_refused(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, -2)
    made = await create_webhook(api)
    said = make_signal(made, action="close", symbol="MXFA6", quantity=None)
    await promised_by_release_before(
        api, made, said, held_until=None, refused="QUANTITY_LIMIT: as it was"
    )
    answer = await post_signal(api, made, said)
    assert (answer.json()["code"], answer.json()["detail"]) == ("QUANTITY_LIMIT", "as it was")
    assert worker.popped == []


async def test_the_release_before_neither_finds_new_webhooks_nor_places_a_repeat(
    api: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker_holding(api, start_worker, 2)
    made = await create_webhook(api)
    async with api.services.database.session() as session:
        webhook = await session.get_one(Webhook, UUID(made["id"]))
        assert webhook.token_hash.startswith("10:")  # that release looks for the plain hash
    said = make_signal(made, action="close", symbol="MXFA6", quantity=None)
    await await_signal_outcome(api, made, said)
    row = await delivery(api)
    assert (str(row.refused).partition(":")[0], row.held_until, row.order_id) == (
        "WEBHOOK_BUSY",
        None,
        None,
    )


async def test_signals_are_carried_out_in_the_order_in_which_they_were_stored(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await start_worker_holding(api, start_worker, 0)
    made = await create_webhook(api)
    async with running_api(api.settings) as other:
        said = [make_signal(made, symbol="MXFA6", quantity=n + 1, id=f"{n}") for n in range(12)]
        served = [api, other] * 6
        await asyncio.gather(
            *(post_signal(each, made, signal) for each, signal in zip(served, said, strict=True))
        )
        rows = await completed(api, 12)
    stored = [row.quantity for row in rows]
    assert [order.quantity for order in worker.popped] == stored
    assert sorted(quantity or 0 for quantity in stored) == list(range(1, 13))


async def test_a_signal_whose_process_is_killed_is_carried_on_by_another_once(
    api: ServedApi, start_worker: StartWorker, serve: Serve
) -> None:
    worker = await start_worker_holding(api, start_worker, -2, silent)
    made = await create_webhook(api)
    process, url = serve(1)
    await alive(url)
    said = [
        make_signal(made, action="long_entry", symbol="MXFA6", quantity=3, id="1"),
        make_signal(made, action="buy", symbol="MXFA6", quantity=1, id="2"),
    ]
    async with httpx.AsyncClient(timeout=40) as client:
        for each in said:
            answer = await client.post(f"{url}/webhooks/{made['token']}/signals", json=each)
            assert (answer.status_code, answer.json()["complete"]) == (202, False)
    await until(lambda: len(worker.popped) == 1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    worker.script = filled
    await worker.answer_later(filled(worker.popped[0]))
    first, second = await completed(api, 2)
    assert [(row.state, row.outcome) for row in (first, second)] == [("done", "placed")] * 2
    assert submitted_orders(worker) == [("buy", 2, True), ("buy", 3, False), ("buy", 1, False)]
