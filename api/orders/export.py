"""A user's orders as CSV (RFC 4180), a page of the database at a time: memory does not grow with the rows."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime

from api.orders.outcomes import view_of
from api.orders.schemas import OrderView
from infra.database.engine import Database
from infra.database.models import Order as Row
from infra.database.orders import listing as order_list

#: Rows that are read at once. About 150 KB of CSV; no transaction is open while a client reads them.
PAGE = 500
COLUMNS = (
    *("accepted_at", "id", "client_order_id", "account_id", "symbol", "side", "quantity", "price_type"),
    *("price", "time_in_force", "state", "filled_quantity", "average_price", "broker_order_id"),
    *("reduce_only", "origin", "code", "reason"),
)
#: How a spreadsheet's formula begins, also in its wide forms (OWASP, "CSV injection").
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001 - meant
#: Of a file with a header (RFC 4180).
MEDIA_TYPE = "text/csv; charset=utf-8; header=present"


def headers(user_id: str) -> dict[str, str]:
    """Of the file of a user's orders."""
    return {
        "Content-Disposition": f'attachment; filename="orders-{user_id}.csv"',
        "Cache-Control": "no-store",
    }


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    text = str(value)
    # A spreadsheet would run it: an apostrophe makes it text.
    return f"'{text}" if text.startswith(_FORMULA) else text


def _row(order: OrderView) -> list[str]:
    shown = order.model_dump(mode="json") | {"accepted_at": order.accepted_at}
    return [_cell(shown[name]) for name in COLUMNS]


def _encoded(rows: Sequence[Sequence[str]]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerows(rows)
    return out.getvalue().encode()


async def lines(database: Database, wanted: order_list.OrderSelection) -> AsyncIterator[bytes]:
    """The header and all rows, the newest first; orders accepted meanwhile are not among them.

    Raises `DatabaseUnavailable`.
    """
    head: Sequence[Sequence[str]] = [COLUMNS]
    behind: order_list.OrderPosition | None = None
    while True:
        rows = await _page(database, wanted, behind)
        yield _encoded([*head, *(_row(view_of(row)) for row in rows)])
        if len(rows) < PAGE:
            return
        head, behind = (), order_list.position_of(rows[-1])


async def _page(
    database: Database, wanted: order_list.OrderSelection, behind: order_list.OrderPosition | None
) -> Sequence[Row]:
    async with database.session() as session:
        return await order_list.page_of_orders(session, wanted, behind=behind, limit=PAGE)
