"""`berth halt`, `reduce`, `open` and `switches`: who may trade, through the REST API.

`berth orders …`: what needs a person, through the REST API with an operator's key.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import Data, Json, KeyFile, Url, as_json, with_api

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi


Everybody = Annotated[bool, typer.Option("--all", help="Everybody.")]
User = Annotated[str | None, typer.Option("--user", metavar="USER", help="One user.")]
Account = Annotated[
    str | None, typer.Option("--account", metavar="ACCOUNT", help="Only this account; needs --user.")
]
Why = Annotated[str, typer.Option("--reason", help="Why; it stands in the audit trail.")]


def install(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(halt)
    app.command()(reduce)
    app.command("open")(open_)
    app.command()(switches)


def halt(
    reason: Why,
    everybody: Everybody = False,
    user: User = None,
    account: Account = None,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Take no new orders, also not those that are queued already. Cancels still pass."""
    _put_switch("halted", reason, everybody, user, account, data, url, key_file)


def reduce(
    reason: Why,
    everybody: Everybody = False,
    user: User = None,
    account: Account = None,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Take only orders that make a position smaller. Cancels still pass."""
    _put_switch("reducing", reason, everybody, user, account, data, url, key_file)


def open_(
    reason: Why,
    everybody: Everybody = False,
    user: User = None,
    account: Account = None,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Take orders again, as far as no other switch is against it."""
    _put_switch("open", reason, everybody, user, account, data, url, key_file)


def switches(
    user: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="Only what holds for him.")
    ] = None,
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Show every switch that was ever set, who set it and why; with --user, what counts for that user."""

    def action(api: OperatorApi) -> int:
        found = api.get("/switches", user_id=user)
        if json:
            as_json(found)
        else:
            _show_switches(found)
        return 0

    with_api(data, url, key_file, action)


def _put_switch(
    state: str,
    reason: str,
    everybody: bool,
    user: str | None,
    account: str | None,
    data: Path,
    url: str | None,
    key_file: Path | None,
) -> None:
    if everybody == (user is not None):
        raise typer.BadParameter("say --all or --user USER, one of them")
    if account is not None and user is None:
        raise typer.BadParameter("--account needs --user")
    body = {
        "state": state,
        "reason": reason,
        "scope": "all" if everybody else "account" if account else "user",
    }
    if user is not None:
        body["user_id"] = user
    if account is not None:
        body["account_id"] = account

    def action(api: OperatorApi) -> int:
        from infra.cli.tables import plain

        reply = api.put("/switches", body)
        whom = "everybody" if everybody else f"{user} {account}" if account else str(user)
        typer.echo(f"{plain(whom)} is {state}")
        if not reply.done:
            typer.echo("Valkey did not answer: workers are told when it does", err=True)
        return 0

    with_api(data, url, key_file, action)


def _show_switches(found: dict[str, Any]) -> None:
    from rich.text import Text

    from infra.cli.tables import clock, console, empty_table, plain

    out = console()
    rows = empty_table(out, "whom", "state", "set by", "at (UTC)", "reason")
    colours = {"halted": "red", "reducing": "yellow", "open": "green"}
    for one in found["switches"]:
        whom = " ".join(plain(one[name]) for name in ("user_id", "account_id") if one[name]) or "everybody"
        state = plain(one["state"])
        holder = "the user" if one["held_by"] == "user" else plain(one["actor"])
        shown = Text(state, style=colours.get(state, ""))
        rows.add_row(whom, shown, holder, clock(one["at"]), Text(plain(one["reason"])))
    out.print(rows)
    if effective := found.get("effective"):
        states = {"all accounts": effective["all_accounts"], **effective["accounts"]}
        out.print("what counts:", ", ".join(plain(f"{name} {state}") for name, state in states.items()))


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


@app.command()
def attention(
    limit: Annotated[int, typer.Option(min=1, help="Most rows.")] = 100,
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Orders whose outcome nobody but a person can find out, those that wait longest first."""

    def action(api: OperatorApi) -> int:
        rows, more = api.rows("/attention", "orders", limit=limit, page=_PAGE)
        if json:
            as_json(rows)
        else:
            _show_orders(rows, more=more)
        return 0

    with_api(data, url, key_file, action)


