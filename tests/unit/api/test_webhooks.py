"""Signals before a server is asked: where they come from, and what they say."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pydantic import ValidationError

from api.http.errors import InvalidRequest, OddLotRefused
from api.webhooks.meaning import ReceivedSignal, SignalMarket, interpret, stored_meaning
from api.webhooks.planning import QuantityUnit, SignalAction, plan_signal
from api.webhooks.schemas import Signal, parse_signal
from api.webhooks.service import shown_body
from infra.database.trading.models import Webhook, WebhookCall
from infra.market.calendar import home_broker, load_calendar
from infra.market.instruments import SymbolTerms
from infra.market.signal_symbols import market_of_symbol, resolve_symbol
from tests.support.brokers.example import write_example
from worker_runtime.protocol.broker_record import MarketRule, TickStep
from worker_runtime.protocol.installed_brokers import load_plugin
from worker_runtime.protocol.messages import PriceType, TimeInForce
from worker_runtime.protocol.order_terms import OrderLot

WEBHOOK = Webhook(id=UUID(int=1), account_id="main", user_id="alice")


def words(**changes: object) -> dict[str, object]:
    said = {
        "secret": "s",
        "time": "2026-11-21T01:00:00Z",
        "action": "buy",
        "symbol": "2330",
        "quantity": 1,
    }
    return said | changes


def signal(**changes: object) -> Signal:
    return Signal.model_validate(words(**changes))


def received(
    webhook: Webhook = WEBHOOK,
    at: datetime = datetime(2026, 11, 20, 3, tzinfo=UTC),
    **changes: Any,
) -> ReceivedSignal:
    taken, markets = signal(**changes), home_broker().record.markets
    symbol = resolve_symbol(taken.symbol, {}, load_calendar(), at)
    rule = market_of_symbol(symbol, markets, markets["stock"])
    return interpret(taken, webhook, symbol, SignalMarket(rule=rule))


@pytest.mark.parametrize("quantity", [1, 1.0, "1", "1.0", "1.", " 1 "])
def test_the_same_signal_is_one_order_however_its_numbers_are_written(quantity: object) -> None:
    assert received(quantity=quantity).digest == received().digest
    elsewhere = "2026-11-21T09:00:00+08:00"
    assert datetime.fromisoformat(elsewhere).astimezone(UTC) == signal().time
    assert received(time=elsewhere) == received()


@pytest.mark.parametrize(
    "quantity", [0, -1, "-1", 1.5, "1.5", "1e3", "", "one", True, 10_001, "9" * 400, None]
)
def test_lots_are_whole(quantity: object) -> None:
    with pytest.raises((ValidationError, InvalidRequest)):
        received(quantity=quantity)


@pytest.mark.parametrize(
    "changes",
    [
        {"time": "2026-11-21T01:00:01Z"},
        {"id": "2"},
        {"action": "sell"},
        {"symbol": "2317"},
        {"quantity": 2},
        {"reduce_only": True},
        {"action": "close"},
        {"action": "long_entry"},
        {"action": "position", "position_size": 1},
        {"price": "1005.5"},
    ],
)
def test_another_signal_is_another_order(changes: dict[str, Any]) -> None:
    other, first = received(**changes), received()
    assert other.digest != first.digest
    names = {name for name, _ in first.meaning.names.both}
    assert names.isdisjoint(name for name, _ in other.meaning.names.both)


def test_the_oldest_time_of_all_is_read() -> None:
    old = signal(time="0001-01-01T00:00:00+08:00")
    assert old.client_order_id(old.digest(WEBHOOK)).startswith("webhook-")


def test_a_signal_of_an_earlier_release_is_the_same_order_today() -> None:
    assert (
        received().meaning.names.open == "webhook-a14bccb56d0a592042292cde1eb3bd6874373d6b5388c77a"
    )


def test_ids_are_made_of_the_text_as_sent_and_not_of_what_it_means() -> None:
    front: dict[str, Any] = {"symbol": "TXF1!", "quantity": 1}
    before = received(at=datetime(2026, 11, 18, 5, 29, tzinfo=UTC), **front)
    after = received(at=datetime(2026, 11, 18, 5, 30, tzinfo=UTC), **front)
    assert (before.meaning.symbol, after.meaning.symbol) == ("TXFK6", "TXFL6")
    assert before.digest == after.digest
    assert before.lane == after.lane == "TXF"


def test_orders_of_intents_have_the_ids_of_an_earlier_release() -> None:
    wish = received(action="short_entry", quantity=3)
    name = wish.signal.client_order_id(wish.digest)
    assert (wish.meaning.names.close, wish.meaning.names.open) == (f"{name}.close", f"{name}.open")
    assert len(f"{name}.close-odd") <= 64
    assert len(f"{name}.close#21") <= 64
    closed = received(action="close", quantity=None)
    assert closed.meaning.names.close == closed.signal.client_order_id(closed.digest)


def test_what_a_signal_means_is_the_same_after_it_was_stored() -> None:
    webhook = Webhook(
        id=UUID(int=1), account_id="main", user_id="alice", quantity_unit="shares", odd="split"
    )
    webhook.entry_mode, webhook.price_rounding = "delta", "refuse"
    variants: list[dict[str, Any]] = [
        {"quantity": "2300", "price": "1005.5"},
        {"action": "position", "position_size": "-5", "symbol": "TXF1!"},
        {"price_type": "LMT", "price": "10.50", "action": "long_entry"},
    ]
    for changes in variants:
        first = received(webhook=webhook, **changes)
        row = WebhookCall(digest=first.digest, **first.columns)
        assert stored_meaning(row) == first.meaning
        assert "secret" not in json.dumps(row.signal)


@pytest.fixture
def spot(tmp_path: Path) -> MarketRule:
    """Returns the market of the example broker, whose lots have ten units."""
    record = write_example(tmp_path) / "berth_harbour" / "broker.toml"
    return load_plugin(record).record.markets["spot"]


def at_spot(
    rule: MarketRule, *, unit: str = "shares", odd: str = "refuse", **changes: Any
) -> ReceivedSignal:
    webhook = Webhook(id=UUID(int=1), account_id="hb", user_id="alice", quantity_unit=unit, odd=odd)
    taken = signal(symbol="ALFA.HB", **changes)
    return interpret(taken, webhook, taken.symbol, SignalMarket(rule=rule))


def test_a_signal_of_100_shares_to_a_market_with_lots_of_ten_orders_ten_lots(
    spot: MarketRule,
) -> None:
    first = at_spot(spot, quantity="100")
    again = stored_meaning(WebhookCall(digest=first.digest, **first.columns))
    for meaning in (first.meaning, again):
        assert meaning.unit is QuantityUnit.SHARES
        (order,) = plan_signal(meaning, 0).orders
        assert (order.quantity, order.pricing.lot) == (10, OrderLot.COMMON)
    (order,) = plan_signal(at_spot(spot, unit="lots", quantity="100").meaning, 0).orders
    assert order.quantity == 100
    # A signal may be for as many lots as elsewhere.
    at_spot(spot, quantity="100000")
    with pytest.raises(InvalidRequest, match="at most"):
        at_spot(spot, quantity="100001")


def test_what_is_left_of_full_lots_is_no_order_in_a_market_without_odd_lots(
    spot: MarketRule,
) -> None:
    with pytest.raises(OddLotRefused, match="10 lots of 10 and 5 shares"):
        plan_signal(at_spot(spot, odd="split", quantity="105").meaning, 0)
    rounded = plan_signal(at_spot(spot, odd="round_down", quantity="105").meaning, 0)
    assert ([order.quantity for order in rounded.orders], rounded.after) == ([10], None)


def test_a_price_is_rounded_to_the_steps_of_the_accounts_market(spot: MarketRule) -> None:
    for action, price in (("buy", "12.02"), ("sell", "12.04")):
        taken = at_spot(spot, action=action, quantity=10, price_type="LMT", price="12.03")
        for meaning in (
            taken.meaning,
            stored_meaning(WebhookCall(digest=taken.digest, **taken.columns)),
        ):
            assert plan_signal(meaning, 0).orders[0].pricing.price == Decimal(price)


def test_a_signal_counts_by_the_lot_and_the_steps_that_the_broker_lists(spot: MarketRule) -> None:
    listed = SymbolTerms(lot_value=Decimal(20), lot_units=20, ticks=(TickStep(tick=Decimal(1)),))
    webhook = Webhook(id=UUID(int=1), account_id="hb", user_id="alice", quantity_unit="shares")
    taken = signal(symbol="DELTA.HB", quantity=100, price_type="LMT", price="12.5")
    meaning = interpret(taken, webhook, "DELTA.HB", SignalMarket(rule=spot, terms=listed)).meaning
    (order,) = plan_signal(meaning, 0).orders
    assert (order.quantity, order.pricing.price) == (5, Decimal(12))


def test_odd_lots_are_those_that_the_market_takes_at_that_hour(spot: MarketRule) -> None:
    stock = home_broker().record.markets["stock"]
    assert SignalMarket(rule=stock).odd_lot is OrderLot.INTRADAY_ODD
    assert SignalMarket(rule=stock, trades_after_close=True).odd_lot is OrderLot.ODD
    assert SignalMarket(rule=spot, trades_after_close=True).odd_lot is None


@pytest.mark.parametrize(
    "changes",
    [
        {"action": "buy", "quantity": None},
        {"action": "long_entry", "quantity": None},
        {"action": "long_entry", "reduce_only": True},
        {"reduce_only": "yes"},
        {"action": "position"},
        {"action": "position", "position_size": 2, "reduce_only": True},
        {"action": "position", "position_size": "1.5"},
        {"action": "position", "position_size": "x"},
        {"action": "position", "position_size": -2, "market_position": "long"},
        {"action": "position", "position_size": 2, "market_position": "flat"},
        {"action": "position", "position_size": 0, "market_position": "long"},
        {"action": "position", "position_size": 2, "market_position": "up"},
    ],
)
def test_what_opens_says_how_much(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        signal(**changes)


@pytest.mark.parametrize(
    ("size", "side", "target"),
    [
        ("2", "long", 2),
        ("-2.0", "short", -2),
        ("2", "short", -2),
        ("-3", "", -3),
        (4, "", 4),
        ("0", "flat", 0),
        (None, "flat", 0),
        ("0", "", 0),
        ("2", "Long", 2),
    ],
)
def test_a_target_has_its_sign_from_the_size_or_from_the_side(
    size: object, side: str, target: int
) -> None:
    assert signal(action="position", position_size=size, market_position=side).target == target


@pytest.mark.parametrize("action", ["BUY", " Buy ", "buy\n"])
def test_an_action_may_have_any_case_and_spaces(action: str) -> None:
    assert signal(action=action).action is SignalAction.BUY


@pytest.mark.parametrize(
    "price", ["", "0", "1005.5", "{{close}}", "NaN", None, 1005.5, "-1", "1e-999999", []]
)
def test_the_price_of_a_market_signal_is_for_information(price: object) -> None:
    taken = signal(price=price)
    assert (taken.price, taken.price_type) == (None, PriceType.MARKET)
    usable = Decimal("1005.5") if str(price) == "1005.5" else None
    if price != "1e-999999":
        assert taken.pricing.quoted == usable


@pytest.mark.parametrize("price", ["", "0", "{{close}}", "NaN", None, "-1", "1e-999999"])
def test_a_limit_signal_needs_a_price(price: object) -> None:
    with pytest.raises(ValidationError):
        signal(price_type="LMT", price=price)


def test_an_unfilled_placeholder_is_named_with_its_field() -> None:
    body = json.dumps(words(quantity="{{strategy.order.contracts}}", secret="canary")).encode()
    with pytest.raises(InvalidRequest) as raised:
        parse_signal(body)
    assert raised.value.detail.startswith(
        "quantity still has the placeholder {{strategy.order.contracts}}, which TradingView "
        "did not fill in"
    )
    assert "canary" not in str(raised.value.errors)


def unquoted(field: str, placeholder: str) -> bytes:
    """A signal whose field has the placeholder without quotes."""
    return json.dumps(words(secret="canary", **{field: "?"})).replace('"?"', placeholder).encode()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            unquoted("quantity", "{{strategy.order.contracts}}"),
            "quantity still has the placeholder {{strategy.order.contracts}}, which",
        ),
        (unquoted("symbol", '"{{plot("RSI-14")}}"'), 'symbol still has the placeholder {{plot("R'),
        (unquoted("quantity", '"{{plot(\\"RSI-14\\")}}"'), "quantity still has the placeholder"),
        (unquoted("quantity", "-{{close}}"), "the message still has the placeholder {{close}}"),
        (b"buy {{ticker}}", "the message still has the placeholder {{ticker}}"),
    ],
)
def test_an_unquoted_placeholder_is_named(body: bytes, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_signal(body)
    assert raised.value.detail.startswith(sentence)


def test_a_message_in_double_braces_shows_nothing_of_itself() -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_signal(b'{{"secret": "canary"}}')
    assert "canary" not in raised.value.detail


def test_an_unquoted_price_that_is_for_information_is_ignored() -> None:
    taken = parse_signal(unquoted("price", "{{close}}"))
    assert (taken.price, taken.pricing.quoted) == (None, None)
    assert taken.digest(WEBHOOK) == signal(price="{{close}}").digest(WEBHOOK)
    with pytest.raises(InvalidRequest, match="price still has the placeholder"):
        parse_signal(
            unquoted("price", "{{close}}").replace(b'"buy"', b'"buy", "price_type": "LMT"')
        )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"quantity": "1.5"}, "quantity: it is not whole"),
        ({"quantity": None}, "buy needs a quantity"),
        ({"time": "yesterday"}, "time: input should be a valid datetime"),
        ({"action": "hold"}, "action: input should be 'buy', 'sell'"),
        ({"symbol": "a b"}, "symbol: "),
        ({"price_type": "LMT"}, "a limit order needs a price"),
    ],
)
def test_a_problem_says_the_sentence_that_helps(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_signal(json.dumps(words(**changes)).encode())
    assert raised.value.detail.startswith(sentence)


def sent(**changes: object) -> str:
    return json.dumps(words(secret="canary", **changes), ensure_ascii=False)


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (sent(comment="@").replace("@", "Long\nentry\t1"), {}),
        (sent(id="@").replace("@", "Long\n1"), {"id": "Long\n1"}),
        (sent().replace(", ", ",\r\n\t") + "\r\n", {}),
        ("\ufeff" + sent(), {}),
        (sent(symbol=2330), {"symbol": "2330"}),
        (sent(id=7), {"id": "7"}),
        (sent(id=None), {"id": ""}),
        (sent(quantity="\uff11\uff10\uff10"), {"quantity": 100}),
        (sent(quantity="?").replace('"?"', "1e2"), {"quantity": 100}),
        (sent(price="?").replace('"?"', "NaN"), {"price": None}),
        (sent(prev_market_position="long", volume=float("nan")), {}),
        (sent(symbol="TWSE_DLY:2330"), {"symbol": "TWSE_DLY:2330"}),
        (sent(action="buy")[:-1] + ', "action": "buy"}', {}),
    ],
)
def test_what_alerts_are_known_to_send_is_understood(body: str, fields: dict[str, object]) -> None:
    taken = parse_signal(body.encode())
    shown = {name: getattr(taken, name) for name in fields}
    assert (taken.action, shown) == (SignalAction.BUY, fields)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (sent()[:-1] + ",}", "(trailing comma at line 1 column 103): take the last comma away"),
        (f"{sent()}\n{sent()}", "something is behind its object, and an alert is one signal"),
        (sent().replace('"', "\u201c"), 'write straight quotes (") and not typographic ones'),
        (sent().replace('"', "'"), 'write names and texts in double quotes (")'),
        (sent()[1:-1], "it begins with { and ends with }"),
        ("buy 2330", "it begins with { and ends with }"),
        ("", "it begins with { and ends with }"),
        (
            sent(id="@").replace("@", 'my "long"'),
            "a comma is missing, or a text has a double quote",
        ),
        (sent(symbol="?").replace('"?"', "0050"), 'in double quotes, as "symbol": "{{ticker}}"'),
        (sent(symbol="?").replace('"?"', "TXF1!"), 'in double quotes, as "symbol": "{{ticker}}"'),
        (f"[{sent()}]", "the message has to be one JSON object, {…}: an alert is one signal"),
        (json.dumps(sent()), "the message has to be one JSON object, {…}: an alert is one signal"),
        (sent()[:-1] + ', "action": "sell"}', "the message has action twice, with different"),
        (sent(quantity=float("nan")), "quantity: it is nan: there was no value for it when"),
        (sent(quantity=" NaN"), "quantity: it is NaN: there was no value for it when the alert"),
        (sent(action="close", quantity="null"), "quantity: it is null: there was no value"),
        (sent(quantity="1,000"), "quantity: it is no number; write it as 150 or 150.0"),
        (sent(action="Long"), 'action: long is a position: send it as "market_position", with'),
        (sent(action="flat"), 'action: flat is a position: send it as "market_position", with'),
        (sent(symbol="\uff12\uff13\uff13\uff10"), "and nothing else; did you mean 2330?"),
        (sent(symbol=""), "symbol: a symbol has letters A to Z, digits and . / _ : ! -"),
        (sent(symbol=23.5), "symbol: input should be a valid string"),
    ],
)
def test_what_is_wrong_with_a_message_is_said_with_what_to_do(body: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_signal(body.encode())
    assert sentence in raised.value.detail
    assert "canary" not in f"{raised.value.detail}{raised.value.errors}"


def test_a_call_is_kept_without_anything_that_may_be_a_secret() -> None:
    secret = "x" * 43
    for body in (
        json.dumps({"secret": secret, "action": "buy"}),
        json.dumps({"Secret": secret, "a": {"b": secret}, "action": "buy"}),
        f"secret={secret} buy",
    ):
        kept = shown_body(body.encode())
        assert secret not in kept
        assert "buy" in kept
    assert len(shown_body(b"a b " * 9000)) <= 2000
    assert "\0" not in shown_body(b"a\0b\xff")


def test_a_new_secret_makes_no_new_signal_of_an_old_one() -> None:
    assert received(secret="another").digest == received().digest


def test_market_orders_do_not_rest_and_limit_orders_do() -> None:
    assert received().meaning.pricing.time_in_force is TimeInForce.IOC
    limited = received(price_type="LMT", price="100")
    assert limited.meaning.pricing.time_in_force is TimeInForce.ROD
    for action in ("buy", "close", "long_entry"):
        with pytest.raises(ValidationError):
            signal(price_type="LMT", action=action)


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValidationError):
        signal(time="2026-11-21T01:00:00")


def test_a_webhooks_token_is_in_no_log_and_no_problem() -> None:
    assert "secret" not in repr(signal(secret="canary"))
