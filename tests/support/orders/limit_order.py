"""A message that places an order."""

from __future__ import annotations

from decimal import Decimal

from worker_runtime.protocol.messages import (
    PlaceOrder,
    PriceType,
    Side,
    TimeInForce,
)

ORDER = PlaceOrder(
    request_id="r1",
    order_id="o1",
    user_id="u1",
    account_id="a1",
    symbol="2330",
    side=Side.BUY,
    quantity=1,
    price_type=PriceType.LIMIT,
    price=Decimal("100.5"),
    time_in_force=TimeInForce.ROD,
    tag="t1",
    reply_to="",
    generation="g1",
)
