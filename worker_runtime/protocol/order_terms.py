"""The words of an order: its terms and its states.

Their values stand in messages, in tables and in the REST API.
"""

from enum import StrEnum


class Side(StrEnum):
    BUY = "buy"
    SELL = "sell"


class PriceType(StrEnum):
    LIMIT = "LMT"
    MARKET = "MKT"
    RANGE_MARKET = "MKP"  # a market order with protection: at most some points from the best price


class TimeInForce(StrEnum):
    ROD = "ROD"  # rest of day
    IOC = "IOC"  # immediate or cancel
    FOK = "FOK"  # fill or kill


class OrderLot(StrEnum):
    """Says what a stock order counts, and where it trades. Futures have `COMMON` only."""

    COMMON = "common"  # lots of 1,000 shares
    ODD = "odd"  # 1 to 999 shares, after the close
    INTRADAY_ODD = "intraday_odd"  # 1 to 999 shares, during the day
    FIXING = "fixing"  # lots, after the close and at its price


#: The lots that count shares.
ODD_LOTS = frozenset({OrderLot.ODD, OrderLot.INTRADAY_ODD})
#: Units in one lot of a market that has odd lots.
SHARES_PER_LOT = 1000


class OrderCondition(StrEnum):
    """Says how a stock order is paid for. What was bought on margin is sold on margin, and so
    on."""

    CASH = "cash"
    MARGIN = "margin"
    SHORT_SELLING = "short_selling"


class OpenClose(StrEnum):
    """Says whether a futures order opens a position or closes one; `AUTO` closes first."""

    AUTO = "auto"
    NEW = "new"
    COVER = "cover"
    DAY_TRADE = "day_trade"


class OrderState(StrEnum):
    """States of an order; `FINAL_ORDER_STATES` never change again."""

    ACCEPTED = "accepted"
    QUEUED = "queued"
    SUBMITTING = "submitting"
    SUBMITTED = "submitted"
    PART_FILLED = "part_filled"
    FILLED = "filled"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    EXPIRED = "expired"
    UNKNOWN = "unknown"
    NEEDS_ATTENTION = "needs_attention"


FINAL_ORDER_STATES = frozenset(
    {OrderState.FILLED, OrderState.CANCELLED, OrderState.REJECTED, OrderState.EXPIRED}
)

#: The reason of an order that was cancelled while it was in the queue: the broker never had it.
CANCELLED_IN_QUEUE = "cancelled before it was sent to the broker"
