"""`berth users …`, `accounts …`, `api-keys …`: who may do something, and with what."""

from __future__ import annotations

import asyncio
import base64
import secrets
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import (
    AccountId,
    CommandAnswer,
    Limit,
    OfUser,
    Reason,
    api_command,
    command_group,
    json_object,
    list_answer,
)
from infra.cli.tables import clock, plain
from infra.vault import key_file

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi
    from infra.client.client import BerthClient

users_app = command_group("Users: add, disable, remove; through the REST API.")
accounts_app = command_group("Users' broker accounts, through the REST API.")

keys_app = command_group("API keys. Most commands need an administrator's key.")

KeyId = Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as `list` shows it.")]
Paper = Annotated[
    bool,
    typer.Option(
        "--paper", help="Also make the account at the paper exchange of the local system."
    ),
]
_ACCOUNTS = (
    "account: account_id, broker, type: broker_type, simulation, version, stored (UTC): updated_at"
)
_ACCOUNTS += ", login, why: login_detail"


@api_command(users_app, "list")
def list_users(
    api: OperatorApi,
    prefix: Annotated[str | None, typer.Option(help="Only ids that begin with this.")] = None,
    disabled: Annotated[
        bool | None,
        typer.Option("--disabled/--enabled", help="Only disabled users, or only enabled ones."),
    ] = None,
    limit: Limit = 100,
) -> CommandAnswer:
    """List users, by id."""
    rows, has_more = api.rows("users", name="users", limit=limit, prefix=prefix, disabled=disabled)
    columns = "user: user_id, made (UTC): created_at, disabled (UTC): disabled_at"
    return list_answer(rows, columns, none="no such user", has_more=has_more)


@api_command(users_app)
def show(api: OperatorApi, user: OfUser) -> CommandAnswer:
    """Show a user and their accounts."""
    details = api.get("users", user)

    def draw() -> None:
        disabled = (
            f", disabled {clock(details['disabled_at'])} UTC" if details["disabled_at"] else ""
        )
        typer.echo(
            plain(f"{details['user_id']}, made {clock(details['created_at'])} UTC{disabled}")
        )
        list_answer(details["accounts"], _ACCOUNTS, none="no account").show(json=False)

    return CommandAnswer(details, draw)


@api_command(users_app)
def add(
    api: OperatorApi,
    user: Annotated[
        str | None,
        typer.Argument(metavar="[USER]", help="Id of the user; without it, Berth makes one up."),
    ] = None,
    paper: Paper = False,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What their key may do, such as read; without it, all that a user may do."
        ),
    ] = None,
) -> CommandAnswer:
    """Create a user, and print their API key. It is not shown again. With --paper they have an
    account, USER-account."""
    made = api.post("users", user_id=user, scopes=scope or None).body
    text = f"user {made['user_id']}, API key {made['api_key']}"
    if not paper:
        return CommandAnswer(made, text)
    account = f"{made['user_id']}-account"
    try:
        _store_paper_keys(api, made["user_id"], account)
    except Exception as error:  # the key is shown whatever happens: nobody sees it again
        return CommandAnswer(made, text, f"error: {error}: try `berth accounts store … --paper`", 1)
    return CommandAnswer(
        {**made, "account_id": account}, f"{text}, account {account} at the paper exchange"
    )


@api_command(users_app)
def disable(api: OperatorApi, user: OfUser, reason: Reason = "requested") -> CommandAnswer:
    """Refuse their keys, signals and all new orders for them, and end their worker.

    Open orders stay at the broker: cancel them with `berth orders cancel`.
    """
    done = api.post("users", user, "disable", reason=reason).body
    return CommandAnswer(done, f"{user} is disabled; its worker ends")


@api_command(users_app)
def enable(api: OperatorApi, user: OfUser, reason: Reason = "requested") -> CommandAnswer:
    """Undo `disable`."""
    done = api.post("users", user, "enable", reason=reason).body
    return CommandAnswer(done, f"{user} is enabled")


@api_command(users_app, "remove")
def remove_user(api: OperatorApi, user: OfUser, reason: Reason = "requested") -> CommandAnswer:
    """Remove a disabled user for good, once their worker has ended and no order is open. Orders are
    kept."""
    api.delete("users", user, reason=reason)
    return CommandAnswer({"removed": user}, f"{user} is removed")


