"""Reconciliations: differences between our books and the broker's, and how they are closed.

What a person has closed is no difference again for the same order or lots. Nor is what the account
held at its first comparison: it may have traded before Berth.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, case, func, literal, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.locks import wait_for_turn
from infra.database.models import BrokerAccount, Order, OrderEventRow
from infra.database.orders.states import OPEN_STATES
from infra.database.trading.models import Reconciliation
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Side
from worker_runtime.protocol.order_terms import ODD_LOTS, SHARES_PER_LOT

#: `resolved_by` of a difference that a later comparison no longer found.
CLOSED_BY_COMPARISON = "reconciliation"
#: `resolved_by` of the row that holds an account's first comparison; it is no difference.
FIRST_COMPARISON = "first comparison"
#: The kind of differences in shares beyond full lots.
ODD_SHARES = "odd_shares"
#: Within this time of a listing a fill may be in one of the books only.
FILL_MARGIN = timedelta(seconds=10)
#: An order that a listing shows by its tag alone was accepted within this time: an evening before
#: holidays belongs to the trading day after them.
MAX_TAG_AGE = timedelta(days=14)


class ReconciliationNotFound(BerthError, code="RECONCILIATION_NOT_FOUND", status=404):
    """There is no such open difference."""


@dataclass(frozen=True)
class EarlierComparisons:
    #: There was a complete comparison.
    begun: bool = False
    #: True if a complete comparison had shares beyond full lots.
    odd_known: bool = False
    #: Shares by symbol that are known apart from our fills: held before Berth, or accepted by
    #: a person.
    base: Counter[str] = field(default_factory=Counter)
    #: Differences that persons have closed, by kind.
    closed: dict[str, list[Any]] = field(default_factory=dict)
    #: Open differences, by kind.
    open: dict[str, Any] = field(default_factory=dict)


async def earlier_comparisons(
    session: AsyncSession, user_id: str, account_id: str
) -> EarlierComparisons:
    """Reads earlier comparisons, and locks out other
    ones of the account until the transaction ends."""
    await wait_for_turn(session, f"reconciliation:{user_id}:{account_id}")
    rows = await session.scalars(
        select(Reconciliation)
        .filter_by(user_id=user_id, account_id=account_id)
        .where(Reconciliation.resolved_by.is_distinct_from(CLOSED_BY_COMPARISON))
        .order_by(Reconciliation.id)
    )
    begun = odd_known = False
    base, closed, now = Counter[str](), dict[str, list[Any]](), dict[str, Any]()
    for row in rows:
        if row.resolved_at is None:
            now = row.differences
            continue
        if row.resolved_by == FIRST_COMPARISON:
            begun, odd_known = True, odd_known or ODD_SHARES in row.differences
        for kind, entries in row.differences.items():
            closed.setdefault(kind, []).extend(entries)
        for kind, shares in (("positions", SHARES_PER_LOT), (ODD_SHARES, 1)):
            for held in row.differences.get(kind, ()):
                base[held["symbol"]] += (held["broker"] - held["ours"]) * shares
    return EarlierComparisons(begun, odd_known, base, closed, now)


async def note_report(
    session: AsyncSession, *, user_id: str, account_id: str, epoch: int, at_ms: int
) -> bool:
    """Notes that the account was reported;
    False for a repeat, an earlier report or an unknown account.

    Holds the account's row until the transaction ends, so reports are compared one after the other.
    """
    newest = tuple_(BrokerAccount.reported_epoch, BrokerAccount.reported_ms)
    noted = await session.scalar(
        update(BrokerAccount)
        .filter_by(user_id=user_id, account_id=account_id)
        .where(newest < tuple_(literal(epoch, BigInteger), literal(at_ms, BigInteger)))
        .values(reported_epoch=epoch, reported_ms=at_ms)
        .returning(BrokerAccount.account_id)
        .execution_options(synchronize_session=False)
    )
    return noted is not None


def note_first_comparison(
    session: AsyncSession, *, user_id: str, account_id: str, epoch: int, held: dict[str, list[Any]]
) -> None:
    """Records what an account held apart from our fills at its first complete comparison.

    With the key `ODD_SHARES`, if perhaps of an empty list:
    the comparison had shares beyond full lots.
    """
    row = Reconciliation(
        user_id=user_id, account_id=account_id, epoch=epoch, differences=held, blocks=False
    )
    row.resolved_at, row.resolved_by = func.clock_timestamp(), FIRST_COMPARISON
    session.add(row)


async def filled_positions(
    session: AsyncSession, user_id: str, account_id: str, *, until: datetime | None = None
) -> dict[str, int]:
    """Returns shares by symbol from our orders' fills, up to `until` (a contract counts as a lot of
    shares); negative when short, without zeros."""
    lots: Any = Order.filled_quantity
    if until is not None:
        filled = func.max(OrderEventRow.data["filled_quantity"].as_integer())
        before = select(filled).where(OrderEventRow.order_id == Order.id, OrderEventRow.at <= until)
        lots = case(
            (Order.updated_at <= until, lots),
            else_=func.coalesce(before.correlate(Order).scalar_subquery(), 0),
        )
    shares = case((Order.lot.in_(ODD_LOTS), lots), else_=lots * SHARES_PER_LOT)
    signed = case((Order.side == Side.BUY, shares), else_=-shares)
    rows = await session.execute(
        select(Order.symbol, func.sum(signed))
        .where(Order.user_id == user_id, Order.account_id == account_id, Order.filled_quantity > 0)
        .group_by(Order.symbol)
    )
    return {symbol: int(held) for symbol, held in rows if held}


async def unsettled_symbols(
    session: AsyncSession, user_id: str, account_id: str, at: datetime
) -> set[str]:
    """Returns symbols whose fills may be on their way: with an open order or a recent change."""
    symbols = await session.scalars(
        select(Order.symbol)
        .where(Order.user_id == user_id, Order.account_id == account_id)
        .where(or_(Order.state.in_(OPEN_STATES), Order.updated_at > at - FILL_MARGIN))
        .distinct()
    )
    return set(symbols)


async def note_differences(
    session: AsyncSession,
    *,
    user_id: str,
    account_id: str,
    epoch: int,
    differences: dict[str, Any],
    blocks: bool,
) -> Reconciliation | None:
    """Records the differences that a comparison found, in place of the open ones.

    The same differences again make no new row;
    no differences close the open ones. Returns a new row.
    """
    unresolved = select(Reconciliation).filter_by(
        user_id=user_id, account_id=account_id, resolved_at=None
    )
    open_ones = (await session.scalars(unresolved.with_for_update())).all()
    if differences and any(open_row.differences == differences for open_row in open_ones):
        return None
    for open_row in open_ones:
        open_row.resolved_at = func.clock_timestamp()
        open_row.resolved_by = CLOSED_BY_COMPARISON
    if not differences:
        return None
    row = Reconciliation(
        user_id=user_id, account_id=account_id, epoch=epoch, differences=differences, blocks=blocks
    )
    session.add(row)
    return row


async def blocking_difference(session: AsyncSession, user_id: str, account_id: str) -> int | None:
    """Returns the number of a difference for which the account takes no orders until an operator
    has looked."""
    query = select(Reconciliation.id).filter_by(
        user_id=user_id, account_id=account_id, resolved_at=None
    )
    return await session.scalar(query.where(Reconciliation.blocks).limit(1))


async def reconciliations_of_user(
    session: AsyncSession, user_id: str, *, limit: int = 100
) -> Sequence[Reconciliation]:
    """Returns the user's reconciliations: open ones first, then the newest."""
    query = select(Reconciliation).filter_by(user_id=user_id).limit(limit)
    query = query.where(Reconciliation.resolved_by.is_distinct_from(FIRST_COMPARISON))
    open_first = Reconciliation.resolved_at.is_not(None), Reconciliation.id.desc()
    return (await session.scalars(query.order_by(*open_first))).all()