@app.command()
def recheck(
    order: OrderId, json: Json = False, data: Data = Path(".berth"), url: Url = None, key_file: KeyFile = None
) -> None:
    """Have an order looked at again, at once, at the broker."""

    def action(api: OperatorApi) -> int:
        reply = api.post(_order_path(order, "recheck"))
        if json:
            as_json(reply.body)
        else:
            typer.echo(f"order {order} is looked at again; it is on the list until it is settled")
        return 0

    with_api(data, url, key_file, action)


@app.command()
def resolve(
    order: OrderId,
    state: Annotated[OrderEnd, typer.Option(help="How it ended.")],
    reason: Annotated[str, typer.Option(help="How it is known; it stands in the audit trail.")],
    filled: Annotated[int, typer.Option(min=0, metavar="LOTS", help="Lots that were filled.")] = 0,
    price: Annotated[str | None, typer.Option(help="Average price of the filled lots.")] = None,
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Write down how an order ended, after a look at the broker. It is final then."""

    def action(api: OperatorApi) -> int:
        end: dict[str, Any] = {"state": state.value, "filled_quantity": filled, "average_price": price}
        reply = api.post(_order_path(order, "resolve"), reason=reason, **end)
        if json:
            as_json(reply.body)
        else:
            typer.echo(f"order {order} is {state.value}")
        return 0

    with_api(data, url, key_file, action)


@app.command()
def differences(
    limit: Annotated[int, typer.Option(min=1, help="Most rows.")] = 100,
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Where our books and the broker's differ, the oldest first; `blocks`: the account takes no orders."""

    def action(api: OperatorApi) -> int:
        rows: list[dict[str, Any]] = []
        more = True
        while more and len(rows) < limit:
            wanted = min(limit - len(rows), _PAGE)
            found = api.get("/reconciliations", limit=wanted, after=rows[-1]["id"] if rows else 0)
            rows += found["reconciliations"]
            more = len(found["reconciliations"]) == wanted
        if json:
            as_json(rows)
        else:
            _show_differences(rows, more=more)
        return 0

    with_api(data, url, key_file, action)


@app.command()
def close(
    number: Annotated[int, typer.Argument(min=1, metavar="NUMBER", help="Of the difference.")],
    reason: Annotated[str, typer.Option(help="What it was; it stands in the audit trail.")],
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Close a difference after a look at the broker: the same one is not told again."""

    def action(api: OperatorApi) -> int:
        reply = api.post(f"/reconciliations/{number}/resolve", reason=reason)
        if json:
            as_json(reply.body)
        else:
            typer.echo(f"difference {number} is closed")
        return 0

    with_api(data, url, key_file, action)


def _order_path(order: str, what: str) -> str:
    from urllib.parse import quote

    return f"/orders/{quote(order, safe='')}/{what}"


def _show_orders(rows: list[dict[str, Any]], *, more: bool) -> None:
    from rich.text import Text

    from infra.cli.tables import clock, console, empty_table, plain

    out = console()
    table = empty_table(out, "order", "user", "account", "what", "known", "since (UTC)", "why")
    for row in rows:
        what = f"{row['side']} {row['quantity']} {row['symbol']}, {row['filled_quantity']} filled"
        words = (row["id"], row["user_id"], row["account_id"], what, row["known_state"])
        table.add_row(
            *(Text(plain(word)) for word in words),
            clock(row["attention_at"]),
            Text(plain(row["attention"])),
        )
    if not table.row_count:
        out.print("no order waits for a person")
        return
    out.print(table)
    if more:
        out.print("there are more: raise --limit")


def _show_differences(rows: list[dict[str, Any]], *, more: bool) -> None:
    from json import dumps

    from rich.text import Text

    from infra.cli.tables import clock, console, empty_table, plain

    out = console()
    table = empty_table(out, "number", "user", "account", "since (UTC)", "blocks", "what")
    for row in rows:
        table.add_row(
            str(row["id"]),
            Text(plain(row["user_id"])),
            Text(plain(row["account_id"])),
            clock(row["at"]),
            "yes" if row["blocks"] else "no",
            Text(plain(dumps(row["differences"], ensure_ascii=False))),
        )
    if not table.row_count:
        out.print("no difference waits for a person")
        return
    out.print(table)
    if more:
        out.print("there may be more: raise --limit")
