"""The judge of a chaos run: compares our books with the exchange's ledger.

Nothing may be lost or doubled, every fill must be the same, and no account may have two owners: the
ledger says who was logged in when, and whose orders came.

The ledger keeps our order id with each order (`client_note`), which no real broker does and nothing
of the system reads. A changed order is compared by what was filled, never by what was asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum

from infra.exchange.connection import CONNECTION_LOST, HUNG_UP
from infra.exchange.records import LedgerOrder, LedgerSession
from infra.lab.chaos.orders.books import Books, OurOrder, OurSignal
from infra.lab.chaos.orders.client import ClientOrder
from worker_runtime.protocol.messages import CANCELLED_IN_QUEUE, FINAL_ORDER_STATES, OrderState

#: Milliseconds by which a busy exchange may see the next login of a worker before the end of the
#: connection that the same worker has closed.
CLOSE_NOTICE_MS = 1000


def epoch_of(client: str) -> int:
    """Returns the epoch in a worker's client name, `worker/epoch`."""
    return int(client.rsplit("/", 1)[1])


def sessions_in_order(sessions: Iterable[LedgerSession]) -> list[LedgerSession]:
    return sorted(sessions, key=lambda session: (session.opened_ms, session.session_id))


def overlapping_sessions(sessions: Sequence[LedgerSession]) -> list[str]:
    """Lists sessions of one account that were open at the same time; `sessions` are
    `sessions_in_order`."""
    overlaps = []
    for i, later in enumerate(sessions):
        for earlier in sessions[:i]:
            hung_up = earlier.client == later.client and earlier.close_reason in (
                HUNG_UP,
                CONNECTION_LOST,
            )
            late = CLOSE_NOTICE_MS if hung_up else 0
            if earlier.closed_ms is None or earlier.closed_ms > later.opened_ms + late:
                overlaps.append(
                    f"two sessions at once: {earlier.session_id} of {earlier.client}, closed "
                    f"{earlier.closed_ms} ({earlier.close_reason}), and {later.session_id} of "
                    f"{later.client}, opened {later.opened_ms}"
                )
    return overlaps


def orders_of_old_epochs(
    sessions: Sequence[LedgerSession], orders: Iterable[LedgerOrder]
) -> list[str]:
    """Lists orders of one account that came from a worker whose successor had logged in."""
    late_orders = []
    for order in orders:
        newer = [
            session
            for session in sessions
            if epoch_of(session.client) > epoch_of(order.client)
            and session.opened_ms < order.received_ms
        ]
        if newer:
            late_orders.append(
                f"order {order.client_note} of {order.client} came at {order.received_ms}, "
                "after the "
                f"login of {newer[0].client} at {newer[0].opened_ms}"
            )
    return late_orders


#: The precision of a price in PostgreSQL: six decimal places.
_EXACT = Decimal("0.000001")
#: States that say that the broker has nothing of it.
_NOT_TAKEN = frozenset({OrderState.REJECTED, OrderState.EXPIRED})


class OrderHarm(StrEnum):
    #: Accepted or at the broker, and our books do not know it,
    #: or say that the broker never took it.
    LOST = "lost"
    #: More at the broker than was asked for.
    DOUBLED = "doubled"
    #: Filled with another quantity or price, or ended in another way, than the books say.
    MISMATCHED = "mismatched"
    #: A reversal opened its new side before the closing
    #: order was filled, or a signal overtook another one.
    OUT_OF_TURN = "out_of_turn"
    #: Two sessions of an account at once, or an order of a worker that had been replaced.
    TWO_OWNERS = "two_owners"


@dataclass(frozen=True, kw_only=True)
class OrderFinding:
    """A harm that was found; `order_id` is empty when it concerns no order of ours."""

    harm: OrderHarm
    what: str
    order_id: str = ""


@dataclass(frozen=True, kw_only=True)
class OrderVerdict:
    """`orders` were accepted. Of these, some are settled by the broker,
    on a person's list, or still open."""

    orders: int
    settled_by_broker: int
    attention: int
    unsettled: int
    findings: tuple[OrderFinding, ...] = field(default=())

    def count(self, harm: OrderHarm) -> int:
        return sum(finding.harm is harm for finding in self.findings)


