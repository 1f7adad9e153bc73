from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from infra.exchange.matching import RestingOrders
from infra.exchange.records import LedgerOrder
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce


def resting(number: int, account: str, symbol: str, quantity: int = 1) -> LedgerOrder:
    return LedgerOrder(
        broker_order_id=f"P{number:07d}",
        account=account,
        session_id="S000001",
        client="",
        tag="",
        client_note="",
        symbol=symbol,
        side=Side.BUY,
        quantity=quantity,
        price_type=PriceType.LIMIT,
        price=Decimal(1),
        time_in_force=TimeInForce.ROD,
        state=OrderState.SUBMITTED,
        reason=None,
        received_ms=0,
        updated_ms=0,
    )


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 3))))
def test_the_indices_agree_with_the_orders(moves: list[tuple[bool, int, int]]) -> None:
    book, known = RestingOrders([]), dict[str, LedgerOrder]()
    for put, number, quantity in moves:
        order = resting(number, f"a{number % 2}", f"s{number % 3}", quantity)
        if put:
            book.put(order)
            known[order.broker_order_id] = order
        else:
            book.remove(order)
            known.pop(order.broker_order_id, None)
        assert book.all() == list(known.values())
        for name in ("0", "1", "2"):
            ours = [order for order in known.values() if order.account == f"a{name}"]
            assert sorted(book.of_account(f"a{name}"), key=str) == sorted(ours, key=str)
            there = [order for order in known.values() if order.symbol == f"s{name}"]
            assert sorted(book.of_symbol(f"s{name}"), key=str) == sorted(there, key=str)
        assert book.get(order.broker_order_id) == known.get(order.broker_order_id)
