"""`berth halt`, `reduce`, `open` and `switches`: who may trade. `berth orders …`: what needs a person."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from infra.cli.options import CommandAnswer, api_command

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi


User = Annotated[str | None, typer.Option("--user", metavar="USER", help="One user.")]


def install(root: typer.Typer) -> None:
    """Adds the four commands of the trading switches to `berth` itself."""
    _add_switch(root, "halt", "halted", "Take no new orders, nor those already queued. Cancels still pass.")
    _add_switch(
        root, "reduce", "reducing", "Take only orders that make a position smaller. Cancels still pass."
    )
    _add_switch(root, "open", "open", "Take orders again, unless another switch forbids it.")
    api_command(root)(switches)


def _add_switch(root: typer.Typer, name: str, state: str, help: str) -> None:
    def command(
        api: OperatorApi,
        reason: Annotated[str, typer.Option(help="Why; recorded in the audit trail.")],
        everybody: Annotated[bool, typer.Option("--all", help="Everybody.")] = False,
        user: User = None,
        account: Annotated[
            str | None, typer.Option(metavar="ACCOUNT", help="Only this account; needs --user.")
        ] = None,
    ) -> CommandAnswer:
        return _put_switch(api, state, reason, user, account)

    command.__doc__ = help
    api_command(root, name, check=_check_target, json=False)(command)


def switches(
    api: OperatorApi,
    user: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="Only what applies to this user.")
    ] = None,
) -> CommandAnswer:
    """Show every switch, who set it and why; with --user, what applies to that user."""
    found = api.get("/switches", user_id=user)
    return CommandAnswer(found, lambda: _show_switches(found))


def _check_target(reason: str, everybody: bool, user: str | None, account: str | None) -> None:
    if everybody == (user is not None):
        raise typer.BadParameter("say --all or --user USER, one of them")
    if account is not None and user is None:
        raise typer.BadParameter("--account needs --user")


def _put_switch(
    api: OperatorApi, state: str, reason: str, user: str | None, account: str | None
) -> CommandAnswer:
    from infra.cli.tables import plain

    scope = "all" if user is None else "account" if account else "user"
    body = {"state": state, "reason": reason, "scope": scope}
    if user is not None:
        body["user_id"] = user
    if account is not None:
        body["account_id"] = account
    reply = api.put("/switches", body)
    whom = "everybody" if user is None else f"{user} {account}" if account else user
    warning = "" if reply.done else "Valkey did not answer: the workers learn of it when it does"
    return CommandAnswer(reply.body, f"{plain(whom)} is {state}", warning)


def _show_switches(found: dict[str, Any]) -> None:
    from rich.text import Text

    from infra.cli.tables import clock, console, plain, table

    def cells(one: dict[str, Any]) -> tuple[object, ...]:
        whom = " ".join(plain(one[name]) for name in ("user_id", "account_id") if one[name]) or "everybody"
        state = Text(plain(one["state"]), style=colours.get(one["state"], ""))
        holder = "the user" if one["held_by"] == "user" else one["actor"]
        return whom, state, holder, clock(one["at"]), one["reason"]

    out = console()
    colours = {"halted": "red", "reducing": "yellow", "open": "green"}
    out.print(table(out, ("for", "state", "set by", "at (UTC)", "reason"), map(cells, found["switches"])))
    if effective := found.get("effective"):
        states = {"all accounts": effective["all_accounts"], **effective["accounts"]}
        out.print("in effect:", ", ".join(plain(f"{name} {state}") for name, state in states.items()))


app = typer.Typer(
    help="What needs a person, through the REST API. Exit codes: 0 done, 1 refused, 2 usage.",
    no_args_is_help=True,
)

#: Most rows that one request may ask for.
_PAGE = 500

OrderId = Annotated[str, typer.Argument(metavar="ORDER", help="Id of the order.")]


class OrderEnd(StrEnum):
    FILLED = "filled"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    EXPIRED = "expired"


@api_command(app)
def attention(
    api: OperatorApi, limit: Annotated[int, typer.Option(min=1, help="Most rows.")] = 100
) -> CommandAnswer:
    """Orders whose outcome only a person can find out, the longest waiting first."""
    rows, more = api.rows("/attention", "orders", limit=limit, page=_PAGE)
    return CommandAnswer(rows, lambda: _show_orders(rows, more=more))


@api_command(app)
def recheck(api: OperatorApi, order: OrderId) -> CommandAnswer:
    """Check an order with the broker again, at once."""
    reply = api.post(_order_path(order, "recheck"))
    return CommandAnswer(
        reply.body, f"order {order} is checked again; it stays on the list until it is settled"
    )


@api_command(app)
def resolve(
    api: OperatorApi,
    order: OrderId,
    state: Annotated[OrderEnd, typer.Option(help="How it ended.")],
    reason: Annotated[str, typer.Option(help="How it is known; recorded in the audit trail.")],
    filled: Annotated[int, typer.Option(min=0, metavar="LOTS", help="Lots that were filled.")] = 0,
    price: Annotated[str | None, typer.Option(help="Average price of the filled lots.")] = None,
) -> CommandAnswer:
    """Record how an order ended, after a check with the broker. The order is final then."""
    end: dict[str, Any] = {"state": state.value, "filled_quantity": filled, "average_price": price}
    reply = api.post(_order_path(order, "resolve"), reason=reason, **end)
    return CommandAnswer(reply.body, f"order {order} is {state.value}")


@api_command(app)
def differences(
    api: OperatorApi, limit: Annotated[int, typer.Option(min=1, help="Most rows.")] = 100
) -> CommandAnswer:
    """Where our books and the broker's differ, the oldest first; `blocks`: the account takes no orders."""
    rows: list[dict[str, Any]] = []
    more = True
    while more and len(rows) < limit:
        wanted = min(limit - len(rows), _PAGE)
        found = api.get("/reconciliations", limit=wanted, after=rows[-1]["id"] if rows else 0)
        rows += found["reconciliations"]
        more = len(found["reconciliations"]) == wanted
    return CommandAnswer(rows, lambda: _show_differences(rows, more=more))


