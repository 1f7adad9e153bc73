"""Lists of orders: a user's orders by page, for a statement, for a worker; and users with recent
orders."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Select,
    Time,
    and_,
    case,
    cast,
    false,
    func,
    literal,
    not_,
    or_,
    select,
    tuple_,
)
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.accounts import accounts_of_user
from infra.database.models import BrokerAccount, Order, StoredCredentials, User
from infra.database.orders.acceptance import place_request
from infra.database.orders.states import OPEN_STATES, rank
from infra.market.calendar import HOME_ZONE_NAME, home_broker
from worker_runtime.jobs.protocol.catalog import OrderRow
from worker_runtime.protocol.broker_record import MarketRule
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState, PlaceOrder, PriceType

#: Names for groups of states.
OPEN, FINAL = "open", "final"


@dataclass(frozen=True, kw_only=True)
class OrderSelection:
    """Which orders to list; a filter that is None is not applied."""

    user_id: str | None = None
    #: States as they are shown, `open` or `final`; empty means all. An order that waits for a
    #: person is `needs_attention` only.
    states: frozenset[str] = frozenset()
    account_id: str | None = None
    symbol: str | None = None
    side: str | None = None
    client_order_id: str | None = None
    #: Accepted at or after `since` and before `until`.
    since: datetime | None = None
    until: datetime | None = None


#: The end of a page: acceptance time and id of its last order.
OrderPosition = tuple[datetime, uuid.UUID]


async def page_of_orders(
    session: AsyncSession,
    selection: OrderSelection,
    *,
    behind: OrderPosition | None = None,
    limit: int = 100,
) -> Sequence[Order]:
    """Returns at most `limit` orders after a position, the newest first."""
    names = ("user_id", "account_id", "symbol", "side", "client_order_id")
    equal = {name: value for name in names if (value := getattr(selection, name)) is not None}
    query = (
        select(Order)
        .filter_by(**equal)
        .order_by(Order.created_at.desc(), Order.id.desc())
        .limit(limit)
    )
    if behind is not None:
        query = query.where(tuple_(Order.created_at, Order.id) < behind)
    if selection.since is not None:
        query = query.where(Order.created_at >= selection.since)
    if selection.until is not None:
        query = query.where(Order.created_at < selection.until)
    if selection.states:
        query = query.where(or_(*(_in_state(state) for state in sorted(selection.states))))
    return (await session.scalars(query)).all()


_WAITS_FOR_A_PERSON = and_(Order.state.in_(OPEN_STATES), Order.attention.is_not(None))


def _in_state(state: str) -> ColumnElement[bool]:
    if state == OPEN:
        return Order.state.in_(OPEN_STATES)
    if state == FINAL:
        return Order.state.in_(FINAL_ORDER_STATES)
    if state == OrderState.NEEDS_ATTENTION:
        return or_(Order.state == state, _WAITS_FOR_A_PERSON)
    return and_(Order.state == state, Order.attention.is_(None))


async def orders_of_statement(
    session: AsyncSession, user_id: str, since: datetime, until: datetime, *, limit: int
) -> list[OrderRow]:
    """Returns at most `limit` orders accepted at or after `since` and before `until`, by account
    and symbol.

    States are as the API shows them. Ids, times and reasons are left out, which make up most of an
    order's bytes when packed.
    """
    state = case((_WAITS_FOR_A_PERSON, OrderState.NEEDS_ATTENTION.value), else_=Order.state).label(
        "state"
    )
    columns = (
        Order.account_id,
        Order.symbol,
        Order.side,
        Order.quantity,
        state,
        Order.filled_quantity,
        Order.average_price,
        Order.lot,
    )
    rows = await session.execute(
        select(*columns)
        .where(Order.user_id == user_id, Order.created_at >= since, Order.created_at < until)
        .order_by(Order.account_id, Order.symbol, Order.side, Order.id)
        .limit(limit)
    )
    left_out: dict[str, Any] = dict.fromkeys(
        ("accepted_at", "id", "client_order_id", "price_type", "time_in_force"), ""
    )
    return [OrderRow(**left_out, price=None, **row._mapping) for row in rows]


#: Orders that go with a claim: 450 bytes each, and a signed message has at most 256 KiB.
MAX_OPEN_ORDERS_PER_CLAIM = 200
#: Days. No broker keeps an order longer than its trading day; the longest one begins on an evening
#: before holidays.
MAX_OPEN_ORDER_AGE_DAYS = 14


async def open_orders_with_accounts(
    session: AsyncSession, user_id: str
) -> tuple[Sequence[StoredCredentials], list[PlaceOrder]]:
    """Returns what a claim needs: the user's accounts and open orders, oldest first."""
    accounts = await accounts_of_user(session, user_id)
    if not accounts:
        return [], []
    age = func.now() - timedelta(days=MAX_OPEN_ORDER_AGE_DAYS)
    newest = (
        select(Order)
        .where(Order.user_id == user_id, Order.state.in_(OPEN_STATES), Order.created_at > age)
        .order_by(Order.created_at.desc())
        .limit(MAX_OPEN_ORDERS_PER_CLAIM)
    )
    orders = (await session.scalars(newest)).all()
    return accounts, [_open_order(order) for order in reversed(orders)]