@api_command(users_app)
def certificates(
    api: OperatorApi,
    within_days: Annotated[
        int,
        typer.Option(
            min=0,
            help="List those that expire within so many days; 0: only those that have expired.",
        ),
    ] = 30,
    limit: Limit = 100,
) -> CommandAnswer:
    """List certificates of live accounts that have expired or expire soon."""
    rows = api.get("certificates", within_days=within_days, limit=limit)["certificates"]
    return list_answer(
        rows,
        "user: user_id, account: account_id, broker, expires (UTC): expires_at, warned days ahead: "
        "warned_days",
        none=f"no certificate expires within {within_days} days",
    )


@api_command(users_app)
def persons(
    api: OperatorApi,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Also list pairs that were decided.")
    ] = False,
    limit: Limit = 100,
) -> CommandAnswer:
    """List pairs of users who log in to a broker as one person, the oldest first."""
    rows: list[dict[str, Any]] = []
    has_more = True
    while has_more and len(rows) < limit:
        page_size = min(limit - len(rows), 500)
        after = rows[-1]["id"] if rows else 0
        page = api.get("person-matches", limit=page_size, after=after, resolved=resolved)[
            "person_matches"
        ]
        rows += page
        has_more = len(page) == page_size
    return list_answer(
        rows,
        "number: id, broker, user: first_user, and: second_user, since (UTC): found_at, budget, "
        "decided by: resolved_by",
        none="no two users log in as one person",
        has_more=has_more,
        budget=lambda row: "shared" if row["shares_budget"] else "apart",
    )


PairNumber = Annotated[
    int, typer.Argument(min=1, metavar="NUMBER", help="Number of the pair, as `persons` shows it.")
]


@api_command(users_app)
def link(api: OperatorApi, number: PairNumber, reason: Reason) -> CommandAnswer:
    """Let two users share one budget at the broker. Ask both first: each can use up what the other
    has."""
    reply = api.post("person-matches", str(number), "resolve", reason=reason, share_budget=True)
    return CommandAnswer(reply.body, f"pair {number} shares a budget")


@api_command(users_app)
def keep_apart(api: OperatorApi, number: PairNumber, reason: Reason) -> CommandAnswer:
    """Let each of two users have limits of their own."""
    reply = api.post("person-matches", str(number), "resolve", reason=reason, share_budget=False)
    return CommandAnswer(reply.body, f"pair {number} is kept apart")


@api_command(accounts_app, "list")
def list_accounts(api: OperatorApi, user: OfUser) -> CommandAnswer:
    """List a user's accounts, with the version of their credentials and how their logins stand."""
    return list_answer(api.get("users", user)["accounts"], _ACCOUNTS, none="no account")


def _check_source(file: Path, paper: bool, certificate: Path | None, **others: Any) -> None:
    if paper and (str(file) != "-" or certificate is not None):
        raise typer.BadParameter("--paper makes the credentials: no FILE and no --certificate")
    for path in filter(None, (file, certificate)):
        if str(path) != "-" and (not path.exists() or path.is_dir()):
            raise typer.BadParameter(f"there is no file {path}")


@api_command(accounts_app, check=_check_source)
def store(
    api: OperatorApi,
    user: OfUser,
    account: AccountId,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="[FILE]", help="JSON with the credentials, mode 0600; -: standard input."
        ),
    ] = Path("-"),
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PKCS#12 file with the certificate, mode 0600; not needed if the JSON has it.",
        ),
    ] = None,
    paper: Paper = False,
) -> CommandAnswer:
    """Store the credentials of a broker account. They are encrypted, and never shown again.

    The JSON is the body of the REST API: broker (`berth broker list` shows them), and the
    credentials that it needs; for a real account simulation is false. A running worker is told to
    load it.
    """
    if paper:
        stored = _store_paper_keys(api, user, account)
    else:
        given = _read_credentials(file, certificate)
        stored = api.put("users", user, "accounts", account, "credentials", **given).body
    login = ": ".join(filter(None, (stored["login"].replace("_", " "), stored["login_detail"])))
    return CommandAnswer(
        stored, f"{user} {account}: version {stored['version']} is stored; login {login}"
    )


def _read_credentials(file: Path, certificate: Path | None) -> dict[str, Any]:
    """Raises `typer.BadParameter`, which shows nothing of the text, and `KeyFileExposed`."""
    text = (
        sys.stdin.buffer.read() if str(file) == "-" else key_file.read_key_file(file, private=True)
    )
    credentials = json_object(text, "the credentials")
    if certificate is not None:
        credentials["ca_certificate"] = base64.b64encode(
            key_file.read_key_file(certificate, private=True)
        ).decode()
    return credentials


