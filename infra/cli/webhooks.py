"""`berth webhooks …` and `berth symbols …`:
where signals come in, and what names of symbols in them mean."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import (
    AccountId,
    CommandAnswer,
    Limit,
    OfUser,
    api_command,
    command_group,
    list_answer,
)

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi

webhooks_app = command_group("Webhooks: addresses that take signals, through the REST API.")
symbols_app = command_group("Names of symbols in signals (docs/how-to/receive-signals.md).")


class Unit(StrEnum):
    SHARES = "shares"
    LOTS = "lots"


class Odd(StrEnum):
    SPLIT = "split"
    REFUSE = "refuse"
    ROUND_DOWN = "round_down"


class Mode(StrEnum):
    OPEN = "open"
    DELTA = "delta"


class Rounding(StrEnum):
    SAFE = "safe"
    REFUSE = "refuse"


WebhookId = Annotated[
    str, typer.Argument(metavar="ID", help="Id of the webhook, as `list` shows it.")
]
UnitOption = Annotated[
    Unit | None, typer.Option(help="Unit of a quantity of stocks. TradingView sends shares.")
]
OddOption = Annotated[Odd | None, typer.Option(help="What to do with shares beyond full lots.")]
ModeOption = Annotated[
    Mode | None,
    typer.Option(
        help="What the quantity of an entry counts: what it opens, or all that it trades."
    ),
]
RoundingOption = Annotated[
    Rounding | None, typer.Option(help="What to do with a limit price between two ticks.")
]
LabelOption = Annotated[str | None, typer.Option(help="Your name for the webhook.")]
ExpiryOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="When it expires, such as 2026-12-31T13:30:00+08:00; without it, never.",
    ),
]


@api_command(webhooks_app, "list")
def list_webhooks(api: OperatorApi, user: OfUser, limit: Limit = 1000) -> CommandAnswer:
    """List a user's webhooks, the newest first, revoked ones too."""
    rows, has_more = api.rows("users", user, "webhooks", name="webhooks", limit=limit)
    for row in rows:
        # An API of the release before tells no unit.
        row["unit"] = row.get("unit") or row["quantity_unit"] or "unconfirmed"
    columns = (
        "id, account: account_id, unit, odd, entries: entry_mode, sources, window (s): window_s"
    )
    return list_answer(
        rows,
        f"{columns}, made (UTC): created_at, paused (UTC): paused_at, expires (UTC): expires_at, "
        "revoked (UTC): revoked_at",
        none="no webhook",
        has_more=has_more,
    )


@api_command(webhooks_app)
def create(
    api: OperatorApi,
    user: OfUser,
    account: AccountId,
    quantity_unit: UnitOption = None,
    odd: OddOption = None,
    entry_mode: ModeOption = None,
    price_rounding: RoundingOption = None,
    label: LabelOption = None,
    expires_at: ExpiryOption = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Address or network that may send signals; without it, all may."),
    ] = None,
    window: Annotated[
        int,
        typer.Option(
            min=1, max=3600, help="Seconds by which a signal's time may differ from the server's."
        ),
    ] = 60,
) -> CommandAnswer:
    """Create a webhook, and print its address and secret. They are not shown again.

    An account of stocks needs --quantity-unit.
    """
    body: dict[str, Any] = {"account_id": account, "sources": source or [], "window_s": window}
    body |= _settings(quantity_unit, odd, entry_mode, price_rounding)
    body |= _texts(label, expires_at)
    made = api.post("users", user, "webhooks", **body).body
    return CommandAnswer(
        made, f"webhook {made['id']}\npath {made['path']}\nsecret {made['secret']}"
    )


@api_command(webhooks_app)
def change(
    api: OperatorApi,
    user: OfUser,
    webhook: WebhookId,
    quantity_unit: UnitOption = None,
    odd: OddOption = None,
    entry_mode: ModeOption = None,
    price_rounding: RoundingOption = None,
    label: LabelOption = None,
    expires_at: ExpiryOption = None,
    no_expiry: Annotated[
        bool, typer.Option("--no-expiry", help="The webhook no longer expires.")
    ] = False,
) -> CommandAnswer:
    """Change what a webhook's quantities count and how
    its orders are made, for signals from now on."""
    if no_expiry and expires_at is not None:
        raise typer.BadParameter("--expires-at and --no-expiry contradict each other")
    body = _settings(quantity_unit, odd, entry_mode, price_rounding) | _texts(label, expires_at)
    if no_expiry:
        body["expires_at"] = None
    if not body:
        raise typer.BadParameter("name at least one setting to change")
    row = api.patch("users", user, "webhooks", webhook, **body).body
    shown = ", ".join(f"{name} {row[name]}" for name in body)
    return CommandAnswer(row, f"webhook {webhook}: {shown}")


@api_command(webhooks_app)
def pause(api: OperatorApi, user: OfUser, webhook: WebhookId) -> CommandAnswer:
    """Pause a webhook: its signals are refused until it is resumed."""
    row = api.post("users", user, "webhooks", webhook, "pause").body
    return CommandAnswer(row, f"webhook {webhook} is paused")


