"""Closes positions. The quantity is the broker's, and two closes of one position are never both
sent.

The broker is asked for positions and balance through the user's worker.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Self
from uuid import uuid4
from weakref import WeakValueDictionary

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from api.http.errors import CloseInvalid, IntentExpired, NoPosition, PositionBusy
from api.orders.placer import OrderPlacer, ParentRequest, PendingOrder, PlacementResult
from api.orders.schemas import MAX_QUANTITY, OrderRequest
from api.positions.parts import part_ids, split_close, whole_result
from api.positions.schemas import ClosePositionRequest, PricedBody
from api.workers.answers import AnswerListener
from api.workers.requests import WorkerRequests
from infra.database import accounts
from infra.database.engine import Database
from infra.database.models import Order as Row
from infra.database.orders import checks as order_checks
from infra.database.trading.reconciliations import FILL_MARGIN
from infra.worker_calls.client import NoAnswer
from worker_runtime.protocol.broker_record import MarketRule
from worker_runtime.protocol.broker_reports import Position
from worker_runtime.protocol.contract_codes import may_be_same_contract
from worker_runtime.protocol.errors import BerthError, MalformedMessage, WorkerLost
from worker_runtime.protocol.installed_brokers import market_of
from worker_runtime.protocol.messages import Side
from worker_runtime.protocol.order_terms import OpenClose
from worker_runtime.protocol.requests import AccountReport, QueryAccount, decode_report

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class Portfolio:
    database: Database
    answers: AnswerListener
    worker_requests: WorkerRequests

    async def report(
        self,
        user_id: str,
        account_id: str,
        seconds: float,
        *,
        orders: bool = False,
        positions: bool = False,
        balance: bool = False,
    ) -> AccountReport:
        """Asks the user's worker, and starts it if there is none. Only with `orders` the broker
        says how far behind its lists are.

        Raises `AccountNotFound`, `LoginRejected`, `NoAnswer` after `seconds`, what the worker or
        the broker said, or why there is no worker; `ValkeyUnavailable`. A question that nobody took
        by then is taken back.
        """
        async with self.database.session() as session:
            await accounts.require_login(session, user_id, account_id)
        query = QueryAccount(
            request_id=f"query:{uuid4()}",
            user_id=user_id,
            account_id=account_id,
            orders=orders,
            positions=positions,
            balance=balance,
            reply_to=self.answers.channels.name_of(user_id),
            generation=self.answers.generation,
        )
        task = self.worker_requests.send(query, seconds)
        await asyncio.wait({task})
        if task.cancelled():
            raise NoAnswer("this process is stopping")
        answer = task.result()
        if answer.failure is not None:
            raise answer.failure.error()
        try:
            report = decode_report(answer.report or {})
        except MalformedMessage:
            log.error("report_malformed", user=user_id)
            raise BerthError("the worker's report cannot be read") from None
        if balance and report.balance is None:
            raise WorkerLost("the worker's report has no balance")
        return report


#: Seconds for the broker's positions: as long as a request for them waits by itself.
POSITIONS_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class PositionClose:
    """A position to close; `quantity` None: all of it."""

    user_id: str
    account_id: str
    symbol: str
    client_order_id: str
    parent: ParentRequest
    actor: str
    pricing: PricedBody
    quantity: int | None
    #: True: only a long position; False: only a short one; None: either.
    is_long: bool | None = None
    #: Client order id of the order that opens a position afterwards; None: nothing is opened.
    opening_order_id: str | None = None

    @classmethod
    def of(
        cls,
        body: ClosePositionRequest,
        user_id: str,
        account_id: str,
        symbol: str,
        actor: str,
        is_long: bool | None = None,
    ) -> Self:
        fingerprint = body.fingerprint(account_id, symbol)
        return cls(
            user_id=user_id,
            account_id=account_id,
            symbol=symbol,
            client_order_id=body.client_order_id,
            parent=ParentRequest(fingerprint=fingerprint, origin="close", reduce_only=True),
            actor=actor,
            pricing=body,
            quantity=body.quantity,
            is_long=is_long,
        )

    def closes(self, position: Position) -> bool:
        """Returns True if it may mean this position. An entry closes the other side, whatever its
        condition."""
        held, condition = position.held(self.pricing.lot), self.pricing.condition
        if (
            self.opening_order_id is not None
        ):  # of shares it may not open next to lots on the other side
            held, condition = held or position.quantity, None
        return (
            may_be_same_contract(position.symbol, self.symbol)
            and held != 0
            and self.is_long in (None, held > 0)
            and condition in (None, position.condition)
        )


@dataclass(frozen=True)
class Holdings:
    """The positions of an account, and PostgreSQL's time before which fills are in them for
    certain."""

    positions: Sequence[Position]
    since: datetime


@dataclass(frozen=True)
class QuietRule:
    """Says which other orders in an account and symbol keep an order from being placed: those that
    work, and those that were filled since `since`, PostgreSQL's time."""

    since: datetime
    #: Only orders on this side count; empty: on any side.
    side: str = ""
    #: Client order ids of orders that do not count.
    except_ids: Sequence[str] = ()


