"""Brings the instruments of a broker into their table: the account that lists them, loads, and
changed lots that wait for an operator.

A load stages the pages of a list in a table that no check reads. `switch_list` puts the whole list
in force in one transaction, so a load that breaks leaves the former list as it was. A newer load
through the same market's account ends an older one, whose switch is refused then.

Brokers differ in what an account lists: all markets, or only its own. So each market of a broker
may have an account, and a list says nothing of the markets of which it has no instrument.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

from sqlalchemy import ColumnElement, delete, exists, func, insert, or_, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.locks import wait_for_turn
from infra.database.models import SCOPED, ApiKey, BrokerAccount, Order, User, upsert
from infra.database.trading.instruments import told_values
from infra.database.trading.models import (
    InstrumentChange,
    InstrumentLoad,
    InstrumentRow,
    InstrumentSource,
    StagedInstrument,
    Webhook,
)
from worker_runtime.protocol.broker_record import Plugin
from worker_runtime.protocol.contract_codes import product_of, read_contract
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.installed_brokers import installed_brokers
from worker_runtime.protocol.instruments import Instrument
from worker_runtime.protocol.order_terms import OrderLot

#: A list with fewer instruments than this share of the listed ones is refused.
MIN_LIST_SHARE = 0.5
#: The actor in the audit trail that puts lists in force.
ACTOR = "instruments"
#: Minutes that an attempt may take (`workflows.calls.load_instruments`).
MAX_LOAD_MIN = 20
_MAX_ERROR_LENGTH = 500


class InstrumentSourceTrades(BerthError, code="INSTRUMENT_SOURCE_TRADES", status=409):
    """The account's user is disabled, or may trade: they have orders, a webhook, or an API key that
    may place orders. Designate an account of a user who is enabled and only lists instruments."""


class InstrumentSourceMissing(BerthError, code="INSTRUMENT_SOURCE_MISSING", status=404):
    """No account is designated to list the instruments of this broker, or of this market. Designate
    one with `berth instruments source set`."""


class InstrumentSourceBusy(BerthError, code="INSTRUMENT_SOURCE_BUSY", retryable=True):
    """The user's worker lists the instruments of another market now, and holds one list at a time.
    The load begins again by itself."""


class InstrumentListRefused(BerthError, code="INSTRUMENT_LIST_REFUSED", status=409):
    """A broker's list of instruments is not put in force: it is empty, much smaller than the list
    before, or has a value that cannot be. The list before stays."""


class InstrumentListChanged(BerthError, code="INSTRUMENT_LIST_CHANGED", retryable=True):
    """The broker's list was read anew while its pages were loaded, as happens when the worker's
    session is replaced. The load begins again by itself."""


class LoadSuperseded(BerthError, code="INSTRUMENT_LOAD_SUPERSEDED", status=409):
    """A newer load of the same broker and market has begun. It puts its list in force instead of
    this one."""


class InstrumentChangeNotFound(BerthError, code="INSTRUMENT_CHANGE_NOT_FOUND", status=404):
    """There is no such change, or it was approved or withdrawn before."""


@dataclass(frozen=True, kw_only=True)
class SwitchedList:
    """Says what a list changed. All are counts of instruments."""

    instruments: int
    added: int
    removed: int
    #: Their lots wait for an operator.
    pending: int


# --- the account that lists
# -------------------------------------------------------------------------


async def set_source(
    session: AsyncSession, broker: str, user_id: str, account_id: str, *, actor: str
) -> InstrumentSource:
    """Designate the account through which a broker's instruments are listed, from the next load on.
    It replaces the one of the account's own market, and leaves those of other markets.

    Raises `InstrumentSourceMissing` if the broker has no such account, `InstrumentSourceTrades`.
    """
    account = await session.get(BrokerAccount, (user_id, account_id))
    if account is None or account.broker != broker:
        raise InstrumentSourceMissing(
            f"User {user_id} has no account {account_id} at {broker}. Store its credentials first."
        )
    await require_not_trading(session, user_id)
    values = {"user_id": user_id, "account_id": account_id, "set_by": actor}
    market = account.broker_type
    key = {"broker": broker, "market": market}
    await session.execute(upsert(InstrumentSource, key, values, set_at=func.clock_timestamp()))
    audit.append_entry(
        session,
        actor,
        "instrument_source.set",
        f"broker:{broker}",
        market=market,
        user=user_id,
        account=account_id,
    )
    return await session.get_one(InstrumentSource, (broker, market), populate_existing=True)


async def delete_source(
    session: AsyncSession, broker: str, market: str = "", *, actor: str
) -> None:
    """Load this broker's instruments no more, or those of one market; the lists stay as they are.
    Raises `InstrumentSourceMissing`."""
    rows = delete(InstrumentSource).where(InstrumentSource.broker == broker)
    if market:
        rows = rows.where(InstrumentSource.market == market)
    markets = (await session.scalars(rows.returning(InstrumentSource.market))).all()
    if not markets:
        raise _no_source(broker, market)
    for deleted in sorted(markets):
        audit.append_entry(
            session, actor, "instrument_source.deleted", f"broker:{broker}", market=deleted
        )


async def list_sources(session: AsyncSession) -> Sequence[InstrumentSource]:
    """Return the designated accounts, by broker and market."""
    source = InstrumentSource
    return (await session.scalars(select(source).order_by(source.broker, source.market))).all()


async def removed_sources(session: AsyncSession) -> Sequence[InstrumentSource]:
    """Return the designated accounts that were removed, by broker and market."""
    source = InstrumentSource
    there = exists().where(
        BrokerAccount.user_id == source.user_id,
        BrokerAccount.account_id == source.account_id,
        BrokerAccount.broker == source.broker,
        BrokerAccount.broker_type == source.market,
    )
    query = select(source).where(~there).order_by(source.broker, source.market)
    return (await session.scalars(query)).all()


async def require_sources(
    session: AsyncSession, broker: str, market: str = ""
) -> Sequence[InstrumentSource]:
    """Return a broker's designated accounts, or that of one market. Raises
    `InstrumentSourceMissing` if there is none or one was removed, and `InstrumentSourceTrades` if a
    user of one trades by now."""
    source = InstrumentSource
    query = select(source).where(source.broker == broker).order_by(source.market)
    if market:
        query = query.where(source.market == market)
    sources = (await session.scalars(query)).all()
    if not sources:
        raise _no_source(broker, market)
    removed = await removed_sources(session)
    for designated in sources:
        if designated in removed:
            raise InstrumentSourceMissing(
                f"Account {designated.account_id} of {designated.user_id}, which lists the"
                f" instruments of {broker}, market {designated.market}, was removed. Designate"
                " another one, or delete the source."
            )
        await require_not_trading(session, designated.user_id)
    return sources


def _no_source(broker: str, market: str) -> InstrumentSourceMissing:
    of_market = f", market {market}" if market else ""
    return InstrumentSourceMissing(f"No account lists the instruments of {broker}{of_market}.")


async def require_not_trading(session: AsyncSession, user_id: str) -> None:
    """Raises `InstrumentSourceTrades` for a user who trades,
    or may, and for one who is disabled."""
    key = ApiKey
    may_trade = or_(~key.role_word.startswith(SCOPED), key.scope_words.contains(["trade"]))
    live = key.revoked_at.is_(None) & or_(
        key.expires_at.is_(None), key.expires_at > func.clock_timestamp()
    )
    for reason, query in (
        ("is disabled", select(User.id).where(User.id == user_id, User.disabled_at.is_not(None))),
        ("has orders", select(Order.id).where(Order.user_id == user_id)),
        (
            "has an API key that may place orders",
            select(key.id).where(key.user_id == user_id, may_trade, live),
        ),
        (
            "has a webhook",
            select(Webhook.id).where(Webhook.user_id == user_id, Webhook.revoked_at.is_(None)),
        ),
    ):
        if await session.scalar(query.limit(1)) is not None:
            raise InstrumentSourceTrades(
                f"User {user_id} {reason}. Designate an account of a user who does nothing else"
                " than list instruments."
            )


# --- loads
# ------------------------------------------------------------------------------------------


async def begin_load(
    session: AsyncSession, broker: str, day: date, market: str = ""
) -> InstrumentLoad:
    """Begin a load through the designated account of a market; ends any other through it.

    `market`: '' for a broker's only account, or the first of several. Raises
    `InstrumentSourceMissing`, `InstrumentSourceTrades`, `InstrumentSourceBusy`.
    """
    await wait_for_turn(session, _turn(broker))
    source = (await require_sources(session, broker, market))[0]
    await _end_running(session, broker, source.market)
    running = InstrumentLoad
    since = func.clock_timestamp() - timedelta(minutes=MAX_LOAD_MIN)
    other = select(running.market).where(
        running.user_id == source.user_id, running.state == "running", running.began_at > since
    )
    if (busy := await session.scalar(other.limit(1))) is not None:
        raise InstrumentSourceBusy(
            f"The worker of user {source.user_id} lists the market {busy} now."
        )
    load = InstrumentLoad(
        broker=broker,
        market=source.market,
        user_id=source.user_id,
        account_id=source.account_id,
        trading_day=day,
        state="running",
    )
    session.add(load)
    await session.flush()
    return load


async def stage_page(
    session: AsyncSession, load_id: int, instruments: Iterable[Instrument]
) -> None:
    """Stages a page of a load that is under way. Raises `LoadSuperseded`."""
    await _require_running(session, load_id)
    rows = [{"load_id": load_id, **told_values(instrument)} for instrument in instruments]
    if rows:
        await session.execute(insert(StagedInstrument), rows)


async def switch_list(
    session: AsyncSession, load_id: int, *, accept_smaller: bool = False, prices_due: bool = False
) -> SwitchedList:
    """Put the staged list in force, all at once.

    Only the markets that the list has are switched. A known instrument keeps its lot: another one
    becomes an `InstrumentChange`. So does another lot of a new instrument than its product or the
    broker's record has. Raises `InstrumentListRefused` if the list is empty, or, without
    `accept_smaller`, has less than half of a market's instruments; `LoadSuperseded`.
    """
    broker = await session.scalar(select(InstrumentLoad.broker).filter_by(id=load_id)) or ""
    await wait_for_turn(session, _turn(broker))  # before the row, as `begin_load` does
    load = await _require_running(session, load_id)
    counts = await _count_by_market(session, StagedInstrument, StagedInstrument.load_id == load_id)
    if not counts:
        raise InstrumentListRefused(f"{broker} listed no instrument.")
    listed = (InstrumentRow.broker == broker) & InstrumentRow.listed
    before = await _count_by_market(session, InstrumentRow, listed)
    for market, count in counts.items():
        if count < before.get(market, 0) * MIN_LIST_SHARE and not accept_smaller:
            raise InstrumentListRefused(
                f"{broker} listed {count} instruments of the market {market}, and {before[market]}"
                " before. If that is right, put the list in force with `berth instruments load"
                f" {broker} --market {load.market} --accept-smaller`."
            )
    load.markets = sorted(counts)
    values = {"load": load_id, "broker": broker, "day": load.trading_day, "markets": load.markets}
    await session.execute(_WITHDRAW_CHANGES, {**values, "actor": ACTOR})
    await session.execute(_ADD_CHANGES, values)
    await _keep_known_lots(session, load)
    removed = len((await session.execute(_UNLIST, values)).all())
    added = await session.scalar(_COUNT_ADDED, values) or 0
    await session.execute(_PUT_IN_FORCE, values)
    pending = await session.scalar(
        select(func.count()).where(
            InstrumentChange.broker == broker, InstrumentChange.resolved_at.is_(None)
        )
    )
    await session.execute(delete(StagedInstrument).where(StagedInstrument.load_id == load_id))
    count = sum(counts.values())
    switched = SwitchedList(instruments=count, added=added, removed=removed, pending=pending or 0)
    load.state, load.ended_at = "loaded", await session.scalar(select(func.clock_timestamp()))
    load.instruments, load.added = switched.instruments, switched.added
    load.removed, load.pending = switched.removed, switched.pending
    load.prices_due = prices_due
    return switched


async def end_load(session: AsyncSession, load_id: int, *, refused: bool, error: str) -> None:
    """End a load that put nothing in force; one that has ended before stays as it is."""
    await session.execute(
        update(InstrumentLoad)
        .where(InstrumentLoad.id == load_id, InstrumentLoad.state == "running")
        .values(
            state="refused" if refused else "failed",
            ended_at=func.clock_timestamp(),
            error=error[:_MAX_ERROR_LENGTH],
        )
    )
    await session.execute(delete(StagedInstrument).where(StagedInstrument.load_id == load_id))


async def latest_loads(session: AsyncSession, *, limit: int = 100) -> Sequence[InstrumentLoad]:
    """Return the last loads of all brokers, the newest first."""
    query = select(InstrumentLoad).order_by(InstrumentLoad.id.desc()).limit(limit)
    return (await session.scalars(query)).all()


async def latest_of_each(session: AsyncSession) -> Sequence[InstrumentLoad]:
    """Return the last load through each market's account, by broker and market."""
    load = InstrumentLoad
    last = select(func.max(load.id)).group_by(load.broker, load.market)
    query = select(load).where(load.id.in_(last)).order_by(load.broker, load.market)
    return (await session.scalars(query)).all()


