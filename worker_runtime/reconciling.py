"""After each login: what the broker lists is taken into the ledger, and the rest is told (requirement O5).

The ledger knows our orders that are not final, also those of former sessions. What it missed of them becomes
events. What it cannot match, and the positions, go to the orchestrator, which has all our books.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from worker_runtime.board import Board
from worker_runtime.boottime import wall_ms
from worker_runtime.brokers.port import Broker, ConnectionKey, Listing
from worker_runtime.fills import Ledger
from worker_runtime.log import Log
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.exchange import ExchangeOrder, Position
from worker_runtime.protocol.messages import AccountReported, encode
from worker_runtime.protocol.requests import AccountReport, told

#: Bytes of orders in one report: a message has at most 256 KiB, and an order with its fills has about 500.
MAX_ORDERS = 128 * 1024


class Reconciling:
    """Lists an account's orders and positions for one user's worker."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        worker_id: str,
        board: Board,
        tell: Callable[[AccountReported], None],
        log: Log,
    ) -> None:
        self._ledger = ledger
        self._worker_id = worker_id
        self._board = board
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
        kept = within_bytes(strange)
        report = report_on(
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
                user_id=self._board.user_id,
                account_id=key.account_id,
                epoch=self._board.epoch,
                at_ms=taken_at,
                report=told(report),
            )
        )


def report_on(account_id: str, listing: Listing | None, **seen: Any) -> AccountReport:
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


def within_bytes(orders: list[ExchangeOrder], limit: int = MAX_ORDERS) -> list[ExchangeOrder]:
    """As many of the last ones as have `limit` bytes together."""
    kept: list[ExchangeOrder] = []
    for order in reversed(orders):
        limit -= len(encode(order))
        if limit < 0:
            break
        kept.append(order)
    return kept[::-1]
