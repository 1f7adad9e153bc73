from __future__ import annotations

from decimal import Decimal

from infra.exchange.records import LedgerFill, LedgerOrder, net_positions
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce


def traded(number: int, side: Side, quantity: int, price: str, symbol: str = "2330") -> LedgerOrder:
    return LedgerOrder(
        broker_order_id=f"P{number}",
        account="a",
        session_id="s",
        client="c",
        tag="",
        client_note="",
        symbol=symbol,
        side=side,
        quantity=quantity,
        price_type=PriceType.MARKET,
        price=None,
        time_in_force=TimeInForce.ROD,
        state=OrderState.FILLED,
        reason=None,
        received_ms=number,
        updated_ms=number,
        fills=(
            LedgerFill(fill_id=f"F{number}", quantity=quantity, price=Decimal(price), at_ms=number),
        ),
    )


def test_buying_more_averages_and_selling_keeps_the_average() -> None:
    [held] = net_positions(
        [
            traded(1, Side.BUY, 1, "100"),
            traded(2, Side.BUY, 3, "104"),
            traded(3, Side.SELL, 2, "200"),
        ]
    )
    assert (held.quantity, held.average_price) == (2, Decimal(103))


def test_selling_more_than_is_held_turns_the_position_round() -> None:
    [held] = net_positions([traded(1, Side.BUY, 1, "100"), traded(2, Side.SELL, 3, "90")])
    assert (held.quantity, held.average_price) == (-2, Decimal(90))


def test_a_closed_position_is_left_out_and_symbols_are_apart() -> None:
    held = net_positions(
        [
            traded(1, Side.BUY, 1, "100"),
            traded(2, Side.SELL, 1, "90"),
            traded(3, Side.SELL, 1, "50", symbol="TXF"),
        ]
    )
    assert [(position.symbol, position.quantity) for position in held] == [("TXF", -1)]
