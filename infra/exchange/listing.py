"""Orders as they were a while ago: what a broker shows whose listings lag behind its events."""

from __future__ import annotations

from infra.exchange.records import LedgerOrder
from worker_runtime.protocol.messages import OrderState


def as_of(order: LedgerOrder, at_ms: int) -> LedgerOrder | None:
    """The order as it stood at a time; None if it was not there yet.

    A changed price or quantity is shown at once: the ledger keeps no history of them.
    """
    if order.received_ms > at_ms:
        return None
    if order.updated_ms <= at_ms:
        return order
    fills = tuple(fill for fill in order.fills if fill.at_ms <= at_ms)
    done = sum(fill.quantity for fill in fills)
    state = OrderState.PART_FILLED if done else OrderState.SUBMITTED
    return order.model_copy(update={"state": state, "reason": None, "fills": fills})
