"""The jobs `statement` and `order_export`: made of the orders that the job brings along."""

from __future__ import annotations

from decimal import Decimal

from worker_runtime.jobs.context import JobContext
from worker_runtime.jobs.registry import JobType
from worker_runtime.protocol import job_work
from worker_runtime.protocol.job_work import (
    ExportOrders,
    MakeStatement,
    OrderExport,
    OrderRow,
    Statement,
    StatementLine,
    unpack,
)
from worker_runtime.protocol.messages import FINAL_ORDER_STATES

#: How a spreadsheet's formula begins, also in its wide forms (OWASP, "CSV injection").
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001 - meant


def statement(arguments: MakeStatement, _context: JobContext) -> Statement:
    """Raises `MalformedMessage`."""
    rows = unpack(arguments.orders)
    groups: dict[tuple[str, str], list[OrderRow]] = {}
    for row in rows:
        groups.setdefault((row.account_id, row.symbol), []).append(row)
    return Statement(
        user_id=arguments.user_id,
        day=arguments.day,
        orders=len(rows),
        open_orders=sum(row.state not in FINAL_ORDER_STATES for row in rows),
        lines=[_line(*key, group) for key, group in sorted(groups.items())],
    )


def _line(account_id: str, symbol: str, rows: list[OrderRow]) -> StatementLine:
    states: dict[str, int] = {}
    for row in rows:
        states[row.state] = states.get(row.state, 0) + 1
    bought, bought_average = _filled(rows, "buy")
    sold, sold_average = _filled(rows, "sell")
    return StatementLine(
        account_id=account_id,
        symbol=symbol,
        bought=bought,
        bought_average=bought_average,
        sold=sold,
        sold_average=sold_average,
        orders=states,
    )


def _filled(rows: list[OrderRow], side: str) -> tuple[int, Decimal | None]:
    """Lots, and their average price to four places; None if one of the prices is not known."""
    filled = [row for row in rows if row.side == side and row.filled_quantity]
    lots = sum(row.filled_quantity for row in filled)
    value = Decimal(0)
    for row in filled:
        if row.average_price is None:
            return lots, None
        value += row.average_price * row.filled_quantity
    return lots, round(value / lots, 4).normalize() if lots else None


def export(arguments: ExportOrders, _context: JobContext) -> OrderExport:
    """Raises `MalformedMessage`."""
    # Here, not above: only this job writes files.
    import csv
    import io
    import zlib

    rows = unpack(arguments.orders)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    columns = OrderRow.__struct_fields__
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(getattr(row, column)) for column in columns])
    packed = zlib.compress(out.getvalue().encode(), 9)
    return OrderExport(user_id=arguments.user_id, orders=len(rows), csv=packed)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = format(value.normalize(), "f") if isinstance(value, Decimal) else str(value)
    # A spreadsheet would run it: an apostrophe makes it text.
    return f"'{text}" if text.startswith(_FORMULA) else text


#: Bytes: many times what 40 KiB of packed orders need, and little beside a session in the same container.
_MEMORY = 128 * 1024 * 1024
STATEMENT = JobType(name=job_work.STATEMENT.name, arguments=MakeStatement, run=statement, memory=_MEMORY)
EXPORT = JobType(name=job_work.EXPORT.name, arguments=ExportOrders, run=export, memory=_MEMORY)