def judge_orders(books: Books, placed: Iterable[ClientOrder]) -> OrderVerdict:
    """Judges every order of both sides, and every order that a client saw."""
    at_broker: dict[str, list[LedgerOrder]] = defaultdict(list)
    for order in books.ledger:
        at_broker[order.client_note].append(order)
    known = {order.order_id: order for order in books.ours}
    findings = [*_unknown_to_us(known, at_broker), *_compare_answers(known, placed)]
    for ours in books.ours:
        findings += _compare(ours, at_broker.get(ours.order_id, []))
    findings += _same_tags(books.ledger)
    findings += _reversals(books.ours, at_broker)
    findings += _signals(books.signals, at_broker)
    findings += _owners(books)
    return OrderVerdict(
        orders=len(books.ours),
        settled_by_broker=sum(_settled_by_broker(order, at_broker) for order in books.ours),
        attention=sum(order.attention is not None and not _final(order) for order in books.ours),
        unsettled=sum(order.attention is None and not _final(order) for order in books.ours),
        findings=tuple(findings),
    )


def _final(order: OurOrder) -> bool:
    return OrderState(order.state) in FINAL_ORDER_STATES


def _settled_by_broker(order: OurOrder, at_broker: dict[str, list[LedgerOrder]]) -> bool:
    return _final(order) and any(
        placed.state.value == order.state for placed in at_broker.get(order.order_id, [])
    )


def _unknown_to_us(
    known: dict[str, OurOrder], at_broker: dict[str, list[LedgerOrder]]
) -> Iterable[OrderFinding]:
    for note, orders in at_broker.items():
        if note not in known:
            for order in orders:
                yield OrderFinding(
                    harm=OrderHarm.LOST,
                    what=f"the broker has {_shown(order)}; our books do not know it",
                )


def _compare_answers(
    known: dict[str, OurOrder], placed: Iterable[ClientOrder]
) -> Iterable[OrderFinding]:
    """Compares the books with the answers that clients got."""
    by_name = {(order.user_id, order.client_order_id): order for order in known.values()}
    for answer in placed:
        row = by_name.get((answer.user_id, answer.client_order_id))
        if answer.order_id and (row is None or row.order_id != answer.order_id):
            text = (
                f"{answer.client_order_id} was accepted as {answer.order_id}; "
                "our books do not have it"
            )
            yield OrderFinding(harm=OrderHarm.LOST, order_id=answer.order_id, what=text)
        elif row is not None and answer.ends - {row.state}:
            text = f"the client's answers say {sorted(answer.ends)}; our books say {row.state}"
            yield OrderFinding(harm=OrderHarm.MISMATCHED, order_id=answer.order_id, what=text)


def _reversals(
    ours: Sequence[OurOrder], at_broker: dict[str, list[LedgerOrder]]
) -> Iterable[OrderFinding]:
    """Finds reversals that opened too early.
    Their legs have known names (`<id>.close`, `<id>.open`)."""
    closes = {
        (order.user_id, order.client_order_id.removesuffix(".close")): order
        for order in ours
        if order.client_order_id.endswith(".close")
    }
    for opening in ours:
        close = closes.get((opening.user_id, opening.client_order_id.removesuffix(".open")))
        if close is None or not opening.client_order_id.endswith(".open"):
            continue
        filled = [fill.at_ms for order in at_broker.get(close.order_id, ()) for fill in order.fills]
        began = [order.received_ms for order in at_broker.get(opening.order_id, ())]
        if close.state != OrderState.FILLED or (began and max(filled, default=0) > min(began)):
            text = f"opened while the closing order {close.order_id} was not filled ({close.state})"
            yield OrderFinding(harm=OrderHarm.OUT_OF_TURN, order_id=opening.order_id, what=text)


def _signals(
    signals: Sequence[OurSignal], at_broker: dict[str, list[LedgerOrder]]
) -> Iterable[OrderFinding]:
    """Finds signals that never ended, and those whose
    orders came to the broker before an earlier one's."""
    latest: dict[tuple[str, str, str], tuple[int, int]] = {}
    for signal in signals:
        if not signal.completed:
            yield OrderFinding(
                harm=OrderHarm.LOST, what=f"signal {signal.number} was stored, and has not ended"
            )
            continue
        received = [
            order.received_ms for name in signal.order_ids for order in at_broker.get(name, ())
        ]
        lane = (signal.user_id, signal.account_id, signal.lane)
        before = latest.get(lane)
        if received and before is not None and min(received) < before[0]:
            text = (
                f"signal {signal.number} came to the broker before signal {before[1]}, "
                "which came first"
            )
            yield OrderFinding(harm=OrderHarm.OUT_OF_TURN, order_id=signal.order_ids[0], what=text)
        if received:
            latest[lane] = max(before or (0, 0), (max(received), signal.number))