def _store_paper_keys(api: OperatorApi, user: str, account: str) -> dict[str, Any]:
    from infra.local.stack import local_settings

    exchange = local_settings(api.local_data()).exchange_admin_url
    return store_paper_keys(api.client, exchange, user, account)


def store_paper_keys(client: BerthClient, exchange: str, user: str, account: str) -> dict[str, Any]:
    """Makes keys at a paper exchange and stores them, so that no clear secret is kept.

    `exchange`: URL of its admin API.
    """
    from infra.client.calls import url_path
    from infra.exchange.client import ExchangeAdmin
    from worker_runtime.protocol.installed_brokers import paper_exchange

    made = {"api_key": secrets.token_urlsafe(16), "secret_key": secrets.token_urlsafe(32)}

    async def register() -> None:
        async with ExchangeAdmin(exchange) as admin:
            await admin.register(account, **made)

    asyncio.run(register())
    path = url_path("users", user, "accounts", account, "credentials")
    stored: dict[str, Any] = client.request(
        "PUT", path, body={"broker": paper_exchange(), **made}
    ).body
    return stored


@api_command(accounts_app)
def retry(api: OperatorApi, user: OfUser, account: AccountId) -> CommandAnswer:
    """Try the login of an account again, with the credentials that the broker has rejected."""
    done = api.post("users", user, "accounts", account, "retry").body
    return CommandAnswer(done, f"{user} {account}: is tried again, as version {done['version']}")


@api_command(accounts_app)
def remove(
    api: OperatorApi, user: OfUser, account: AccountId, reason: Reason = "requested"
) -> CommandAnswer:
    """Remove an account for good, once no worker of the user runs and no order of it is open."""
    api.delete("users", user, "accounts", account, reason=reason)
    return CommandAnswer({"removed": account}, f"{user} {account} is removed")


@api_command(accounts_app)
def limits(
    api: OperatorApi,
    user: OfUser,
    account: AccountId,
    max_quantity: Annotated[
        int | None, typer.Option(min=0, help="Maximum quantity of one order, in lots.")
    ] = None,
    max_notional: Annotated[
        str | None, typer.Option(help="Maximum value of one order, in the account's currency.")
    ] = None,
    max_daily_orders: Annotated[
        int | None, typer.Option(min=0, help="Maximum number of orders per day.")
    ] = None,
    duplicate_window: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Seconds within which an identical order is refused; 0: never.",
        ),
    ] = None,
    price_band: Annotated[
        str | None,
        typer.Option(
            help="Maximum distance of a price from the reference price, as a share of it."
        ),
    ] = None,
    clear: Annotated[
        bool,
        typer.Option(
            "--clear", help="Reset the limits that are not given to those of the settings."
        ),
    ] = False,
) -> CommandAnswer:
    """Show an account's limits, or change those that are given; the others stay."""
    path = ("users", user, "accounts", account, "limits")
    given = {"max_quantity": max_quantity, "max_notional": max_notional}
    given |= {"max_daily_orders": max_daily_orders, "duplicate_window_s": duplicate_window}
    given |= {"price_band": price_band}
    changes = {name: value for name, value in given.items() if value is not None}
    limits = api.get(*path)
    if changes or clear:
        limits = api.put(*path, **{**({} if clear else limits), **changes}).body
    shown = (
        f"{name} {'as the settings say' if value is None else value}"
        for name, value in limits.items()
    )
    return CommandAnswer(limits, "\n".join(shown))


@api_command(keys_app, "list")
def list_keys(
    api: OperatorApi,
    user: Annotated[str | None, typer.Option(help="Only the keys of this user.")] = None,
    revoked: Annotated[
        bool, typer.Option("--revoked", help="Also list revoked and expired keys.")
    ] = False,
    limit: Limit = 100,
) -> CommandAnswer:
    """List API keys: role, scopes, sources, label, last use, expiry."""
    asked = {"user_id": user, "revoked": revoked or None}
    rows, has_more = api.rows("api-keys", name="api_keys", limit=limit, **asked)
    columns = (
        "id, begins with: prefix, role, user: user_id, label, scopes, from: sources, "
        "made: created_at"
    )
    columns += ", last used: last_used_at, ends: expires_at, revoked: revoked_at"
    return list_answer(
        rows,
        columns,
        none="no such key",
        has_more=has_more,
        value={"api_keys": rows},
        scopes=lambda row: (
            "all (before scopes)" if row["scopes"] is None else ", ".join(row["scopes"])
        ),
        sources=lambda row: ", ".join(row["sources"]) or "anywhere",
    )


