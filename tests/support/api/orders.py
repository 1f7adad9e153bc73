"""Contains the orders of API tests: placed, changed, closed, and written without the API."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
from sqlalchemy import update

from infra.database.models import Order
from infra.database.orders import acceptance, attention, recording
from tests.support.api.scripted_answers import (
    answer_change_done,
    answer_positions,
    answer_submitted,
    make_position,
)
from tests.support.systems.api import ServedApi, StartWorker, an_order
from tests.support.workers.api_worker import Script, ScriptedWorker, failed, filled
from worker_runtime.protocol.errors import OutcomeUnknown
from worker_runtime.protocol.messages import Failure, OrderEvent, OrderState

_WHOLE = {"quantity": 10, "price": "1000"}


async def place_order(
    api: ServedApi, user: httpx.AsyncClient, number: int = 1, **changes: Any
) -> str:
    """Places an order of 10 lots, and returns its id."""
    body = an_order(number, **{**_WHOLE, **changes})
    answer = await user.post(f"/users/{api.user}/orders", json=body)
    assert answer.status_code in (201, 202), answer.text
    return str(answer.json()["id"])


async def start_working_order(
    api: ServedApi,
    user: httpx.AsyncClient,
    start_worker: StartWorker,
    reply: Any = answer_change_done,
) -> tuple[ScriptedWorker, str]:
    """Starts a worker and places an order that works at the broker."""
    worker = await start_worker(api.user, answer_submitted)
    worker.reply = reply
    return worker, await place_order(api, user)


async def set_order_columns(api: ServedApi, order_id: str, **values: Any) -> None:
    async with api.services.database.session() as session:
        await session.execute(update(Order).where(Order.id == UUID(order_id)).values(values))


async def start_worker_holding(
    api: ServedApi, start_worker: StartWorker, quantity: int, script: Script = filled
) -> ScriptedWorker:
    """Starts the worker of an account that holds this many lots of MXFA6."""
    worker = await start_worker(api.user, script)
    worker.reply = answer_positions(make_position("MXFA6", quantity))
    return worker


def submitted_orders(worker: ScriptedWorker) -> list[tuple[str, int, bool]]:
    """Returns side, quantity and `reduce_only` of each order that the worker took."""
    return [(order.side.value, order.quantity, order.reduce_only) for order in worker.popped]


async def send_intent(
    user: httpx.AsyncClient,
    api: ServedApi,
    intent: str,
    number: int = 1,
    *,
    wait: float = 10,
    **fields: Any,
) -> httpx.Response:
    body = {"client_order_id": f"i-{number}", "intent": intent, "symbol": "MXFA6", **fields}
    return await user.post(f"/users/{api.user}/accounts/main/intents?wait={wait}", json=body)


async def close_position(
    user: httpx.AsyncClient, api: ServedApi, number: int = 1, **fields: Any
) -> httpx.Response:
    body = {"client_order_id": f"x-{number}", **fields}
    return await user.post(f"/users/{api.user}/accounts/main/positions/MXFA6/close", json=body)


_answer_unknown = failed(OrderState.UNKNOWN, Failure.of(OutcomeUnknown("timeout")))


async def place_unknown_order(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> dict[str, Any]:
    """Places an order whose outcome nobody knows."""
    await start_worker(api.user, _answer_unknown)
    placed = await user.post(f"/users/{api.user}/orders", json=an_order())
    assert placed.status_code == 202, placed.text
    order: dict[str, Any] = placed.json()
    async with api.services.database.session() as session:
        row = await recording.get_order(session, uuid.UUID(order["id"]))
        row.state = "unknown"  # as the recorder writes it
    return order


async def demand_attention(
    api: ServedApi, order: dict[str, Any], reason: str = "nobody knows"
) -> None:
    async with api.services.database.session() as session:
        assert await attention.demand_attention(session, uuid.UUID(order["id"]), reason)


FIRST_ORDER_AT = datetime(2026, 11, 20, 1, 0, tzinfo=UTC)


async def write_orders(
    api: ServedApi, count: int = 1, *, first: int = 0, **changes: Any
) -> list[UUID]:
    """Writes orders a minute apart, the first at `FIRST_ORDER_AT`, and returns their ids. `changes`
    are columns that differ."""
    made = []
    async with api.services.database.session() as session:
        for number in range(first, first + count):
            new = acceptance.NewOrder(
                user_id=api.user,
                account_id="main",
                client_order_id=f"c-{number}",
                fingerprint="f",
                symbol="2330",
                side="buy",
                quantity=1,
                price_type="LMT",
                price=None,
                time_in_force="ROD",
                generation="g",
                lifetime_s=0.0,
                trading_day=FIRST_ORDER_AT.date(),
            )
            order = (await acceptance.accept_order(session, new)).order
            values = {"created_at": FIRST_ORDER_AT + timedelta(minutes=number), **changes}
            await session.execute(update(Order).where(Order.id == order.id).values(values))
            made.append(order.id)
    return made


async def record_order_state(
    api: ServedApi, *order_ids: UUID, state: str = "submitted", reason: str | None = None
) -> None:
    """Records a report of a worker about each order, in one batch as the recorder does."""
    events = [
        OrderEvent(
            event_id=f"{order_id}:{state}",
            order_id=str(order_id),
            user_id=api.user,
            epoch=1,
            state=OrderState(state),
            at_ms=1_795_410_000_000,
            reason=reason,
        )
        for order_id in order_ids
    ]
    async with api.services.database.session() as session:
        await recording.record_events(session, events)