@api_command(webhooks_app)
def resume(api: OperatorApi, user: OfUser, webhook: WebhookId) -> CommandAnswer:
    """Resume a paused webhook."""
    row = api.post("users", user, "webhooks", webhook, "resume").body
    return CommandAnswer(row, f"webhook {webhook} takes signals again")


@api_command(webhooks_app)
def rotate(
    api: OperatorApi,
    user: OfUser,
    webhook: WebhookId,
    overlap: Annotated[
        float,
        typer.Option(min=0, max=2_592_000, help="Seconds for which the old secret stays valid."),
    ] = 86_400,
) -> CommandAnswer:
    """Give a webhook a new secret, and print it. It is not shown again."""
    row = api.post("users", user, "webhooks", webhook, "rotate", overlap_s=overlap).body
    return CommandAnswer(row, f"webhook {webhook}\nsecret {row['secret']}")


@api_command(webhooks_app)
def calls(
    api: OperatorApi,
    user: OfUser,
    webhook: WebhookId,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Maximum number of calls.")] = 50,
) -> CommandAnswer:
    """List the latest calls of a webhook, the newest first, and what became of each."""
    rows = api.get("users", user, "webhooks", webhook, "calls", limit=limit)["calls"]
    for row in rows:
        row["orders"] = len(row["order_ids"])
    columns = (
        "id, when (UTC): received_at, action, symbol, quantity, state, outcome, orders, "
        "ms: answered_ms"
    )
    return list_answer(rows, f"{columns}, reason", none="no call")


@api_command(webhooks_app, "test")
def try_signal(
    api: OperatorApi,
    user: OfUser,
    webhook: WebhookId,
    signal: Annotated[
        str, typer.Argument(metavar="JSON", help="The signal, such as TradingView sends it.")
    ],
    position: Annotated[
        int | None, typer.Option(help="Position to plan from; without it, Berth asks the broker.")
    ] = None,
) -> CommandAnswer:
    """Check and plan a signal as if it came now, and place nothing."""
    try:
        words = json.loads(signal)
    except ValueError as error:
        raise typer.BadParameter(f"the signal is not JSON: {error}") from None
    body: dict[str, Any] = {"signal": words}
    if position is not None:
        body["position"] = position
    view = api.post("users", user, "webhooks", webhook, "test", **body).body
    plan = view["plan"]
    lines = [
        f"{view['symbol']}: {plan['outcome']}" + (f" ({plan['note']})" if plan["note"] else "")
    ]
    if plan["before"] is not None:
        lines.append(f"position {plan['before']} -> {plan['after']} {view['unit']}")
    for order in plan["orders"]:
        kind = "close" if order["closes"] else "open"
        price = order["price"] or order["price_type"]
        lines.append(f"{kind}: {order['side']} {order['quantity']} at {price}, lot {order['lot']}")
    return CommandAnswer(view, "\n".join(lines))


@api_command(webhooks_app)
def revoke(api: OperatorApi, user: OfUser, webhook: WebhookId) -> CommandAnswer:
    """Revoke a webhook: it accepts no more signals."""
    done = api.delete("users", user, "webhooks", webhook).body
    return CommandAnswer(done, f"webhook {webhook} is revoked")


def _settings(
    unit: Unit | None, odd: Odd | None, mode: Mode | None, rounding: Rounding | None
) -> dict[str, Any]:
    given = {"quantity_unit": unit, "odd": odd, "entry_mode": mode, "price_rounding": rounding}
    return {name: value.value for name, value in given.items() if value is not None}


def _texts(label: str | None, expires_at: str | None) -> dict[str, str]:
    given = {"label": label, "expires_at": expires_at}
    return {name: text for name, text in given.items() if text is not None}


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name as signals have it, in upper or lower case.")
]


@api_command(symbols_app, "list")
def list_symbols(api: OperatorApi) -> CommandAnswer:
    """List names that operators gave to symbols."""
    rows = api.get("symbols")["symbols"]
    return list_answer(rows, "name, symbol, by: actor, when (UTC): at", none="no name")


@api_command(symbols_app, "set")
def set_symbol(
    api: OperatorApi,
    name: Name,
    symbol: Annotated[
        str, typer.Argument(metavar="SYMBOL", help="What it means, such as 2330, TXFL6 or TXF1!.")
    ],
) -> CommandAnswer:
    """Give a name a meaning, for signals that come from now on."""
    row = api.put("symbols", name, symbol=symbol).body
    return CommandAnswer(row, f"{row['name']} means {row['symbol']}")


@api_command(symbols_app)
def forget(api: OperatorApi, name: Name) -> CommandAnswer:
    """Forget a name: from now on it is resolved without the table."""
    done = api.delete("symbols", name).body
    return CommandAnswer(done, f"{name.upper()} is resolved without the table again")
