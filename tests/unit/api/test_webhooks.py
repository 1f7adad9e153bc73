"""Alerts before anything is asked of a server: where they come from, and what they say."""

from __future__ import annotations

from datetime import UTC, datetime
from ipaddress import ip_network
from uuid import UUID

import pytest
from pydantic import ValidationError

from api.http.errors import InvalidRequest
from api.http.limits import source_of
from api.http.problems import redacted_path
from api.orders.schemas import OrderRequest
from api.positions.closer import PositionClose
from api.positions.schemas import IntentRequest
from api.webhooks.schemas import Signal, plan_of
from infra.database.trading.models import Webhook
from worker_runtime.protocol.messages import TimeInForce

WEBHOOK = Webhook(id=UUID(int=1), account_id="main", user_id="alice")
PROXIES = [ip_network("10.0.0.0/8"), ip_network("::1/128")]


@pytest.mark.parametrize(
    ("peer", "forwarded", "expected"),
    [
        ("203.0.113.9", [], "203.0.113.9"),
        ("203.0.113.9", ["52.89.214.238"], "203.0.113.9"),  # no proxy of ours wrote that
        ("10.0.0.1", ["52.89.214.238"], "52.89.214.238"),
        ("10.0.0.1", ["52.89.214.238, 203.0.113.9"], "203.0.113.9"),  # the first one was invented
        ("10.0.0.1", ["52.89.214.238", "10.0.0.2"], "52.89.214.238"),
        ("::ffff:10.0.0.1", ["52.89.214.238"], "52.89.214.238"),
        ("10.0.0.1", ["nonsense"], "nonsense"),
        ("10.0.0.1", [], "10.0.0.1"),
    ],
)
def test_a_forwarded_address_counts_as_far_as_our_proxies_wrote_it(
    peer: str, forwarded: list[str], expected: str
) -> None:
    assert source_of(peer, forwarded, PROXIES) == expected


def test_nobody_is_believed_without_proxies_of_ours() -> None:
    assert source_of("10.0.0.1", ["52.89.214.238"], []) == "10.0.0.1"


def signal(**changes: object) -> Signal:
    said = {"secret": "s", "time": "2026-11-21T01:00:00Z", "action": "buy", "symbol": "2330", "quantity": 1}
    return Signal.model_validate(said | changes)


def order_of(signal: Signal) -> OrderRequest:
    found = plan_of(signal, WEBHOOK).what
    assert isinstance(found, OrderRequest)
    return found


@pytest.mark.parametrize("quantity", [1, 1.0, "1", "1.0", "1."])
def test_the_same_signal_is_one_order_however_its_numbers_are_written(quantity: object) -> None:
    assert plan_of(signal(quantity=quantity), WEBHOOK) == plan_of(signal(), WEBHOOK)
    elsewhere = "2026-11-21T09:00:00+08:00"
    assert datetime.fromisoformat(elsewhere).astimezone(UTC) == signal().time
    assert signal(time=elsewhere).time == signal().time
    assert plan_of(signal(time=elsewhere), WEBHOOK) == plan_of(signal(), WEBHOOK)


@pytest.mark.parametrize(
    "quantity", [0, -1, "-1", 1.5, "1.5", "1e3", "", "one", True, 10_001, "9" * 400, None]
)
def test_lots_are_whole(quantity: object) -> None:
    with pytest.raises(ValidationError):
        signal(quantity=quantity)


@pytest.mark.parametrize(
    "changes",
    [
        *({"time": "2026-11-21T01:00:01Z"}, {"id": "2"}, {"action": "sell"}, {"symbol": "2317"}),
        *({"quantity": 2}, {"reduce_only": True}, {"action": "close"}, {"action": "long_entry"}),
    ],
)
def test_another_signal_is_another_order(changes: dict[str, object]) -> None:
    other, first = plan_of(signal(**changes), WEBHOOK), plan_of(signal(), WEBHOOK)
    assert other.digest != first.digest
    assert set(other.ids).isdisjoint(first.ids)


def test_the_oldest_time_of_all_is_read() -> None:
    wish = plan_of(signal(time="0001-01-01T00:00:00+08:00"), WEBHOOK)
    assert wish.client_order_id.startswith("webhook-")


def test_a_signal_of_an_earlier_release_is_the_same_order_today() -> None:
    assert order_of(signal()).client_order_id == "webhook-a14bccb56d0a592042292cde1eb3bd6874373d6b5388c77a"


def test_a_close_takes_either_side_and_a_reducing_order_only_the_other_one() -> None:
    close = plan_of(signal(action="close", quantity=None), WEBHOOK)
    reducing = plan_of(signal(action="sell", reduce_only=True, price_type="LMT", price=10), WEBHOOK)
    assert isinstance(close.what, PositionClose)
    assert isinstance(reducing.what, PositionClose)
    assert (close.what.long, close.what.quantity) == (None, None)
    assert (reducing.what.long, reducing.what.quantity) == (True, 1)
    assert reducing.what.pricing.lasts is TimeInForce.ROD


def test_an_intent_has_ids_for_its_orders() -> None:
    wish = plan_of(signal(action="short_entry", quantity=3), WEBHOOK)
    assert isinstance(wish.what, IntentRequest)
    assert (wish.what.intent, wish.what.quantity) == ("short_entry", 3)
    closing, *parts, opening = wish.ids
    assert (closing, opening) == (f"{wish.client_order_id}.close", f"{wish.client_order_id}.open")
    assert (parts[0], parts[-1], len(parts)) == (f"{closing}#2", f"{closing}#21", 20)
    assert len(parts[-1]) <= 64
    assert plan_of(signal(action="long_exit", quantity=None), WEBHOOK).what.quantity is None


@pytest.mark.parametrize(
    "changes",
    [
        *({"action": "buy", "quantity": None}, {"action": "long_entry", "quantity": None}),
        *({"action": "long_entry", "reduce_only": True}, {"reduce_only": "yes"}),
    ],
)
def test_what_opens_says_how_much(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        signal(**changes)


def test_a_new_secret_makes_no_new_signal_of_an_old_one() -> None:
    assert plan_of(signal(secret="another"), WEBHOOK) == plan_of(signal(), WEBHOOK)


def test_market_orders_do_not_rest_and_limit_orders_do() -> None:
    assert order_of(signal()).time_in_force is TimeInForce.IOC
    assert order_of(signal(price_type="LMT", price="100")).time_in_force is TimeInForce.ROD
    for action in ("buy", "close", "long_entry"):
        with pytest.raises(InvalidRequest):
            plan_of(signal(price_type="LMT", action=action), WEBHOOK)


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValidationError):
        signal(time="2026-11-21T01:00:00")


def test_a_webhooks_token_is_in_no_log_and_no_problem() -> None:
    assert redacted_path("/v1/webhooks/canary/orders") == "/v1/webhooks/…"
    assert redacted_path("/v1/users/u/webhooks") == "/v1/users/u/webhooks"
    assert "secret" not in repr(signal(secret="canary"))
