"""Contains handlers, events and waits for tests of the event streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from activities.events.stream import GROUPS, RECORDER_GROUP, EventStream
from infra import tasks
from infra.database.engine import DatabaseUnavailable
from infra.database.models import Order
from infra.database.orders import acceptance, recording
from infra.valkey.client import reply_of
from tests.support.activities.harness import ActivityHarness
from worker_runtime.protocol.messages import (
    Event,
    Fill,
    OrderEvent,
    OrderState,
    WorkerEvent,
    WorkerEventKind,
)


class FailingHandler:
    """Keeps the events that it gets, after failing as often as a test says."""

    def __init__(self, failures: int = 0) -> None:
        self.events: list[Event] = []
        self.failures = failures

    async def handle(
        self, events: Sequence[Event], received_ms: Sequence[int] = ()
    ) -> Sequence[Event] | None:
        if self.failures:
            self.failures -= 1
            raise DatabaseUnavailable
        self.events.extend(events)
        return None


#: Unix milliseconds.
EVENT_AT_MS = 1_795_410_000_000


@asynccontextmanager
async def run_streams(*streams: EventStream) -> AsyncIterator[None]:
    """Runs the streams until the block ends."""
    running = [asyncio.create_task(stream.run()) for stream in streams]
    try:
        yield
    finally:
        await tasks.cancel_tasks(*running)


async def wait_for_events(heard: FailingHandler, count: int) -> None:
    """Waits until the handler has this many events."""
    while len(heard.events) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def wait_until_acknowledged(harness: ActivityHarness, group: str = RECORDER_GROUP) -> None:
    """Waits until the group has read and acknowledged every entry."""
    while True:
        groups = {
            entry["name"].decode(): entry
            for entry in await reply_of(harness.client.xinfo_groups(GROUPS[group]))
        }
        info = groups.get(group)
        if info and info["pending"] == 0 and info["lag"] == 0:
            return
        await asyncio.sleep(0.02)


def make_worker_event(
    sequence: int, kind: WorkerEventKind = WorkerEventKind.CONNECTED, worker: str = "w1"
) -> WorkerEvent:
    return WorkerEvent(
        worker_id=worker,
        user_id="u1",
        epoch=1,
        sequence=sequence,
        kind=kind,
        at_ms=EVENT_AT_MS,
        detail="bye",
    )


def make_order_event(order_id: str, number: int, state: OrderState, filled: int = 0) -> OrderEvent:
    """Returns the event that moves the order to this state."""
    return OrderEvent(
        event_id=f"{order_id}:{number}",
        order_id=order_id,
        user_id="u1",
        epoch=1,
        state=state,
        at_ms=EVENT_AT_MS + number,
        filled_quantity=filled,
    )


async def accept_new_order(harness: ActivityHarness, user: str = "") -> str:
    """Accepts an order of this user, or of a new one, and returns its id."""
    user = user or await harness.user()
    now = datetime.now(UTC)
    async with harness.database.session() as session:
        accepted = await acceptance.accept_order(
            session,
            acceptance.NewOrder(
                user_id=user,
                account_id="main",
                client_order_id="o1",
                fingerprint="f",
                symbol="2330",
                side="buy",
                quantity=1,
                price_type="MKT",
                price=None,
                time_in_force="IOC",
                generation="g",
                lifetime_s=30.0,
                trading_day=now.date(),
            ),
        )
    return str(accepted.order.id)


FILL = Fill(fill_id="f1", quantity=1, price=Decimal(1), at_ms=1_795_410_006_000)


def make_fill_event(
    user_id: str, order_id: str, event_name: str = "filled", **changes: Any
) -> OrderEvent:
    """Returns the event of an order that was filled, with these changes."""
    event = OrderEvent(
        event_id=f"{order_id}:{event_name}",
        order_id=order_id,
        user_id=user_id,
        epoch=1,
        state=OrderState.FILLED,
        at_ms=1_795_410_006_000,
        fill=FILL,
        filled_quantity=1,
        average_price=Decimal(1),
    )
    return msgspec.structs.replace(event, **changes)


async def load_order(harness: ActivityHarness, order_id: str) -> Order:
    async with harness.database.session() as session:
        return await recording.get_order(session, UUID(order_id))
