"""Orders in the SDK's own objects: what is made before a submission, and found before a change.

Nothing here sends anything that changes an order. The SDK comes in as an argument.
"""

from __future__ import annotations

import time
from typing import Any

from worker_runtime.brokers import shioaji_mapping as mapping
from worker_runtime.protocol.errors import BerthError, OrderRejected
from worker_runtime.protocol.messages import PlaceOrder, PriceType, TimeInForce

#: Kinds of contracts that an account of this type trades.
SECURITY = {"stock": ("STK",), "futures": ("FUT", "OPT")}


def milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def prepare(sdk: Any, api: Any, account: Any, broker_type: str, order: PlaceOrder) -> tuple[Any, Any]:
    """Contract and order of the SDK; raises `OrderRejected` for what it cannot express."""
    if len(order.tag) > mapping.MAX_TAG:
        raise OrderRejected(f"the tag has more than {mapping.MAX_TAG} characters")
    market = order.price_type is PriceType.MARKET
    if not market and order.price is None:
        raise OrderRejected("a limit order needs a price")
    words = {
        "action": mapping.action_of(order.side),
        "price": 0.0 if market or order.price is None else float(order.price),
        "quantity": order.quantity,
        "price_type": order.price_type.value,
        "time_in_force": order.time_in_force.value,
        "custom_field": order.tag,
        "account": account,
    }
    try:
        if broker_type == "stock":
            native = sdk.StockOrder(**words, order_lot="Common", order_cond="Cash")
        else:
            if market and order.time_in_force is TimeInForce.ROD:
                raise OrderRejected("TAIFEX takes no market order for the rest of the day (9938)")
            native = sdk.FuturesOrder(**words, octype="Auto")
        return _contract(api, broker_type, order.symbol), native
    except BerthError:
        raise
    except Exception as error:  # nothing has been sent yet, whatever it is
        raise OrderRejected(f"{order.symbol}: {type(error).__name__}") from None


def find(api: Any, account: Any, broker_type: str, broker_order_id: str, deadline: float) -> Any:
    """The `Trade` with this id, None if the SDK knows none; raises the SDK's errors.

    Futures can be cancelled only after their state was read anew (Sinotrade/Shioaji #235). `deadline` is of
    `time.monotonic`.
    """
    trade = _cached(api, broker_order_id)
    if trade is None or broker_type == "futures":
        api.update_status(account, timeout=milliseconds(deadline - time.monotonic()))
        trade = _cached(api, broker_order_id)
    return trade


def asks_first(api: Any, broker_type: str, broker_order_id: str) -> bool:
    """Whether `find` will ask the broker, and not only look at what the SDK holds."""
    return broker_type == "futures" or _cached(api, broker_order_id) is None


def _cached(api: Any, broker_order_id: str) -> Any:
    found = [trade for trade in api.list_trades() if str(trade.order.id) == broker_order_id]
    return found[0] if found else None


def _contract(api: Any, broker_type: str, symbol: str) -> Any:
    for security in SECURITY[broker_type]:
        found = api.contracts.get(symbol, security_type=security)
        if found is not None:
            # A rolling code (TXFR1) stands for a real one, and orders name the real one.
            real = found.target_code
            return api.contracts.get(real, security_type=security) if real else found
    raise OrderRejected(f"{symbol} is no {broker_type} contract")
