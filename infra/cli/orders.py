"""`berth orders …`: what needs a person, through the REST API with an operator's key."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.operating import Data, Json, KeyFile, Url, as_json, with_api

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi

app = typer.Typer(
    help="What needs a person, through the REST API. Exit codes: 0 done, 1 refused, 2 usage.",
    no_args_is_help=True,
)

#: Most rows that one request may ask for.
_PAGE = 500

OrderId = Annotated[str, typer.Argument(metavar="ORDER", help="Id of the order.")]


class End(StrEnum):
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
            _show(rows, more=more)
        return 0

    with_api(data, url, key_file, action)


@app.command()
def recheck(
    order: OrderId, json: Json = False, data: Data = Path(".berth"), url: Url = None, key_file: KeyFile = None
) -> None:
    """Have an order looked at again, at once, at the broker."""

    def action(api: OperatorApi) -> int:
        reply = api.post(_path(order, "recheck"))
        if json:
            as_json(reply.body)
        else:
            typer.echo(f"order {order} is looked at again; it is on the list until it is settled")
        return 0

    with_api(data, url, key_file, action)


@app.command()
def resolve(
    order: OrderId,
    state: Annotated[End, typer.Option(help="How it ended.")],
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
        reply = api.post(_path(order, "resolve"), reason=reason, **end)
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


def _path(order: str, what: str) -> str:
    from urllib.parse import quote

    return f"/orders/{quote(order, safe='')}/{what}"


def _show(rows: list[dict[str, Any]], *, more: bool) -> None:
    from rich.text import Text

    from infra.cli.worker_tables import clock, console, empty_table, plain

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

    from infra.cli.worker_tables import clock, console, empty_table, plain

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
