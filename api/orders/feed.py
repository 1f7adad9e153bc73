"""Feeds the stream of changes of a user's orders."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from api.http.streams import ServerEvent
from api.orders.outcomes import view_of
from api.orders.schemas import PresentOrders
from infra.database.engine import Database
from infra.database.models import Order
from infra.database.orders import feed as order_changes

#: Changed orders that a stream reads at once, and open ones that stand in its first event.
PAGE = 100
#: Seconds until changes are read again while an earlier transaction is still open; doubled each time.
GAP_PAUSE = 0.01
#: Such reads: after 1.3 s in all the stream waits for the next notice or heartbeat instead.
GAP_CHECKS = 8


class OrderFeed:
    """`EventFeed` of one user's orders.

    An event's id stands for all that one transaction changed. Only the last event of a transaction carries
    it, the others carry the id before: a client that comes back after half of them gets them all again.
    """

    channel = order_changes.ORDERS_CHANNEL

    def __init__(self, database: Database, user_id: str) -> None:
        self._database = database
        self.key = user_id

    async def current_event(self) -> ServerEvent:
        async with self._database.session() as session:
            # First the number, then the orders: what changes in between is sent again.
            now = await order_changes.read_outlook(session, self.key, 0)
            rows = await order_changes.open_orders(session, self.key, limit=PAGE + 1)
        orders = PresentOrders(
            user_id=self.key, orders=[view_of(row) for row in rows[:PAGE]], complete=len(rows) <= PAGE
        )
        return ServerEvent(now.horizon - 1, "orders", orders.model_dump_json())

    async def events_after(self, last: int) -> Sequence[ServerEvent]:
        pause = GAP_PAUSE
        for _ in range(GAP_CHECKS):
            async with self._database.session() as session:
                rows = await order_changes.changes_behind(session, self.key, last, limit=PAGE)
                if rows:
                    return _events(rows, last)
                ahead = await order_changes.read_outlook(session, self.key, last)
            if last >= ahead.horizon:  # a number of another database: begin anew
                return [await self.current_event()]
            if not ahead.more:
                break
            await asyncio.sleep(pause)
            pause *= 2
        return []


def _events(rows: Sequence[Order], last: int) -> list[ServerEvent]:
    found = []
    for changed, together in itertools.groupby(rows, key=lambda row: row.changed):
        *others, final = [view_of(row).model_dump_json() for row in together]
        found += [ServerEvent(last, "order", data) for data in others]
        found.append(ServerEvent(changed, "order", final))
        last = changed
    return found