async def last_ended(session: AsyncSession) -> Sequence[InstrumentLoad]:
    """Return the last load through each market's account that has ended."""
    load = InstrumentLoad
    ended = select(func.max(load.id)).where(load.ended_at.is_not(None))
    last = ended.group_by(load.broker, load.market)
    query = select(load).where(load.id.in_(last)).order_by(load.broker, load.market)
    return (await session.scalars(query)).all()


async def is_loaded(
    session: AsyncSession,
    broker: str,
    market: str,
    day: date,
    *,
    since: datetime,
    with_prices: bool,
) -> bool:
    """Return True if the list of this trading day, of the account of a market, is in force.

    A load that began before `since` does not count; `with_prices`: nor does one without the prices
    of the day.
    """
    load = InstrumentLoad
    query = select(load.id).where(
        load.broker == broker,
        load.market == market,
        load.trading_day == day,
        load.state == "loaded",
        load.began_at >= since,
    )
    if with_prices:
        query = query.where(~load.prices_due)
    return await session.scalar(query.limit(1)) is not None


# --- changed lots
# -----------------------------------------------------------------------------------


async def open_changes(session: AsyncSession, *, limit: int = 1000) -> Sequence[InstrumentChange]:
    """Return lots that differ from the known ones and wait for an operator, the oldest first."""
    query = select(InstrumentChange).where(InstrumentChange.resolved_at.is_(None))
    return (await session.scalars(query.order_by(InstrumentChange.id).limit(limit))).all()


