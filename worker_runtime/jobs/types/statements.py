"""The jobs `statement`, `statement_email`, `statement_webhook` and `order_export`.

They are made from the orders that the job carries.
"""

import zlib
from collections import Counter
from decimal import Decimal

import msgspec

from worker_runtime.jobs.config import MailOutlet, WebhookOutlet
from worker_runtime.jobs.protocol.catalog import (
    JOB_KINDS,
    DeliverWebhook,
    ExportOrders,
    MailStatement,
    MakeStatement,
    OrderExport,
    OrderRow,
    PostStatement,
    SendEmail,
    Statement,
    StatementLine,
    csv_of,
    unpack_orders,
)
from worker_runtime.jobs.types.job_type import JobContext, JobType
from worker_runtime.jobs.types.mail import email_job
from worker_runtime.jobs.types.webhook import webhook_job
from worker_runtime.protocol.messages import FINAL_ORDER_STATES
from worker_runtime.protocol.order_terms import ODD_LOTS


def make_statement(arguments: MakeStatement, _context: JobContext) -> Statement:
    """Raises `MalformedMessage`."""
    rows = unpack_orders(arguments.orders)
    groups: dict[tuple[str, str, bool], list[OrderRow]] = {}
    for row in rows:
        groups.setdefault((row.account_id, row.symbol, row.lot in ODD_LOTS), []).append(row)
    return Statement(
        user_id=arguments.user_id,
        day=arguments.day,
        orders=len(rows),
        open_orders=sum(row.state not in FINAL_ORDER_STATES for row in rows),
        lines=[_line(*key, group) for key, group in sorted(groups.items())],
    )


def _line(account_id: str, symbol: str, odd: bool, rows: list[OrderRow]) -> StatementLine:
    bought, bought_average = _filled(rows, "buy")
    sold, sold_average = _filled(rows, "sell")
    return StatementLine(
        account_id=account_id,
        symbol=symbol,
        odd=odd,
        bought=bought,
        bought_average=bought_average,
        sold=sold,
        sold_average=sold_average,
        orders=dict(Counter(row.state for row in rows)),
    )


def _filled(rows: list[OrderRow], side: str) -> tuple[int, Decimal | None]:
    """Returns the filled lots and their average price to four places, without an exponent; None if
    a price is not known."""
    filled = [row for row in rows if row.side == side and row.filled_quantity]
    lots = sum(row.filled_quantity for row in filled)
    value = Decimal(0)
    for row in filled:
        if row.average_price is None:
            return lots, None
        value += row.average_price * row.filled_quantity
    return lots, Decimal(f"{round(value / lots, 4).normalize():f}") if lots else None


def export_orders(arguments: ExportOrders, _context: JobContext) -> OrderExport:
    """Raises `MalformedMessage`."""
    rows = unpack_orders(arguments.orders)
    packed = zlib.compress(csv_of(rows, header=True), 9)
    return OrderExport(user_id=arguments.user_id, orders=len(rows), csv=packed)


#: Bytes: far more than 40 KiB of packed orders need,
#: and little next to a session in the same container.
_MEMORY_BYTES = 128 * 1024 * 1024
STATEMENT_JOB = JobType(
    name=JOB_KINDS[MakeStatement].name,
    arguments=MakeStatement,
    run=make_statement,
    memory=_MEMORY_BYTES,
)
EXPORT_JOB = JobType(
    name=JOB_KINDS[ExportOrders].name,
    arguments=ExportOrders,
    run=export_orders,
    memory=_MEMORY_BYTES,
)


#: The event of the webhook.
STATEMENT_EVENT = "statement.daily"


def statement_email_job(outlet: MailOutlet) -> JobType:
    """Returns the type `statement_email`, with the server that sends our mails."""
    mail = email_job(outlet)

    def send(arguments: MailStatement, context: JobContext) -> object:
        made = make_statement(arguments, context)
        text = statement_text(made)
        return mail.run(
            SendEmail(to=arguments.to, subject=f"Statement of {made.day}", text=text), context
        )

    return JobType(name=JOB_KINDS[MailStatement].name, arguments=MailStatement, run=send)


def statement_webhook_job(outlet: WebhookOutlet) -> JobType:
    """Returns the type `statement_webhook`, with the fleet's keys. The body is the result of the
    job `statement`."""
    post = webhook_job(outlet)

    def deliver(arguments: PostStatement, context: JobContext) -> object:
        body = msgspec.Raw(msgspec.json.encode(make_statement(arguments, context)))
        delivery = DeliverWebhook(
            url=arguments.url, recipient=arguments.user_id, event=STATEMENT_EVENT, body=body
        )
        return post.run(delivery, context)

    return JobType(name=JOB_KINDS[PostStatement].name, arguments=PostStatement, run=deliver)


def statement_text(made: Statement) -> str:
    """Returns the text of a mail: a line for each account and symbol."""
    lines = [f"User {made.user_id}, {made.day}", ""]
    if not made.orders:
        return "\n".join([*lines, "No orders on this day.", ""])
    lines.append(f"Orders: {made.orders}, of which not final yet: {made.open_orders}")
    account = ""
    for line in made.lines:
        if line.account_id != account:
            account = line.account_id
            lines += ["", f"Account {account}"]
        lines.append(f"  {line.symbol}{' (shares)' if line.odd else ''}: {_trades(line)}")
    lines += [
        "",
        "Quantities are lots, or shares. Fees and taxes are the broker's and not in it.",
        "",
    ]
    return "\n".join(lines)


def _trades(line: StatementLine) -> str:
    parts = []
    for side, lots, average in (
        ("bought", line.bought, line.bought_average),
        ("sold", line.sold, line.sold_average),
    ):
        if lots:
            price = "at prices not all known" if average is None else f"at {average:f} on average"
            parts.append(f"{side} {lots} {price}")
    states = ", ".join(f"{count} {state}" for state, count in sorted(line.orders.items()))
    return f"{'; '.join(parts) or 'no fills'} (orders: {states})"
