"""Compares our books with what a session found at the broker right after its login.

The worker has sent events for the orders that it knew. Here come the orders that it could not
match, and the positions. News of our orders is recorded as an event; what contradicts our books
becomes a difference, which is shown and blocks the account if the settings say so.

A difference stays until a comparison shows that the books agree, or a person closes it. Orders that
are not listed any more, symbols in which something is under way, and incomplete reports prove
nothing.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import Order
from infra.database.orders import recording
from infra.database.trading import reconciliations
from infra.database.trading.reconciliations import FILL_MARGIN, ODD_SHARES, EarlierComparisons
from worker_runtime.protocol.broker_reports import BrokerOrder
from worker_runtime.protocol.contract_codes import is_rolling, may_be_same_contract, product_of
from worker_runtime.protocol.messages import (
    FINAL_ORDER_STATES,
    AccountReported,
    OrderEvent,
    OrderState,
)
from worker_runtime.protocol.order_terms import SHARES_PER_LOT
from worker_runtime.protocol.requests import AccountReport, decode_report


def filled_of(listed: BrokerOrder) -> int:
    """Returns the filled lots."""
    return sum(fill.quantity for fill in listed.fills)


def may_be_listed_as(order: Order, listed: BrokerOrder) -> bool:
    """Returns True if a listed order with our tag can be this one.

    The symbol may differ: an order for a rolling code (TXFR1) is listed under its contract, and
    some brokers write codes differently. A tag is used only once, so requiring the symbol would
    prove nothing, but could take a working order for one that never arrived. Side and quantity
    (which only falls) exclude an order of another program that happens to have the tag.
    """
    return order.side == listed.side and listed.quantity <= order.quantity


def listed_event(order: Order, listed: BrokerOrder, at_ms: int) -> OrderEvent:
    """Returns the event of a listed order. The same listing makes the same event; epoch 0 means no
    worker."""
    filled = filled_of(listed)
    smaller = 0 < listed.quantity < order.quantity
    changed = smaller or (None not in (order.price, listed.price) and order.price != listed.price)
    worth = sum((fill.price * fill.quantity for fill in listed.fills), Decimal(0))
    return OrderEvent(
        event_id=f"{order.id}:listed:{listed.state.value}:{filled}",
        order_id=str(order.id),
        user_id=order.user_id,
        epoch=0,
        state=listed.state,
        at_ms=at_ms,
        broker_order_id=listed.broker_order_id,
        filled_quantity=filled,
        average_price=worth / filled if filled else None,
        reason=listed.reason,
        quantity=listed.quantity if changed else None,
        price=listed.price if changed else None,
    )


#: Final states without fills.
_NEVER_TAKEN = frozenset({OrderState.REJECTED, OrderState.EXPIRED})

Differences = dict[str, list[Any]]

#: Orders of others that an account's books list: about what one report has room for.
MAX_FOREIGN_ORDERS = 1000

#: The kind of differences in full lots, or in contracts.
POSITIONS = "positions"

log = structlog.get_logger()


async def reconcile_account(session: AsyncSession, event: AccountReported, *, blocks: bool) -> None:
    """Compares a report that is newer than all before; others are ignored, since the books have
    moved on.

    Raises `MalformedMessage`.
    """
    report = decode_report(event.report)
    if not await reconciliations.note_report(session, **_whose(event), at_ms=event.at_ms):
        log.info(
            "account_report_not_new",
            user_id=event.user_id,
            account=event.account_id,
            epoch=event.epoch,
        )
        return
    known = await reconciliations.earlier_comparisons(session, event.user_id, event.account_id)
    differences = await _orders(session, event, report, known)
    if not report.complete:
        for kind in (POSITIONS, ODD_SHARES):
            differences[kind] = known.open.get(kind, [])
    elif not known.begun:
        await _begin_books(session, event, report)
    else:
        differences |= await _positions(session, event, report, known)
    differences = {kind: those for kind, those in differences.items() if those}
    row = await reconciliations.note_differences(
        session, **_whose(event), differences=differences, blocks=blocks
    )
    if row is not None:
        log.warning(
            "books_differ",
            user_id=event.user_id,
            account=event.account_id,
            kinds=sorted(differences),
        )


async def _orders(
    session: AsyncSession, event: AccountReported, report: AccountReport, known: EarlierComparisons
) -> Differences:
    """Returns the differences of listed orders that the worker could not match: our final ones, and
    other programs'."""
    user_id, account_id, taken_at = event.user_id, event.account_id, _taken_at(report)
    open_ones: list[str] = known.open.get("foreign_orders", [])
    ids = [listed.broker_order_id for listed in report.orders]
    ours = await reconciliations.orders_by_broker_ids(
        session, user_id, account_id, [*ids, *open_ones]
    )
    nameless = [
        listed for listed in report.orders if listed.broker_order_id not in ours and listed.tag
    ]
    tagged = await reconciliations.orders_by_tags(
        session, user_id, account_id, {listed.tag for listed in nameless}, taken_at
    )
    by_tag = {
        listed.broker_order_id: tagged[listed.tag]
        for listed in nameless
        if listed.tag in tagged and may_be_listed_as(tagged[listed.tag], listed)
    }
    missed = [
        # Only those with our broker id: a tag alone may be another program's.
        listed_event(row, listed, event.at_ms)
        for listed in report.orders
        if (row := ours.get(listed.broker_order_id)) is not None
    ]
    if missed:
        await recording.record_events(session, missed)
    differences: Differences = {"states": [], "fills": []}
    settled: set[str] = set()
    for listed in report.orders:
        row = ours.get(listed.broker_order_id) or by_tag.get(listed.broker_order_id)
        if row is not None and row.updated_at <= taken_at - FILL_MARGIN:
            settled.add(str(row.id))
            _contradictions(row, listed, report.absence_certain, differences)
    for kind in ("states", "fills"):
        stays = [entry for entry in known.open.get(kind, ()) if entry["order"] not in settled]
        fresh = [entry for entry in differences[kind] if entry not in known.closed.get(kind, ())]
        differences[kind] = sorted([*stays, *fresh], key=lambda entry: str(entry["order"]))
    explained = {*ours, *by_tag, *known.closed.get("foreign_orders", ())}
    strangers = [
        order_id for order_id in dict.fromkeys([*open_ones, *ids]) if order_id not in explained
    ]
    differences["foreign_orders"] = sorted(strangers[:MAX_FOREIGN_ORDERS])
    return differences


