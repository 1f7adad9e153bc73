"""A user's orders as CSV (RFC 4180), and as a stream of changes."""

import asyncio
import csv
import io
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from api.http.streams import ServerEvent
from api.orders.outcomes import view_of
from api.orders.schemas import OrderView, PresentOrders
from infra.database.engine import Database
from infra.database.models import Order
from infra.database.orders import feed as order_changes
from infra.database.orders import listing as order_list
from infra.market.calendar import HOME_ZONE
from worker_runtime.jobs.protocol.catalog import OrderRow, csv_of

#: Rows that are read at once: memory does not grow with the rows. About 150 KB of CSV; no
#: transaction is open while a client reads them.
PAGE_SIZE = 500
#: The type of a file with a header (RFC 4180).
MEDIA_TYPE = "text/csv; charset=utf-8; header=present"


def headers(user_id: str) -> dict[str, str]:
    """Returns the headers of the file of a user's orders."""
    return {
        "Content-Disposition": f'attachment; filename="orders-{user_id}.csv"',
        "Cache-Control": "no-store",
    }


def row_of(order: OrderView) -> OrderRow:
    """Returns the columns of an order."""
    shown = order.model_dump(include=set(OrderRow.__struct_fields__))
    at = order.accepted_at.astimezone(HOME_ZONE).isoformat(timespec="microseconds")
    plain = {name: value.value for name, value in shown.items() if isinstance(value, Enum)}
    return OrderRow(**(shown | plain | {"accepted_at": at}))


async def lines(
    database: Database, selection: order_list.OrderSelection, *, bom: bool = False
) -> AsyncIterator[bytes]:
    """Yields the header and all rows, the newest first; orders accepted meanwhile are not among
    them.

    `bom`: as `for_spreadsheet` writes them. Raises `DatabaseUnavailable`.
    """
    behind: order_list.OrderPosition | None = None
    while True:
        async with database.session() as session:
            rows = await order_list.page_of_orders(
                session, selection, behind=behind, limit=PAGE_SIZE
            )
        header = behind is None
        part = csv_of((row_of(view_of(row)) for row in rows), header=header)
        yield for_spreadsheet(part, header=header) if bom else part
        if len(rows) < PAGE_SIZE:
            return
        behind = rows[-1].created_at, rows[-1].id


def for_spreadsheet(rows: bytes, *, header: bool) -> bytes:
    """Return rows of an export as spreadsheets read them: their times without a zone, so that they
    are times.

    They are in the home zone, to the millisecond. With the header, a byte order mark comes first:
    without it, Excel takes UTF-8 for the code page of its country.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    column = OrderRow.__struct_fields__.index("accepted_at")
    for number, row in enumerate(csv.reader(io.StringIO(rows.decode(), newline=""))):
        if number or not header:
            at = datetime.fromisoformat(row[column]).astimezone(HOME_ZONE)
            row[column] = at.replace(tzinfo=None).isoformat(" ", "milliseconds")
        writer.writerow(row)
    return out.getvalue().encode("utf-8-sig" if header else "utf-8")


#: Changed orders that a stream reads at once, and open ones that stand in its first event.
FEED_PAGE_SIZE = 100
#: Seconds until changes are read again while an earlier transaction is still open; doubled each
#: time.
GAP_CHECK_INTERVAL_S = 0.01
#: Such reads: after 1.3 s in all the stream waits for the next notice or heartbeat instead.
MAX_GAP_CHECKS = 8


@dataclass(eq=False)
class OrderFeed:
    """`EventFeed` of one user's orders.

    An event's id stands for all that one transaction changed. Only the last event of a transaction
    carries it, the others carry the id before: a client that comes back after half of them gets
    them all again.
    """

    database: Database
    #: The user.
    key: str
    channel: str = order_changes.ORDERS_CHANNEL

    async def current_event(self) -> ServerEvent:
        async with self.database.session() as session:
            # First the number, then the orders: what changes in between is sent again.
            horizon, _ = await order_changes.read_outlook(session, self.key, 0)
            selection = order_list.OrderSelection(
                user_id=self.key, states=frozenset({order_list.OPEN})
            )
            rows = await order_list.page_of_orders(session, selection, limit=FEED_PAGE_SIZE + 1)
        orders = PresentOrders(
            user_id=self.key,
            orders=[view_of(row) for row in rows[:FEED_PAGE_SIZE]],
            complete=len(rows) <= FEED_PAGE_SIZE,
        )
        return ServerEvent(horizon - 1, "orders", orders.model_dump_json())

    async def events_after(self, last: int) -> Sequence[ServerEvent]:
        pause = GAP_CHECK_INTERVAL_S
        for _ in range(MAX_GAP_CHECKS):
            async with self.database.session() as session:
                rows = await order_changes.changes_behind(
                    session, self.key, last, limit=FEED_PAGE_SIZE
                )
                if rows:
                    return _events(rows, last)
                horizon, has_gap = await order_changes.read_outlook(session, self.key, last)
            if last >= horizon:  # a number of another database: begin anew
                return [await self.current_event()]
            if not has_gap:
                break
            await asyncio.sleep(pause)
            pause *= 2
        return []


def _events(rows: Sequence[Order], last: int) -> list[ServerEvent]:
    events = []
    for changed, together in itertools.groupby(rows, key=lambda row: row.changed):
        *others, final = [view_of(row).model_dump_json() for row in together]
        events += [ServerEvent(last, "order", data) for data in others]
        events.append(ServerEvent(changed, "order", final))
        last = changed
    return events
