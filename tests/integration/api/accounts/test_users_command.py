"""`berth users`, `accounts` and `webhooks` as processes, against a real API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.vault.key_file import write_key_file
from tests.support.commands import CommandForker
from tests.support.systems.api import OperatorCommand, ServedApi, operator


@pytest.fixture
async def berth(
    whole_api: ServedApi, commands: CommandForker, tmp_path: Path
) -> AsyncIterator[OperatorCommand]:
    async with operator(whole_api, commands, tmp_path) as berth:
        yield berth


async def test_a_user_is_made_shown_disabled_and_removed(
    whole_api: ServedApi, berth: OperatorCommand
) -> None:
    made = await berth("users", "add", "carol")
    assert made.out.startswith("user carol, API key berth_"), made.err
    assert "USER_EXISTS" in (await berth("users", "add", "carol")).err
    key = made.out.split()[-1]
    async with whole_api.client(key) as user:
        assert (await user.get("/users/carol")).status_code == 200
    assert "no account" in (await berth("users", "show", "carol")).out
    assert "disable it first" in (await berth("users", "remove", "carol")).err
    assert (await berth("users", "disable", "carol", "--reason", "left")).code == 0
    listed = (await berth("users", "list", "--disabled")).out.splitlines()
    assert [line.split()[0] for line in listed] == ["user", "carol"]
    assert ", disabled 20" in (await berth("users", "show", "carol")).out
    assert (await berth("users", "enable", "carol")).out == "carol is enabled\n"
    assert (await berth("users", "disable", "carol")).code == 0
    assert (await berth("users", "remove", "carol")).out == "carol is removed\n"
    assert "no such user" in (await berth("users", "list", "--prefix", "carol")).out
    refused = await berth("users", "add", "dora", "--paper")
    assert refused.code == 1
    assert "API key berth_" in refused.out  # it is shown whatever happens
    assert "leave out --url" in refused.err


async def test_credentials_come_from_a_file_or_standard_input_and_are_never_shown(
    whole_api: ServedApi, berth: OperatorCommand, tmp_path: Path
) -> None:
    user, body = (
        whole_api.user,
        {"broker": "paper", "api_key": "canary-1", "secret_key": "canary-2"},
    )
    file = tmp_path / "credentials.json"
    write_key_file(file, json.dumps(body).encode(), private=True)
    stored = await berth("accounts", "store", user, "second", str(file))
    assert (stored[0], stored[2]) == (0, "")
    assert stored[1].startswith(f"{user} second: version 1 is stored; login not tried: ")
    file.chmod(0o644)
    exposed = await berth("accounts", "store", user, "second", str(file))
    assert (exposed.code, "0600" in exposed.err) == (1, True), exposed.err
    file.chmod(0o600)
    for wrong in (
        '["canary"]',
        "{canary",
        "",
        '{"broker": "paper", "api_key": "canary-1", "sekret": 1}',
    ):
        file.write_text(wrong)
        refused = await berth("accounts", "store", user, "second", str(file))
        assert refused.code != 0, wrong
        assert "canary" not in refused.out + refused.err
    assert (await berth("accounts", "store", user, "second", str(file), "--paper")).code == 2
    listed = (await berth("accounts", "list", user)).out
    assert [line.split()[:2] for line in listed.splitlines()[1:]] == [
        ["main", "paper"],
        ["second", "paper"],
    ]
    assert (await berth("accounts", "remove", user, "second")).out == f"{user} second is removed\n"
    assert "ACCOUNT_NOT_FOUND" in (await berth("accounts", "remove", user, "second")).err


async def test_limits_are_shown_and_changed_one_by_one(
    whole_api: ServedApi, berth: OperatorCommand
) -> None:
    words = ("accounts", "limits", whole_api.user, "main")
    assert (await berth(*words)).out.count("as the settings say") == 5
    await berth(*words, "--max-quantity", "3")
    changed = json.loads((await berth(*words, "--max-notional", "5000.5", "--json")).out)
    assert (changed["max_quantity"], changed["max_notional"]) == (3, "5000.5")
    cleared = json.loads((await berth(*words, "--clear", "--max-daily-orders", "9", "--json")).out)
    assert list(cleared.values()) == [None, None, 9, None, None]
    assert "INVALID_REQUEST" in (await berth(*words, "--max-notional", "much")).err


async def test_a_webhook_is_made_listed_and_revoked(
    whole_api: ServedApi, berth: OperatorCommand
) -> None:
    user = whole_api.user
    made = await berth(
        "webhooks",
        "create",
        user,
        "main",
        "--quantity-unit",
        "shares",
        "--odd",
        "split",
        "--source",
        "10.0.0.0/8",
        "--window",
        "30",
        "--json",
    )
    hook = json.loads(made.out)
    assert (hook["sources"], hook["window_s"]) == (["10.0.0.0/8"], 30)
    listed = (await berth("webhooks", "list", user)).out.splitlines()
    row = [hook["id"], "main", "shares", "split", "open", "10.0.0.0/8", "30"]
    assert listed[1].split()[:7] == row
    assert hook["secret"] not in "".join(listed)
    changed = await berth("webhooks", "change", user, hook["id"], "--odd", "round_down")
    assert changed.out == f"webhook {hook['id']}: odd round_down\n"
    assert (await berth("webhooks", "change", user, hook["id"])).code == 2
    assert (await berth("symbols", "set", "fitx", "txf1!")).out == "FITX means TXF1!\n"
    assert "TXF1!" in (await berth("symbols", "list")).out
    assert (await berth("symbols", "forget", "FITX")).code == 0
    assert (await berth("symbols", "forget", "FITX")).code == 1
    assert (
        await berth("webhooks", "revoke", user, hook["id"])
    ).out == f"webhook {hook['id']} is revoked\n"
    assert (await berth("webhooks", "revoke", user, "../x")).code == 1


async def test_any_route_can_be_called(whole_api: ServedApi, berth: OperatorCommand) -> None:
    user = whole_api.user
    body = '{"email": "alice@example.com"}'
    put = await berth("call", "put", f"/users/{user}/statement-addresses", "--body", body)
    assert json.loads(put.out) == {"email": "alice@example.com", "webhook_url": None}
    listed = await berth("call", "GET", f"/users?prefix={user}&limit=1")
    assert json.loads(listed.out)["users"][0]["user_id"] == user
    assert json.loads((await berth("call", "GET", "/users?prefix=nobody")).out)["users"] == []
    for path in ("/users/nobody", "/v1/users/nobody"):
        assert "USER_NOT_FOUND" in (await berth("call", "GET", path)).err
    # Also what is no JSON.
    exported = (await berth("call", "GET", f"/users/{user}/orders.csv")).out
    assert (exported[:15], exported.count("\n")) == ("accepted_at,id,", 1)
    assert "\nberth_server_up{" in (await berth("call", "GET", "/metrics")).out
    # The key goes to the API only.
    for wrong in ("http://127.0.0.1:1/x", "users", ""):
        assert (await berth("call", "GET", wrong)).code == 2
    assert (await berth("call", "GET", "//127.0.0.1:1/x")).code == 1
    assert (await berth("call", "PUT", "/switches", "--body", "{")).code == 2
