"""The data of the pre-trade checks: an account's limits and its earlier orders."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import BrokerAccount, Order, OrderTag, upsert
from infra.database.trading.models import AccountLimits

#: The last price of a symbol is taken from the user's fills of this time.
PRICE_AGE = timedelta(hours=24)
#: The columns of `AccountLimits` that are limits.
LIMITS = ("max_quantity", "max_notional", "max_daily_orders", "duplicate_window_s")


@dataclass(frozen=True, kw_only=True)
class AccountUsage:
    """An account, its limits, and the tags that it has used today: at least as many as it has orders."""

    broker: str
    broker_type: str
    limits: AccountLimits
    tags: int


async def account_usage(
    session: AsyncSession, user_id: str, account_id: str, day: date
) -> AccountUsage | None:
    """Returns None if the user has no such account."""
    account = BrokerAccount
    of_account = (AccountLimits.user_id == account.user_id) & (AccountLimits.account_id == account.account_id)
    of_day = (
        (OrderTag.user_id == account.user_id)
        & (OrderTag.account_id == account.account_id)
        & (OrderTag.trading_day == day)
    )
    found = (
        await session.execute(
            select(account, AccountLimits, func.coalesce(OrderTag.last, 0))
            .outerjoin(AccountLimits, of_account)
            .outerjoin(OrderTag, of_day)
            .where(account.user_id == user_id, account.account_id == account_id)
        )
    ).one_or_none()
    if found is None:
        return None
    row, limits, tags = found
    return AccountUsage(
        broker=row.broker, broker_type=row.broker_type, limits=limits or AccountLimits(), tags=tags
    )


async def count_orders_of_day(session: AsyncSession, user_id: str, account_id: str, day: date) -> int:
    found = select(func.count()).where(
        Order.user_id == user_id, Order.account_id == account_id, Order.trading_day == day
    )
    return int(await session.scalar(found) or 0)


async def last_price(session: AsyncSession, user_id: str, symbol: str) -> Decimal | None:
    """Returns the average price of the user's last fill in this symbol within `PRICE_AGE`."""
    return await session.scalar(
        select(Order.average_price)
        .where(Order.user_id == user_id, Order.created_at > func.clock_timestamp() - PRICE_AGE)
        .where(Order.symbol == symbol, Order.average_price.is_not(None))
        .order_by(Order.created_at.desc())
        .limit(1)
    )


async def client_id_used(session: AsyncSession, user_id: str, client_order_id: str) -> bool:
    """Whether this client order id was used: a repeat is answered without checks."""
    found = select(Order.id).where(Order.user_id == user_id, Order.client_order_id == client_order_id)
    return await session.scalar(found) is not None


async def find_duplicate(
    session: AsyncSession, *, user_id: str, client_order_id: str, fingerprint: str, window: float
) -> str | None:
    """Returns the client order id of another order with this fingerprint, accepted within `window` seconds.

    Holds a lock until the transaction ends, so that of two equal orders at once one is found.
    """
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


async def get_limits(session: AsyncSession, user_id: str, account_id: str) -> AccountLimits:
    """Returns the account's own limits; all are None if it has none."""
    return await session.get(AccountLimits, (user_id, account_id)) or AccountLimits()


async def put_limits(
    session: AsyncSession, user_id: str, account_id: str, limits: AccountLimits, *, actor: str
) -> None:
    """Sets all limits of an account, which must exist."""
    values = {name: getattr(limits, name) for name in LIMITS}
    await session.execute(upsert(AccountLimits, {"user_id": user_id, "account_id": account_id}, values))
    shown = {name: None if value is None else str(value) for name, value in values.items()}
    audit.append_entry(
        session, actor=actor, action="limits.set", subject=f"account:{user_id}:{account_id}", **shown
    )
