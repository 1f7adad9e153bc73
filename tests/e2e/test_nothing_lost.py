"""Invariant nothing-lost on the whole system: orders whose handling broke off end by themselves."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import text

from infra.database.engine import Database
from infra.database.orders import acceptance
from infra.exchange.behaviour import Behaviour, FaultPoint
from infra.market.calendar import HOME_ZONE
from tests.support.systems.local import RunningSystem, Trader, until


def seen(system: RunningSystem, trader: Trader, order_id: str) -> dict[str, Any]:
    order: dict[str, Any] = system.call("GET", f"/v1/orders/{order_id}", trader.api_key).json()
    return order


def final(system: RunningSystem, trader: Trader, order_id: str) -> dict[str, Any]:
    def ended() -> dict[str, Any] | None:
        view = seen(system, trader, order_id)
        return view if view.get("final") else None

    return until(ended, "final order", 90.0)


def inject_faults(system: RunningSystem, trader: Trader, *points: FaultPoint) -> None:
    behaviour = Behaviour(faults=dict.fromkeys(points, 1))
    system.exchange(lambda admin: admin.set_behaviour(trader.account_id, behaviour))


async def expire(system: RunningSystem, order_id: str) -> None:
    """Ends an order's time now."""
    database = Database(system.stack.settings.database_url)
    async with database.session() as session:
        await session.execute(
            text("update orders set deadline_at = clock_timestamp() where id = :id"),
            {"id": order_id},
        )
    await database.close()


def test_an_order_whose_answer_and_events_were_lost_is_found_at_the_broker(
    system: RunningSystem,
) -> None:
    trader = system.trader()
    system.start_until_active(trader)
    inject_faults(system, trader, FaultPoint.LOST_ACK, FaultPoint.LOST_EVENT)
    order_id = system.order(trader).json()["id"]
    order = final(system, trader, order_id)
    assert (order["state"], order["filled_quantity"]) == ("filled", 1)
    assert [entry.broker_order_id for entry in system.ledger(trader)] == [order["broker_order_id"]]


def test_an_order_that_never_arrived_blocks_its_symbol_until_that_is_certain(
    system: RunningSystem,
) -> None:
    trader = system.trader()
    system.start_until_active(trader)
    # A list that is a minute behind proves no absence: so nothing is certain before the symbol was
    # tried.
    behind = Behaviour(faults={FaultPoint.LOST_REQUEST: 1}, listing_lag_ms=60_000)
    system.exchange(lambda admin: admin.set_behaviour(trader.account_id, behind))
    order_id = system.order(trader).json()["id"]
    until(lambda: seen(system, trader, order_id)["state"] == "unknown", "unknown order")
    blocked = system.order(trader)
    assert (blocked.status_code, blocked.json()["code"]) == (409, "SYMBOL_BLOCKED"), blocked.text
    # Until its deadline its worker might still submit it. As if that were over:
    asyncio.run(expire(system, order_id))
    system.exchange(lambda admin: admin.set_behaviour(trader.account_id, Behaviour()))
    order = final(system, trader, order_id)
    assert (order["state"], order["code"]) == ("rejected", "WORKER_LOST")
    assert "never reached the broker" in order["reason"]
    assert system.ledger(trader) == []
    # Its worker still refuses what was accepted within 5 s of it (`UnknownOutcomes`).
    until(lambda: system.order(trader).json().get("state") == "filled", "order in the symbol")
    assert len(system.ledger(trader)) == 1


def test_an_order_whose_api_died_before_it_was_queued_is_placed_once(system: RunningSystem) -> None:
    trader = system.trader()
    with system.valkey() as client:
        generation = client.get("berth:generation")
    assert isinstance(generation, bytes)
    now = datetime.now(UTC)
    new = acceptance.NewOrder(
        user_id=trader.user_id,
        account_id=trader.account_id,
        client_order_id=uuid4().hex,
        fingerprint="f",
        symbol="2330",
        side="buy",
        quantity=1,
        price_type="MKT",
        price=None,
        time_in_force="IOC",
        generation=generation.decode(),
        lifetime_s=60.0,
        trading_day=now.astimezone(HOME_ZONE).date(),
    )

    async def accepted() -> str:
        database = Database(system.stack.settings.database_url)
        async with database.session() as session:
            order_id = (await acceptance.accept_order(session, new)).order.id
        await database.close()
        return str(order_id)

    order_id = asyncio.run(accepted())  # and nothing more: the API is dead
    assert final(system, trader, order_id)["state"] == "filled"
    assert len(system.ledger(trader)) == 1
