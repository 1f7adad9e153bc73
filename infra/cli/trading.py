"""`berth halt`, `reduce`, `open` and `switches`: who may trade. `berth orders …`: orders."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from infra.cli.options import (
    END_HELP,
    START_HELP,
    AccountId,
    CommandAnswer,
    Json,
    Limit,
    OfUser,
    Reason,
    api_command,
    as_json,
    command_group,
    list_answer,
)
from infra.cli.tables import console, person, plain, row_table, state_text
from infra.client import models

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi
    from infra.client.models import OrderSnapshot


User = Annotated[str | None, typer.Option("--user", metavar="USER", help="For one user.")]


def install(root: typer.Typer) -> None:
    """Adds the four commands of the trading switches to `berth` itself."""
    _add_switch(
        root,
        "halt",
        "halted",
        "Halt trading: send no order, also none that is already queued. Cancels still pass.",
    )
    _add_switch(
        root,
        "reduce",
        "reducing",
        "Take only orders that make a position smaller. Cancels still pass.",
    )
    _add_switch(root, "open", "open", "Take orders again, unless another switch forbids it.")
    api_command(root)(switches)


def _add_switch(root: typer.Typer, name: str, state: str, help: str) -> None:
    def command(
        api: OperatorApi,
        reason: Reason,
        everybody: Annotated[bool, typer.Option("--all", help="For all users.")] = False,
        user: User = None,
        account: Annotated[
            str | None, typer.Option(metavar="ACCOUNT", help="Only this account; needs --user.")
        ] = None,
    ) -> CommandAnswer:
        scope = "all" if user is None else "account" if account else "user"
        target = {"scope": scope, "user_id": user, "account_id": account}
        reply = api.put("switches", state=state, reason=reason, **target)
        whom = "everybody" if user is None else f"{user} {account}" if account else user
        also = reply.body.get("also")
        text = (
            f"the switch of {whom} is open, but {also}"
            if also and state == "open"
            else f"{whom} is {state}"
        )
        warning = (
            "" if reply.done else "Valkey did not answer: the workers learn of it when it does"
        )
        return CommandAnswer(reply.body, plain(text), warning)

    command.__doc__ = help
    api_command(root, name, check=_check_target, json=False)(command)


def switches(
    api: OperatorApi,
    user: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="Only what applies to this user.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Only users whose ids begin with this.")
    ] = None,
    state: Annotated[str | None, typer.Option(help="Only halted, reducing or open ones.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of rows.")] = 100,
) -> CommandAnswer:
    """Show every switch, who set it and why; with --user, what applies to that user."""
    answer = api.get("switches", user_id=user, prefix=prefix, state=state, limit=limit)
    hint = "there are more: raise --limit" if answer["next_cursor"] else ""
    return CommandAnswer(answer, lambda: _show_switches(answer), hint)


def _check_target(reason: str, everybody: bool, user: str | None, account: str | None) -> None:
    if everybody == (user is not None):
        raise typer.BadParameter("give either --all or --user USER")
    if account is not None and user is None:
        raise typer.BadParameter("--account needs --user")


def _show_switches(answer: dict[str, Any]) -> None:
    def whom(row: Mapping[str, Any]) -> str:
        return " ".join(row[name] for name in ("user_id", "account_id") if row[name]) or "everybody"

    def holder(row: Mapping[str, Any]) -> str:
        return "the user" if row["held_by"] == "user" else person(row["actor"])

    out = console()
    columns = "for: whom, state, set by: holder, at (UTC): at, reason"
    cells = {"whom": whom, "holder": holder, "state": lambda row: state_text(row["state"])}
    out.print(row_table(out, answer["switches"], columns, **cells))
    if effective := answer.get("effective"):
        states = {"all accounts": effective["all_accounts"], **effective["accounts"]}
        out.print(
            "in effect:", ", ".join(plain(f"{name} {state}") for name, state in states.items())
        )


app = command_group(
    "Orders, and those that need an operator, through the REST API. Exit codes: 0 done, "
    "1 refused, 2 usage."
)

OrderId = Annotated[str, typer.Argument(metavar="ORDER", help="Id of the order.")]
OrderEnd = Literal["filled", "cancelled", "rejected", "expired"]
Price = Annotated[str | None, typer.Option(help="Limit price.")]
RequestId = Annotated[
    str | None,
    typer.Option(
        "--id",
        help="Id of the request. A repeat with the same id is not carried out again.",
        show_default="a new one",
    ),
]


@api_command(app)
def place(
    api: OperatorApi,
    user: OfUser,
    account: AccountId,
    side: Annotated[Literal["buy", "sell"], typer.Argument(metavar="SIDE", help="buy or sell.")],
    quantity: Annotated[
        int, typer.Argument(min=1, metavar="LOTS", help="Quantity, in lots (odd lots: in shares).")
    ],
    symbol: Annotated[str, typer.Argument(metavar="SYMBOL", help="Symbol, such as 2330.")],
    price: Annotated[
        str | None, typer.Option(help="Limit price; without it, a market order.")
    ] = None,
    time_in_force: Annotated[
        models.TimeInForce | None,
        typer.Option("--tif", help="How long the order stays valid (time in force)."),
    ] = None,
    lot: Annotated[
        models.OrderLot, typer.Option(help="Kind of lot. Odd lots count shares instead of lots.")
    ] = "common",
    condition: Annotated[
        models.OrderCondition, typer.Option(help="Cash or credit, for stocks.")
    ] = "cash",
    open_close: Annotated[
        models.OpenClose, typer.Option(help="Open or close a position, for futures.")
    ] = "auto",
    round_price: Annotated[
        bool,
        typer.Option(
            "--round-price",
            help="Round a price between two ticks to the next one that is no worse for you.",
        ),
    ] = False,
    range_market: Annotated[
        bool, typer.Option("--mkp", help="Place a range market order (futures).")
    ] = False,
    request_id: RequestId = None,
) -> CommandAnswer:
    """Place an order, with the key of the user or of an administrator; waits for the broker's
    answer."""
    body: dict[str, Any] = {
        "client_order_id": request_id,
        "account_id": account,
        "symbol": symbol,
        "side": side,
        "quantity": quantity,
        "price": price,
        "price_type": "MKP" if range_market else "MKT" if price is None else "LMT",
        "lot": lot,
        "condition": condition,
        "open_close": open_close,
        "price_rounding": "passive" if round_price else "refuse",
        "time_in_force": time_in_force or ("IOC" if price is None else "ROD"),
    }
    return _order_answer(api.client.place_order(user, _ticket("OrderTicket", **body)))


@api_command(app, "list")
def list_orders(
    api: OperatorApi,
    user: Annotated[
        str | None, typer.Argument(help="Id of the user; without it, all users.")
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="Only orders in this state: open, final, filled…")
    ] = None,
    since: Annotated[str | None, typer.Option("--from", metavar="TIME", help=START_HELP)] = None,
    until: Annotated[str | None, typer.Option("--to", metavar="TIME", help=END_HELP)] = None,
    limit: Limit = 50,
) -> CommandAnswer:
    """List orders of a user or of all (without --from: of the last 24 hours), the newest first."""
    path = ("users", user, "orders") if user else ("orders",)
    span = {"from": since, "to": until}
    rows, has_more = api.rows(*path, name="orders", limit=limit, state=state, **span)
    columns = (
        "at (UTC): accepted_at, order: id, user: user_id, account: account_id, what, price, state"
    )
    columns += ", filled: filled_quantity, average: average_price, why: reason"
    return list_answer(
        rows,
        columns,
        none="no such order",
        has_more=has_more,
        what=_what,
        price=lambda row: row["price"] or "market",
    )


def _what(row: Mapping[str, Any]) -> str:
    special = [row.get(name) for name in ("lot", "condition", "open_close")]
    words = [word for word in special if word not in (None, "common", "cash", "auto")]
    return " ".join([f"{row['side']} {row['quantity']} {row['symbol']}", *words])


@api_command(app)
def show(api: OperatorApi, order: OrderId) -> CommandAnswer:
    """Show an order and the steps of its life."""
    details = api.get("orders", order)

    def draw() -> None:
        out = console()
        out.print(_sentence(details), highlight=False, markup=False)
        out.print(row_table(out, details["timeline"], "step, at (UTC): at, ms: elapsed_ms, detail"))

    return CommandAnswer(details, draw)


@api_command(app)
def cancel(api: OperatorApi, order: OrderId, request_id: RequestId = None) -> CommandAnswer:
    """Cancel an order; waits for the broker's answer."""
    return _order_answer(
        api.client.cancel_order(order, _ticket("CancelTicket", request_id=request_id))
    )


