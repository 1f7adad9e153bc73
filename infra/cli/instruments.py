"""`berth instruments …`: what brokers list, whose account lists it, and changed lots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import (
    CommandAnswer,
    Limit,
    Reason,
    api_command,
    command_group,
    list_answer,
)

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi

app = command_group("Instruments that brokers list (docs/how-to/load-instruments.md).")
source_app = command_group("The account through which a broker's instruments are loaded.")
app.add_typer(source_app, name="source")

BrokerName = Annotated[str, typer.Argument(metavar="BROKER", help="Name of the broker.")]
_PAGE_SIZE = 1000


@api_command(app, "list")
def list_instruments(
    api: OperatorApi,
    query: Annotated[
        str, typer.Argument(metavar="[QUERY]", help="Beginning of a code, or part of a name.")
    ] = "",
    broker: Annotated[str | None, typer.Option(help="Only instruments of this broker.")] = None,
    market: Annotated[str | None, typer.Option(help="Only instruments of this market.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="Only this kind: stock, fund, warrant, future, option or other."),
    ] = None,
    limit: Limit = 100,
) -> CommandAnswer:
    """Find instruments by code or name."""
    rows: list[dict[str, Any]] = []
    after = ""
    while len(rows) < limit:
        page = api.get(
            "instruments",
            query=query,
            broker=broker,
            market=market,
            kind=kind,
            after=after,
            limit=min(limit - len(rows), _PAGE_SIZE),
        )
        rows += page["instruments"]
        after = page["next_cursor"] or ""
        if not after:
            break
    columns = (
        "broker, code, name, market, kind, units: lot_units, value: lot_value, reference,"
        " down: limit_down, up: limit_up, expires: expires_on, listed on: loaded_on"
    )
    answer = list_answer(rows, columns, none="no instrument")
    warning = "there are more: raise --limit, or say more of the code" if after else ""
    return CommandAnswer(answer.value, answer.text, warning)


@api_command(app)
def show(
    api: OperatorApi,
    broker: BrokerName,
    code: Annotated[str, typer.Argument(metavar="CODE", help="Code of the instrument.")],
) -> CommandAnswer:
    """Show all that a broker says of one instrument."""
    row = api.get("instruments", broker, code)
    lines = [f"{name.replace('_', ' ')}: {_shown(value)}" for name, value in row.items()]
    return CommandAnswer(row, "\n".join(lines))


@api_command(app)
def load(
    api: OperatorApi,
    broker: BrokerName,
    accept_smaller: Annotated[
        bool,
        typer.Option(
            "--accept-smaller",
            help="Accept the list even if it has less than half as many as the one before.",
        ),
    ] = False,
    market: Annotated[
        str | None, typer.Option(help="Only through the account of this market.")
    ] = None,
) -> CommandAnswer:
    """Load a broker's instruments now, instead of ahead of its next trading day."""
    begun = api.post(
        "instruments", "sources", broker, "load", accept_smaller=accept_smaller, market=market
    ).body
    text = (
        f"the load of {broker} for {begun['trading_day']} has begun: `berth instruments source"
        " list` shows how it ends"
    )
    return CommandAnswer(begun, text)


@api_command(app)
def changes(api: OperatorApi, limit: Limit = 100) -> CommandAnswer:
    """List changed lots that wait for an operator. Orders are checked with the old ones."""
    rows = api.get("instruments", "changes", limit=limit)["changes"]
    columns = (
        "id, broker, code, units: old_lot_units, new units: new_lot_units, value: old_lot_value,"
        " new value: new_lot_value, since"
    )
    return list_answer(rows, columns, none="no changed lot")


@api_command(app)
def approve(
    api: OperatorApi,
    change: Annotated[int, typer.Argument(metavar="ID", help="Id of the change.")],
    reason: Reason,
) -> CommandAnswer:
    """Put a changed lot in force, within 30 s."""
    row = api.post("instruments", "changes", str(change), "approve", reason=reason).body
    text = (
        f"a lot of {row['code']} at {row['broker']} has {row['new_lot_units']} units now, worth"
        f" {row['new_lot_value']} at a price of 1"
    )
    return CommandAnswer(row, text)


@api_command(source_app, "list")
def list_sources(api: OperatorApi) -> CommandAnswer:
    """List the accounts through which instruments are loaded, the age of the lists, and the last
    loads."""
    rows = api.get("instruments", "sources")["sources"]
    flat = [row | {"state": _load_state(row), "error": _load_error(row)} for row in rows]
    columns = (
        "broker, market, user: user_id, account: account_id, list of: loaded_on,"
        " days behind: missed_days, last load: state, error"
    )
    answer = list_answer(flat, columns, none="no account lists instruments")
    return CommandAnswer(rows, answer.text)


@api_command(source_app, "set")
def set_source(
    api: OperatorApi,
    broker: BrokerName,
    user: Annotated[str, typer.Argument(metavar="USER", help="A user who does not trade.")],
    account: Annotated[
        str, typer.Argument(metavar="ACCOUNT", help="Id of their account at the broker.")
    ],
) -> CommandAnswer:
    """Designate the account through which a broker's instruments are loaded, one of each market."""
    row = api.put("instruments", "sources", broker, user_id=user, account_id=account).body
    text = (
        f"account {account} of {user}, market {row['market']}, lists the instruments of {broker}:"
        f" `berth instruments load {broker}` loads them now"
    )
    return CommandAnswer(row, text)


@api_command(source_app)
def delete(
    api: OperatorApi,
    broker: BrokerName,
    market: Annotated[
        str | None, typer.Option(help="Only through the account of this market.")
    ] = None,
) -> CommandAnswer:
    """Stop loading a broker's instruments. The list in force stays."""
    done = api.delete("instruments", "sources", broker, market=market).body
    return CommandAnswer(done, f"the instruments of {broker} are loaded no more")


def _load_state(row: dict[str, Any]) -> str:
    if not row["last_load"]:
        return ""
    return f"{row['last_load']['state']}{', prices due' if row['last_load']['prices_due'] else ''}"


def _load_error(row: dict[str, Any]) -> str:
    if row["account_removed"]:
        return "the account was removed"
    return str(row["last_load"]["error"]) if row["last_load"] else ""


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(
            f"{step['tick']} below {step['below']}" if step["below"] else f"{step['tick']} above"
            for step in value
        )
    return "" if value is None else str(value)