def _compare(ours: OurOrder, ledger: Sequence[LedgerOrder]) -> Iterable[OrderFinding]:
    if len(ledger) > 1:
        shown = ", ".join(map(_shown, ledger))
        yield OrderFinding(
            harm=OrderHarm.DOUBLED,
            order_id=ours.order_id,
            what=f"at the broker more than once: {shown}",
        )
        return
    theirs = ledger[0] if ledger else None
    filled = theirs.filled if theirs else 0
    if filled > ours.quantity:
        text = f"{filled} lots filled of {ours.quantity}"
        yield OrderFinding(harm=OrderHarm.DOUBLED, order_id=ours.order_id, what=text)
    if not _final(ours):
        # Still open for us: it may have got further at the broker, never less far.
        if ours.filled_quantity > filled:
            text = f"{ours.filled_quantity} lots filled in our books, {filled} at the broker"
            yield OrderFinding(harm=OrderHarm.MISMATCHED, order_id=ours.order_id, what=text)
        return
    state = OrderState(ours.state)
    not_taken = state in _NOT_TAKEN or (
        state is OrderState.CANCELLED
        and ours.reason == CANCELLED_IN_QUEUE
        and not ours.filled_quantity
    )
    if theirs is not None and not_taken and theirs.state is not state:
        text = f"{state} ({ours.reason_code}), but the broker has {_shown(theirs)}"
        yield OrderFinding(harm=OrderHarm.LOST, order_id=ours.order_id, what=text)
        return
    their_state = theirs.state.value if theirs else "absent"
    if their_state != ours.state and not (theirs is None and not_taken):
        text = f"{ours.state} in our books, {their_state} at the broker"
        yield OrderFinding(harm=OrderHarm.MISMATCHED, order_id=ours.order_id, what=text)
    elif ours.filled_quantity != filled or _price(ours.average_price) != _price(_average(theirs)):
        yield OrderFinding(
            harm=OrderHarm.MISMATCHED,
            order_id=ours.order_id,
            what=f"{ours.filled_quantity} lots at {_price(ours.average_price)} in our books, "
            f"{filled} at {_price(_average(theirs))} at the broker",
        )


def _same_tags(ledger: Sequence[LedgerOrder]) -> Iterable[OrderFinding]:
    """Finds tags with several orders: a tag is one order of an account; a second one was submitted
    twice."""
    by_tag: dict[tuple[str, str], list[LedgerOrder]] = defaultdict(list)
    for order in ledger:
        by_tag[order.account, order.tag].append(order)
    for (account, tag), orders in by_tag.items():
        if len({order.client_note for order in orders}) > 1:  # the same note is counted already
            shown = ", ".join(map(_shown, orders))
            yield OrderFinding(
                harm=OrderHarm.DOUBLED, what=f"tag {tag} of {account} stands for several: {shown}"
            )


def _owners(books: Books) -> Iterable[OrderFinding]:
    for account in sorted({session.account for session in books.sessions}):
        sessions = sessions_in_order(entry for entry in books.sessions if entry.account == account)
        orders = [entry for entry in books.ledger if entry.account == account]
        for text in (*overlapping_sessions(sessions), *orders_of_old_epochs(sessions, orders)):
            yield OrderFinding(harm=OrderHarm.TWO_OWNERS, what=f"{account}: {text}")


def _average(order: LedgerOrder | None) -> Decimal | None:
    if order is None or not order.filled:
        return None
    return sum((fill.price * fill.quantity for fill in order.fills), Decimal(0)) / order.filled


def _price(price: Decimal | None) -> Decimal | None:
    return None if price is None else price.quantize(_EXACT)


def _shown(order: LedgerOrder) -> str:
    return (
        f"{order.broker_order_id} ({order.state}, {order.filled} of {order.quantity}, from "
        f"{order.client}, "
        f"received {order.received_ms}, note {order.client_note})"
    )
