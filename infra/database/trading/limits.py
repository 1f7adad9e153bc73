"""What the pre-trade checks ask PostgreSQL: an account's limits, and what was ordered already."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal

from sqlalchemy import Date, String, bindparam, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import Order
from infra.database.trading.models import AccountLimits

#: How far back a price of the user's own fills counts as the last known one.
PRICE_AGE = timedelta(hours=24)


@dataclass(frozen=True, kw_only=True)
class LimitOverrides:
    """An account's own limits; None where the settings' hold."""

    max_quantity: int | None = None
    max_notional: Decimal | None = None
    max_daily_orders: int | None = None
    #: Seconds.
    duplicate_window_s: int | None = None


@dataclass(frozen=True, kw_only=True)
class AccountUsage:
    """An account, its limits, and how many tags it has used today: at least as many as it has orders."""

    broker: str
    broker_type: str
    limits: LimitOverrides
    tags: int


_USAGE = text("""
select a.broker, a.broker_type, l.max_quantity, l.max_notional, l.max_daily_orders, l.duplicate_window_s,
       coalesce(t.last, 0) as tags
  from broker_accounts a
  left join account_limits l on l.user_id = a.user_id and l.account_id = a.account_id
  left join order_tags t
         on t.user_id = a.user_id and t.account_id = a.account_id and t.trading_day = :day
 where a.user_id = :user_id and a.account_id = :account_id
""").bindparams(
    bindparam("user_id", type_=String), bindparam("account_id", type_=String), bindparam("day", type_=Date)
)


async def account_usage(
    session: AsyncSession, user_id: str, account_id: str, day: date
) -> AccountUsage | None:
    """None if the user has no such account."""
    values = {"user_id": user_id, "account_id": account_id, "day": day}
    row = (await session.execute(_USAGE, values)).one_or_none()
    if row is None:
        return None
    return AccountUsage(
        broker=row.broker,
        broker_type=row.broker_type,
        limits=LimitOverrides(
            max_quantity=row.max_quantity,
            max_notional=row.max_notional,
            max_daily_orders=row.max_daily_orders,
            duplicate_window_s=row.duplicate_window_s,
        ),
        tags=row.tags,
    )


async def count_orders_of_day(session: AsyncSession, user_id: str, account_id: str, day: date) -> int:
    found = select(func.count()).where(
        Order.user_id == user_id, Order.account_id == account_id, Order.trading_day == day
    )
    return int(await session.scalar(found) or 0)


async def last_price(session: AsyncSession, user_id: str, symbol: str) -> Decimal | None:
    """The average price of the user's last fill in this symbol, if it is not too old."""
    return await session.scalar(
        select(Order.average_price)
        .where(Order.user_id == user_id, Order.created_at > func.clock_timestamp() - PRICE_AGE)
        .where(Order.symbol == symbol, Order.average_price.is_not(None))
        .order_by(Order.created_at.desc())
        .limit(1)
    )


async def client_id_used(session: AsyncSession, user_id: str, client_order_id: str) -> bool:
    """Whether this client order id was used: a repeat is answered, not checked."""
    found = select(Order.id).where(Order.user_id == user_id, Order.client_order_id == client_order_id)
    return await session.scalar(found) is not None


async def find_duplicate(
    session: AsyncSession, *, user_id: str, client_order_id: str, fingerprint: str, window: float
) -> str | None:
    """Client order id of another order for the same that was accepted within `window` seconds, whatever
    became of it. Until the transaction ends, nobody else looks for a twin of this one."""
    lock = func.hashtextextended(f"twin {user_id} {fingerprint}", 0)
    await session.execute(select(func.pg_advisory_xact_lock(lock)))
    return await session.scalar(
        select(Order.client_order_id)
        .where(Order.user_id == user_id, Order.fingerprint == fingerprint)
        .where(Order.client_order_id != client_order_id)
        .where(Order.created_at > func.clock_timestamp() - timedelta(seconds=window))
        .order_by(Order.created_at.desc())
        .limit(1)
    )


async def get_limits(session: AsyncSession, user_id: str, account_id: str) -> LimitOverrides:
    row = await session.get(AccountLimits, (user_id, account_id))
    if row is None:
        return LimitOverrides()
    return LimitOverrides(**{name: getattr(row, name) for name in LimitOverrides.__dataclass_fields__})


async def put_limits(
    session: AsyncSession, user_id: str, account_id: str, limits: LimitOverrides, *, actor: str
) -> None:
    """Sets all limits of an account, which exists."""
    values = {name: getattr(limits, name) for name in LimitOverrides.__dataclass_fields__}
    row = insert(AccountLimits).values(user_id=user_id, account_id=account_id, **values)
    await session.execute(row.on_conflict_do_update(index_elements=["user_id", "account_id"], set_=values))
    shown = {name: None if value is None else str(value) for name, value in values.items()}
    audit.append_entry(
        session, actor=actor, action="limits.set", subject=f"account:{user_id}:{account_id}", **shown
    )