@api_command(app)
def replace(
    api: OperatorApi,
    order: OrderId,
    quantity: Annotated[
        int | None, typer.Option(min=1, help="New total quantity, in lots (odd lots: in shares).")
    ] = None,
    price: Price = None,
    request_id: RequestId = None,
) -> CommandAnswer:
    """Lower the quantity of a working order, change its price, or both."""
    ticket = _ticket("ReplaceTicket", request_id=request_id, quantity=quantity, price=price)
    return _order_answer(api.client.replace_order(order, ticket))


def _ticket(kind: str, **given: Any) -> Any:
    """Makes a ticket of the client; without an id it makes one. Raises `typer.BadParameter`."""
    try:
        fields = {name: value for name, value in given.items() if value is not None}
        return msgspec.convert(fields, getattr(models, kind))
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error)) from None


@api_command(app)
def watch(api: OperatorApi, user: OfUser, json: Json = False) -> None:
    """Show a user's open orders, then every change of an order, until Ctrl-C."""
    for event in api.client.follow_orders(user):
        data = msgspec.to_builtins(event.data)
        for order in data.get("orders", [data]):
            if json:
                as_json(order, line=True)
            else:
                typer.echo(_sentence(order))
        sys.stdout.flush()


def _order_answer(snapshot: OrderSnapshot) -> CommandAnswer:
    order = msgspec.to_builtins(snapshot)
    return CommandAnswer(order, _sentence(order))


