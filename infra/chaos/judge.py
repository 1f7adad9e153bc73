"""Compares our books with the exchange's ledger: nothing lost, nothing doubled, every fill the same.

The ledger keeps our order id with each order (`client_note`), which no real broker does and nothing of the
system reads. A changed order is compared by what was filled, never by what was asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum

from infra.chaos.books import Books, OurOrder
from infra.chaos.client import Placed
from infra.chaos.owners import in_order, old_orders, two_sessions
from infra.exchange.records import LedgerOrder
from worker_runtime.protocol.messages import CANCELLED_IN_QUEUE, FINAL_ORDER_STATES, OrderState

#: What PostgreSQL keeps of a price: six decimal places.
_EXACT = Decimal("0.000001")
#: States that say that the broker has nothing of it.
_NOT_TAKEN = frozenset({OrderState.REJECTED, OrderState.EXPIRED})


class Harm(StrEnum):
    #: Accepted or at the broker, and our books do not know it, or say that the broker never took it.
    LOST = "lost"
    #: More at the broker than was asked for.
    DOUBLED = "doubled"
    #: Filled with another quantity or price, or ended in another way, than the books say.
    MISMATCHED = "mismatched"
    #: A reversal opened its new side before the closing order was filled.
    OUT_OF_TURN = "out_of_turn"
    #: Two sessions of an account at once, or an order of a worker that had been replaced.
    TWO_OWNERS = "two_owners"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One harm; `order_id` is empty when it concerns no order of ours."""

    harm: Harm
    what: str
    order_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`orders` were accepted; of them so many are settled by the broker, on a person's list, still open."""

    orders: int
    settled_by_broker: int
    attention: int
    unsettled: int
    findings: tuple[Finding, ...] = field(default=())

    def count(self, harm: Harm) -> int:
        return sum(one.harm is harm for one in self.findings)


def judge(books: Books, placed: Iterable[Placed]) -> Verdict:
    """Looks at every order of both sides, and at every order that a client was told of."""
    at_broker: dict[str, list[LedgerOrder]] = defaultdict(list)
    for order in books.ledger:
        at_broker[order.client_note].append(order)
    known = {order.order_id: order for order in books.ours}
    findings = [*_unknown_to_us(known, at_broker), *_told(known, placed)]
    for ours in books.ours:
        findings += _compare(ours, at_broker.get(ours.order_id, []))
    findings += _same_tags(books.ledger)
    findings += _reversals(books.ours, at_broker)
    findings += _owners(books)
    return Verdict(
        orders=len(books.ours),
        settled_by_broker=sum(_settled_by_broker(one, at_broker) for one in books.ours),
        attention=sum(one.attention is not None and not _final(one) for one in books.ours),
        unsettled=sum(one.attention is None and not _final(one) for one in books.ours),
        findings=tuple(findings),
    )


def _final(order: OurOrder) -> bool:
    return OrderState(order.state) in FINAL_ORDER_STATES


def _settled_by_broker(order: OurOrder, at_broker: dict[str, list[LedgerOrder]]) -> bool:
    return _final(order) and any(one.state.value == order.state for one in at_broker.get(order.order_id, []))


def _unknown_to_us(known: dict[str, OurOrder], at_broker: dict[str, list[LedgerOrder]]) -> Iterable[Finding]:
    for note, orders in at_broker.items():
        if note not in known:
            for order in orders:
                yield Finding(
                    harm=Harm.LOST, what=f"the broker has {_shown(order)}; our books do not know it"
                )


def _told(known: dict[str, OurOrder], placed: Iterable[Placed]) -> Iterable[Finding]:
    """Whether the books have what clients were told."""
    by_name = {(order.user_id, order.client_order_id): order for order in known.values()}
    for one in placed:
        row = by_name.get((one.user_id, one.client_order_id))
        if one.order_id and (row is None or row.order_id != one.order_id):
            what = f"{one.client_order_id} was accepted as {one.order_id}; our books do not have it"
            yield Finding(harm=Harm.LOST, order_id=one.order_id, what=what)
        elif row is not None and one.ends - {row.state}:
            what = f"the client was told {sorted(one.ends)}; our books say {row.state}"
            yield Finding(harm=Harm.MISMATCHED, order_id=one.order_id, what=what)


