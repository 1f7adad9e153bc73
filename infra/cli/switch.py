"""`berth halt`, `reduce`, `open` and `switches`: who may trade, through the REST API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.operating import Data, Json, KeyFile, Url, as_json, with_api

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
    _put("halted", reason, everybody, user, account, data, url, key_file)


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
    _put("reducing", reason, everybody, user, account, data, url, key_file)


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
    _put("open", reason, everybody, user, account, data, url, key_file)


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
            _show(found)
        return 0

    with_api(data, url, key_file, action)


def _put(
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
        from infra.cli.worker_tables import plain

        reply = api.put("/switches", body)
        whom = "everybody" if everybody else f"{user} {account}" if account else str(user)
        typer.echo(f"{plain(whom)} is {state}")
        if not reply.done:
            typer.echo("Valkey did not answer: workers are told when it does", err=True)
        return 0

    with_api(data, url, key_file, action)


def _show(found: dict[str, Any]) -> None:
    from rich.text import Text

    from infra.cli.worker_tables import clock, console, empty_table, plain

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
