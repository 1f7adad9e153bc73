"""Room that was asked for ahead is used once, by the right call, in time; else all is as without it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import hiredis
import pytest

from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Argument, Valkey
from worker_runtime.protocol.errors import RateLimited
from worker_runtime.protocol.launch import Allowance, WorkerConfig
from worker_runtime.protocol.messages import Credentials
from worker_runtime.protocol.scripts import SPEND_BUDGET, Script
from worker_runtime.trading import shared_rate_limiter
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.rate_limiter import CallKind
from worker_runtime.trading.shared_rate_limiter import GRANT_LIFETIME, SharedRateLimiter

GRANTED = [1, 0, b"count"]
REFUSED = [0, 700, b"count"]
UNKNOWN = hiredis.ReplyError("NOSCRIPT No matching script.")


class CountingValkey(Valkey):
    """Grants what it is asked, and notes the calls."""

    def __init__(self) -> None:
        super().__init__("redis://127.0.0.1:1/0")
        self.asked: list[Argument] = []

    def run(self, script: Script, key_names: Sequence[str], args: Sequence[Argument]) -> Any:
        self.asked.append(args[0])
        return GRANTED


class Full(CountingValkey):
    """Has no room."""

    def run(self, script: Script, key_names: Sequence[str], args: Sequence[Argument]) -> Any:
        return REFUSED


class Teller:
    """A budget, and what Valkey was asked for it outside of pops."""

    def __init__(self, egress: str = "", client: CountingValkey | None = None) -> None:
        config = WorkerConfig(
            worker_id="w",
            pool="p",
            valkey_url="",
            launch_token=b"",
            orchestrator_key=b"secret",
            allowance=Allowance(egress=egress),
        )
        self.client = client or CountingValkey()
        self.budget = SharedRateLimiter(self.client, config, SharedState(), Log("CRITICAL"))

    def order(self, account: OpenedAccount, *, what: CallKind = CallKind.ORDER, cost: int = 1) -> int:
        """How often Valkey was asked for it."""
        before = len(self.client.asked)
        self.budget.spend(account, what, lambda: 1.0, cost=cost)
        return len(self.client.asked) - before


def account(name: str = "a1", version: int = 1) -> OpenedAccount:
    credentials = Credentials(api_key="k", secret_key="s")
    return OpenedAccount(ConnectionKey("paper", "stock", True, name), version, credentials)


ONE = account()


def wait_until_void(since: float) -> None:
    while time.monotonic() - since < GRANT_LIFETIME:
        time.sleep(0.01)


def test_an_order_uses_the_room_that_was_granted_ahead_and_asks_for_none() -> None:
    teller = Teller()
    [question] = teller.budget.ask_ahead([ONE])
    assert question[:2] == ("EVALSHA", SPEND_BUDGET.sha)
    teller.budget.answered_ahead([GRANTED])
    assert not teller.budget.granted
    assert teller.order(ONE) == 0
    assert teller.budget.granted


def test_room_is_used_once() -> None:
    teller = Teller()
    teller.budget.ask_ahead([ONE])
    teller.budget.answered_ahead([GRANTED])
    assert [teller.order(ONE), teller.order(ONE)] == [0, 1]


def test_a_grant_is_as_old_as_its_question() -> None:
    teller = Teller()
    teller.budget.ask_ahead([ONE])
    asked = time.monotonic()
    while time.monotonic() - asked < GRANT_LIFETIME / 2:
        time.sleep(0.01)
    teller.budget.answered_ahead([GRANTED])
    teller.order(ONE)
    wait_until_void(asked)
    assert len(teller.client.asked) == 1 or not teller.budget.granted


def test_a_grant_whose_reply_took_too_long_is_void() -> None:
    class Slow(CountingValkey):
        def run(self, script: Script, key_names: Sequence[str], args: Sequence[Argument]) -> Any:
            wait_until_void(time.monotonic())
            return GRANTED

    teller = Teller(client=Slow())
    teller.order(ONE)
    assert not teller.budget.granted


def test_room_that_is_too_old_is_asked_for_anew() -> None:
    teller = Teller()
    teller.budget.ask_ahead([ONE])
    teller.budget.answered_ahead([GRANTED])
    wait_until_void(time.monotonic())
    assert teller.order(ONE) == 1
    assert teller.budget.ask_ahead([ONE])  # there was an order all the same


@pytest.mark.parametrize("reply", [REFUSED, UNKNOWN])
def test_room_that_was_not_granted_ahead_is_asked_for_as_ever(reply: Any) -> None:
    teller = Teller()
    teller.budget.ask_ahead([ONE])
    teller.budget.answered_ahead([reply])
    assert teller.order(ONE) == 1


def test_nothing_is_asked_ahead_for_a_while_after_an_order_had_to_wait() -> None:
    teller = Teller()
    teller.budget.ask_ahead([ONE])
    teller.budget.answered_ahead([REFUSED])
    teller.order(ONE)
    assert teller.budget.ask_ahead([ONE]) == []


def test_an_order_that_is_refused_its_room_lets_nothing_be_asked_ahead() -> None:
    teller = Teller(client=Full())
    with pytest.raises(RateLimited):
        teller.budget.spend(ONE, CallKind.ORDER, lambda: 0.0)
    assert teller.budget.ask_ahead([ONE]) == []


def test_a_script_that_is_unknown_ahead_is_asked_for_again_after_the_order_that_sent_it() -> None:
    teller = Teller()
    teller.budget.ask_ahead([ONE])
    teller.budget.answered_ahead([UNKNOWN])
    assert teller.budget.ask_ahead([ONE]) == []
    teller.order(ONE)
    assert len(teller.budget.ask_ahead([ONE])) == 1


def test_a_question_without_an_answer_is_asked_again_as_the_same_call() -> None:
    teller = Teller()
    first = teller.budget.ask_ahead([ONE])
    assert teller.budget.ask_ahead([ONE]) == first
    teller.budget.answered_ahead([GRANTED])
    assert teller.order(ONE) == 0


def test_a_question_that_was_too_long_without_an_answer_is_dropped() -> None:
    teller = Teller()
    teller.budget.ask_ahead([ONE])
    wait_until_void(time.monotonic())
    assert teller.budget.ask_ahead([ONE]) == []
    assert teller.order(ONE) == 1


@pytest.mark.parametrize(
    ("call", "cost", "asked"),
    [
        (CallKind.QUERY, 1, 1),
        (CallKind.QUERY_AND_CHANGE, 1, 1),
        (CallKind.LOGIN, 1, 1),
        (CallKind.ORDER, 2, 1),
    ],
)
def test_a_call_that_counts_otherwise_leaves_the_room_to_an_order(
    call: CallKind, cost: int, asked: int
) -> None:
    teller = Teller()
    teller.budget.ask_ahead([ONE])
    teller.budget.answered_ahead([GRANTED])
    assert teller.order(ONE, what=call, cost=cost) == asked
    assert teller.budget.ask_ahead([ONE]) == []  # it is at hand


def test_room_of_another_account_or_other_credentials_is_not_used() -> None:
    for other in (account("a2"), account(version=2)):
        teller = Teller()
        teller.budget.ask_ahead([ONE])
        teller.budget.answered_ahead([GRANTED])
        assert teller.order(other) == 1
        assert teller.order(ONE) == 0


def test_whoever_never_orders_pays_one_call_at_the_most() -> None:
    teller = Teller()
    calls = 0
    for _ in range(3):
        asked = teller.budget.ask_ahead([ONE])
        teller.budget.answered_ahead([GRANTED for _ in asked])
        teller.order(ONE, what=CallKind.QUERY)
        calls += len(asked)
        wait_until_void(time.monotonic())
    assert calls == 1


def test_a_person_and_an_address_are_both_asked_ahead() -> None:
    teller = Teller(egress="10.0.0.1")
    assert len(teller.budget.ask_ahead([ONE])) == 2
    teller.budget.answered_ahead([GRANTED, GRANTED])
    assert teller.order(ONE) == 0


@pytest.mark.parametrize("replies", [[GRANTED, REFUSED], [REFUSED, GRANTED], [GRANTED, UNKNOWN]])
def test_room_of_one_of_two_owners_is_none(replies: list[Any]) -> None:
    teller = Teller(egress="10.0.0.1")
    teller.budget.ask_ahead([ONE])
    teller.budget.answered_ahead(replies)
    assert teller.order(ONE) == 2


def test_room_of_one_of_two_owners_was_counted_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rate_limiter, "_SCARCE", 0.0)
    teller = Teller(egress="10.0.0.1")
    teller.budget.ask_ahead([ONE])
    teller.budget.answered_ahead([GRANTED, REFUSED])
    assert teller.budget.ask_ahead([ONE]) == []


def test_no_two_calls_share_an_id() -> None:
    teller = Teller()
    [question] = teller.budget.ask_ahead([ONE])
    teller.budget.answered_ahead([REFUSED])
    teller.order(ONE)
    teller.order(ONE)
    assert len({question[5], *teller.client.asked}) == 3