def _sentence(order: dict[str, Any]) -> str:
    summary = f"{_what(order)} is {order['state']}"
    lots = order["filled_quantity"]
    filled = f", {lots} filled at {order['average_price']}" if lots else ""
    return plain(
        f"order {order['id']}: {summary}{filled}"
        + (f": {order['reason']}" if order["reason"] else "")
    )


@api_command(app)
def attention(
    api: OperatorApi,
    limit: Limit = 100,
    unknown: Annotated[
        bool,
        typer.Option("--unknown", help="Also list orders about which Berth still asks the broker."),
    ] = False,
) -> CommandAnswer:
    """List orders whose outcome only an operator can find out, the longest waiting first, and what
    comes next."""
    rows, has_more = api.rows("attention", name="orders", limit=limit, unknown=unknown or None)
    columns = "order: id, user: user_id, account: account_id, what, known: known_state"
    return list_answer(
        rows,
        f"{columns}, since (UTC): attention_at, next: next_step, why",
        none="no order waits for a person",
        has_more=has_more,
        what=lambda row: f"{_what(row)}, {row['filled_quantity']} filled",
        why=lambda row: row["attention"] or row["reason"],
    )


@api_command(app)
def recheck(api: OperatorApi, order: OrderId) -> CommandAnswer:
    """Check an order with the broker again, at once."""
    reply = api.post("orders", order, "recheck")
    waits = "; it stays on the list until it is settled" * bool(reply.body["attention"])
    return CommandAnswer(
        reply.body, f"order {order} is checked again (`berth orders show` it){waits}"
    )


@api_command(app)
def resolve(
    api: OperatorApi,
    order: OrderId,
    state: Annotated[OrderEnd, typer.Option(help="How it ended.")],
    reason: Annotated[str, typer.Option(help="How you know it; recorded in the audit trail.")],
    filled: Annotated[
        int, typer.Option(min=0, metavar="LOTS", help="Number of lots that were filled.")
    ] = 0,
    price: Annotated[str | None, typer.Option(help="Average price of the filled lots.")] = None,
) -> CommandAnswer:
    """Record how an order ended, after a check with the broker. The order is final then."""
    end: dict[str, Any] = {"state": state, "filled_quantity": filled, "average_price": price}
    reply = api.post("orders", order, "resolve", reason=reason, **end)
    return CommandAnswer(reply.body, f"order {order} is {state}")


@api_command(app)
def differences(api: OperatorApi, limit: Limit = 100) -> CommandAnswer:
    """List where our books and the broker's differ, the oldest first; `blocks`: the account takes
    no orders."""
    rows: list[dict[str, Any]] = []
    has_more = True
    while has_more and len(rows) < limit:
        page_size = min(limit - len(rows), 500)
        page = api.get("reconciliations", limit=page_size, after=rows[-1]["id"] if rows else 0)
        rows += page["reconciliations"]
        has_more = len(page["reconciliations"]) == page_size
    return list_answer(
        rows,
        "number: id, user: user_id, account: account_id, since (UTC): at, blocks, what",
        none="no difference waits for a person",
        has_more=has_more,
        blocks=lambda row: "yes" if row["blocks"] else "no",
        what=lambda row: json_text.dumps(row["differences"], ensure_ascii=False),
    )


@api_command(app)
def close(
    api: OperatorApi,
    number: Annotated[
        int,
        typer.Argument(
            min=1, metavar="NUMBER", help="Number of the difference, as `differences` shows it."
        ),
    ],
    reason: Annotated[str, typer.Option(help="What the cause was; recorded in the audit trail.")],
) -> CommandAnswer:
    """Close a difference after a check with the broker: it is not reported again."""
    reply = api.post("reconciliations", str(number), "resolve", reason=reason)
    return CommandAnswer(reply.body, f"difference {number} is closed")
