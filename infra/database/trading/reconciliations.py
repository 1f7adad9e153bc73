"""Differences between our books and the broker's: the open ones, and how they are closed.

What a person has closed is known from then on: the same order, the same lots make no difference again. So is
what the account held when it was compared for the first time: it may have traded before Berth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import case, func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import Order, OrderEventRow
from infra.database.orders.states import OPEN_STATES
from infra.database.trading.models import Reconciliation
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import Side

#: Who closes a difference that a later comparison does not find any more.
CLOSED_BY_COMPARISON = "reconciliation"
#: Who closes the row that holds what an account had before its first comparison; it is no difference.
FIRST_COMPARISON = "first comparison"
#: Seconds around a listing within which a fill may stand in one of the books only.
FILL_MARGIN = timedelta(seconds=10)
#: How long before a listing an order may have been accepted that it shows with a tag alone: an evening before
#: holidays belongs to the trading day after them.
TAG_AGE = timedelta(days=14)


class ReconciliationNotFound(BerthError):
    """There is no such open difference."""

    code = "RECONCILIATION_NOT_FOUND"


@dataclass(frozen=True)
class EarlierComparisons:
    """What earlier comparisons of an account found."""

    #: There was a complete one.
    begun: bool = False
    #: Lots by symbol that are known beside our fills: held before Berth, or closed by a person.
    base: Counter[str] = field(default_factory=Counter)
    #: What persons have closed, by kind.
    closed: dict[str, list[Any]] = field(default_factory=dict)
    #: What is open, by kind.
    open: dict[str, Any] = field(default_factory=dict)


async def earlier_comparisons(session: AsyncSession, user_id: str, account_id: str) -> EarlierComparisons:
    """Also keeps other comparisons of the account out until the transaction ends."""
    lock = func.hashtextextended(literal(f"reconciliation:{user_id}:{account_id}"), 0)
    await session.execute(select(func.pg_advisory_xact_lock(lock)))
    rows = await session.scalars(
        select(Reconciliation)
        .where(Reconciliation.user_id == user_id, Reconciliation.account_id == account_id)
        .where(Reconciliation.resolved_by.is_distinct_from(CLOSED_BY_COMPARISON))
        .order_by(Reconciliation.id)
    )
    begun, base, closed, now = False, Counter[str](), dict[str, list[Any]](), dict[str, Any]()
    for row in rows:
        if row.resolved_at is None:
            now = row.differences
            continue
        begun = begun or row.resolved_by == FIRST_COMPARISON
        for kind, found in row.differences.items():
            closed.setdefault(kind, []).extend(found)
        for held in row.differences.get("positions", ()):
            base[held["symbol"]] += held["broker"] - held["ours"]
    return EarlierComparisons(begun, base, closed, now)


def note_first_comparison(
    session: AsyncSession, *, user_id: str, account_id: str, epoch: int, held: list[Any]
) -> None:
    """Writes down what an account held beside our fills at its first complete comparison."""
    session.add(
        Reconciliation(
            user_id=user_id,
            account_id=account_id,
            epoch=epoch,
            differences={"positions": held} if held else {},
            blocks=False,
            resolved_at=func.clock_timestamp(),
            resolved_by=FIRST_COMPARISON,
        )
    )


async def filled_positions(
    session: AsyncSession, user_id: str, account_id: str, *, until: datetime | None = None
) -> dict[str, int]:
    """Lots by symbol, as our orders' fills make them; negative when short, none that are 0.

    `until`: without what happened later.
    """
    lots: Any = Order.filled_quantity
    if until is not None:
        told = func.max(OrderEventRow.data["filled_quantity"].as_integer())
        before = select(told).where(OrderEventRow.order_id == Order.id, OrderEventRow.at <= until)
        lots = case(
            (Order.updated_at <= until, lots),
            else_=func.coalesce(before.correlate(Order).scalar_subquery(), 0),
        )
    signed = case((Order.side == Side.BUY, lots), else_=-lots)
    rows = await session.execute(
        select(Order.symbol, func.sum(signed))
        .where(Order.user_id == user_id, Order.account_id == account_id, Order.filled_quantity > 0)
        .group_by(Order.symbol)
    )
    return {symbol: int(held) for symbol, held in rows if held}


async def unsettled_symbols(session: AsyncSession, user_id: str, account_id: str, at: datetime) -> set[str]:
    """Symbols whose fills may be on their way at this time: with an open order, or told of just now."""
    found = await session.scalars(
        select(Order.symbol)
        .where(Order.user_id == user_id, Order.account_id == account_id)
        .where(or_(Order.state.in_(OPEN_STATES), Order.updated_at > at - FILL_MARGIN))
        .distinct()
    )
    return set(found)


async def note_differences(
    session: AsyncSession,
    *,
    user_id: str,
    account_id: str,
    epoch: int,
    differences: dict[str, Any],
    blocks: bool,
) -> Reconciliation | None:
    """Writes down what a comparison found; it takes the place of what earlier ones had.

    The same differences again make no new row; none at all close what was open. Returns a new row.
    """
    open_ones = (
        await session.scalars(
            select(Reconciliation)
            .where(Reconciliation.user_id == user_id, Reconciliation.account_id == account_id)
            .where(Reconciliation.resolved_at.is_(None))
            .with_for_update()
        )
    ).all()
    if differences and any(one.differences == differences for one in open_ones):
        return None
    for one in open_ones:
        one.resolved_at = func.clock_timestamp()
        one.resolved_by = CLOSED_BY_COMPARISON
    if not differences:
        return None
    row = Reconciliation(
        user_id=user_id, account_id=account_id, epoch=epoch, differences=differences, blocks=blocks
    )
    session.add(row)
    return row


async def reconciliations_of_user(
    session: AsyncSession, user_id: str, *, limit: int = 100
) -> Sequence[Reconciliation]:
    """The open ones first, then the newest."""
    return (
        await session.scalars(
            select(Reconciliation)
            .where(Reconciliation.user_id == user_id)
            .where(Reconciliation.resolved_by.is_distinct_from(FIRST_COMPARISON))
            .order_by(Reconciliation.resolved_at.is_not(None), Reconciliation.id.desc())
            .limit(limit)
        )
    ).all()


async def open_reconciliations(
    session: AsyncSession, *, after: int = 0, limit: int = 100
) -> Sequence[Reconciliation]:
    """The open ones of all users behind the number `after`, the oldest first."""
    return (
        await session.scalars(
            select(Reconciliation)
            .where(Reconciliation.resolved_at.is_(None), Reconciliation.id > after)
            .order_by(Reconciliation.id)
            .limit(limit)
        )
    ).all()


async def resolve_reconciliation(
    session: AsyncSession, number: int, *, actor: str, reason: str
) -> Reconciliation:
    """Closes an open difference: the account may trade again. Raises `ReconciliationNotFound`."""
    row: Reconciliation | None = await session.scalar(
        update(Reconciliation)
        .where(Reconciliation.id == number, Reconciliation.resolved_at.is_(None))
        .values(resolved_at=func.clock_timestamp(), resolved_by=actor)
        .returning(Reconciliation)
    )
    if row is None:
        raise ReconciliationNotFound(f"there is no open difference {number}")
    audit.append_entry(
        session,
        actor=actor,
        action="reconciliation.resolved",
        subject=f"reconciliation:{number}",
        user=row.user_id,
        account=row.account_id,
        reason=reason,
    )
    return row


async def orders_by_broker_ids(
    session: AsyncSession, user_id: str, account_id: str, broker_ids: Sequence[str]
) -> dict[str, Order]:
    """Our orders by the broker's ids of them."""
    rows = await session.scalars(
        select(Order)
        .where(Order.user_id == user_id, Order.account_id == account_id)
        .where(Order.broker_order_id.in_(broker_ids))
    )
    return {row.broker_order_id: row for row in rows if row.broker_order_id is not None}


async def orders_by_tags(
    session: AsyncSession, user_id: str, account_id: str, tags: Iterable[str], at: datetime
) -> dict[str, Order]:
    """Our latest orders by their tags, of those whose broker's id nobody knows."""
    rows = await session.scalars(
        select(Order)
        .where(Order.user_id == user_id, Order.account_id == account_id)
        .where(Order.tag.in_(tags), Order.broker_order_id.is_(None))
        .where(Order.created_at.between(at - TAG_AGE, at))
        .order_by(Order.created_at)
    )
    return {row.tag: row for row in rows}
