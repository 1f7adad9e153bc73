"""A user's orders as CSV (RFC 4180), a page of the database at a time: memory does not grow with the rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC

from api.orders.outcomes import view_of
from api.orders.schemas import OrderView
from infra.database.engine import Database
from infra.database.orders import listing as order_list
from worker_runtime.jobs.protocol.catalog import OrderRow, csv_of

#: Rows that are read at once. About 150 KB of CSV; no transaction is open while a client reads them.
PAGE = 500
#: Of a file with a header (RFC 4180).
MEDIA_TYPE = "text/csv; charset=utf-8; header=present"


def headers(user_id: str) -> dict[str, str]:
    """Of the file of a user's orders."""
    return {
        "Content-Disposition": f'attachment; filename="orders-{user_id}.csv"',
        "Cache-Control": "no-store",
    }


def row_of(order: OrderView) -> OrderRow:
    """The columns of an order."""
    shown = order.model_dump(include=set(OrderRow.__struct_fields__))
    at = order.accepted_at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    plain = {name: shown[name].value for name in ("side", "price_type", "time_in_force", "state")}
    return OrderRow(**(shown | plain | {"accepted_at": at}))


async def lines(database: Database, wanted: order_list.OrderSelection) -> AsyncIterator[bytes]:
    """The header and all rows, the newest first; orders accepted meanwhile are not among them.

    Raises `DatabaseUnavailable`.
    """
    behind: order_list.OrderPosition | None = None
    while True:
        async with database.session() as session:
            rows = await order_list.page_of_orders(session, wanted, behind=behind, limit=PAGE)
        yield csv_of((row_of(view_of(row)) for row in rows), header=behind is None)
        if len(rows) < PAGE:
            return
        behind = order_list.position_of(rows[-1])