@api_command(keys_app, "create")
def create_key(
    api: OperatorApi,
    role: Annotated[str, typer.Option(help="user, operator or admin.")],
    label: Annotated[str, typer.Option(help="What the key is for.")],
    user: Annotated[
        str | None, typer.Option(help="User that the key acts for, if the role is user.")
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What the key may do, such as read; without it, all that the role may do."
        ),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Address or network that may use the key; without it, all may."),
    ] = None,
    days: Annotated[
        float, typer.Option(min=0, max=36_500, help="Days until the key expires.")
    ] = 90.0,
    no_end: Annotated[bool, typer.Option("--no-end", help="The key does not expire.")] = False,
) -> CommandAnswer:
    """Create an API key, and print it. It is not shown again."""
    body: dict[str, Any] = {"role": role, "label": label, "user_id": user}
    body |= {"scopes": scope or None, "sources": source or []}
    body["expires_at"] = None if no_end else (datetime.now(UTC) + timedelta(days=days)).isoformat()
    made = api.client.request("POST", "/api-keys", body=body).body
    return CommandAnswer(made, made["api_key"])


@api_command(keys_app, "show")
def show_own_key(api: OperatorApi) -> CommandAnswer:
    """Show the API key that this command uses: what it may do, from where, and until when."""
    key = api.get("api-keys", "self")
    scopes = "all (before scopes)" if key["scopes"] is None else ", ".join(key["scopes"])
    lines = [
        f"{key['role']}'s key {key['id']}" + (f" of {key['user_id']}" if key["user_id"] else ""),
        f"scopes   {scopes}",
        f"sources  {', '.join(key['sources']) or 'anywhere'}",
        f"ends     {key['expires_at'] or 'when it is revoked'}",
    ]
    return CommandAnswer(key, "\n".join(lines))


@api_command(keys_app, "rotate")
def rotate_key(
    api: OperatorApi,
    key_id: KeyId,
    hours: Annotated[
        float, typer.Option(min=0, max=720, help="Hours until the old key expires.")
    ] = 24.0,
) -> CommandAnswer:
    """Create a key in place of another one, and print it once. The other one expires later."""
    made = api.post("api-keys", key_id, "rotate", overlap_hours=hours).body
    return CommandAnswer(made, made["api_key"])


@api_command(keys_app, "revoke")
def revoke_key(
    api: OperatorApi,
    key_id: KeyId,
    reason: Reason = "requested",
    webhooks: Annotated[
        bool, typer.Option("--webhooks", help="Also revoke the webhooks that the key has made.")
    ] = False,
    keys: Annotated[
        bool,
        typer.Option(
            "--keys",
            help="Also revoke the API keys that the key has made, and what these have made.",
        ),
    ] = False,
) -> CommandAnswer:
    """Revoke an API key: no API process accepts it any more, and its event streams end.

    The ID `self` is that of the key that this command uses.
    """
    gone = api.delete("api-keys", key_id, reason=reason, webhooks=webhooks, keys=keys).body
    said = f"{gone['role']}'s key {gone['prefix']}… is revoked"
    if gone["webhooks_revoked"]:
        said += f", and {gone['webhooks_revoked']} webhooks that it had made"
    if gone["webhooks_left"]:
        said += (
            f"; {gone['webhooks_left']} webhooks that it had made still take signals: give "
            "--webhooks to revoke them, too"
        )
    if made := gone["api_keys"]:
        said += f", and {len(made)} keys that it had made" if keys else ""
        said += (
            ""
            if keys
            else f"; {len(made)} keys that it had made still work: give --keys to revoke them"
        )
    for hook in gone["webhooks"]:
        state = "takes signals" if hook["revoked_at"] is None else "revoked"
        said += f"\nwebhook {hook['id']} of {hook['user_id']}: {state}"
    for key in made:
        state = "works" if key["revoked_at"] is None else "revoked"
        said += f"\nkey {key['id']} {key['label'] or ''}: {state}"
    return CommandAnswer(gone, said)
