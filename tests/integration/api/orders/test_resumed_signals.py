"""Alerts whose process died after its answer: another one carries them on, or writes their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.engine import make_url

from infra.database.models import AuditEntry, Order
from infra.database.trading.models import WebhookDelivery
from infra.local.process import HOST
from infra.settings import Settings
from tests.integration.activities.maintenance.maintaining import ValkeyLine
from tests.integration.api.accounts.test_webhooks import a_signal, make, outcome_of, post
from tests.integration.api.conftest import ServedApi, StartWorker, an_order, running_api
from tests.integration.api.orders.test_intents import broker, sent
from tests.integration.api.orders.test_order_changes import resting, set_row
from tests.integration.api.scripted_worker import ScriptedWorker, filled, silent, until
from worker_runtime.protocol.messages import PlaceOrder


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """An answer of 202 comes soon: here it stands for a signal that goes on after it."""
    return settings.model_copy(update={"webhook_wait": 0.3})


async def leave(api: ServedApi, **columns: str) -> None:
    """As if much time had passed for the signal: its columns are these."""
    async with api.services.database.session() as session:
        for name, value in columns.items():
            await session.execute(text(f"update webhook_deliveries set {name} = {value}"))  # noqa: S608


async def delivery(api: ServedApi) -> WebhookDelivery:
    async with api.services.database.session() as session:
        return (await session.scalars(select(WebhookDelivery))).one()


async def failures(api: ServedApi) -> list[AuditEntry]:
    """What the audit trail tells of signals that were promised."""
    async with api.services.database.session() as session:
        found = select(AuditEntry).where(AuditEntry.action.like("webhook.signal%"))
        return list(await session.scalars(found))


@asynccontextmanager
async def way_to_postgresql(api: ServedApi) -> AsyncIterator[tuple[ValkeyLine, str]]:
    """A way that can be cut, and the URL on it."""
    url = make_url(api.settings.database_url)
    assert url.port is not None
    line = ValkeyLine(url.port)
    server = await asyncio.start_server(line.accepted, HOST, 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield line, url.set(host=HOST, port=port).render_as_string(hide_password=False)
    finally:
        line.break_off()
        server.close()
        await server.wait_closed()


async def took_and_died(
    api: ServedApi, start_worker: StartWorker, **signal: Any
) -> tuple[ScriptedWorker, dict[str, Any], dict[str, Any]]:
    """A process takes an entry and answers 202 while the close is not filled yet; then it is gone."""
    worker = await broker(api, start_worker, -2, silent)
    made = await make(api)
    said = a_signal(made, action="long_entry", symbol="MXFA6", quantity=3, **signal)
    async with running_api(api.settings) as dying:
        answer = await post(dying, made, said)
        assert (answer.status_code, answer.json()["complete"]) == (202, False)
        await until(lambda: len(worker.popped) == 1)
    await leave(api, held_until="now() + interval '1 hour'")  # a slow machine is no dead process
    worker.script = filled
    await worker.answer_later(filled(worker.popped[0]))
    return worker, made, said


async def test_an_entry_whose_process_died_after_its_answer_is_carried_on_once(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker, made, said = await took_and_died(api, start_worker)
    held = await delivery(api)
    assert held.alert is not None
    assert made["secret"] not in str(held.alert)
    keeper = api.services.webhooks
    assert await keeper.keep_signals() == 0  # the one that took it may be alive
    assert sent(worker) == [("buy", 2, True)]
    await leave(api, held_until="now()")
    await until(lambda: len(worker.popped) == 2)
    assert sent(worker) == [("buy", 2, True), ("buy", 3, False)]
    answer = await outcome_of(api, made, said)
    assert [leg["state"] for leg in answer.json()["legs"]] == ["filled", "filled"]
    done = await delivery(api)
    assert (done.held_until, done.refused) == (None, None)
    assert str(done.order_id) == answer.json()["legs"][1]["id"]


async def test_two_processes_at_one_signal_make_each_leg_once(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await broker(api, start_worker, -2, silent)
    made = await make(api)
    said = a_signal(made, action="long_entry", symbol="MXFA6", quantity=3)
    async with running_api(api.settings) as other:
        assert (await post(other, made, said)).status_code == 202
        await until(lambda: len(worker.popped) == 1)
        keeper = api.services.webhooks
        while not api.services.webhooks.under_way:
            await leave(api, held_until="now()")  # it was too slow to renew its lease, and lives
            await keeper.keep_signals()
        assert api.services.webhooks.under_way == other.services.webhooks.under_way
        worker.script = filled
        await worker.answer_later(filled(worker.popped[0]))
        await until(lambda: len(worker.popped) == 2)
        await until(lambda: not other.services.webhooks.under_way and not api.services.webhooks.under_way)
    assert sent(worker) == [("buy", 2, True), ("buy", 3, False)]


async def test_after_its_deadline_a_signal_opens_nothing_and_its_end_is_written(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker, made, said = await took_and_died(api, start_worker)
    await leave(api, until="now()", held_until="now()")
    keeper = api.services.webhooks
    await keeper.keep_signals()  # or the process's own, at the same time

    async def ended() -> WebhookDelivery:
        while (row := await delivery(api)).refused is None:
            await keeper.keep_signals()
        return row

    row = await ended()
    assert row.held_until is None
    assert str(row.refused).startswith("INTENT_EXPIRED")
    assert sent(worker) == [("buy", 2, True)]
    (entry,) = await failures(api)
    assert (entry.action, entry.subject) == ("webhook.alert_failed", f"webhook:{made['id']}")
    assert entry.data["code"] == "INTENT_EXPIRED"
    assert (await post(api, made, said)).json()["code"] == "INTENT_EXPIRED"
    assert sent(worker) == [("buy", 2, True)]


@pytest.mark.parametrize("action", ["close", "short_exit"])
async def test_a_close_that_was_placed_is_done_whatever_became_of_its_process(
    api: ServedApi, start_worker: StartWorker, action: str
) -> None:
    worker = await broker(api, start_worker, -2, silent)
    made = await make(api)
    said = a_signal(made, action=action, symbol="MXFA6", quantity=None)
    async with running_api(api.settings) as dying:
        assert (await post(dying, made, said)).status_code == 202
        await until(lambda: len(worker.popped) == 1)
    await leave(api, until="now()", held_until="now()")
    while (await delivery(api)).held_until is not None:
        await api.services.webhooks.keep_signals()
    row = await delivery(api)
    assert (row.refused, row.order_id is not None) == (None, True)
    assert sent(worker) == [("buy", 2, True)]


async def test_a_signal_is_held_from_its_promise_on_also_when_it_was_refused_before(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await broker(api, start_worker, 2, resting)
    made = await make(api)
    order = an_order(7, symbol="MXFA6", side="sell", quantity=1)
    async with api.client(api.key) as user:
        placed = (await user.post(f"/users/{api.user}/orders", json=order)).json()
    said = a_signal(made, action="long_exit", symbol="MXFA6", quantity=None)
    refused = await outcome_of(api, made, said)
    assert refused.json()["code"] == "POSITION_BUSY"
    assert (await delivery(api)).held_until is None
    await set_row(api, placed["id"], state="cancelled")
    worker.script = silent
    again = asyncio.create_task(post(api, made, said))
    await until(lambda: len(worker.popped) == 2)
    answer = await again
    assert answer.status_code == 202
    held = await delivery(api)
    assert held.held_until is not None
    assert held.until is not None
    assert timedelta(0) < held.until - held.at <= timedelta(seconds=api.settings.order_deadline + 20)


async def test_a_signal_that_was_answered_with_an_error_is_not_carried_on(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await broker(api, start_worker, -2, silent)
    made = await make(api)
    said = a_signal(made, action="long_entry", symbol="MXFA6", quantity=3)
    async with AsyncExitStack() as stack:
        line, url = await stack.enter_async_context(way_to_postgresql(api))
        # The answer is given when this time is over, by which the worker has taken the close.
        changed = api.settings.model_copy(update={"database_url": url, "webhook_wait": 10.0})
        failing = await stack.enter_async_context(running_api(changed))

        def breaks_off(order: PlaceOrder) -> None:
            """PostgreSQL is away for this process from the moment at which the close is taken."""
            line.break_off()

        worker.script = breaks_off
        assert (await post(failing, made, said)).status_code == 503
        assert (await delivery(api)).held_until is None
        worker.script = filled
        await worker.answer_later(filled(worker.popped[0]))
        await until(lambda: not failing.services.webhooks.under_way)
    await leave(api, held_until="case when held_until is not null then now() end")
    assert await api.services.webhooks.keep_signals() == 0
    assert not api.services.webhooks.under_way
    assert sent(worker) == [("buy", 2, True)]


async def test_a_promised_reversal_that_was_stopped_halfway_is_finished(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await broker(api, start_worker, -2, silent)
    made = await make(api)
    said = a_signal(made, action="long_entry", symbol="MXFA6", quantity=3)
    assert (await post(api, made, said)).status_code == 202
    await until(lambda: len(worker.popped) == 1)
    worker.script = resting
    order = an_order(7, symbol="MXFA6", side="sell", quantity=1)
    async with api.client(api.key) as user:
        beside = (await user.post(f"/users/{api.user}/orders", json=order)).json()
    await worker.answer_later(filled(worker.popped[0]))
    await until(lambda: not api.services.webhooks.under_way)  # POSITION_BUSY, which may pass
    row = await delivery(api)
    assert (row.refused, row.held_until is None) == (None, False)
    worker.script = filled
    await set_row(api, beside["id"], state="cancelled")
    await leave(api, held_until="now()")
    await until(lambda: len(worker.popped) == 3)
    assert sent(worker)[::2] == [("buy", 2, True), ("buy", 3, False)]
    assert await failures(api) == []


async def test_what_refuses_the_second_half_of_a_promised_reversal_is_written(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker = await broker(api, start_worker, -2, silent)
    made = await make(api)
    said = a_signal(made, action="long_entry", symbol="MXFA6", quantity=3)
    assert (await post(api, made, said)).status_code == 202
    await until(lambda: len(worker.popped) == 1)
    async with api.client(api.key) as user:
        await user.put("/switches", json={"scope": "user", "state": "halted", "reason": "a test"})
    await worker.answer_later(filled(worker.popped[0]))
    await until(lambda: not api.services.webhooks.under_way)
    row = await delivery(api)
    assert row.held_until is None
    assert str(row.refused).startswith("TRADING_HALTED")
    (entry,) = await failures(api)
    assert (entry.action, entry.data["code"]) == ("webhook.alert_failed", "TRADING_HALTED")
    assert (await post(api, made, said)).json()["code"] == "TRADING_HALTED"
    assert sent(worker) == [("buy", 2, True)]


async def test_no_order_of_a_signal_is_valid_beyond_its_deadline(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker, _, _ = await took_and_died(api, start_worker)
    await leave(api, until="now() + interval '12 seconds'", held_until="now()")
    await until(lambda: len(worker.popped) == 2)
    end = (await delivery(api)).until
    async with api.services.database.session() as session:
        opened = await session.get(Order, UUID(worker.popped[1].order_id))
    assert opened is not None
    assert end is not None
    assert opened.deadline_at < end + timedelta(seconds=5)  # 30 s after now without the signal's own
    assert worker.popped[1].lifetime_ms <= 12_000


async def test_a_signal_that_cannot_be_read_holds_up_no_other(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker, made, _ = await took_and_died(api, start_worker)
    async with api.services.database.session() as session:
        for digest, signal in (("1" * 64, {}), ("2" * 64, None)):
            now = func.clock_timestamp()
            row = WebhookDelivery(webhook_id=UUID(made["id"]), digest=digest, alert=signal)
            row.until, row.held_until = now + timedelta(seconds=60), now - timedelta(seconds=60)
            session.add(row)
        session.add(WebhookDelivery(webhook_id=uuid4(), digest="3" * 64, signal={}, held_until=func.now()))
    await leave(api, held_until="least(held_until, now())")
    keeper = api.services.webhooks

    async def refusals() -> list[str]:
        async with api.services.database.session() as session:
            return [str(one) for one in await session.scalars(select(WebhookDelivery.refused)) if one]

    await keeper.keep_signals()
    await until(lambda: len(worker.popped) == 2)
    while len(found := await refusals()) < 2:  # the process's own keeper is at them
        await keeper.keep_signals()
    assert {one.partition(":")[0] for one in found} == {"INVALID_REQUEST"}


async def test_a_signal_of_a_revoked_webhook_is_not_taken_up_again(
    api: ServedApi, start_worker: StartWorker
) -> None:
    worker, made, _ = await took_and_died(api, start_worker)
    async with api.client(api.key) as user:
        await user.delete(f"/users/{api.user}/webhooks/{made['id']}")
    await leave(api, held_until="now()")
    while (row := await delivery(api)).held_until is not None:
        await api.services.webhooks.keep_signals()
    assert str(row.refused).startswith("WEBHOOK_UNKNOWN")
    assert [entry.data["code"] for entry in await failures(api)] == ["WEBHOOK_UNKNOWN"]
    assert sent(worker) == [("buy", 2, True)]
