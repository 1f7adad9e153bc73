"""The data of the pre-trade checks: an account's limits and its earlier orders."""

from dataclasses import dataclass
from datetime import date, datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.models import BrokerAccount, Order, OrderTag, upsert
from infra.database.trading.models import AccountLimits

#: The columns of `AccountLimits` that are limits.
LIMITS = ("max_quantity", "max_notional", "max_daily_orders", "duplicate_window_s", "price_band")


@dataclass(frozen=True, kw_only=True)
class AccountUsage:
    """An account, its limits, and the tags that it has used today:
    at least as many as it has orders."""

    broker: str
    broker_type: str
    limits: AccountLimits
    tags: int
    #: The end of the certificate that signs the orders of a live account; None: there is none, or
    #: it is not known.
    certificate_expires_at: datetime | None = None


async def account_usage(
    session: AsyncSession, user_id: str, account_id: str, day: date
) -> AccountUsage | None:
    """Returns None if the user has no such account."""
    account = BrokerAccount
    of_account = (AccountLimits.user_id == account.user_id) & (
        AccountLimits.account_id == account.account_id
    )
    of_day = (
        (OrderTag.user_id == account.user_id)
        & (OrderTag.account_id == account.account_id)
        & (OrderTag.trading_day == day)
    )
    query = select(account, AccountLimits, func.coalesce(OrderTag.used, 0))
    query = query.outerjoin(AccountLimits, of_account).outerjoin(OrderTag, of_day)
    this = account.user_id == user_id, account.account_id == account_id
    usage_row = (await session.execute(query.where(*this))).one_or_none()
    if usage_row is None:
        return None
    row, limits, tags = usage_row
    return AccountUsage(
        broker=row.broker,
        broker_type=row.broker_type,
        limits=limits or AccountLimits(),
        tags=tags,
        certificate_expires_at=None if row.simulation else row.certificate_expires_at,
    )


async def count_orders_of_day(
    session: AsyncSession, user_id: str, account_id: str, day: date
) -> int:
    orders = select(func.count(Order.id)).filter_by(
        user_id=user_id, account_id=account_id, trading_day=day
    )
    return int(await session.scalar(orders) or 0)


async def get_limits(session: AsyncSession, user_id: str, account_id: str) -> AccountLimits:
    """Returns the account's own limits; all are None if it has none."""
    return await session.get(AccountLimits, (user_id, account_id)) or AccountLimits()


async def put_limits(
    session: AsyncSession, user_id: str, account_id: str, limits: AccountLimits, *, actor: str
) -> None:
    """Sets all limits of an account, which must exist."""
    values = {name: getattr(limits, name) for name in LIMITS}
    await session.execute(
        upsert(AccountLimits, {"user_id": user_id, "account_id": account_id}, values)
    )
    shown = {name: None if value is None else str(value) for name, value in values.items()}
    audit.append_entry(session, actor, "limits.set", f"account:{user_id}:{account_id}", **shown)
