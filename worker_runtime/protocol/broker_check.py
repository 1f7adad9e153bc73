"""The messages between `berth broker check` and the process that makes the check, as lines of
JSON."""

from decimal import Decimal
from enum import StrEnum
from typing import Any

import msgspec

from worker_runtime.protocol.messages import Credentials
from worker_runtime.protocol.order_terms import OrderLot
from worker_runtime.protocol.requests import QuantityMeaning


class CheckOutcome(StrEnum):
    PASSED = "passed"
    WARNED = "warned"
    FAILED = "failed"
    SKIPPED = "skipped"


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which account to check, and how far. `credentials` travel on standard input only."""

    broker: str
    broker_type: str
    simulation: bool
    #: The broker's id of the account.
    account: str
    credentials: Credentials
    symbol: str
    #: The price of the orders, far from the market; None: the day's limit down, where the broker
    #: shows it.
    price: Decimal | None = None
    #: Kinds of lot whose quantity changes are tried.
    lots: tuple[OrderLot, ...] = (OrderLot.COMMON,)
    #: Price and quantity of an order that is filled
    #: in part and then cancelled; None, 0: none is tried.
    partial_price: Decimal | None = None
    partial_quantity: int = 0
    #: False: places nothing.
    orders: bool = True
    #: Seconds in which the broker has to confirm an order, a cancel or a change.
    patience_s: float = 15.0
    paper_exchange: str = ""
    #: The operator's options for this broker.
    options: dict[str, str] = {}


class CheckStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step and what came of it. `evidence` has no credentials and no id of the person or
    account."""

    name: str
    outcome: CheckOutcome
    detail: str = ""
    seconds: float = 0.0
    evidence: dict[str, Any] = {}


class SeenMeaning(msgspec.Struct, frozen=True, kw_only=True):
    """Says what a quantity change was seen to mean; in the evidence of its step."""

    broker: str
    sdk_version: str
    lot: OrderLot
    futures: bool
    simulation: bool
    meaning: QuantityMeaning