async def open_reconciliations(
    session: AsyncSession, *, after: int = 0, limit: int = 100
) -> Sequence[Reconciliation]:
    """Returns open reconciliations of all users after the number `after`, the oldest first."""
    query = select(Reconciliation).filter_by(resolved_at=None).where(Reconciliation.id > after)
    return (await session.scalars(query.order_by(Reconciliation.id).limit(limit))).all()


async def resolve_reconciliation(
    session: AsyncSession, number: int, *, actor: str, reason: str
) -> Reconciliation:
    """Closes an open difference: the account may trade again. Raises `ReconciliationNotFound`."""
    row: Reconciliation | None = await session.scalar(
        update(Reconciliation)
        .filter_by(id=number, resolved_at=None)
        .values(resolved_at=func.clock_timestamp(), resolved_by=actor)
        .returning(Reconciliation)
    )
    if row is None:
        raise ReconciliationNotFound(f"there is no open difference {number}")
    about = {"user": row.user_id, "account": row.account_id, "reason": reason}
    audit.append_entry(
        session, actor, "reconciliation.resolved", f"reconciliation:{number}", **about
    )
    return row


async def orders_by_broker_ids(
    session: AsyncSession, user_id: str, account_id: str, broker_ids: Sequence[str]
) -> dict[str, Order]:
    known = select(Order).filter_by(user_id=user_id, account_id=account_id)
    rows = await session.scalars(known.where(Order.broker_order_id.in_(broker_ids)))
    return {row.broker_order_id: row for row in rows if row.broker_order_id is not None}


async def orders_by_tags(
    session: AsyncSession, user_id: str, account_id: str, tags: Iterable[str], at: datetime
) -> dict[str, Order]:
    """Returns our latest orders with these tags and no known broker id, by tag."""
    rows = await session.scalars(
        select(Order)
        .filter_by(user_id=user_id, account_id=account_id, broker_order_id=None)
        .where(Order.tag.in_(tags))
        .where(Order.created_at.between(at - MAX_TAG_AGE, at))
        .order_by(Order.created_at)
    )
    return {row.tag: row for row in rows}
