"""Shioaji's words in ours: pure functions, which never import the SDK.

Errors are distinguished by the names of their classes and those of their parents, so that this
file, and its tests, need no SDK. Names and meanings: stubs of shioaji 1.7.9.
"""

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

from worker_runtime.protocol import errors
from worker_runtime.protocol.bounds import round_price
from worker_runtime.protocol.broker_reports import Balance, BrokerOrder, Position
from worker_runtime.protocol.messages import (
    FINAL_ORDER_STATES,
    Credentials,
    Fill,
    OrderState,
    PriceType,
    Side,
    TimeInForce,
)
from worker_runtime.protocol.order_terms import OpenClose, OrderCondition, OrderLot

#: Takes secrets out of a text.
Redactor = Callable[[str], str]

#: An HTTP status at the text's start or behind a word for it: `503: …`, `[451] …`, `status 451`,
#: `StatusCode: 451, Detail: …`, `{"status_code": 451}`. Other numbers are prices, times or ids.
_STATUS = re.compile(
    r"""(?:^|(?:status|code|http(?:/[\d.]+)?|error)['"]?\s*[:=]?)"""
    r"""[\s(\[{'"]*([45]\d\d)(?![^\s:,.;)\]}'"]|\.\d)""",
    re.IGNORECASE,
)
#: Seconds of the pause, without any call, that the manual asks for after a 503.
PAUSE_S = 60.0
#: Seconds between two logins with a version of the SDK that the broker refuses.
REFUSED_VERSION_RETRY_INTERVAL_S = 3600.0
#: The broker's zone. A time without a zone is in this one, or in UTC.
TAIPEI = timezone(timedelta(hours=8))
#: The characters that the real broker keeps of our tag.
MAX_TAG_LENGTH = 6

_REFUSES_LOGIN = frozenset(
    {
        "AuthError",
        "CaError",
        "AccountNotSignError",
        "AccountNotProvideError",
        "ValidationError",
        "BadRequestError",
        "ShioajiValueError",
        "ShioajiTypeError",
    }
)
#: Refused before anything left this process (wrong value, no certificate), or by a clear 400 or
#: 422.
_REFUSES_ORDER = frozenset(
    {
        "CaError",
        "AccountNotSignError",
        "AccountNotProvideError",
        "ValidationError",
        "BadRequestError",
        "ShioajiValueError",
        "ShioajiTypeError",
    }
)

_STATES = {
    # On its way to the exchange, not there yet. Yesterday's filled orders also come back as this
    # (Sinotrade/Shioaji #216).
    "PendingSubmit": OrderState.SUBMITTING,
    "PreSubmitted": OrderState.SUBMITTED,  # reserved before the opening
    "Submitted": OrderState.SUBMITTED,
    "PartFilled": OrderState.PART_FILLED,
    "Filled": OrderState.FILLED,
    "Cancelled": OrderState.CANCELLED,
    "Failed": OrderState.REJECTED,
    # Undocumented; neither final nor alive for certain, so reconciliation has to check.
    "Inactive": OrderState.UNKNOWN,
}


#: `StockOrderLot`, `StockOrderCond` and `FuturesOCType` of the SDK, in the order of our own.
LOTS = dict(zip(OrderLot, ("Common", "Odd", "IntradayOdd", "Fixing"), strict=True))
CONDITIONS = dict(zip(OrderCondition, ("Cash", "MarginTrading", "ShortSelling"), strict=True))
OPEN_CLOSE = dict(zip(OpenClose, ("Auto", "New", "Cover", "DayTrade"), strict=True))
#: The condition of a position. Borrowed stock that was sold (`SBLShort`) is a short position, never
#: cash; our orders cannot close it, and the broker refuses one that tries.
CONDITION_OF = {name: condition for condition, name in CONDITIONS.items()} | {
    "SBLShort": OrderCondition.SHORT_SELLING,
    "SBLShortPriceExempt": OrderCondition.SHORT_SELLING,
    "Netting": OrderCondition.CASH,  # bought and sold on one day
    "Emerging": OrderCondition.CASH,  # the emerging board, which has no credit
}
#: Lots of the SDK that Berth does not place: block trades are agreed outside the order book.
UNSUPPORTED_LOTS = frozenset({"BlockTrade"})


def redactor_of(credentials: Credentials) -> Redactor:
    """Puts `***` where a text quotes one of these credentials, in whatever case."""
    secrets = {
        credentials.api_key,
        credentials.secret_key,
        credentials.ca_password,
        credentials.person_id,
    } - {""}
    # The longest first: a shorter one may be a part of it.
    words = re.compile(
        "|".join(map(re.escape, sorted(secrets, key=len, reverse=True))), re.IGNORECASE
    )
    return lambda text: words.sub("***", text) if secrets else text