class PositionCloser:
    def __init__(
        self, database: Database, placer: OrderPlacer, portfolio: Portfolio, *, connections: int
    ) -> None:
        """`connections`: to the database, of this process."""
        self._database = database
        self._placer = placer
        self._portfolio = portfolio
        # A write holds one connection, perhaps while it waits for another process's lock, and needs
        # a second one. So at most half of them write at a time, and a user has one turn at a time.
        self._writing = asyncio.Semaphore(max(1, connections // 2))
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read_holdings(
        self, user_id: str, account_id: str, not_after: float = math.inf
    ) -> Holdings:
        """Asks the broker for the positions of an account. Raises what `Portfolio.report`
        raises."""
        async with self._database.session(autocommit=True) as session:
            now = await order_checks.database_clock(session)
        seconds = max(0.0, min(POSITIONS_TIMEOUT_S, not_after - time.monotonic()))
        report = await self._portfolio.report(
            user_id, account_id, seconds, orders=True, positions=True
        )
        # A fill that the position may not show yet must not be closed, or entered, a second time.
        # Positions are as old as the list of orders only where the broker says so.
        behind = timedelta(milliseconds=report.behind_ms)
        certain = report.absence_certain and report.positions_agree
        return Holdings(report.positions, now - (behind if certain else max(FILL_MARGIN, behind)))

    async def require_quiet(
        self, user_id: str, account_id: str, symbol: str, quiet: QuietRule
    ) -> None:
        """Raises `PositionBusy` if an order in a symbol conflicts by the rule `quiet`."""
        async with self._database.session(autocommit=True) as session:
            await _require_quiet(session, user_id, account_id, symbol, quiet)

    async def close_position(
        self, close: PositionClose, wait: float, *, not_after: float = math.inf
    ) -> PlacementResult:
        """Places the order that closes the position, and waits for its outcome up to `wait`
        seconds.

        `not_after`: an instant on `time.monotonic` after which no order is written, and none sent.
        A repeat returns the first order's outcome, without reading the position again. Raises
        `NoPosition`, `CloseInvalid`, `PositionBusy`, `IntentExpired`, `ClientOrderIdReused` for
        another close, what `Portfolio.report` and `OrderPlacer.place_order` raise.
        """
        async with self._database.session() as session:
            ids = part_ids(close.client_order_id)
            known = await order_checks.orders_by_client_ids(session, close.user_id, ids)
        if known:
            return await self._repeat(known, ids, close.parent, wait, close.actor)
        holdings = await self.read_holdings(close.user_id, close.account_id, not_after)
        position = _choose_position(close, holdings)
        if position is None:
            # An order that works or was just filled may have made such a position, or make it yet.
            own_ids = [] if close.opening_order_id is None else [close.opening_order_id]
            await self.require_quiet(
                close.user_id,
                close.account_id,
                close.symbol,
                QuietRule(holdings.since, except_ids=own_ids),
            )
            raise NoPosition
        order = _close_order(close, position)
        # What works on the other side would be filled next to the position that is opened
        # afterwards.
        side = order.side.value if close.opening_order_id is None else ""
        return await self.place_alone(
            close.user_id,
            order,
            close.parent,
            wait,
            close.actor,
            quiet=QuietRule(holdings.since, side),
            not_after=not_after,
        )

    async def place_alone(
        self,
        user_id: str,
        body: OrderRequest,
        parent: ParentRequest,
        wait: float,
        actor: str,
        *,
        quiet: QuietRule,
        not_after: float = math.inf,
    ) -> PlacementResult:
        """Places an order, a close above the market's maximum as several, and waits for the outcome
        up to `wait` seconds.

        Only while no other order conflicts by the rule `quiet`. `not_after` as in `close_position`.
        Raises `PositionBusy`, `IntentExpired` and what `OrderPlacer.place_order` raises.
        """
        (placed,) = await self.place_together(
            user_id, [(body, parent)], wait, actor, quiet=quiet, not_after=not_after
        )
        return placed

    async def place_together(
        self,
        user_id: str,
        orders: Sequence[tuple[OrderRequest, ParentRequest]],
        wait: float,
        actor: str,
        *,
        quiet: QuietRule | None,
        not_after: float = math.inf,
        guard: Callable[[AsyncSession], Awaitable[None]] | None = None,
    ) -> list[PlacementResult]:
        """Places orders of one account and symbol as `place_alone` does: all of them are written,
        or none.

        `quiet` None: whatever else works or was filled. `guard` runs in the transaction that writes
        them, and keeps them from being written by raising.
        """
        first = orders[0][0]
        where = (user_id, first.account_id, first.symbol)
        ids = [client_id for body, _ in orders for client_id in part_ids(body.client_order_id)]
        written: list[list[PendingOrder | PlacementResult]] = []
        async with self._user_turn(user_id), self._database.session() as session:
            if quiet is not None:
                await order_checks.lock_symbol(session, *where)
            if guard is not None:
                await guard(session)
            known = await order_checks.orders_by_client_ids(session, user_id, ids)
            if not known:  # else an equal request was quicker
                if quiet is not None:
                    await _require_quiet(session, *where, quiet)
                if time.monotonic() >= not_after:
                    raise IntentExpired("its deadline had passed before the order could be written")
                written = await self._write_orders(session, user_id, orders, actor, not_after)
        if known:
            return await self._repeat_all(known, orders, wait, actor, guarded=guard is not None)
        return list(await asyncio.gather(*(self._follow_parts(parts, wait) for parts in written)))

    async def _write_orders(
        self,
        session: AsyncSession,
        user_id: str,
        orders: Sequence[tuple[OrderRequest, ParentRequest]],
        actor: str,
        not_after: float,
    ) -> list[list[PendingOrder | PlacementResult]]:
        """Writes orders in the caller's transaction, and returns the parts of each: several for a
        close above the market's maximum, else one."""
        written = []
        for body, parent in orders:
            parts = await _parts_of(session, user_id, body, parent)
            written.append(
                [
                    await self._placer.write_order(
                        user_id, part, actor, parent=parent, session=session, not_after=not_after
                    )
                    for part in parts
                ]
            )
        return written

    async def check_together(
        self, user_id: str, orders: Sequence[tuple[OrderRequest, ParentRequest]]
    ) -> None:
        """Raises what orders would be refused for if `place_together` placed them now, apart from
        other orders in the symbol. Writes nothing."""
        for body, parent in orders:
            async with self._database.session(autocommit=True) as session:
                parts = await _parts_of(session, user_id, body, parent)
            for part in parts:
                await self._placer.check_order(user_id, part, parent=parent)

    async def _repeat_all(
        self,
        known: Mapping[str, Row],
        orders: Sequence[tuple[OrderRequest, ParentRequest]],
        wait: float,
        actor: str,
        *,
        guarded: bool,
    ) -> list[PlacementResult]:
        """Returns the outcomes of those orders that an equal request has written."""
        repeats = []
        for body, parent in orders:
            row = known.get(body.client_order_id)
            if row is not None:
                # Guarded ids are made of what was asked for, so whatever has them is the same
                # request.
                own = replace(parent, fingerprint=row.fingerprint) if guarded else parent
                ids = part_ids(body.client_order_id)
                repeats.append(self._repeat(known, ids, own, wait, actor))
        return list(await asyncio.gather(*repeats))

    async def _follow_parts(
        self, parts: Sequence[PendingOrder | PlacementResult], wait: float
    ) -> PlacementResult:
        follow = self._placer.follow_order
        return whole_result(await asyncio.gather(*(follow(part, wait) for part in parts)))

    async def _repeat(
        self,
        known: Mapping[str, Row],
        ids: Sequence[str],
        parent: ParentRequest,
        wait: float,
        actor: str,
    ) -> PlacementResult:
        """Returns the outcome of what an equal request has written; sends what that may not have
        sent."""
        rows = [known[client_id] for client_id in ids if client_id in known]
        body = OrderRequest.model_validate(rows[0], from_attributes=True)
        bodies = [body.model_copy(update={"client_order_id": row.client_order_id}) for row in rows]
        placed = (
            self._placer.place_order(rows[0].user_id, order, wait, actor, parent=parent)
            for order in bodies
        )
        return whole_result(await asyncio.gather(*placed))

    @asynccontextmanager
    async def _user_turn(self, user_id: str) -> AsyncIterator[None]:
        lock = self._turns.setdefault(user_id, asyncio.Lock())
        async with lock, self._writing:
            yield


async def _parts_of(
    session: AsyncSession, user_id: str, body: OrderRequest, parent: ParentRequest
) -> list[OrderRequest]:
    """Returns the orders of a request: several for a close above the market's maximum."""
    if not parent.reduce_only:
        return [body]
    return split_close(body, await _find_market(session, user_id, body))


async def _find_market(session: AsyncSession, user_id: str, order: OrderRequest) -> MarketRule:
    """Returns the market of an order's account. Raises `AccountNotFound`, `BrokerNotInstalled`."""
    account = await accounts.require_account(session, user_id, order.account_id)
    _, market = market_of(account.broker, account.broker_type)
    return market


async def _require_quiet(
    session: AsyncSession, user_id: str, account_id: str, symbol: str, quiet: QuietRule
) -> None:
    conflict = await order_checks.conflicting_order(
        session, user_id, account_id, symbol, quiet.side, quiet.since, quiet.except_ids
    )
    if conflict is not None:
        raise PositionBusy(f"order {conflict.id} works on this position, or has just changed it")


def _choose_position(close: PositionClose, holdings: Holdings) -> Position | None:
    """Returns the position that a close means, or None if there is none. Raises `CloseInvalid` if
    it may mean several, or one under another symbol."""
    candidates = [position for position in holdings.positions if close.closes(position)]
    positions = [position for position in candidates if position.symbol == close.symbol]
    if candidates and not positions:
        raise CloseInvalid(
            f"{close.symbol} may mean {candidates[0].symbol}, in which there is a position."
            " Name that symbol."
        )
    if len(positions) > 1:
        kinds = ", ".join(sorted(position.condition for position in positions))
        raise CloseInvalid(
            f"There are several positions ({kinds}). Name the condition of the one to close."
        )
    return positions[0] if positions else None


def _close_order(close: PositionClose, position: Position) -> OrderRequest:
    """Returns the order that closes a position. Raises `CloseInvalid` if the position is smaller,
    or the order would be too large."""
    terms: dict[str, object] = {"condition": position.condition}
    if close.opening_order_id is not None:
        # Its open or close type is that of the order that opens.
        terms["open_close"] = OpenClose.AUTO
    pricing = close.pricing.model_copy(update=terms)
    signed = position.held(pricing.lot)
    held = abs(signed)
    quantity = close.quantity or held
    if quantity > held or not held:
        raise CloseInvalid(f"The position in this lot is only {held}; a close cannot be larger.")
    if quantity > MAX_QUANTITY:
        raise CloseInvalid(
            f"One close is at most {MAX_QUANTITY}. Close the position in several steps."
        )
    side = Side.SELL if signed > 0 else Side.BUY
    return pricing.order(close.client_order_id, close.account_id, close.symbol, side, quantity)
