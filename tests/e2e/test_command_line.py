"""A person runs the system from the command line: a user, an account, orders, and the end of all of
it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Finished
from tests.support.systems.local import RunningSystem, until

BERTH = str(Path(sys.executable).with_name("berth"))
Berth = Callable[..., Finished]


@pytest.fixture
def berth(system: RunningSystem) -> Berth:
    def run(*words: str, stdin: str = "") -> Finished:
        done = subprocess.run(
            [BERTH, *words, "--data", str(system.stack.folder.path)],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


def said(done: Finished) -> str:
    assert done.code == 0, done.err
    return done.out


def placed(done: Finished) -> dict[str, Any]:
    view: dict[str, Any] = json.loads(said(done))
    return view


@pytest.mark.timeout(180)
def test_a_user_trades_is_disabled_and_is_removed(system: RunningSystem, berth: Berth) -> None:
    user = f"cli{os.getpid()}"
    account = f"{user}-account"
    assert f"account {account} at the paper exchange" in said(
        berth("users", "add", user, "--paper")
    )
    follow = ["/usr/bin/env", "--default-signal=INT", BERTH, "orders", "watch", user, "--json"]
    follow += ["--data", str(system.stack.folder.path)]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, text=True) as watching:
        try:
            words = ("orders", "place", user, account, "buy")
            assert "is filled, 1 filled at" in said(berth(*words, "1", "2330"))
            # It rests: cancelled, and changed before.
            resting = placed(berth(*words, "3", "2330", "--price", "1", "--id", "rests", "--json"))
            again = placed(berth(*words, "3", "2330", "--price", "1", "--id", "rests", "--json"))
            assert (resting["state"], again["id"]) == ("submitted", resting["id"])
            changed = placed(berth("orders", "replace", resting["id"], "--quantity", "2", "--json"))
            assert (changed["quantity"], changed["state"]) == (2, "submitted")
            assert (
                "REPLACE_INVALID"
                in berth("orders", "replace", resting["id"], "--quantity", "9").err
            )
            assert "STILL_IN_USE" in berth("users", "remove", user).err
            assert "2330 is cancelled" in said(berth("orders", "cancel", resting["id"]))
            assert "2330 is cancelled" in said(berth("orders", "cancel", resting["id"]))
            assert berth(*words, "1", "2330", "--price", "cheap").code == 2
            assert "INVALID" in berth(*words, "1", "2330", "--price", "-1").err
            assert watching.stdout is not None
            seen: list[tuple[str, str]] = []
            while ("rests", "cancelled") not in seen:
                row = json.loads(watching.stdout.readline())
                seen.append((row["client_order_id"], row["state"]))
        finally:
            watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 130

    assert "worker" in berth("accounts", "remove", user, account).err  # it runs
    said(berth("users", "disable", user, "--reason", "left the firm"))
    refused = berth(*words, "1", "2330")
    assert (refused.code, "USER_DISABLED" in refused.err) == (1, True), refused

    def ended() -> dict[str, Any] | None:
        view: dict[str, Any] = json.loads(said(berth("worker", "show", user, "--json")))
        return None if view["live"] else view

    shown = until(ended, "the end of its worker")
    assert shown["lifecycle"]["reason"].startswith("disabled: left the firm")
    until(lambda: berth("users", "remove", user).code == 0, "the removal")
    assert "USER_NOT_FOUND" in berth("users", "show", user).err
    assert system.exchange(lambda admin: admin.sessions(account, open=True)) == []


def test_credentials_may_come_from_standard_input(system: RunningSystem, berth: Berth) -> None:
    trader = system.trader()
    body = {
        "broker": "paper",
        "api_key": "key",
        "secret_key": "secret",
        "person_id": trader.user_id,
    }
    words = ("accounts", "store", trader.user_id, trader.account_id)
    assert "version 2 is stored" in said(berth(*words, stdin=json.dumps(body)))
    assert berth(*words, stdin="canary").code == 2
    assert berth(*words).code == 2
    assert "version 3 is stored" in said(berth(*words, "--paper"))
    assert system.order(trader).json()["state"] == "filled"


def test_a_rejected_login_is_listed_with_its_reason_and_tried_again_by_a_command(
    system: RunningSystem, berth: Berth
) -> None:
    trader = system.trader(wrong_key=True)
    assert system.order(trader).json()["code"] == "LOGIN_REJECTED"
    [account] = json.loads(said(berth("accounts", "list", trader.user_id, "--json")))
    assert (account["login"], account["login_code"]) == ("rejected", "LOGIN_REJECTED")
    listed = said(berth("accounts", "list", trader.user_id))
    assert "rejected" in listed
    assert account["login_detail"] in listed
    system.exchange(
        lambda admin: admin.register(trader.account_id, "wrong", "secret", trader.user_id)
    )
    retry = ("accounts", "retry", trader.user_id, trader.account_id)
    assert "is tried again, as version 2" in said(berth(*retry))
    assert system.order(trader).json()["state"] == "filled"
    assert "connected" in said(berth("accounts", "list", trader.user_id))
    assert "ACCOUNT_NOT_FOUND" in berth(*retry[:-1], "another").err
    rows = json.loads(said(berth("audit", "--action", "account.login_retried", "--json")))
    assert rows[0]["subject"] == f"account:{trader.user_id}/{trader.account_id}"


def test_what_is_done_on_a_server_is_in_the_audit_trail(
    system: RunningSystem, berth: Berth
) -> None:
    said(berth("keys", "rotate", "temporal"))  # the only one that may be rotated again at once
    rows = json.loads(said(berth("audit", "--action", "key.", "--json")))
    assert (rows[0]["action"], rows[0]["subject"]) == ("key.rotation_requested", "secret:temporal")
    assert " at " in rows[0]["actor"]


def test_a_broker_account_is_checked_with_its_keys(
    system: RunningSystem, berth: Berth, tmp_path: Path
) -> None:
    account = f"check{os.getpid()}"
    system.exchange(lambda admin: admin.register(account, "anApiKey1234", "aSecretKey1234"))
    keys = tmp_path / "keys.json"
    keys.write_text(
        json.dumps({"api_key": "anApiKey1234", "secret_key": "aSecretKey1234"}), encoding="utf-8"
    )
    keys.chmod(0o600)
    words = (
        "broker",
        "check",
        "--broker",
        "paper",
        "--account",
        account,
        "--credentials",
        str(keys),
    )
    done = berth(
        *words, "--symbol", "2330", "--price", "1", "--json", "--fixtures", str(tmp_path / "seen")
    )
    report = json.loads(said(done))
    outcomes = {step["name"]: step["outcome"] for step in report["steps"]}
    assert (outcomes["place and cancel"], outcomes["nothing left"]) == ("passed", "passed")
    assert (report["simulation"], report["confirmed"]) == (True, [])
    orders = system.exchange(lambda admin: admin.ledger(account))
    assert {order.state for order in orders} == {"cancelled"}
    assert not any("aSecretKey" in path.read_text() for path in (tmp_path / "seen").iterdir())
    table = berth(*words, "--no-orders")
    assert "the session answers" in said(table)
    wrong = tmp_path / "wrong.json"
    wrong.write_text(
        json.dumps({"api_key": "anApiKey1234", "secret_key": "another"}), encoding="utf-8"
    )
    wrong.chmod(0o600)
    refused = berth(*words[:-1], str(wrong))
    assert (refused.code, "LOGIN_REJECTED" in refused.out) == (2, True)
    unsure = berth(*words, "--production", stdin="no\n")
    assert (unsure.code, "Nothing was sent" in unsure.err) == (1, True)