def login_error(error: BaseException) -> errors.BrokerError:
    """Returns the port's error for one of the constructor, the login or the certificate.

    Its text stays here, but for an HTTP status: it may quote credentials, even in other words.
    """
    names, said = _class_names(error), str(error)
    status = status_of(error)
    text = f"{type(error).__name__} {status}" if status else type(error).__name__
    if status == 451 or "Too Many Connections" in said:
        return errors.LoginLimited(text)  # the sixth connection of this person
    if "update the version" in said.lower():
        return errors.BrokerVersionRefused(text, retry_after=REFUSED_VERSION_RETRY_INTERVAL_S)
    if status == 503:  # maintenance, or the ban of a minute after too many calls
        return errors.LoginLimited(text, retry_after=PAUSE_S)
    if is_stale_signature(error):
        return errors.BrokerClockRefused(text)
    if names & _REFUSES_LOGIN:
        return errors.LoginRejected(text)
    return errors.BrokerUnreachable(text)


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status that an error of the SDK names, or that its class stands for."""
    if (match := _STATUS.search(str(error))) is not None:
        return int(match.group(1))
    names = _class_names(error)
    classes = {
        "TokenError": 401,
        "SystemMaintenance": 503,
        "ValidationError": 422,
        "BadRequestError": 400,
    }
    return next((status for name, status in classes.items() if name in names), None)


def is_certificate_expired(error: BaseException) -> bool:
    """Returns True if the SDK did not activate a certificate because it has expired."""
    return "CaExpiredError" in _class_names(error)


def is_stale_signature(error: BaseException) -> bool:
    """Returns True if the broker found the login's time stamp too old ("Sign data is timeout")."""
    return "sign data is timeout" in str(error).lower()


def place_error(error: BaseException, blank: Redactor = str) -> errors.BrokerError:
    """Maps an error of `place_order`. Unless it proves that there is no order, it is
    `OutcomeUnknown`: timeouts, connection errors, unreadable responses, server errors and
    surprises. A 503 is `OutcomeUnknown` with a pause.
    """
    names, text = _class_names(error), _redacted_text(error, blank)
    if names & _REFUSES_ORDER:
        return errors.OrderRejected(text)
    if status_of(error) == 503:
        return errors.OutcomeUnknown(text, retry_after=PAUSE_S)
    if "AuthError" in names:
        return errors.SessionDown(text)  # not logged in (any more): the order was not taken
    return errors.OutcomeUnknown(text)


def query_error(error: BaseException, blank: Redactor = str) -> errors.BrokerError:
    """Maps an error of a call that changes nothing."""
    text = _redacted_text(error, blank)
    if status_of(error) == 503:
        return errors.BrokerMaintenance(text, retry_after=PAUSE_S)
    if "AuthError" in _class_names(error):
        return errors.SessionDown(text)
    return errors.BrokerUnreachable(text)


def unsent_error(error: BaseException, blank: Redactor = str) -> errors.BrokerError:
    """Maps an error that comes before anything was sent of an order, a cancel or a change."""
    reason = query_error(error, blank)
    if isinstance(reason, errors.SessionDown | errors.BrokerMaintenance):
        return reason
    return errors.OrderRejected(f"not sent: {reason}")


def state_of(status: str, filled: int, quantity: int) -> OrderState:
    """Returns an order's state from Shioaji's status and the lots filled, which may be ahead of the
    status."""
    state = _STATES.get(status, OrderState.UNKNOWN)
    return with_fills(state, filled, quantity)


def with_fills(state: OrderState, filled: int, quantity: int) -> OrderState:
    """Returns the state that the fills prove, where they prove more than `state` says."""
    if filled and filled >= quantity:
        return OrderState.FILLED
    if filled and state in (OrderState.SUBMITTING, OrderState.SUBMITTED, OrderState.UNKNOWN):
        return OrderState.PART_FILLED
    return state


def order_of(trade: Any) -> BrokerOrder:
    """Maps a `Trade` of the SDK. `trade.contract` may be any of its contract classes: all have a
    code. The fills are the deals of the row, which may be fewer than it counts
    (`counted_fills`)."""
    order, status = trade.order, trade.status
    fills = [
        fill_of(str(order.id), str(deal.seq), deal.quantity, deal.price, deal.ts)
        for deal in status.deals
    ]
    filled = max(sum(done.quantity for done in fills), counted_fills(trade))
    word = _enum_value(status.status)
    quantity, nothing_left = _quantity_of(order, status, word, filled)
    state = state_of(word, filled, quantity)
    if nothing_left and state not in FINAL_ORDER_STATES:
        state = OrderState.CANCELLED
    price_type = price_type_of(_enum_value(order.price_type), order.price)
    return BrokerOrder(
        broker_order_id=str(order.id),
        tag=order.custom_field or "",
        symbol=str(trade.contract.code),
        side=side_of(_enum_value(order.action)),
        quantity=quantity,
        price_type=price_type,
        price=price_of(status.modified_price or order.price)
        if price_type is PriceType.LIMIT
        else None,
        time_in_force=TimeInForce(_enum_value(order.time_in_force) or "ROD"),
        state=state,
        fills=fills,
        reason=status.msg or None,
    )


def counted_fills(trade: Any) -> int:
    """Returns how much of an order the row counts as filled, whether or not it lists the deals.
    More than was ordered says nothing."""
    counted = int(trade.status.deal_quantity or 0)
    return counted if counted <= int(trade.order.quantity) else 0


