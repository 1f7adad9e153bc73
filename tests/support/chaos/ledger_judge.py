"""What the exchange's ledger says about one user: who was logged in when, and whose orders
arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from infra.exchange.records import LedgerOrder, LedgerSession
from infra.lab.chaos.orders.judge import (
    orders_of_old_epochs,
    overlapping_sessions,
    sessions_in_order,
)

#: States in which an order may stay: final ones, and those that an operator has to decide.
SETTLED = frozenset({"filled", "cancelled", "rejected", "expired", "unknown", "needs_attention"})
#: States that say that the broker never took the order.
NOT_TAKEN = frozenset({"rejected", "expired"})


@dataclass(frozen=True)
class AnsweredOrder:
    """The API's last answer about an order."""

    order_id: str
    state: str
    code: str | None = None
    reason: str | None = None


def violations(
    sessions: Iterable[LedgerSession],
    orders: Iterable[LedgerOrder],
    answers: Mapping[str, AnsweredOrder],
) -> list[str]:
    """Returns what is wrong, in sentences. Times are the exchange's own, in ms."""
    opened = sessions_in_order(sessions)
    ledger = list(orders)
    return [
        *overlapping_sessions(opened),
        *orders_of_old_epochs(opened, ledger),
        *_outcomes(ledger, answers),
    ]


def _outcomes(orders: list[LedgerOrder], answers: Mapping[str, AnsweredOrder]) -> list[str]:
    counted = Counter(order.client_note for order in orders)
    states = {order.client_note: order.state.value for order in orders}
    harms = [f"order {name} arrived {count} times" for name, count in counted.items() if count > 1]
    for answer in answers.values():
        there = states.get(answer.order_id)
        if answer.state not in SETTLED:
            harms.append(f"order {answer.order_id} rests in {answer.state}")
        if answer.state in NOT_TAKEN and there not in (None, *NOT_TAKEN):
            harms.append(
                f"order {answer.order_id} is {answer.state} ({answer.code}), "
                f"but the broker has it: {there}"
            )
        if answer.state == "filled" and there != "filled":
            harms.append(f"order {answer.order_id} is filled, but the broker says {there}")
    unknown = set(counted) - {answer.order_id for answer in answers.values()}
    harms += [
        f"order {name} at the broker was never accepted from anybody" for name in sorted(unknown)
    ]
    return harms
