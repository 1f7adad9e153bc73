"""What blocks an order: a switch, an order of unknown outcome, differences from the broker's books.

`acceptance.py` checks this in the statement that writes an order; `find_refusal` says why it wrote none.

An order that closes a position, or enters one, has further conditions, since brokers have no orders that can
only reduce. It is written under a lock of its account and symbol (`lock_symbol`), and only if no other order
could have changed the position or still could (`conflicting_order`).
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import String, and_, bindparam, func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.models import BrokerAccount, Order
from infra.database.orders.states import OPEN_STATES
from infra.database.trading import switches
from infra.database.trading.models import Reconciliation
from worker_runtime.protocol.errors import (
    AccountBlocked,
    BerthError,
    ReducingOnly,
    SymbolBlocked,
    TradingHalted,
    UnknownAccount,
)
from worker_runtime.protocol.requests import SwitchState

#: Orders of unknown outcome that block another one. An order whose worker ended while submitting it counts as
#: unknown even before it is marked so. (For orders already in a queue the worker checks the same.)
#: `offset 0` keeps PostgreSQL from merging the subqueries: the first needs the index `orders_unsettled` and
#: not `orders_by_state`, and without the second one it reads all events while the tables are new.
#: A rolling code (TXFR1) stands for a contract of its product that only the broker knows.
UNSETTLED_ORDERS = """
select id, created_at from (
    select id, created_at, state from orders
     where :unknown_blocks <> 'off' and user_id = :user_id and account_id = :account_id
       and state in ('unknown', 'submitting')
       and (:unknown_blocks = 'account' or symbol = :symbol
            or left(symbol, 3) = left(:symbol, 3)
               and (symbol ~ '^[A-Z]{2}[A-Z0-9]R[12]$' or :symbol ~ '^[A-Z]{2}[A-Z0-9]R[12]$'))
    offset 0) as begun_orders
 where state = 'unknown' or not exists (
         select from order_events as begun
           join worker_sessions as serving on serving.epoch = cast(begun.data ->> 'epoch' as bigint)
          where begun.event_id = begun_orders.id || '\\:submitting'
            and serving.user_id = :user_id and serving.ended_at is null offset 0)
"""
FIRST_UNSETTLED = text(
    f"select id from ({UNSETTLED_ORDERS}) as unsettled order by created_at limit 1"  # noqa: S608 - ours
).bindparams(
    *(bindparam(name, type_=String) for name in ("unknown_blocks", "user_id", "account_id", "symbol"))
)


async def find_refusal(
    session: AsyncSession,
    *,
    user_id: str,
    account_id: str,
    symbol: str,
    reduce_only: bool,
    unknown_blocks: str,
) -> BerthError:
    """Returns why an order was not accepted."""
    state = (await switches.switch_of_user(session, user_id)).of(account_id)
    if state is SwitchState.HALTED:
        return TradingHalted()
    if state is SwitchState.REDUCING and not reduce_only:
        return ReducingOnly()
    wanted = {
        "unknown_blocks": unknown_blocks,
        "user_id": user_id,
        "account_id": account_id,
        "symbol": symbol,
    }
    blocking = await session.scalar(FIRST_UNSETTLED, wanted)
    if blocking is not None:
        return SymbolBlocked(f"the outcome of order {blocking} in this account is unknown; settle it first")
    difference = await session.scalar(
        select(Reconciliation.id)
        .where(Reconciliation.user_id == user_id, Reconciliation.account_id == account_id)
        .where(Reconciliation.blocks, Reconciliation.resolved_at.is_(None))
        .limit(1)
    )
    if difference is not None:
        return AccountBlocked(
            f"reconciliation {difference} of this account is open; a person has to look first"
        )
    account = select(BrokerAccount.account_id).where(
        BrokerAccount.user_id == user_id, BrokerAccount.account_id == account_id
    )
    if await session.scalar(account) is None:
        return UnknownAccount(f"user {user_id} has no account {account_id}")
    # What blocked the order was settled since.
    return SymbolBlocked("another order had to be settled first; it is now: place the order again")


#: The first half of these advisory locks' names; the timeline uses another one.
_SYMBOL_LOCKS = 0x6275


async def database_clock(session: AsyncSession) -> datetime:
    """Returns PostgreSQL's time, which stamps orders."""
    found = await session.scalar(select(func.clock_timestamp()))
    assert isinstance(found, datetime)  # noqa: S101
    return found


async def lock_symbol(session: AsyncSession, user_id: str, account_id: str, symbol: str) -> None:
    """Waits for the lock of one symbol in an account, held until the transaction ends."""
    name = func.hashtext(f"{user_id}/{account_id}/{symbol}")
    await session.execute(select(func.pg_advisory_xact_lock(_SYMBOL_LOCKS, name)))


async def conflicting_order(
    session: AsyncSession,
    user_id: str,
    account_id: str,
    symbol: str,
    side: str,
    since: datetime,
    but: Collection[str] = (),
) -> Order | None:
    """Returns an open order on this side ('' for both), or one with fills that changed since `since`.

    Ignores orders whose client order id is in `but`.
    """
    is_open = Order.state.in_(OPEN_STATES)
    order: Order | None = await session.scalar(
        select(Order)
        .where(Order.user_id == user_id, Order.account_id == account_id, Order.symbol == symbol)
        .where(Order.client_order_id.not_in(but))
        .where(
            or_(
                and_(is_open, Order.side == side) if side else is_open,
                and_(Order.updated_at >= since, Order.filled_quantity > 0),
            )
        )
        .order_by(Order.created_at.desc())
        .limit(1)
    )
    return order


async def orders_by_client_ids(session: AsyncSession, user_id: str, ids: Collection[str]) -> dict[str, Order]:
    found = await session.scalars(
        select(Order).where(Order.user_id == user_id, Order.client_order_id.in_(ids))
    )
    return {order.client_order_id: order for order in found}
