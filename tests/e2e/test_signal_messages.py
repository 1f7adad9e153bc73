"""Messages of alerts as TradingView sends them, and as traders report them, on the whole system:
the answer, the exchange's ledger, and what the list of calls shows.

TradingView sends `application/json` if the message is JSON, else `text/plain`
(https://www.tradingview.com/support/solutions/43000529348/), and fills placeholders without looking
at quotes (https://www.tradingview.com/support/solutions/43000531021/).
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from typing import Any

import httpx
import pytest

from tests.support.systems.local import RunningSystem, until
from tests.support.systems.signals import TraderHook, make_hook
from worker_runtime.protocol.messages import Side

_numbers = count(1)

JSON, TEXT = "application/json", "text/plain; charset=utf-8"

#: A strategy's alert with all its placeholders, as TradingView fills them in.
STRATEGY = """{
  "secret": "%(secret)s",
  "time": "%(now)s",
  "action": "position",
  "symbol": "%(symbol)s",
  "exchange": "TWSE_DLY",
  "interval": "1D",
  "open": 921.73, "high": 930, "low": 915.5, "price": "921.73", "volume": 1.2345e7, "plot_0": NaN,
  "position_size": "%(size)s",
  "market_position": "%(side)s",
  "market_position_size": "%(absolute)s",
  "prev_market_position": "%(before)s",
  "prev_market_position_size": "0",
  "order": {"action": "buy", "contracts": "2", "price": "921.73", "comment": "Long \\u9032\\u5834"},
  "id": "%(id)s"
}"""


@pytest.fixture(scope="module")
def hook(running_system: RunningSystem) -> TraderHook:
    running_system.restore()
    return make_hook(running_system, quantity_unit="lots", entry_mode="delta")


@pytest.fixture(scope="module")
def refusing_hook(hook: TraderHook) -> TraderHook:
    """Another webhook of the same account: each takes 60 calls a minute."""
    return make_hook(hook.system, hook.trader, quantity_unit="lots")


@pytest.fixture
def symbol() -> str:
    """A symbol of this test alone."""
    return f"{2400 + next(_numbers)}"


def order_text(hook: TraderHook, symbol: str, /, **fields: str) -> str:
    """Returns an alert's message; `fields` are written as they are, quotes and all."""
    said = {
        "secret": f'"{hook.secret}"',
        "time": f'"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"',
        "action": '"buy"',
        "symbol": f'"{symbol}"',
        "quantity": '"1"',
        "id": f'"Long {next(_numbers)}"',
        **fields,
    }
    return "{" + ",\n  ".join(f'"{name}": {value}' for name, value in said.items()) + "}"


def post_text(hook: TraderHook, text: str, content_type: str) -> httpx.Response:
    """Posts a message until its outcome is known."""

    def posted() -> httpx.Response | None:
        headers = {"content-type": content_type}
        answer = hook.system.call("POST", hook.path, "", content=text.encode(), headers=headers)
        return None if answer.status_code == 202 else answer

    return until(posted, "the signal's outcome")


def net_of(hook: TraderHook, symbol: str) -> int:
    orders = [order for order in hook.system.ledger(hook.trader) if order.symbol == symbol]
    return sum(order.filled if order.side is Side.BUY else -order.filled for order in orders)


def last_call(hook: TraderHook) -> dict[str, Any]:
    path = f"/v1/users/{hook.trader.user_id}/webhooks/{hook.id}/calls"
    shown = hook.system.call("GET", path, hook.trader.api_key, params={"limit": 1})
    assert hook.secret not in shown.text
    (call,) = shown.json()["calls"]
    assert isinstance(call, dict)
    return call


def test_a_strategys_whole_alert_moves_the_position_from_flat_to_long_to_short_to_flat(
    hook: TraderHook, symbol: str
) -> None:
    sides = [("2", "long", "flat"), ("-3", "short", "long"), ("0", "flat", "short")]
    for size, side, before in sides:
        text = STRATEGY % {
            "secret": hook.secret,
            "now": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            "symbol": symbol,
            "size": size,
            "absolute": size.lstrip("-"),
            "side": side,
            "before": before,
            "id": f"Long {next(_numbers)}",
        }
        # `NaN` is no JSON, so TradingView says that it is plain text.
        answer = post_text(hook, text, TEXT)
        assert answer.status_code in (200, 201), answer.text
        assert net_of(hook, symbol) == int(size)
        call = last_call(hook)
        assert (call["outcome"], call["action"], call["quantity"]) == (
            "placed",
            "position",
            int(size),
        )


