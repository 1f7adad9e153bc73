"""Invariant *one-owner*, judged by the exchange's ledger: who was logged in when, and whose orders came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infra.exchange.link import HUNG_UP, LOST
from infra.exchange.records import LedgerOrder, LedgerSession

#: Milliseconds by which a busy exchange may see the next login of a worker before the end of the connection
#: that the same worker has closed.
NOTICED = 1000


def epoch_of(client: str) -> int:
    """A worker's client name is `worker/epoch`."""
    return int(client.rsplit("/", 1)[1])


def in_order(sessions: Iterable[LedgerSession]) -> list[LedgerSession]:
    return sorted(sessions, key=lambda session: (session.opened_ms, session.session_id))


def two_sessions(sessions: Sequence[LedgerSession]) -> list[str]:
    """Sessions of one account that were open at the same time; `sessions` are `in_order`."""
    found = []
    for i, later in enumerate(sessions):
        for earlier in sessions[:i]:
            hung_up = earlier.client == later.client and earlier.close_reason in (HUNG_UP, LOST)
            late = NOTICED if hung_up else 0
            if earlier.closed_ms is None or earlier.closed_ms > later.opened_ms + late:
                found.append(
                    f"two sessions at once: {earlier.session_id} of {earlier.client}, closed "
                    f"{earlier.closed_ms} ({earlier.close_reason}), and {later.session_id} of "
                    f"{later.client}, opened {later.opened_ms}"
                )
    return found


def old_orders(sessions: Sequence[LedgerSession], orders: Iterable[LedgerOrder]) -> list[str]:
    """Orders of one account that came from a worker whose successor had logged in."""
    found = []
    for order in orders:
        newer = [
            session
            for session in sessions
            if epoch_of(session.client) > epoch_of(order.client) and session.opened_ms < order.received_ms
        ]
        if newer:
            found.append(
                f"order {order.client_note} of {order.client} came at {order.received_ms}, after the "
                f"login of {newer[0].client} at {newer[0].opened_ms}"
            )
    return found