async def approve_change(
    session: AsyncSession, change_id: int, *, actor: str, reason: str
) -> InstrumentChange:
    """Put a changed lot in force within 30 s (`CACHE_TTL_S` of `api/orders/instrument_cache.py`):
    each API keeps the old lot for so long at most. Raises `InstrumentChangeNotFound`."""
    broker = await session.scalar(select(InstrumentChange.broker).filter_by(id=change_id)) or ""
    # A list that is put in force at the same time compares its lots with those in force.
    await wait_for_turn(session, _turn(broker))
    query = select(InstrumentChange).where(
        InstrumentChange.id == change_id, InstrumentChange.resolved_at.is_(None)
    )
    change = await session.scalar(query.with_for_update())
    if change is None:
        raise InstrumentChangeNotFound(f"There is no open change {change_id}.")
    row = InstrumentRow
    await session.execute(
        update(row)
        .where(row.broker == change.broker, row.code == change.code)
        .values(lot_units=change.new_lot_units, lot_value=change.new_lot_value)
    )
    change.resolution, change.resolved_by = "approved", actor
    change.resolved_at = await session.scalar(select(func.clock_timestamp()))
    audit.append_entry(
        session,
        actor,
        "instrument_change.approved",
        f"instrument:{change.broker}/{change.code}",
        old_lot_units=change.old_lot_units,
        old_lot_value=str(change.old_lot_value),
        new_lot_units=change.new_lot_units,
        new_lot_value=str(change.new_lot_value),
        reason=reason,
    )
    return change


