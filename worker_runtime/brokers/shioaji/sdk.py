"""Calls the SDK within a time limit, builds its objects
before a submission, and finds them before a change.

Nothing here sends anything that changes an order. The SDK comes in as an argument.
"""

import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from worker_runtime.brokers.port import BrokerOrderTerms
from worker_runtime.brokers.shioaji import mapping
from worker_runtime.protocol.errors import OrderRejected
from worker_runtime.protocol.messages import PriceType, TimeInForce

T = TypeVar("T")


class CallTimedOut(Exception):
    """The call has not returned in time. It continues, and its outcome is unknown."""


def call_within(seconds: float, work: Callable[[], T], late: Callable[[T], None]) -> T:
    """Runs `work` in a thread of its own and returns its result, or raises its error.

    Raises `CallTimedOut` after `seconds`; a result that comes later is given to `late`, in that
    thread. SDKs have calls without a timeout (Shioaji's constructor and login), and none keeps its
    own to the point.
    """
    result: list[T] = []
    errors: list[BaseException] = []
    # Taken by what comes first: the end of the call, or that of its caller's patience.
    first, done = threading.Lock(), threading.Event()

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # passed to the waiting thread, if there still is one
            errors.append(error)
        if first.acquire(blocking=False):
            done.set()
        elif result:
            late(result[0])

    threading.Thread(target=run, name="broker-call", daemon=True).start()
    if not done.wait(max(0.0, seconds)) and first.acquire(blocking=False):
        raise CallTimedOut(f"no answer within {seconds:.1f} s")
    done.wait()
    if errors:
        raise errors[0]
    return result[0]


#: Kinds of contracts that an account of this type trades. Warrants are a type of their own since
#: 1.7.
SECURITY = {"stock": ("STK", "WRT"), "futures": ("FUT", "OPT")}
#: Those that are loaded at the login.
#: Tens of thousands of warrants are loaded when one is first asked for.
PRELOADED = {"stock": ("STK",), "futures": ("FUT", "OPT")}
#: Codes of warrants: 030001, 05001P.
#: Some funds and bonds look like it, and are found as stocks before.
_WARRANT = re.compile(r"[0-9]{5}[0-9A-Z]")


def to_milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def build_order(
    sdk: Any, api: Any, account: Any, broker_type: str, order: BrokerOrderTerms, deadline: float
) -> tuple[Any, Any]:
    """Returns contract and order of the SDK. Raises `OrderRejected` for what it cannot express, and
    the SDK's errors; nothing was sent then. `deadline` is of `time.monotonic`."""
    if len(order.tag) > mapping.MAX_TAG_LENGTH:
        raise OrderRejected(f"the tag has more than {mapping.MAX_TAG_LENGTH} characters")
    market = order.price_type is not PriceType.LIMIT
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
    if broker_type == "stock":
        lot, condition = mapping.LOTS[order.lot], mapping.CONDITIONS[order.condition]
        native = sdk.StockOrder(**words, order_lot=lot, order_cond=condition)
    else:
        if market and order.time_in_force is TimeInForce.ROD:
            # TAIFEX lists ROD for limit orders only, for neither its market orders nor
            # those with protection: https://www.taifex.com.tw/enl/eng4/ordTypeInfo.
            # Its code for it is 9938.
            raise OrderRejected("TAIFEX takes no market order for the rest of the day (9938)")
        native = sdk.FuturesOrder(**words, octype=mapping.OPEN_CLOSE[order.open_close])
    return find_contract(api, broker_type, order.symbol, deadline), native


def find_trade(
    api: Any, account: Any, broker_order_id: str, deadline: float, *, fresh: bool
) -> Any:
    """Returns the `Trade` with this id; None if the SDK knows none. Raises the SDK's errors. With
    `fresh`, it is as the broker has it now. `deadline` is of `time.monotonic`.

    Before 1.7.6 futures had to be read anew before each cancel (Sinotrade/Shioaji #235).
    """
    trade = _find_cached(api, broker_order_id)
    if trade is None or fresh:
        api.update_status(account, timeout=to_milliseconds(deadline - time.monotonic()))
        trade = _find_cached(api, broker_order_id)
    return trade


def queries_first(api: Any, broker_order_id: str, *, fresh: bool) -> bool:
    """Returns True if `find_trade` will ask the broker instead of reading what the SDK holds."""
    return fresh or _find_cached(api, broker_order_id) is None


def _find_cached(api: Any, broker_order_id: str) -> Any:
    return next(
        (trade for trade in api.list_trades() if str(trade.order.id) == broker_order_id), None
    )


def find_contract(api: Any, broker_type: str, symbol: str, deadline: float = 0.0) -> Any:
    """Returns the SDK's contract of a symbol. Raises `OrderRejected` if there is none, or if the
    SDK answers with the contract of another code (Sinotrade/Shioaji #176).

    `deadline` of `time.monotonic` allows for the time that it takes to load the warrants.
    """
    for security in SECURITY[broker_type]:
        contract = _get_contract(api, security, symbol)
        remaining_s = deadline - time.monotonic()
        if (
            contract is None
            and security == "WRT"
            and remaining_s > 0
            and _WARRANT.fullmatch(symbol)
        ):
            api.contracts.preload(["WRT"], timeout=to_milliseconds(remaining_s))
            contract = _get_contract(api, security, symbol)
        # A rolling code (TXFR1) stands for a real one, and orders name the real one.
        if contract is not None and contract.target_code:
            contract = _get_contract(api, security, contract.target_code)
        if contract is not None:
            return contract
    raise OrderRejected(f"{symbol} is no {broker_type} contract")


def _get_contract(api: Any, security: str, code: str) -> Any:
    contract = api.contracts.get(code, security_type=security)
    if contract is not None and contract.code != code:
        raise OrderRejected(
            f"asked for {code}, Shioaji answered with {contract.code}; nothing was sent"
        )
    return contract
