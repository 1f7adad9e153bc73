"""The requests in a user's queue, framed as `deadline ms|request id|payload` so that Lua can read the
deadline.

All go through one FIFO, so that a cancel never overtakes its order. Quantities are lots, prices are decimal
strings, times are Unix milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec

from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.exchange import Balance as Balance
from worker_runtime.protocol.exchange import ExchangeOrder, Position
from worker_runtime.protocol.messages import Message, PlaceOrder


@dataclass(frozen=True, slots=True)
class Frame:
    """One item of a request queue. `raw` is what `answer.lua` and `withdraw.lua` look for."""

    raw: bytes
    deadline_ms: int
    request_id: str
    payload: bytes


def parse_frame(raw: bytes) -> Frame:
    """Splits an item into its parts. Raises `MalformedMessage` if it is no frame."""
    parts = raw.split(b"|", 2)
    # 15 digits of milliseconds reach the year 33658; `int` would raise ValueError for thousands of them.
    if len(parts) != 3 or not parts[0].isdigit() or len(parts[0]) > 15 or not parts[1].isascii():
        raise MalformedMessage("a queued item is not `deadline|request|payload`")
    return Frame(raw, int(parts[0]), parts[1].decode("ascii"), parts[2])


class CancelOrder(Message, frozen=True, kw_only=True, tag="cancel_order"):
    """Cancels a working order. Passes every switch."""

    request_id: str
    order_id: str
    user_id: str
    account_id: str
    symbol: str
    tag: str
    broker_order_id: str | None
    reply_to: str
    generation: str


class ReplaceOrder(Message, frozen=True, kw_only=True, tag="replace_order"):
    """Changes a working order to a smaller quantity or another price. At most once, like a submission."""

    request_id: str
    order_id: str
    user_id: str
    account_id: str
    symbol: str
    tag: str
    broker_order_id: str | None
    #: New total quantity, at least the filled one; None: unchanged. It can only fall (Shioaji, TAIFEX).
    quantity: int | None
    price: Decimal | None
    reply_to: str
    generation: str


class QueryAccount(Message, frozen=True, kw_only=True, tag="query_account"):
    """Asks what the broker knows of one account now. The answer carries an `AccountReport`."""

    request_id: str
    user_id: str
    account_id: str
    orders: bool = True
    #: Only the orders with these tags; empty: all. A report has room for some hundreds.
    tags: tuple[str, ...] = ()
    positions: bool = False
    balance: bool = False
    reply_to: str
    generation: str


Request = PlaceOrder | CancelOrder | ReplaceOrder | QueryAccount


class AccountReport(msgspec.Struct, frozen=True, kw_only=True):
    """The broker's view of an account, as one session saw it."""

    account_id: str
    taken_at_ms: int
    #: Whether the report has everything that was asked for.
    complete: bool
    #: Whether all orders that the broker took between `reaches_ms` and `behind_ms` before are certainly
    #: listed. False where a list may leave out any, such as those of earlier sessions (Shioaji's simulation,
    #: Sinotrade/Shioaji #218).
    absence_certain: bool
    behind_ms: int = 0
    #: None if the broker does not say.
    reaches_ms: int | None = None
    #: Whether the positions include the fills of all orders that are certainly listed.
    positions_agree: bool = False
    orders: list[ExchangeOrder] = []
    positions: list[Position] = []
    balance: Balance | None = None


def decode_report(report: dict[str, Any]) -> AccountReport:
    """Reads `Answer.report` or `AccountReported.report`; raises `msgspec.ValidationError`."""
    return msgspec.convert(report, AccountReport)


def encode_report(report: AccountReport) -> dict[str, Any]:
    """A report as it travels in a message."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    return found
