"""What a trader does with orders, on the real system: changed, cancelled, closed, reversed; by the
ledger."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

from infra.database.engine import Database
from infra.database.orders import changes as order_changes
from infra.database.orders import recording
from infra.database.orders.changes import OrderChange
from infra.exchange.behaviour import Behaviour, FillMode
from infra.valkey import client as valkey
from infra.valkey.request_queue import RequestQueue
from infra.vault.message_secret import MessageSecretFile
from tests.support.systems.local import RunningSystem, until
from tests.support.systems.trading import (
    account_path,
    list_orders,
    post_and_wait,
    read_positions,
    wait_for_fills,
)
from worker_runtime.protocol.messages import OrderState
from worker_runtime.protocol.requests import ReplaceOrder


def test_a_resting_order_is_changed_and_cancelled(system: RunningSystem) -> None:
    trader = system.trader()
    resting = Behaviour(fill=FillMode.NEVER)
    system.exchange(lambda admin: admin.set_behaviour(trader.account_id, resting))
    placed = system.order(
        trader, price_type="LMT", price="100", time_in_force="ROD", quantity=5
    ).json()
    assert placed["state"] == "submitted"
    path = f"/orders/{placed['id']}"
    changed = post_and_wait(
        system, trader, f"{path}/replace", request_id="r", quantity=2, price="101"
    )
    assert changed.status_code == 200, changed.text
    cancelled = post_and_wait(system, trader, f"{path}/cancel", request_id="c")
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    (order,) = system.ledger(trader)
    assert (order.quantity, str(order.price), order.state) == (2, "101", OrderState.CANCELLED)
    until(
        lambda: list_orders(system, trader) == [("cancelled", 2, "101")], "the cancel in the books"
    )


def test_a_change_whose_api_died_after_it_was_queued_is_in_the_books(system: RunningSystem) -> None:
    trader = system.trader()
    system.exchange(
        lambda admin: admin.set_behaviour(trader.account_id, Behaviour(fill=FillMode.NEVER))
    )
    placed = system.order(
        trader, price_type="LMT", price="100", time_in_force="ROD", quantity=5
    ).json()
    order_id = UUID(placed["id"])

    async def noted() -> str | None:
        database = Database(system.stack.settings.database_url, pool_size=1)
        async with database.session() as session:
            broker_order_id = (await recording.get_order(session, order_id)).broker_order_id
        await database.close()
        return broker_order_id

    until(lambda: asyncio.run(noted()), "broker's name of the order in the books")

    async def change() -> None:
        """What the API does, until it dies."""
        database = Database(system.stack.settings.database_url)
        async with database.session() as session:
            row = await recording.get_order(session, order_id)
            change_row = OrderChange(
                quantity=2,
                price=Decimal(101),
                generation=row.generation,
                deadline_at=datetime.now(UTC) + timedelta(seconds=30),
            )
            await order_changes.note_change(session, row, "r", change_row, actor="test")
        await database.close()
        request = ReplaceOrder(
            request_id=order_changes.request_id_of(order_id, "replace", "r"),
            order_id=str(order_id),
            user_id=trader.user_id,
            account_id=trader.account_id,
            symbol="2330",
            tag=row.tag,
            broker_order_id=row.broker_order_id,
            quantity=2,
            price=Decimal(101),
            reply_to="",
            generation=row.generation,
        )
        async with valkey.connect_valkey(system.stack.settings.valkey_url) as client:
            secrets = MessageSecretFile(system.stack.settings.message_key_file)
            await RequestQueue(client, secrets).enqueue(request, time.monotonic() + 30.0)

    asyncio.run(change())

    def changed() -> bool:
        view = system.call("GET", f"/v1/orders/{order_id}", trader.api_key).json()
        return (view["quantity"], view["price"]) == (2, "101")

    until(changed, "changed order in the books")
    (order,) = system.ledger(trader)
    assert (order.quantity, str(order.price)) == (2, "101")


def test_an_entry_reverses_a_position_and_an_exit_closes_it(system: RunningSystem) -> None:
    trader = system.trader()
    assert system.order(trader, side="sell", quantity=3).json()["state"] == "filled"
    assert read_positions(system, trader) == [("short", 3)]
    wait_for_fills(system, trader)
    intent = {"client_order_id": "i", "intent": "long_entry", "symbol": "2330", "quantity": 2}
    for _ in range(2):
        answer = post_and_wait(system, trader, f"{account_path(trader)}/intents", **intent)
        assert (answer.status_code, answer.json().get("complete")) == (200, True), answer.text
    assert read_positions(system, trader) == [("long", 2)]
    wait_for_fills(system, trader)
    closed = post_and_wait(
        system, trader, f"{account_path(trader)}/positions/2330/close", client_order_id="x"
    )
    assert (closed.status_code, closed.json()["state"]) == (200, "filled"), closed.text
    assert read_positions(system, trader) == []
    sent = [(order.side.value, order.quantity) for order in system.ledger(trader)]
    assert sent == [("sell", 3), ("buy", 3), ("buy", 2), ("sell", 2)]
    balance = system.call("GET", f"/v1{account_path(trader)}/balance", trader.api_key)
    assert (balance.status_code, balance.json()["user_id"]) == (200, trader.user_id)