def _contradictions(
    row: Order, listed: BrokerOrder, certain: bool, differences: Differences
) -> None:
    """Adds what a listing contradicts. A listing that may lag proves nothing by what it lacks, nor
    does an order on its way: so Shioaji lists filled ones of the day before."""
    filled, certain = filled_of(listed), certain and listed.state is not OrderState.SUBMITTING
    works = row.state in FINAL_ORDER_STATES and listed.state not in FINAL_ORDER_STATES and certain
    if works or (filled and row.state in _NEVER_TAKEN):
        differences["states"].append(
            {"order": str(row.id), "ours": row.state, "broker": listed.state.value}
        )
    if filled < row.filled_quantity and certain:
        differences["fills"].append(
            {"order": str(row.id), "ours": row.filled_quantity, "broker": filled}
        )


async def _positions(
    session: AsyncSession, event: AccountReported, report: AccountReport, known: EarlierComparisons
) -> Differences:
    """Returns the positions that our fills do not explain; symbols in which something is under way
    stay as before."""
    moving = await reconciliations.unsettled_symbols(
        session, event.user_id, event.account_id, _taken_at(report)
    )
    ours = await reconciliations.filled_positions(session, event.user_id, event.account_id)
    expected = Counter(
        {symbol: ours.get(symbol, 0) + known.base[symbol] for symbol in {*ours, *known.base}}
    )
    if report.odd_shown and not known.odd_known:
        # The books were begun by a release that saw full lots only: what is beyond them was held
        # before.
        beyond = {ODD_SHARES: _unexplained(expected, report)[ODD_SHARES]}
        reconciliations.note_first_comparison(session, **_whose(event), held=beyond)
        for entry in beyond[ODD_SHARES]:
            expected[entry["symbol"]] += entry["broker"] - entry["ours"]
    differ = _unexplained(expected, report)
    unseen = () if report.odd_shown else (ODD_SHARES,)

    def moves(entry: Any) -> bool:
        return any(may_be_same_contract(entry["symbol"], symbol) for symbol in moving)

    return {
        kind: sorted(
            [
                *(entry for entry in known.open.get(kind, ()) if moves(entry) or kind in unseen),
                *(entry for entry in those if not moves(entry)),
            ],
            key=lambda entry: str(entry["symbol"]),
        )
        for kind, those in differ.items()
    }


async def _begin_books(
    session: AsyncSession, event: AccountReported, report: AccountReport
) -> None:
    """Writes the first positions: the account may have traded before Berth."""
    ours = await reconciliations.filled_positions(
        session, event.user_id, event.account_id, until=_taken_at(report)
    )
    held = _unexplained(ours, report)
    if not report.odd_shown:
        del held[ODD_SHARES]
    reconciliations.note_first_comparison(session, **_whose(event), held=held)


def _whose(event: AccountReported) -> dict[str, Any]:
    return {"user_id": event.user_id, "account_id": event.account_id, "epoch": event.epoch}


def _unexplained(expected: Mapping[str, int], report: AccountReport) -> Differences:
    """Returns what differs in lots, and in the shares beyond them. `expected`: shares by symbol. A
    product of which it has a rolling code is compared as a whole: only the broker knows for which
    contract that stands."""
    names = {product_of(symbol): symbol for symbol in expected if is_rolling(symbol)}
    ours, theirs = Counter[str](), Counter[str]()
    for symbol, shares in expected.items():
        ours[names.get(product_of(symbol), symbol)] += shares
    for held in report.positions:  # a broker may list cash and margin of one symbol separately
        theirs[names.get(product_of(held.symbol), held.symbol)] += held.shares
    differences: Differences = {POSITIONS: [], ODD_SHARES: []}
    for symbol in sorted({*ours, *theirs}):
        pairs = zip(_lots_of(ours[symbol]), _lots_of(theirs[symbol]), strict=True)
        for kind, (own, broker) in zip(differences, pairs, strict=True):
            if own != broker and (kind == POSITIONS or report.odd_shown):
                differences[kind].append({"symbol": symbol, "ours": own, "broker": broker})
    return differences


def _lots_of(shares: int) -> tuple[int, int]:
    """Returns lots, and the shares beyond them, both with their sign."""
    lots, odd = divmod(abs(shares), SHARES_PER_LOT)
    return (lots, odd) if shares > 0 else (-lots, -odd)


def _taken_at(report: AccountReport) -> datetime:
    """Returns the moment that the report shows; later changes may be missing."""
    return datetime.fromtimestamp((report.taken_at_ms - report.behind_ms) / 1000, UTC)
