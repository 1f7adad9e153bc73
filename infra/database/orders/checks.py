"""Finds what blocks an order: a switch, an order of unknown outcome, a difference from the broker's
books.

The statement that writes an order checks this (`acceptance.py`). If it wrote none, `find_refusal`
says why.

An order that closes a position, or enters one, has further conditions, since brokers have no orders
that can only reduce. It is written under a lock of its account and symbol (`lock_symbol`), and only
if no other order could have changed the position or still could (`conflicting_order`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Self

from sqlalchemy import ColumnElement, String, and_, bindparam, func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.accounts import rejection_of
from infra.database.models import BrokerAccount, Order
from infra.database.orders.states import OPEN_STATES
from infra.database.trading import switches
from infra.database.trading.reconciliations import blocking_difference
from infra.database.users import UserDisabled, is_disabled
from worker_runtime.protocol.contract_codes import (
    product_of,
    same_contract_pattern,
)
from worker_runtime.protocol.errors import (
    AccountBlocked,
    BerthError,
    ReducingOnly,
    SymbolBlocked,
    TradingHalted,
    UnknownAccount,
)
from worker_runtime.protocol.order_terms import (
    OpenClose,
    OrderCondition,
    OrderLot,
)
from worker_runtime.protocol.requests import SwitchState

#: Orders of unknown outcome that block another one. An order whose worker ended while submitting it
#: counts as unknown even before it is marked so. (For orders already in a queue the worker checks
#: the same.) `offset 0` keeps PostgreSQL from merging the subqueries: the first needs the index
#: `orders_unsettled` and not `orders_by_state`, and without the second one it reads all events
#: while the tables are new. `same_contract` is the pattern of other symbols that may name the same
#: contract (`same_contract_pattern`), or null.
UNSETTLED_ORDERS = """
select id, created_at from (
    select id, created_at, state from orders
     where :unknown_blocks <> 'off' and user_id = :user_id and account_id = :account_id
       and state in ('unknown', 'submitting')
       and (:unknown_blocks = 'account' or symbol = :symbol or symbol ~ :same_contract)
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
    *(
        bindparam(name, type_=String)
        for name in ("unknown_blocks", "user_id", "account_id", "symbol", "same_contract")
    )
)


@dataclass(frozen=True, kw_only=True)
class CheckedTerms:
    """Holds what is checked of a new order, or of one at another price. `trading_day` is the date
    in the home zone (`infra/market/calendar.py`)."""

    user_id: str
    account_id: str
    symbol: str
    quantity: int
    price_type: str
    price: Decimal | None
    time_in_force: str
    trading_day: date
    #: The order can only make a position smaller.
    reduce_only: bool = False
    lot: str = OrderLot.COMMON
    condition: str = OrderCondition.CASH
    open_close: str = OpenClose.AUTO

    @classmethod
    def of(cls, order: Order, quantity: int, price: Decimal) -> Self:
        """Returns an order with this quantity (lots) at this price."""
        own = {name: getattr(order, name) for name in cls.__dataclass_fields__}
        return cls(**own | {"quantity": quantity, "price": price})


async def find_refusal(
    session: AsyncSession, order: CheckedTerms, unknown_blocks: str
) -> BerthError | None:
    """Returns what keeps an order, or another price of one, from being accepted; None: nothing does
    now."""
    user_id, account_id = order.user_id, order.account_id
    if await is_disabled(session, user_id):
        return UserDisabled(f"User {user_id} is disabled and cannot place orders.")
    held = await switches.holding_switch(session, user_id, account_id)
    if held is not None and held.state == SwitchState.HALTED:
        return TradingHalted(f"{switches.described(held)}; cancels still pass")
    if held is not None and not order.reduce_only:
        return ReducingOnly(
            f"{switches.described(held)}; orders that make a position smaller still pass"
        )
    terms = {
        "user_id": user_id,
        "account_id": account_id,
        "symbol": order.symbol,
        "same_contract": same_contract_pattern(order.symbol),
    }
    blocking = await session.scalar(FIRST_UNSETTLED, terms | {"unknown_blocks": unknown_blocks})
    if blocking is not None:
        return SymbolBlocked(
            f"The outcome of order {blocking} in this account is unknown. Berth asks the broker "
            "about it. Call `recheck` to ask now, or ask an operator to call `resolve`."
        )
    difference = await blocking_difference(session, user_id, account_id)
    if difference is not None:
        return AccountBlocked(
            f"Difference {difference} between this account and the broker is open. "
            "Ask an operator to settle it."
        )
    account = await session.get(BrokerAccount, (user_id, account_id))
    if account is None:
        return UnknownAccount(f"user {user_id} has no account {account_id}")
    return rejection_of(account) if account.login_rejected else None


#: The first half of these advisory locks' names; the timeline uses another one.
_SYMBOL_LOCK_CLASS = 0x6275


async def database_clock(session: AsyncSession) -> datetime:
    """Returns PostgreSQL's time, which stamps orders."""
    now: datetime = (await session.scalars(select(func.clock_timestamp()))).one()
    return now


async def lock_symbol(session: AsyncSession, user_id: str, account_id: str, symbol: str) -> None:
    """Waits for the lock of one symbol in an account, held until the transaction ends.

    Contracts of one product share it, and so do all symbols that begin with the same three
    characters. Every release takes it by this name: during an update two of them run side by side,
    and each would close the same position under a lock of its own.
    """
    name = func.hashtext(f"{user_id}/{account_id}/{product_of(symbol)[:3]}")
    await session.execute(select(func.pg_advisory_xact_lock(_SYMBOL_LOCK_CLASS, name)))


async def conflicting_order(
    session: AsyncSession,
    user_id: str,
    account_id: str,
    symbol: str,
    side: str,
    since: datetime,
    but: Collection[str] = (),
) -> Order | None:
    """Returns an open order on this side ('' for both), or one with fills that changed since
    `since`.

    Ignores orders whose client order id is in `but`. A rolling code and what it may stand for are
    one symbol.
    """
    is_open: ColumnElement[bool] = Order.state.in_(OPEN_STATES)
    if side:
        is_open = and_(is_open, Order.side == side)
    filled_since = and_(Order.updated_at >= since, Order.filled_quantity > 0)
    orders = select(Order).filter_by(user_id=user_id, account_id=account_id)
    orders = orders.where(Order.client_order_id.not_in(but), or_(is_open, filled_since))
    is_same: ColumnElement[bool] = Order.symbol == symbol
    if (pattern := same_contract_pattern(symbol)) is not None:
        is_same = or_(is_same, Order.symbol.regexp_match(pattern))
    rows = await session.scalars(orders.where(is_same).order_by(Order.created_at.desc()).limit(1))
    return rows.one_or_none()


async def orders_by_client_ids(
    session: AsyncSession, user_id: str, ids: Collection[str]
) -> dict[str, Order]:
    query = select(Order).filter_by(user_id=user_id).where(Order.client_order_id.in_(ids))
    return {order.client_order_id: order for order in await session.scalars(query)}
