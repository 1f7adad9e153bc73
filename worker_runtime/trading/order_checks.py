"""Whether an order may be placed now. Only orders ask: cancels and queries pass every switch.

Orders of unknown outcome stand in the way of those that were accepted before anybody could know of it.

PostgreSQL refuses an order in a symbol in which another one is unknown (O3), but one that stood in the queue
by then has passed that check. So the worker refuses it, by the same rule and under the same code. An order
that was accepted later is none of its business: PostgreSQL knew by then, and knows, as no worker does, when a
listing or a person has settled the other one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from worker_runtime.protocol.errors import ReducingOnly, SymbolBlocked, TradingHalted
from worker_runtime.protocol.messages import OrderState, PlaceOrder
from worker_runtime.protocol.switches import SwitchState, UserSwitch
from worker_runtime.session.queue_reader import QueueItem
from worker_runtime.trading.order_tracker import OrderTracker


def check_switch(switch: UserSwitch, order: PlaceOrder) -> None:
    """Raises `TradingHalted` or `ReducingOnly`."""
    state = switch.of(order.account_id)
    if state is SwitchState.HALTED:
        raise TradingHalted
    if state is SwitchState.REDUCING and not order.reduce_only:
        raise ReducingOnly


_MILLION = 1_000_000
#: Nanoseconds after which PostgreSQL knows of an unknown outcome: the recorder needs milliseconds, an API
#: that waits writes it after 2 s. Shorter than it takes to prove that the broker does not have the order.
_RECORDED_AFTER = 5_000_000_000

#: TAIFEX by way of Shioaji: the nearest month of a product, or the one after it (TXFR1, TXFR2).
_ROLLING = re.compile(r"[A-Z]{2}[A-Z0-9]R[12]")


class UnknownOutcomes:
    """One session's orders whose outcome nobody knows."""

    def __init__(self, ledger: OrderTracker) -> None:
        self._ledger = ledger
        #: By order id, with the CLOCK_MONOTONIC ns at which this was noted.
        self._noted: dict[str, tuple[PlaceOrder, int]] = {}

    def load_open_orders(self, orders: Iterable[PlaceOrder]) -> None:
        """Orders of former sessions: our books say that they were begun, and not what became of them."""
        for order in orders:
            if order.begun and order.broker_order_id is None:
                self._noted.setdefault(order.order_id, (order, time.monotonic_ns()))

    def note(self, order: PlaceOrder) -> None:
        self._noted.setdefault(order.order_id, (order, time.monotonic_ns()))

    def heed(self, order: PlaceOrder, piece: QueueItem) -> None:
        """Raises `SymbolBlocked` for an order that was accepted before one in its way became unknown."""
        if order.unknown_blocks == "off":
            return
        accepted = piece.deadline_ns - order.lifetime_ms * _MILLION
        for order_id, (other, noted) in list(self._noted.items()):
            known = self._ledger.known_outcome(order_id)
            if known is None or known[0].state is not OrderState.UNKNOWN:
                del self._noted[order_id]  # the broker has told of it since
            elif accepted < noted + _RECORDED_AFTER and _blocks(other, order):
                raise SymbolBlocked(
                    f"the outcome of order {order_id} in this account is unknown; settle it first"
                )


def _blocks(other: PlaceOrder, order: PlaceOrder) -> bool:
    same = other.account_id == order.account_id
    return same and (order.unknown_blocks == "account" or may_be_same_contract(other.symbol, order.symbol))


def may_be_same_contract(one: str, other: str) -> bool:
    """Whether two symbols may name the same contract: a rolling code stands for one of its product's, and
    which one, only the broker knows."""
    rolling = _ROLLING.fullmatch(one) or _ROLLING.fullmatch(other)
    return one == other or (rolling is not None and one[:3] == other[:3])
