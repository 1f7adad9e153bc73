"""After each login: what the broker lists is taken into the ledger, and the rest is told (requirement O5).

The ledger knows our orders that are not final, also those of former sessions. What it missed of them becomes
events. What it cannot match, and the positions, go to the orchestrator, which has all our books.

What the broker knows of one account now, for whoever asks; our own orders learn from it, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from worker_runtime.brokers.port import Broker, ConnectionKey, Listing
from worker_runtime.process.clock import wall_ms
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.exchange import ExchangeOrder, Position
from worker_runtime.protocol.messages import AccountReported, encode
from worker_runtime.protocol.requests import AccountReport, QueryAccount, encode_report
from worker_runtime.session.queue_reader import QueueItem
from worker_runtime.trading.broker_calls import BrokerCalls
from worker_runtime.trading.order_tracker import OrderTracker

#: Bytes of orders in one report: a message has at most 256 KiB, and an order with its fills has about 500.
MAX_ORDER_BYTES = 128 * 1024


class AccountReconciler:
    """Lists an account's orders and positions for one user's worker."""

    def __init__(
        self,
        ledger: OrderTracker,
        *,
        worker_id: str,
        board: SharedState,
        tell: Callable[[AccountReported], None],
        log: Log,
    ) -> None:
        self._ledger = ledger
        self._worker_id = worker_id
        self._shared_state = board
        self._tell = tell
        self._log = log

    def look(self, key: ConnectionKey, broker: Broker, timeout: float) -> None:
        """One listing within `timeout` seconds. Raises the broker's error if the orders cannot be had;
        without the positions the report is not complete."""
        until = time.monotonic() + timeout
        taken_at = wall_ms()
        listing = broker.orders(timeout)
        strange = self._ledger.listed(key, listing.orders)
        positions: list[Position] = []
        complete = True
        try:
            positions = broker.positions(max(0.0, until - time.monotonic()))
        except BerthError as error:
            self._log.warning("positions_unknown", account=key.account_id, code=error.code)
            complete = False
        kept = newest_within(strange)
        report = build_report(
            key.account_id,
            listing,
            taken_at_ms=taken_at,
            complete=complete and len(kept) == len(strange),
            orders=kept,
            positions=positions,
        )
        self._log.info("account_listed", account=key.account_id, unmatched=len(strange))
        self._tell(
            AccountReported(
                worker_id=self._worker_id,
                user_id=self._shared_state.user_id,
                account_id=key.account_id,
                epoch=self._shared_state.epoch,
                at_ms=taken_at,
                report=encode_report(report),
            )
        )


def build_report(account_id: str, listing: Listing | None, **seen: Any) -> AccountReport:
    """What is told of an account, with what the broker says of its list of orders; None: it was not asked."""
    if listing is None or listing.behind is None:
        return AccountReport(account_id=account_id, absence_certain=False, **seen)
    return AccountReport(
        account_id=account_id,
        absence_certain=True,
        behind_ms=math.ceil(listing.behind * 1000),
        reaches_ms=int(listing.reaches * 1000),
        positions_agree=listing.positions_agree,
        **seen,
    )


def newest_within(orders: list[ExchangeOrder], limit: int = MAX_ORDER_BYTES) -> list[ExchangeOrder]:
    """As many of the last ones as have `limit` bytes together."""
    kept: list[ExchangeOrder] = []
    for order in reversed(orders):
        limit -= len(encode(order))
        if limit < 0:
            break
        kept.append(order)
    return kept[::-1]


class AccountReader:
    """Carries out `QueryAccount`."""

    def __init__(self, calls: BrokerCalls, ledger: OrderTracker) -> None:
        self._calls = calls
        self._ledger = ledger

    def execute(self, query: QueryAccount, piece: QueueItem) -> AccountReport:
        """Raises a `BerthError` if any part of it cannot be had."""
        broker = self._calls.ready(query.account_id, piece, listed=False)
        taken_at = wall_ms()
        ask = self._calls.ask
        listing = self._listing(query, broker, piece) if query.orders else None
        orders = [one for one in listing.orders if _is_wanted(query, one)] if listing else []
        kept = newest_within(orders)
        return build_report(
            query.account_id,
            listing,
            taken_at_ms=taken_at,
            complete=len(kept) == len(orders),
            orders=kept,
            positions=ask(query.account_id, piece, broker.positions) if query.positions else [],
            balance=ask(query.account_id, piece, broker.balance) if query.balance else None,
        )

    def _listing(self, query: QueryAccount, broker: Broker, piece: QueueItem) -> Listing:
        listing = self._calls.ask(query.account_id, piece, broker.orders)
        self._ledger.listed(self._calls.key_of(query.account_id), listing.orders)
        return listing


def _is_wanted(query: QueryAccount, order: ExchangeOrder) -> bool:
    return not query.tags or order.tag in query.tags
