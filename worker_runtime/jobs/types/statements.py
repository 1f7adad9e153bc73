"""The jobs `statement_email` and `statement_webhook`: a user's day, made of the job's orders and sent."""

from __future__ import annotations

import msgspec

from worker_runtime.jobs.config import MailOutlet, WebhookOutlet
from worker_runtime.jobs.context import JobContext
from worker_runtime.jobs.registry import JobType
from worker_runtime.jobs.types.mail import email
from worker_runtime.jobs.types.orders import statement
from worker_runtime.jobs.types.webhook import webhook
from worker_runtime.protocol import job_work
from worker_runtime.protocol.job_work import (
    MailStatement,
    MakeStatement,
    PostStatement,
    SendEmail,
    Statement,
    StatementLine,
    WebhookDelivery,
)

#: What a receiver knows the webhook by.
EVENT = "statement.daily"


def statement_email(outlet: MailOutlet) -> JobType:
    """The type, with the server that takes our mails."""
    mail = email(outlet)

    def send(arguments: MailStatement, context: JobContext) -> object:
        made = _made(arguments, context)
        text = text_of(made)
        return mail.run(SendEmail(to=arguments.to, subject=f"Statement of {made.day}", text=text), context)

    return JobType(name=job_work.STATEMENT_MAIL.name, arguments=MailStatement, run=send)


def statement_webhook(outlet: WebhookOutlet) -> JobType:
    """The type, with the fleet's keys. The body is the statement, as the job `statement` returns it."""
    post = webhook(outlet)

    def deliver(arguments: PostStatement, context: JobContext) -> object:
        body = msgspec.Raw(msgspec.json.encode(_made(arguments, context)))
        delivery = WebhookDelivery(url=arguments.url, recipient=arguments.user_id, event=EVENT, body=body)
        return post.run(delivery, context)

    return JobType(name=job_work.STATEMENT_POST.name, arguments=PostStatement, run=deliver)


def _made(arguments: MailStatement | PostStatement, context: JobContext) -> Statement:
    """Raises `MalformedMessage`."""
    wanted = MakeStatement(user_id=arguments.user_id, day=arguments.day, orders=arguments.orders)
    return statement(wanted, context)


def text_of(made: Statement) -> str:
    """The statement for a person: a line for each account and symbol."""
    lines = [f"User {made.user_id}, {made.day}", ""]
    if not made.orders:
        return "\n".join([*lines, "No orders on this day.", ""])
    lines.append(f"Orders: {made.orders}, of which not final yet: {made.open_orders}")
    account = ""
    for line in made.lines:
        if line.account_id != account:
            account = line.account_id
            lines += ["", f"Account {account}"]
        lines.append(f"  {line.symbol}: {_trades(line)}")
    return "\n".join([*lines, "", "Quantities are lots. Fees and taxes are the broker's and not in it.", ""])


def _trades(line: StatementLine) -> str:
    parts = []
    for what, lots, average in (
        ("bought", line.bought, line.bought_average),
        ("sold", line.sold, line.sold_average),
    ):
        if lots:
            price = "at prices not all known" if average is None else f"at {average:f} on average"
            parts.append(f"{what} {lots} {price}")
    states = ", ".join(f"{count} {state}" for state, count in sorted(line.orders.items()))
    return f"{'; '.join(parts) or 'no fills'} (orders: {states})"