def _quantity_of(order: Any, status: Any, word: str, filled: int) -> tuple[int, bool]:
    """Returns an order's quantity, and True if nothing of it is left at the exchange.

    `order.quantity` is the ordered one, `cancel_quantity` what reductions and cancels took off it.
    `order_quantity` is 0 on some rows that are filled or reduced (1.7.6), so it counts only where
    it says something. A cancelled or failed order keeps its ordered quantity.
    """
    ordered, cancelled = int(order.quantity), int(status.cancel_quantity or 0)
    remaining = ordered - cancelled
    nothing_left = cancelled > 0 and remaining <= filled and word != "Filled"
    if nothing_left or word in ("Cancelled", "Failed"):
        return ordered, nothing_left
    if status.order_quantity and not cancelled:
        remaining = min(remaining, int(status.order_quantity))
    return max(remaining, filled, 1), False


def positions_of(listed: Iterable[Any]) -> list[Position]:
    """Returns the positions of a futures account from `list_positions`: lots, with a direction
    instead of a sign."""
    return [
        Position(
            symbol=str(position.code),
            quantity=_signed(position),
            average_price=price_of(position.price),
        )
        for position in listed
    ]


def stock_positions_of(listed: Iterable[Any]) -> list[Position]:
    """Returns the positions of a stock account from `list_positions(unit=Share)`: shares, each
    condition by itself (see `CONDITION_OF`)."""
    return [
        Position.of_shares(
            str(position.code),
            _signed(position),
            price_of(position.price),
            CONDITION_OF.get(_enum_value(position.cond), OrderCondition.CASH),
        )
        for position in listed
    ]


def _signed(position: Any) -> int:
    return int(position.quantity) * (
        1 if side_of(_enum_value(position.direction)) is Side.BUY else -1
    )


def balance_of(account_balance: Any) -> Balance:
    """Returns the balance of a stock account from `account_balance`: settled money, all of it
    available as far as the SDK says."""
    money = price_of(account_balance.acc_balance)
    return Balance(currency="TWD", cash=money, available=money)


def margin_of(margin: Any) -> Balance:
    """Returns the balance of a futures account from `margin`."""
    return Balance(
        currency="TWD",
        cash=price_of(margin.today_balance),
        available=price_of(margin.available_margin),
    )


def fill_of(order_id: str, sequence: str, quantity: int, price: float, at: float) -> Fill:
    """Returns the fill of a deal. The sequence is the exchange's, in simulation counted anew for
    every order, so the order's id belongs to the fill's id. `at` is Unix seconds."""
    return Fill(
        fill_id=f"{order_id}-{sequence}",
        quantity=int(quantity),
        price=price_of(price),
        at_ms=int(at * 1000),
    )


def end_of(expires: datetime) -> tuple[float, float]:
    """Returns the earliest and the latest Unix seconds that the SDK may mean by the end of a
    certificate.

    It names no zone. Its manual shows 15:59:59, which would be the end of a day in Taipei if it is
    written in UTC; nobody has confirmed that.
    """
    if expires.tzinfo is not None:
        return expires.timestamp(), expires.timestamp()
    return expires.replace(tzinfo=TAIPEI).timestamp(), expires.replace(tzinfo=UTC).timestamp()


def side_of(action: str) -> Side:
    return Side.BUY if action == "Buy" else Side.SELL


def action_of(side: Side) -> str:
    return "Buy" if side is Side.BUY else "Sell"


def price_type_of(name: str, price: float) -> PriceType:
    """Returns the price type. Range market orders (MKP) count as market orders: neither has a price
    of its own. An event of a changed or cancelled futures order names what was done instead (UPL,
    CXQ …): there the price tells."""
    return (
        PriceType.LIMIT
        if name == "LMT" or (price and name not in ("MKT", "MKP"))
        else PriceType.MARKET
    )


def price_of(value: float) -> Decimal:
    """Returns a float of the SDK as the decimal it was written as, with at most six places."""
    return round_price(Decimal(str(value)))


def _enum_value(name: Any) -> str:
    """Returns the text of one of the SDK's enums; "" for None."""
    return "" if name is None else str(getattr(name, "value", name))


def security_of(contract: Any) -> str:
    """Returns STK, WRT, FUT or OPT; "" if the contract does not say."""
    return _enum_value(getattr(contract, "security_type", None))


def lot_of(trade: Any) -> OrderLot | None:
    """Returns the lot of a stock order that the SDK lists; None if the row does not say, as the SDK
    allows, or names a lot that is not ours."""
    name = _enum_value(trade.order.order_lot)
    return next((lot for lot, word in LOTS.items() if word == name), None)


def _class_names(error: BaseException) -> frozenset[str]:
    return frozenset(cls.__name__ for cls in type(error).__mro__)


def _redacted_text(error: BaseException, blank: Redactor) -> str:
    # Blanked before it is cut: a part of a secret would not be found.
    return f"{type(error).__name__}: {blank(str(error))[:200]}"