@api_command(app)
def close(
    api: OperatorApi,
    number: Annotated[int, typer.Argument(min=1, metavar="NUMBER", help="Of the difference.")],
    reason: Annotated[str, typer.Option(help="What it was; recorded in the audit trail.")],
) -> CommandAnswer:
    """Close a difference after a check with the broker: it is not reported again."""
    reply = api.post(f"/reconciliations/{number}/resolve", reason=reason)
    return CommandAnswer(reply.body, f"difference {number} is closed")


def _order_path(order: str, what: str) -> str:
    return f"/orders/{quote(order, safe='')}/{what}"


def _show_orders(rows: list[dict[str, Any]], *, more: bool) -> None:
    from infra.cli.tables import clock, console, show_table

    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        what = f"{row['side']} {row['quantity']} {row['symbol']}, {row['filled_quantity']} filled"
        names = (row["id"], row["user_id"], row["account_id"])
        return *names, what, row["known_state"], clock(row["attention_at"]), row["attention"]

    columns = ("order", "user", "account", "what", "known", "since (UTC)", "why")
    advice = "there are more: raise --limit" if more else ""
    show_table(console(), columns, map(cells, rows), none="no order waits for a person", more=advice)


def _show_differences(rows: list[dict[str, Any]], *, more: bool) -> None:
    from infra.cli.tables import clock, console, show_table

    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        what = json.dumps(row["differences"], ensure_ascii=False)
        blocks = "yes" if row["blocks"] else "no"
        return row["id"], row["user_id"], row["account_id"], clock(row["at"]), blocks, what

    columns = ("number", "user", "account", "since (UTC)", "blocks", "what")
    advice = "there may be more: raise --limit" if more else ""
    show_table(console(), columns, map(cells, rows), none="no difference waits for a person", more=advice)
