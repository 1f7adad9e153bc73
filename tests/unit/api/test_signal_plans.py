"""Orders of a signal: by the table that the docs show, and in shares and lots."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest

from api.http.errors import OddLotRefused
from api.webhooks.planning import (
    EntryMode,
    Meaning,
    Move,
    OddLots,
    OrderNames,
    OrderPricing,
    Outcome,
    PriceRounding,
    QuantityUnit,
    SignalAction,
    SignalPlan,
    Wish,
    plan_moves,
    plan_signal,
)
from api.webhooks.queue import order_request
from tests.support.signal_table import rows, wish_of
from worker_runtime.protocol.errors import PriceOffTick
from worker_runtime.protocol.messages import PriceType, Side, TimeInForce
from worker_runtime.protocol.order_terms import OrderCondition, OrderLot

#: `tests/integration` imports these from here.

NAMES = OrderNames(close="s.close", open="s.open")
_NOTHING = {"nothing to close": Outcome.NOTHING_TO_CLOSE, "nothing to do": Outcome.NOTHING_TO_DO}


def move_of(text: str) -> Move:
    match = re.fullmatch(r"([+-])(\d+)( \(close\))?", text)
    assert match is not None, text
    return Move(Side.BUY if match[1] == "+" else Side.SELL, int(match[2]), closes=bool(match[3]))


@pytest.mark.parametrize(("before", "signal", "mode", "orders", "after"), rows())
def test_each_row_of_the_docs_table_is_what_is_planned(
    before: str, signal: str, mode: str, orders: str, after: str
) -> None:
    modes = list(EntryMode) if mode == "any" else [EntryMode(mode)]
    for each in modes:
        moves = plan_moves(wish_of(signal), int(before), each)
        if orders in _NOTHING:
            assert (moves.outcome, list(moves.steps)) == (_NOTHING[orders], [])
        else:
            assert list(moves.steps) == [move_of(text) for text in orders.split(", ")]
            assert moves.outcome is Outcome.PLACED
        assert moves.position_after(int(before)) == int(after)


def test_the_table_has_all_actions_and_both_modes() -> None:
    assert {wish_of(row[1]).action for row in rows()} == set(SignalAction)
    assert {row[2] for row in rows()} == {"any", "open", "delta"}


@pytest.mark.parametrize("held", range(-4, 5))
@pytest.mark.parametrize("quantity", range(1, 6))
def test_delta_trades_its_quantity_and_open_opens_it_whatever_is_held(
    held: int, quantity: int
) -> None:
    for action, sign in ((SignalAction.LONG_ENTRY, 1), (SignalAction.SHORT_ENTRY, -1)):
        wish = Wish(action=action, quantity=quantity)
        delta = plan_moves(wish, held, EntryMode.DELTA)
        assert delta.position_after(held) == held + sign * quantity
        opened = plan_moves(wish, held, EntryMode.OPEN)
        same_side = held if held * sign > 0 else 0
        assert opened.position_after(held) == same_side + sign * quantity
    for target in (-quantity, 0, quantity):
        moves = plan_moves(Wish(action=SignalAction.POSITION, target=target), held)
        assert moves.position_after(held) == target
        closed = sum(step.quantity for step in moves.steps if step.closes)
        assert closed <= abs(held)


def meaning(wish: Wish, **changes: object) -> Meaning:
    usual: dict[str, object] = {
        "symbol": "2330",
        "unit": QuantityUnit.SHARES,
        "wish": wish,
        "mode": EntryMode.OPEN,
        "odd": OddLots.SPLIT,
        "rounding": PriceRounding.SAFE,
        "pricing": OrderPricing(quoted=Decimal("1005.5")),
        "names": NAMES,
    }
    return Meaning(**usual | changes)  # type: ignore[arg-type]


def shown(plan: SignalPlan) -> list[tuple[str, str, int, str]]:
    return [
        (order.client_order_id, order.side.value, order.quantity, order.pricing.lot.value)
        for order in plan.orders
    ]


BUY_2300 = Wish(action=SignalAction.BUY, quantity=2300)
BUY_100 = Wish(action=SignalAction.BUY, quantity=100)


def test_shares_become_lots_and_an_odd_lot_with_a_limit_near_the_price() -> None:
    plan = plan_signal(meaning(BUY_2300), 0)
    assert shown(plan) == [
        ("s.open", "buy", 2, "common"),
        ("s.open-odd", "buy", 300, "intraday_odd"),
    ]
    lots, odd = plan.orders
    assert (lots.pricing.price_type, lots.pricing.time_in_force) == (
        PriceType.MARKET,
        TimeInForce.IOC,
    )
    assert (odd.pricing.price_type, odd.pricing.price) == (PriceType.LIMIT, Decimal(1015))
    assert odd.pricing.time_in_force is TimeInForce.ROD
    sold = plan_signal(meaning(Wish(action=SignalAction.SELL, quantity=100)), 0)
    assert [order.pricing.price for order in sold.orders] == [Decimal("996")]


def test_a_hundred_shares_are_never_a_hundred_lots() -> None:
    assert shown(plan_signal(meaning(BUY_100), 0)) == [("s.open-odd", "buy", 100, "intraday_odd")]
    rounded = plan_signal(meaning(BUY_100, odd=OddLots.ROUND_DOWN), 0)
    assert (shown(rounded), rounded.outcome) == ([], Outcome.NOTHING_TO_DO)
    assert "100 of 100 shares" in rounded.note
    with pytest.raises(OddLotRefused, match="0 lots and 100 shares"):
        plan_signal(meaning(BUY_100, odd=OddLots.REFUSE), 0)
    lots = plan_signal(meaning(BUY_100, unit=QuantityUnit.LOTS), 0)
    assert shown(lots) == [("s.open", "buy", 100, "common")]


@pytest.mark.parametrize("odd", list(OddLots))
def test_full_lots_in_shares_are_lots_whatever_the_setting(odd: OddLots) -> None:
    plan = plan_signal(meaning(Wish(action=SignalAction.BUY, quantity=3000), odd=odd), 0)
    assert shown(plan) == [("s.open", "buy", 3, "common")]


def test_rounding_down_names_what_is_left_out() -> None:
    plan = plan_signal(meaning(BUY_2300, odd=OddLots.ROUND_DOWN), 0)
    assert shown(plan) == [("s.open", "buy", 2, "common")]
    assert plan.note == "300 of 2300 shares are no full lot and are not bought"


@pytest.mark.parametrize(("before", "signal", "orders", "after"), rows("shares before"))
def test_rounding_down_never_opens_next_to_a_rest_of_the_other_side(
    before: str, signal: str, orders: str, after: str
) -> None:
    held, meant = int(before), meaning(wish_of(signal), odd=OddLots.ROUND_DOWN)
    if orders == "`ODD_LOT_REFUSED`":
        with pytest.raises(OddLotRefused, match="nothing is opened"):
            plan_signal(meant, held)
        return
    plan = plan_signal(meant, held)
    planned = [Move(order.side, order.quantity, order.closes) for order in plan.orders]
    assert planned == [move_of(text) for text in orders.split(", ") if orders not in _NOTHING]
    assert plan.outcome is _NOTHING.get(orders, Outcome.PLACED)
    assert plan.after == int(after)


def test_a_reversal_that_leaves_a_rest_says_why_it_opens_nothing() -> None:
    meant = meaning(Wish(action=SignalAction.POSITION, target=-1500), odd=OddLots.ROUND_DOWN)
    assert plan_signal(meant, 1500).note == (
        "500 of 1500 shares are no full lot and are not sold; 500 shares of the other side are "
        "left, so nothing is opened"
    )


def test_an_odd_lot_of_a_market_signal_without_a_price_is_refused_with_what_to_send() -> None:
    with pytest.raises(OddLotRefused, match=r'"price": "\{\{close\}\}"'):
        plan_signal(meaning(BUY_2300, pricing=OrderPricing()), 0)


def test_an_odd_lot_of_a_limit_signal_has_its_limit() -> None:
    limit = OrderPricing(
        price_type=PriceType.LIMIT, price=Decimal(1005), time_in_force=TimeInForce.ROD, quoted=None
    )
    plan = plan_signal(meaning(BUY_2300, pricing=limit), 0)
    assert [order.pricing.price for order in plan.orders] == [Decimal(1005), Decimal(1005)]


@pytest.mark.parametrize("refused", [OrderCondition.MARGIN, OrderCondition.SHORT_SELLING])
def test_odd_lots_are_for_cash(refused: OrderCondition) -> None:
    pricing = OrderPricing(condition=refused, quoted=Decimal(100))
    with pytest.raises(OddLotRefused, match="cash only"):
        plan_signal(meaning(BUY_2300, pricing=pricing), 0)


def test_only_full_lots_trade_at_the_closing_price() -> None:
    with pytest.raises(OddLotRefused, match="closing price"):
        plan_signal(
            meaning(BUY_2300, pricing=OrderPricing(lot=OrderLot.FIXING, quoted=Decimal(9))), 0
        )


def test_a_reversal_in_shares_closes_lots_and_odd_shares_and_opens_both() -> None:
    plan = plan_signal(meaning(Wish(action=SignalAction.POSITION, target=-1500)), 2300)
    assert shown(plan) == [
        ("s.close", "sell", 2, "common"),
        ("s.close-odd", "sell", 300, "intraday_odd"),
        ("s.open", "sell", 1, "common"),
        ("s.open-odd", "sell", 500, "intraday_odd"),
    ]
    assert (plan.before, plan.after) == (2300, -1500)


def test_a_close_has_the_condition_of_its_position_and_the_entry_its_own() -> None:
    wish = Wish(action=SignalAction.SHORT_ENTRY, quantity=1000)
    plan = plan_signal(meaning(wish, pricing=OrderPricing()), 1000, condition=OrderCondition.MARGIN)
    assert [(order.closes, order.pricing.condition) for order in plan.orders] == [
        (True, OrderCondition.MARGIN),
        (False, None),
    ]


@pytest.mark.parametrize(
    ("side", "price", "expected"),
    [
        (SignalAction.BUY, "1005.5", "1005"),
        (SignalAction.SELL, "1005.5", "1010"),
        (SignalAction.BUY, "1005", "1005"),
    ],
)
def test_a_limit_is_rounded_to_a_tick_that_is_not_worse_or_refused(
    side: SignalAction, price: str, expected: str
) -> None:
    limit = OrderPricing(
        price_type=PriceType.LIMIT, price=Decimal(price), time_in_force=TimeInForce.ROD
    )
    wish = Wish(action=side, quantity=1000)
    (order,) = plan_signal(meaning(wish, pricing=limit), 0).orders
    assert order.pricing.price == Decimal(expected)
    strict = meaning(wish, pricing=limit, rounding=PriceRounding.REFUSE)
    if price == expected:
        assert plan_signal(strict, 0).orders[0].pricing.price == Decimal(price)
    else:
        with pytest.raises(PriceOffTick, match="between two ticks"):
            plan_signal(strict, 0)


def test_an_order_of_a_safe_webhook_is_rounded_by_the_brokers_list_as_well() -> None:
    limit = OrderPricing(
        price_type=PriceType.LIMIT, price=Decimal(1005), time_in_force=TimeInForce.ROD
    )
    for rounding, expected in ((PriceRounding.SAFE, "passive"), (PriceRounding.REFUSE, "refuse")):
        meant = meaning(BUY_2300, pricing=limit, rounding=rounding)
        requests = [order_request(order, meant, "main") for order in plan_signal(meant, 0).orders]
        assert {request.price_rounding for request in requests} == {expected}
    # An odd lot's limit is ours, and a market order has none.
    meant = meaning(BUY_2300, rounding=PriceRounding.REFUSE)
    lots, odd = (order_request(order, meant, "main") for order in plan_signal(meant, 0).orders)
    assert (lots.price_rounding, odd.price_rounding) == ("refuse", "passive")


@pytest.mark.parametrize(
    ("wish", "allowed"),
    [
        (Wish(action=SignalAction.POSITION, target=2000), True),
        (Wish(action=SignalAction.BUY, quantity=1000), False),
        (Wish(action=SignalAction.LONG_ENTRY, quantity=1000), False),
    ],
)
def test_a_strategy_that_adds_the_same_twice_in_a_moment_gets_both_by_its_position(
    wish: Wish, allowed: bool
) -> None:
    meant = meaning(wish)
    (order,) = plan_signal(meant, 1000).orders
    request = order_request(order, meant, "main")
    assert (request.side, request.quantity, request.symbol) == (Side.BUY, 1, "2330")
    assert request.allow_duplicate is allowed


def test_a_plan_is_the_same_after_it_was_stored() -> None:
    plan = plan_signal(meaning(Wish(action=SignalAction.POSITION, target=-1500)), 2300)
    stored = SignalPlan.from_json(plan.to_json())
    assert stored.to_json() == plan.to_json()
    assert shown(stored) == shown(plan)