class _Lot(NamedTuple):
    units: int
    value: Decimal


async def _keep_known_lots(session: AsyncSession, load: InstrumentLoad) -> None:
    """Give new instruments of a staged list the lot that is known of them, and write an
    `InstrumentChange` where the list has another."""
    staged, known = StagedInstrument, InstrumentRow
    is_known = exists().where(known.broker == load.broker, known.code == staged.code)
    query = select(staged.code, staged.market, staged.lot_units, staged.lot_value).where(
        staged.load_id == load.id, ~is_known
    )
    new_rows = (await session.execute(query)).all()
    plugin = installed_brokers().get(load.broker)
    if not new_rows or plugin is None:
        return
    in_force = await _lots_of_products(session, load)
    changes = []
    for code, market, units, value in new_rows:
        lots = in_force.get(product_of(code)) or _lots_of_form(plugin, market, code)
        if lots and _Lot(units, value) not in lots:
            changes.append((code, lots[0], _Lot(units, value)))
    if not changes:
        return
    await session.execute(
        postgresql.insert(InstrumentChange).on_conflict_do_nothing(),
        [
            {
                "broker": load.broker,
                "code": code,
                "old_lot_units": old.units,
                "old_lot_value": old.value,
                "new_lot_units": new.units,
                "new_lot_value": new.value,
                "since": load.trading_day,
            }
            for code, old, new in changes
        ],
    )
    await session.execute(
        update(staged),
        [
            {"load_id": load.id, "code": code, "lot_units": old.units, "lot_value": old.value}
            for code, old, _ in changes
        ],
    )