def _reversals(ours: Sequence[OurOrder], at_broker: dict[str, list[LedgerOrder]]) -> Iterable[Finding]:
    """The legs of an intent are known by their names (`<id>.close`, `<id>.open`)."""
    closes = {
        (one.user_id, one.client_order_id.removesuffix(".close")): one
        for one in ours
        if one.client_order_id.endswith(".close")
    }
    for opening in ours:
        close = closes.get((opening.user_id, opening.client_order_id.removesuffix(".open")))
        if close is None or not opening.client_order_id.endswith(".open"):
            continue
        filled = [fill.at_ms for order in at_broker.get(close.order_id, ()) for fill in order.fills]
        began = [order.received_ms for order in at_broker.get(opening.order_id, ())]
        if close.state != OrderState.FILLED or (began and max(filled, default=0) > min(began)):
            what = f"opened while the closing order {close.order_id} was not filled ({close.state})"
            yield Finding(harm=Harm.OUT_OF_TURN, order_id=opening.order_id, what=what)


def _compare(ours: OurOrder, ledger: Sequence[LedgerOrder]) -> Iterable[Finding]:
    if len(ledger) > 1:
        shown = ", ".join(map(_shown, ledger))
        yield Finding(
            harm=Harm.DOUBLED, order_id=ours.order_id, what=f"at the broker more than once: {shown}"
        )
        return
    theirs = ledger[0] if ledger else None
    filled = theirs.filled if theirs else 0
    if filled > ours.quantity:
        what = f"{filled} lots filled of {ours.quantity}"
        yield Finding(harm=Harm.DOUBLED, order_id=ours.order_id, what=what)
    if not _final(ours):
        # Still open for us: it may have got further at the broker, never less far.
        if ours.filled_quantity > filled:
            what = f"{ours.filled_quantity} lots filled in our books, {filled} at the broker"
            yield Finding(harm=Harm.MISMATCHED, order_id=ours.order_id, what=what)
        return
    state = OrderState(ours.state)
    not_taken = state in _NOT_TAKEN or (
        state is OrderState.CANCELLED and ours.reason == CANCELLED_IN_QUEUE and not ours.filled_quantity
    )
    if theirs is not None and not_taken and theirs.state is not state:
        what = f"{state} ({ours.reason_code}), but the broker has {_shown(theirs)}"
        yield Finding(harm=Harm.LOST, order_id=ours.order_id, what=what)
        return
    their_state = theirs.state.value if theirs else "absent"
    if their_state != ours.state and not (theirs is None and not_taken):
        what = f"{ours.state} in our books, {their_state} at the broker"
        yield Finding(harm=Harm.MISMATCHED, order_id=ours.order_id, what=what)
    elif ours.filled_quantity != filled or _price(ours.average_price) != _price(_average(theirs)):
        yield Finding(
            harm=Harm.MISMATCHED,
            order_id=ours.order_id,
            what=f"{ours.filled_quantity} lots at {_price(ours.average_price)} in our books, "
            f"{filled} at {_price(_average(theirs))} at the broker",
        )


def _same_tags(ledger: Sequence[LedgerOrder]) -> Iterable[Finding]:
    """A tag stands for one order of an account; a second one with it was submitted twice."""
    by_tag: dict[tuple[str, str], list[LedgerOrder]] = defaultdict(list)
    for order in ledger:
        by_tag[order.account, order.tag].append(order)
    for (account, tag), orders in by_tag.items():
        if len({order.client_note for order in orders}) > 1:  # the same note is counted already
            shown = ", ".join(map(_shown, orders))
            yield Finding(harm=Harm.DOUBLED, what=f"tag {tag} of {account} stands for several: {shown}")


def _owners(books: Books) -> Iterable[Finding]:
    for account in sorted({session.account for session in books.sessions}):
        sessions = in_order(one for one in books.sessions if one.account == account)
        orders = [one for one in books.ledger if one.account == account]
        for what in (*two_sessions(sessions), *old_orders(sessions, orders)):
            yield Finding(harm=Harm.TWO_OWNERS, what=f"{account}: {what}")


def _average(order: LedgerOrder | None) -> Decimal | None:
    if order is None or not order.filled:
        return None
    return sum((fill.price * fill.quantity for fill in order.fills), Decimal(0)) / order.filled


def _price(price: Decimal | None) -> Decimal | None:
    return None if price is None else price.quantize(_EXACT)


def _shown(order: LedgerOrder) -> str:
    return (
        f"{order.broker_order_id} ({order.state}, {order.filled} of {order.quantity}, from {order.client}, "
        f"received {order.received_ms}, note {order.client_note})"
    )
