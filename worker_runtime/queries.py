"""What the broker knows of one account now, for whoever asks; our own orders learn from it, too."""

from __future__ import annotations

from worker_runtime.boottime import wall_ms
from worker_runtime.brokers.port import Broker, Listing
from worker_runtime.calls import Calls
from worker_runtime.fills import Ledger
from worker_runtime.inlet import Piece
from worker_runtime.protocol.exchange import ExchangeOrder
from worker_runtime.protocol.requests import AccountReport, QueryAccount
from worker_runtime.reconciling import report_on, within_bytes


class Querying:
    """Carries out `QueryAccount`."""

    def __init__(self, calls: Calls, ledger: Ledger) -> None:
        self._calls = calls
        self._ledger = ledger

    def execute(self, query: QueryAccount, piece: Piece) -> AccountReport:
        """Raises a `BerthError` if any part of it cannot be had."""
        broker = self._calls.ready(query.account_id, piece, listed=False)
        taken_at = wall_ms()
        ask = self._calls.ask
        listing = self._listing(query, broker, piece) if query.orders else None
        orders = [one for one in listing.orders if _wanted(query, one)] if listing else []
        kept = within_bytes(orders)
        return report_on(
            query.account_id,
            listing,
            taken_at_ms=taken_at,
            complete=len(kept) == len(orders),
            orders=kept,
            positions=ask(query.account_id, piece, broker.positions) if query.positions else [],
            balance=ask(query.account_id, piece, broker.balance) if query.balance else None,
        )

    def _listing(self, query: QueryAccount, broker: Broker, piece: Piece) -> Listing:
        listing = self._calls.ask(query.account_id, piece, broker.orders)
        self._ledger.listed(self._calls.key_of(query.account_id), listing.orders)
        return listing


def _wanted(query: QueryAccount, order: ExchangeOrder) -> bool:
    return not query.tags or order.tag in query.tags
