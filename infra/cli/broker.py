"""`berth broker check`: what only a person with keys can find out about a broker account."""

from __future__ import annotations

import asyncio
import getpass
import json as json_text
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from infra.cli.options import CommandAnswer, command_group, settings_command
from infra.cli.tables import console, plain, row_table
from worker_runtime.protocol.broker_check import CheckOutcome, CheckRequest, CheckStep, SeenMeaning
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import Credentials
from worker_runtime.protocol.order_terms import OrderLot

if TYPE_CHECKING:
    from infra.settings import Settings

app = command_group("Broker accounts, checked with their own keys (docs/reference/brokers.md).")

#: Exit codes, besides 0: a step failed; the login did, so nothing is known; an order may still
#: work.
FAILED, UNDECIDED, LEFT_WORKING = 1, 2, 3


class CheckRefused(BerthError, code="BROKER_CHECK_REFUSED"):
    """The check did not begin."""


@settings_command(app, "list", data=False)
def list_brokers(
    settings: Settings,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> CommandAnswer:
    """List the installed brokers: their markets, their credentials, whether they trade for real."""
    rows: list[dict[str, Any]] = []
    for plugin in installed_brokers().values():
        record = plugin.record
        rows.append(
            {
                "broker": record.name,
                "record": record.version,
                "from": f"{plugin.distribution} {plugin.release}".strip() or "Berth",
                "markets": [
                    f"{name} ({market.currency})" for name, market in record.markets.items()
                ],
                "credentials": record.needed_credentials(simulation=not record.trades_live),
                "live": record.trades_live,
            }
        )

    def draw() -> None:
        out = console()
        shown = [{name: value for name, value in row.items()} for row in rows]
        for row in shown:
            row |= {name: ", ".join(row[name]) for name in ("markets", "credentials")}
        out.print(row_table(out, shown, "broker, record, from, markets, credentials, live"))

    return CommandAnswer({"brokers": rows}, draw)


@settings_command(app)
def check(
    settings: Settings,
    credentials: Annotated[
        Path,
        typer.Option(
            help="JSON file, mode 0600: api_key, secret_key; for production person_id, "
            "ca_file, ca_password."
        ),
    ],
    account: Annotated[str, typer.Option(help="The broker's id of the account.")],
    broker: Annotated[
        str | None,
        typer.Option(
            help="An installed broker: `berth broker list`.",
            show_default="the first one that trades for real",
        ),
    ] = None,
    broker_type: Annotated[
        str | None,
        typer.Option(
            help="The market of the account, as the broker's record names it.",
            show_default="the record's first one",
        ),
    ] = None,
    symbol: Annotated[
        str | None,
        typer.Option(
            help="What the orders are for: cheap, and traded every day.",
            show_default="the record's",
        ),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            help="Far below the market.", show_default="limit down, if the broker shows it"
        ),
    ] = None,
    lot: Annotated[
        list[OrderLot] | None,
        typer.Option(
            help="Kind of lot whose quantity change is tried; may be given again.",
            show_default="common",
        ),
    ] = None,
    partial: Annotated[
        str | None,
        typer.Option(
            metavar="LOTS@PRICE",
            help="Also buy more than is offered at this price, and cancel the rest once some "
            "is filled.",
        ),
    ] = None,
    orders: Annotated[
        bool, typer.Option("--orders/--no-orders", help="Place orders and cancel them.")
    ] = True,
    production: Annotated[
        bool, typer.Option("--production", help="Real orders. Asks for the account's id.")
    ] = False,
    patience: Annotated[
        float, typer.Option(min=1, max=120, help="Seconds for each confirmation.")
    ] = 15.0,
    fixtures: Annotated[
        Path | None,
        typer.Option(help="Folder for what the broker showed, without ids and credentials."),
    ] = None,
    store: Annotated[
        bool,
        typer.Option("--store/--no-store", help="Store what quantity changes were seen to mean."),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> CommandAnswer:
    """Check an account with its keys: login, rights, certificate, contract; then orders of up to 3
    lots.

    In simulation unless --production is given. Exit code 0: no step failed, perhaps with warnings;
    1: a step failed, or what was seen could not be stored; 2: the login failed; 3: an order may
    still work, cancel it by hand.
    """
    broker, broker_type, symbol = what_to_check(broker, broker_type, symbol)
    if production:
        bought = "" if partial is None else f", and one of {partial} that is to be filled in part"
        typed = typer.prompt(
            f"Real orders of up to 3 lots of {symbol} at {price or 'limit down'}{bought}. "
            "Type the account's id to continue",
            err=True,
        )
        if typed != account:
            raise CheckRefused("That is not the account's id. Nothing was sent.")
    partial_quantity, partial_price = read_partial(partial)
    try:
        limit = None if price is None else Decimal(price)
    except InvalidOperation:
        raise CheckRefused(f"{price} is not a price") from None
    request = CheckRequest(
        broker=broker,
        broker_type=broker_type,
        simulation=not production,
        account=account,
        credentials=read_credentials(credentials),
        symbol=symbol,
        price=limit,
        lots=tuple(lot or [OrderLot.COMMON]),
        partial_quantity=partial_quantity,
        partial_price=partial_price,
        orders=orders,
        patience_s=patience,
        paper_exchange=settings.exchange_address,
        options=settings.broker_options.get(broker, {}),
    )
    shows_progress = sys.stderr.isatty()
    steps = run_check(request, show_progress if shows_progress else None)
    meanings = seen_meanings(steps)
    stored, failures = keep_results(
        settings.database_url, request, steps, fixtures=fixtures, store=store
    )
    rows = [msgspec.to_builtins(step) for step in steps]
    confirmed = [msgspec.to_builtins(meaning) for meaning in meanings]

    def draw() -> None:
        out = console()
        out.print(row_table(out, rows, "step: name, outcome, seconds, detail"))
        for meaning in meanings:
            kind = "futures" if meaning.futures else f"lot {meaning.lot.value}"
            out.print(
                f"{kind}: a changed quantity means "
                f"{meaning.meaning.value}{'; stored' if stored else ''}"
            )

    report = {
        "simulation": request.simulation,
        "steps": rows,
        "confirmed": confirmed,
        "stored": stored,
    }
    exit_code = exit_code_of(steps) or (FAILED if failures else 0)
    return CommandAnswer(report, draw, warning="\n".join(failures), exit_code=exit_code)


def what_to_check(
    broker: str | None, broker_type: str | None, symbol: str | None
) -> tuple[str, str, str]:
    """Returns broker, market and symbol, from the records where they are not given. Raises
    `CheckRefused`."""
    brokers = installed_brokers()
    if broker is None:
        broker = next((name for name, known in brokers.items() if known.record.trades_live), None)
    plugin = brokers.get(broker or "")
    if broker is None or plugin is None:
        raise CheckRefused(f"There is no broker {broker or 'that trades for real'} here.")
    markets = plugin.record.markets
    broker_type = broker_type or next(iter(markets))
    if broker_type not in markets:
        raise CheckRefused(
            f"{plugin.record.title} has no market {broker_type}; it has {', '.join(markets)}."
        )
    symbol = symbol or markets[broker_type].check_symbol
    if not symbol:
        raise CheckRefused(f"Say with --symbol what is to be ordered in {broker_type}.")
    return broker, broker_type, symbol


def show_progress(step: CheckStep) -> None:
    typer.echo(f"{step.outcome.value:8} {step.name} ({step.seconds} s)", err=True)


def read_partial(partial: str | None) -> tuple[int, Decimal | None]:
    """Returns quantity and price of `LOTS@PRICE`; 0 and None without one. Raises `CheckRefused`."""
    if partial is None:
        return 0, None
    lots, _, price = partial.partition("@")
    try:
        quantity, at = int(lots), Decimal(price)
    except (ValueError, InvalidOperation):
        raise CheckRefused(f"{partial} is not LOTS@PRICE, such as 3@15.05") from None
    if quantity < 2 or not at.is_finite() or at <= 0:
        raise CheckRefused("A partial fill takes at least 2 lots and a price above zero")
    return quantity, at


def exit_code_of(steps: Sequence[CheckStep]) -> int:
    failed = {step.name for step in steps if step.outcome is CheckOutcome.FAILED}
    if "nothing left" in failed or any(step.evidence.get("left_working") for step in steps):
        return LEFT_WORKING
    if "login" in failed or not any(step.name == "login" for step in steps):
        return UNDECIDED
    return FAILED if failed else 0


def read_credentials(path: Path) -> Credentials:
    """Reads the file of keys. Raises `CheckRefused` if others can read it, or if it has no keys."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise CheckRefused(f"Others can read {path}. Run: chmod 600 {path}")
        fields = json_text.loads(path.read_text(encoding="utf-8"))
        ca_file = fields.pop("ca_file", None)
        certificate = b"" if ca_file is None else Path(path.parent, ca_file).read_bytes()
        return Credentials(**fields, ca_certificate=certificate)
    except (OSError, ValueError, TypeError, AttributeError):
        # Without the cause: its text may quote what is in the file.
        raise CheckRefused(
            f"{path} is not a readable JSON file with api_key and secret_key"
        ) from None


def run_check(
    request: CheckRequest, progress: Callable[[CheckStep], None] | None = None
) -> list[CheckStep]:
    """Makes the check in a process of its own; the broker's SDK may print, hang or crash there."""
    command = [sys.executable, "-m", "worker_runtime.brokers.check"]
    steps: list[CheckStep] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        if child.stdin is None or child.stdout is None:
            raise CheckRefused("no pipe to the checking process could be opened")
        child.stdin.write(msgspec.json.encode(request))
        child.stdin.close()
        for line in child.stdout:
            step = msgspec.json.decode(line, type=CheckStep)
            steps.append(step)
            if progress is not None:
                progress(step)
    if child.returncode != 0:
        detail = (
            f"ended with {child.returncode} after {len(steps)} steps. Check again: that looks for "
            "an order that still works, and cancels it"
        )
        # It may have placed one.
        name = "nothing left" if request.orders else "the checking process"
        steps.append(CheckStep(name=name, outcome=CheckOutcome.FAILED, detail=detail))
    return steps


def seen_meanings(steps: Sequence[CheckStep]) -> list[SeenMeaning]:
    meanings = [step.evidence["meaning"] for step in steps if "meaning" in step.evidence]
    return [msgspec.convert(meaning, SeenMeaning) for meaning in meanings]


def keep_results(
    database_url: str,
    request: CheckRequest,
    steps: Sequence[CheckStep],
    *,
    fixtures: Path | None,
    store: bool,
) -> tuple[bool, list[str]]:
    """Writes the fixtures and stores what was confirmed. Returns True if something was stored, and
    a sentence for each of the two that failed: the report, which may name an order that still
    works, is shown all the same."""
    from sqlalchemy.exc import SQLAlchemyError

    failures: list[str] = []
    if fixtures is not None:
        try:
            write_fixtures(fixtures, request, steps)
        except OSError as error:
            failures.append(f"The fixtures were not written: {error}")
    if not store or not seen_meanings(steps):
        return False, failures
    try:
        asyncio.run(store_meanings(database_url, steps, actor=f"cli:{getpass.getuser()}"))
    except (BerthError, SQLAlchemyError, OSError) as error:
        reason = str(error).partition("\n")[0]
        failures.append(f"What was confirmed is not stored. Check again: {reason}")
        return False, failures
    return True, failures


async def store_meanings(database_url: str, steps: Sequence[CheckStep], *, actor: str) -> None:
    """Stores each meaning with its evidence, and an entry in the audit trail."""
    from infra.database.engine import Database
    from infra.database.trading import quantity_changes

    async with Database(database_url, pool_size=1) as database, database.session() as session:
        for step in steps:
            for seen in seen_meanings([step]):
                evidence: dict[str, Any] = {
                    k: v for k, v in step.evidence.items() if k != "meaning"
                }
                await quantity_changes.store_confirmation(
                    session,
                    quantity_changes.SeenQuantityChange(
                        broker=seen.broker,
                        sdk_version=seen.sdk_version,
                        lot=seen.lot,
                        futures=seen.futures,
                        simulation=seen.simulation,
                        meaning=seen.meaning,
                        evidence=evidence,
                    ),
                    actor=actor,
                )


def write_fixtures(folder: Path, request: CheckRequest, steps: Sequence[CheckStep]) -> None:
    """Writes a file for each step that saw something, which our tests can read."""
    folder.mkdir(parents=True, exist_ok=True)
    mode = "simulation" if request.simulation else "production"
    for step in steps:
        if step.evidence:
            name = "".join(sign if sign.isalnum() else "_" for sign in step.name)
            content: dict[str, Any] = {
                "broker": request.broker,
                "type": request.broker_type,
                "mode": mode,
            }
            content |= {"step": step.name, "outcome": step.outcome.value, "evidence": step.evidence}
            text = json_text.dumps(content, indent=2, default=plain)
            (folder / f"{request.broker}_{mode}_{name}.json").write_text(
                f"{text}\n", encoding="utf-8"
            )