def _open_order(order: Order) -> PlaceOrder:
    begun = rank(order.state) >= rank(OrderState.SUBMITTING)
    request = place_request(order, "")
    # It is only compared, and a worker of release 0.1.0 would not read a claim with a range market
    # order.
    changes = {"price_type": PriceType.MARKET} if request.price is None else {}
    known = order.broker_order_id
    return msgspec.structs.replace(
        request, broker_order_id=known, begun=begun, lifetime_ms=0, **changes
    )


_DISABLED = select(User.id).where(User.disabled_at.is_not(None))
_clock = cast(func.timezone(HOME_ZONE_NAME, Order.created_at), Time)


def _trades_like(home: MarketRule, hours: Callable[[MarketRule], object]) -> ColumnElement[bool]:
    """Returns True of accounts whose market has the same `hours` in the same zone as a home market.

    A market of another broker may have the name of a home market and hours of its own.
    """
    markets = [
        (name, market)
        for name, plugin in installed_brokers().items()
        for market, rule in plugin.record.markets.items()
        if rule.zone == home.zone and hours(rule) == hours(home)
    ]
    return tuple_(BrokerAccount.broker, BrokerAccount.broker_type).in_(markets)


def _in_evening() -> ColumnElement[bool]:
    """Returns True in the evening session of a home market, which may end on the next morning."""
    evenings: list[ColumnElement[bool]] = []
    for market in home_broker().record.markets.values():
        if (evening := market.evening) is not None:
            begun, not_ended = _clock >= evening.opens, _clock < evening.closes
            hours = or_(begun, not_ended) if evening.ends_next_day else and_(begun, not_ended)
            evenings.append(and_(_trades_like(market, lambda rule: rule.evening), hours))
    return or_(false(), *evenings)


def _first_market() -> ColumnElement[str]:
    """Returns the home market with the earliest bell that somebody traded; the last one of what has
    no bell of theirs."""
    markets = home_broker().record.markets
    *earlier, last = sorted(markets, key=lambda name: markets[name].day.bell)
    if not earlier:
        return literal(last)
    bells = [
        (func.bool_or(_trades_like(markets[name], lambda rule: rule.day.bell)), name)
        for name in earlier
    ]
    return case(*bells, else_=last)


def _recent_users(since: datetime, evening: bool) -> Select[str, str]:
    """Selects users with an order since then, in evenings or by day, and their market; not disabled
    ones."""
    in_evening = _in_evening()
    return (
        select(Order.user_id, _first_market().label("market"))
        .join(
            BrokerAccount,
            and_(
                BrokerAccount.user_id == Order.user_id, BrokerAccount.account_id == Order.account_id
            ),
        )
        .where(Order.created_at >= since, in_evening if evening else not_(in_evening))
        .where(Order.user_id.not_in(_DISABLED))
        .group_by(Order.user_id)
    )


async def count_recent_users(
    session: AsyncSession, since: datetime, *, evening: bool
) -> dict[str, int]:
    """Returns how many users have traded since then, by the market with the earliest bell."""
    users = _recent_users(since, evening).subquery()
    rows = await session.execute(select(users.c.market, func.count()).group_by(users.c.market))
    return {market: count for market, count in rows}


async def recent_users_after(
    session: AsyncSession, since: datetime, *, evening: bool, market: str, after: str, limit: int
) -> list[str]:
    """Returns the next `limit` such users after the id `after`, by id; an empty `market` means
    all."""
    query = _recent_users(since, evening).where(Order.user_id > after)
    if market:
        query = query.having(_first_market() == market)
    return list(await session.scalars(query.order_by(Order.user_id).limit(limit)))
