"""When the session takes the next ring for an order, and of which account."""

from __future__ import annotations

import time

from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.protocol.messages import Credentials
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.guess import OrderGuess


def account(name: str, version: int = 1) -> OpenedAccount:
    credentials = Credentials(api_key="k", secret_key="s")
    return OpenedAccount(ConnectionKey("paper", "stock", True, name), version, credentials)


ONE, OTHER = account("a1"), account("a2")


def test_the_first_order_is_for_the_only_account() -> None:
    assert OrderGuess().among([ONE]) == ONE


def test_there_is_no_guess_among_several_accounts_or_none() -> None:
    assert OrderGuess().among([ONE, OTHER]) is None
    assert OrderGuess().among([]) is None


def test_the_next_order_is_for_the_account_of_the_last_one() -> None:
    guess = OrderGuess()
    guess.ordered(OTHER)
    assert guess.among([ONE, OTHER]) == OTHER


def test_an_account_that_cannot_trade_is_no_guess() -> None:
    guess = OrderGuess()
    guess.ordered(OTHER)
    assert guess.among([ONE, account("a3")]) is None
    assert guess.among([ONE, account("a2", version=2)]) is None


def test_no_guess_follows_a_wrong_one_until_there_was_an_order() -> None:
    guess = OrderGuess()
    guess.wrong()
    assert guess.among([ONE]) is None
    guess.ordered(ONE)
    assert guess.among([ONE]) == ONE


def test_a_client_that_asks_for_a_list_after_each_order_has_its_orders_guessed() -> None:
    guess = OrderGuess()
    for _ in range(5):
        assert guess.among([ONE]) == ONE
        guess.ordered(ONE)
        assert guess.among([ONE]) == ONE
        guess.wrong()


def test_wrong_guesses_are_never_more_than_orders_and_one() -> None:
    guess, orders, wrong = OrderGuess(), 0, 0
    for ring in range(40):
        if ring % 5 == 0:
            guess.ordered(ONE)
            orders += 1
        elif guess.among([ONE]) is not None:
            guess.wrong()
            wrong += 1
    assert 0 < wrong <= orders + 1


def test_there_is_no_guess_while_room_is_scarce() -> None:
    guess = OrderGuess()
    guess.scarce(0.05)
    until = time.monotonic() + 0.05
    guess.ordered(ONE)
    while guess.among([ONE]) is None:
        time.sleep(0.001)
    assert time.monotonic() >= until - 0.001