async def _lots_of_products(
    session: AsyncSession, load: InstrumentLoad
) -> Mapping[str, Sequence[_Lot]]:
    """Return the lots in force of each product of contracts. It has two after an operator has
    approved one of some of its contracts."""
    row = InstrumentRow
    query = select(row.code, row.lot_units, row.lot_value).where(
        row.broker == load.broker, row.listed, row.market.in_(load.markets)
    )
    lots: dict[str, list[_Lot]] = {}
    for code, units, value in await session.execute(query.order_by(row.code)):
        contract = read_contract(code)
        if contract is None:
            continue
        of_product = lots.setdefault(contract.product, [])
        if _Lot(units, value) not in of_product:
            of_product.append(_Lot(units, value))
    return lots


def _lots_of_form(plugin: Plugin, market: str, code: str) -> Sequence[_Lot]:
    """Return the lot that the broker's record gives the form of a code; none if it gives none."""
    rule = plugin.record.markets.get(market)
    if rule is None:
        return ()
    form, common = rule.symbol_rule(code), rule.lots.get(OrderLot.COMMON)
    if form is None or form.lot_value is None or common is None:
        return ()
    return (_Lot(common.units, form.lot_value),)


def _turn(broker: str) -> str:
    return f"instruments:{broker}"


async def _end_running(session: AsyncSession, broker: str, market: str) -> None:
    load = InstrumentLoad
    running = select(load.id).where(
        load.broker == broker, load.market == market, load.state == "running"
    )
    error = "a newer load of this broker and market has begun"
    for load_id in (await session.scalars(running)).all():
        await end_load(session, load_id, refused=False, error=error)


async def _count_by_market(
    session: AsyncSession,
    row: type[StagedInstrument | InstrumentRow],
    chosen: ColumnElement[bool],
) -> Mapping[str, int]:
    query = select(row.market, func.count()).where(chosen).group_by(row.market)
    return {market: count for market, count in await session.execute(query)}


async def _require_running(session: AsyncSession, load_id: int) -> InstrumentLoad:
    """Requires that the load is under way, and locks it until the transaction ends, so that no
    newer load ends it meanwhile."""
    load = await session.get(InstrumentLoad, load_id, with_for_update=True, populate_existing=True)
    if load is None or load.state != "running":
        raise LoadSuperseded(f"Load {load_id} has ended: {load.error if load else 'it is gone'}.")
    return load


_TOLD = (
    "name, market, kind, ticks, reference, limit_up, limit_down, expires_on, day_trade, underlying"
)
#: An open change that the list does not repeat:
#: the lot in force again, another one, or no such instrument.
_WITHDRAW_CHANGES = text("""
update instrument_changes as known
   set resolution = 'withdrawn', resolved_at = clock_timestamp(), resolved_by = :actor
 where broker = :broker and resolved_at is null
   and code in (select code from instruments
                 where broker = :broker and market = any(cast(:markets as varchar[])))
   and not exists (select from instrument_staging as staged
                    where load_id = :load and staged.code = known.code
                      and lot_units = new_lot_units and lot_value = new_lot_value)
""")
_ADD_CHANGES = text("""
insert into instrument_changes (broker, code, old_lot_units, old_lot_value, new_lot_units,
                                new_lot_value, since)
select broker, code, known.lot_units, known.lot_value, staged.lot_units, staged.lot_value, :day
  from instrument_staging as staged join instruments as known using (code)
 where load_id = :load and broker = :broker
   and (staged.lot_units, staged.lot_value) is distinct from (known.lot_units, known.lot_value)
    on conflict (broker, code) where resolved_at is null do nothing
""")
_UNLIST = text("""
update instruments as known set listed = false
 where broker = :broker and listed and market = any(cast(:markets as varchar[]))
   and not exists (select from instrument_staging where load_id = :load and code = known.code)
returning code
""")
_COUNT_ADDED = text("""
select count(*) from instrument_staging as staged
 where load_id = :load
   and not exists (select from instruments where broker = :broker and code = staged.code)
""")
#: The lot of a known instrument stays as it is.
_PUT_IN_FORCE = text(f"""
insert into instruments (broker, code, lot_units, lot_value, loaded_on, {_TOLD})
select :broker, code, lot_units, lot_value, :day, {_TOLD} from instrument_staging
 where load_id = :load
    on conflict (broker, code) do update
   set loaded_on = excluded.loaded_on, loaded_at = clock_timestamp(), listed = true,
       {", ".join(f"{name} = excluded.{name}" for name in _TOLD.split(", "))}
""")  # noqa: S608 - columns of ours
