"""Reads an account at the broker: after each login, and when a caller asks for it.

The order tracker knows our orders that are not final, also those of former sessions: what it missed
of them becomes events. After a login, the orders that it cannot match and the positions go to the
orchestrator, which has all our books.
"""

import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from worker_runtime.brokers.port import Broker, ConnectionKey, Listing
from worker_runtime.process.clock import wall_ms
from worker_runtime.process.log import Log
from worker_runtime.process.shared_state import SharedState
from worker_runtime.protocol.broker_reports import BrokerOrder, Position
from worker_runtime.protocol.errors import BerthError, BrokerMaintenance
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import AccountReported, encode
from worker_runtime.protocol.requests import AccountReport, QueryAccount, encode_report
from worker_runtime.trading.broker_calls import BrokerCalls
from worker_runtime.trading.order_tracker import OrderTracker
from worker_runtime.trading.queue_item import QueueItem

#: Bytes of orders in one report: a message has at most 256 KiB, and an order with its fills has
#: about 500.
MAX_ORDER_BYTES = 128 * 1024
DAY_S = 86_400.0


@dataclass(eq=False, repr=False)
class AccountReconciler:
    tracker: OrderTracker
    _: KW_ONLY
    worker_id: str
    shared_state: SharedState
    add_event: Callable[[AccountReported], None]
    log: Log

    def reconcile(self, key: ConnectionKey, broker: Broker, timeout: float) -> bool:
        """Lists the account once within `timeout` seconds and reports it. Raises the broker's error
        if the orders cannot be listed; without the positions the report is not complete. Returns
        whether they are known. Raises `BrokerMaintenance` after the report if they were refused
        so."""
        until = time.monotonic() + timeout
        taken_at = wall_ms()
        listing = broker.orders(timeout)
        unmatched = self.tracker.reconcile_list(key, listing.orders)
        positions: list[Position] = []
        positions_known = True
        maintenance: BrokerMaintenance | None = None
        try:
            positions = broker.positions(max(0.0, until - time.monotonic()))
        except BerthError as error:
            self.log.warning("positions_unknown", account=key.account_id, code=error.code)
            positions_known = False
            maintenance = error if isinstance(error, BrokerMaintenance) else None
        kept = newest_within(unmatched)
        report = build_report(
            key.account_id,
            proven_by(listing, key),
            taken_at_ms=taken_at,
            complete=positions_known and len(kept) == len(unmatched),
            orders=kept,
            positions=positions,
        )
        self.log.info("account_listed", account=key.account_id, unmatched=len(unmatched))
        self.add_event(
            AccountReported(
                worker_id=self.worker_id,
                user_id=self.shared_state.user_id,
                account_id=key.account_id,
                epoch=self.shared_state.epoch,
                at_ms=taken_at,
                report=encode_report(report),
            )
        )
        if maintenance is not None:
            raise maintenance
        return positions_known


def build_report(account_id: str, listing: Listing | None, **seen: Any) -> AccountReport:
    """Builds a report of an account. `listing` is None if the orders were not asked for."""
    if listing is None or listing.behind is None:
        return AccountReport(account_id=account_id, absence_certain=False, odd_shown=True, **seen)
    return AccountReport(
        account_id=account_id,
        absence_certain=True,
        behind_ms=math.ceil(listing.behind * 1000),
        reaches_ms=int(listing.reaches * 1000),
        positions_agree=listing.positions_agree,
        odd_shown=True,
        **seen,
    )


def proven_by(listing: Listing, key: ConnectionKey) -> Listing:
    """Return the list with what it proves, which is at most what the broker's record says."""
    plugin = installed_brokers().get(key.broker)
    if plugin is None or listing.behind is None:
        return listing
    coverage = plugin.record.lists
    has_all = coverage.all_sessions_in_simulation if key.simulation else coverage.all_sessions
    return listing._replace(
        behind=max(listing.behind, coverage.lag_s) if has_all else None,
        reaches=listing.reaches if coverage.reach == "always" else min(listing.reaches, DAY_S),
        positions_agree=listing.positions_agree and coverage.positions_agree,
    )


def newest_within(orders: list[BrokerOrder], limit: int = MAX_ORDER_BYTES) -> list[BrokerOrder]:
    """Returns the last orders that fit into `limit` bytes."""
    kept: list[BrokerOrder] = []
    for order in reversed(orders):
        limit -= len(encode(order))
        if limit < 0:
            break
        kept.append(order)
    return kept[::-1]


class AccountReader:
    """Carries out `QueryAccount`."""

    def __init__(self, broker_calls: BrokerCalls, tracker: OrderTracker) -> None:
        self._broker_calls = broker_calls
        self._tracker = tracker

    def read_account(self, query: QueryAccount, item: QueueItem) -> AccountReport:
        """Reads what the query asks for; our own orders learn from it, too.

        Raises a `BerthError`.
        """
        broker = self._broker_calls.ensure_session(query.account_id, item, listed=False)
        key = self._broker_calls.session(query.account_id).account.key
        taken_at = wall_ms()
        query_broker = self._broker_calls.query
        listing: Listing | None = None
        orders: list[BrokerOrder] = []
        if query.orders:
            listing = query_broker(query.account_id, item, broker.orders)
            self._tracker.reconcile_list(key, listing.orders)
            orders = [
                order for order in listing.orders if not query.tags or order.tag in query.tags
            ]
        kept = newest_within(orders)
        return build_report(
            query.account_id,
            listing and proven_by(listing, key),
            taken_at_ms=taken_at,
            complete=len(kept) == len(orders),
            orders=kept,
            positions=query_broker(query.account_id, item, broker.positions)
            if query.positions
            else [],
            balance=query_broker(query.account_id, item, broker.balance) if query.balance else None,
        )