@pytest.mark.parametrize(
    ("fields", "net", "content_type"),
    [
        ({}, 1, JSON),
        ({}, 1, "application/json; charset=utf-8"),
        ({}, 1, TEXT),
        ({}, 1, "application/x-www-form-urlencoded"),
        ({"quantity": "2"}, 2, JSON),
        ({"quantity": "2.0"}, 2, JSON),
        ({"quantity": '"2.000000"'}, 2, JSON),
        ({"quantity": "1e2"}, 100, JSON),
        ({"quantity": '"\uff11\uff12"'}, 12, JSON),
        ({"action": '"sell"'}, -1, JSON),
        ({"action": '"Buy "'}, 1, JSON),
        ({"price": "NaN"}, 1, TEXT),
        ({"price": "{{close}}"}, 1, TEXT),
        ({"comment": '"stop\nloss\t1"'}, 1, TEXT),
        ({"id": '"exit\n2"'}, 1, TEXT),
        ({"id": "17"}, 1, JSON),
        ({"symbol": "{number}"}, 1, JSON),
        ({"symbol": '"TWSE_DLY:{number}"'}, 1, JSON),
    ],
)
def test_what_alerts_are_known_to_send_becomes_one_order(
    hook: TraderHook, symbol: str, fields: dict[str, str], net: int, content_type: str
) -> None:
    fields = {name: value.replace("{number}", symbol) for name, value in fields.items()}
    text = order_text(hook, symbol, **fields)
    # Some tools begin with a byte order mark, and many end with a new line.
    answer = post_text(hook, "\ufeff" * (content_type == TEXT) + text + "\r\n", content_type)
    assert (answer.status_code in (200, 201), answer.json().get("quantity")) == (True, abs(net))
    assert net_of(hook, symbol) == net
    # TradingView sends an alert again that was answered with 500 or more: it is one order.
    assert post_text(hook, text, content_type).status_code == 200
    assert net_of(hook, symbol) == net


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"quantity": "NaN"}, "quantity: it is nan: there was no value for it when the alert"),
        ({"quantity": '"NaN"'}, "quantity: it is NaN: there was no value for it when the alert"),
        ({"quantity": "0.5"}, "quantity: it is not whole: the exchange trades whole shares"),
        ({"quantity": '"1,000"'}, "quantity: it is no number; write it as 150 or 150.0"),
        ({"quantity": "-1"}, "quantity: input should be greater than 0"),
        ({"quantity": "9" * 40}, "quantity: input should be less than or equal to 10000000"),
        ({"quantity": "10001"}, "10001 lots are too many: one signal may be for 10000 at most"),
        ({"action": '"long"'}, "action: long is a position: send it as"),
        ({"action": "{{strategy.order.action}}"}, "action still has the placeholder {{strategy."),
        ({"symbol": '"\uff12\uff13"'}, "symbol: a symbol has letters A to Z, digits and"),
        ({"symbol": "0050"}, "the message is not JSON (invalid number at line 4 column"),
        ({"symbol": '"NASDAQ:AAPL"'}, "there is no exchange NASDAQ"),
        ({"time": '"2026-11-27T01:00:00Z"'}, "{{time}} is when the bar opened"),
        ({"id": '"my "long" entry"'}, "a comma is missing, or a text has a double quote in it"),
        ({"id": '"1", "action": "sell"'}, "the message has action twice, with different values"),
        ({"id": '"1",'}, "take the last comma away"),
        ({"id": '"1"}\n{"action": "buy"'}, "something is behind its object, and an alert is one"),
    ],
)
def test_what_is_wrong_with_an_alert_is_in_its_answer_and_in_the_list_and_nothing_is_placed(
    refusing_hook: TraderHook, symbol: str, fields: dict[str, str], sentence: str
) -> None:
    hook, text = refusing_hook, order_text(refusing_hook, symbol, **fields)
    answer = post_text(hook, text, TEXT)
    assert (answer.status_code, sentence in answer.json()["detail"]) == (422, True), answer.text
    assert hook.secret not in answer.text
    call = last_call(hook)
    assert (call["state"], call["outcome"]) == ("refused", answer.json()["code"])
    assert call["reason"] == answer.json()["detail"]
    assert symbol in call["body"] or "symbol" in fields
    assert net_of(hook, symbol) == 0


def test_a_message_in_typographic_quotes_is_its_owners_and_hears_of_the_quotes(
    refusing_hook: TraderHook, symbol: str
) -> None:
    text = order_text(refusing_hook, symbol).replace('"', "\u201d")
    answer = post_text(refusing_hook, text, TEXT)
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST"), answer.text
    assert 'write straight quotes (")' in answer.json()["detail"]
    assert symbol in last_call(refusing_hook)["body"]


def test_an_empty_message_hears_that_it_has_no_secret(refusing_hook: TraderHook) -> None:
    answer = post_text(refusing_hook, "", TEXT)
    assert (answer.status_code, answer.json()["code"]) == (403, "WEBHOOK_SECRET_WRONG")
    assert answer.json()["detail"] == 'the body has no secret: send "secret": "…" with it'
