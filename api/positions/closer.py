"""Closes positions. The quantity is the broker's, and two closes of one position are never both sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from weakref import WeakValueDictionary

from api.http.errors import CloseInvalid, IntentExpired, NoPosition, PositionBusy
from api.orders import schemas
from api.orders.placer import OrderLeg, OrderPlacer, PlacementResult
from api.positions.service import Portfolio, position_in
from infra.database.engine import Database
from infra.database.models import Order as Row
from infra.database.orders import checks as closing
from infra.database.trading.reconciliations import FILL_MARGIN
from worker_runtime.protocol.messages import PriceType, Side, TimeInForce

#: Seconds for the broker's positions: as long as a look at them waits by itself.
POSITIONS_WAIT = 20.0


@dataclass(frozen=True, kw_only=True)
class PositionClose:
    """A position to close; `quantity` None: all of it."""

    user_id: str
    account_id: str
    symbol: str
    client_order_id: str
    fingerprint: str
    origin: str
    actor: str
    price_type: PriceType
    price: object
    time_in_force: TimeInForce
    quantity: int | None = None
    #: Only a position on this side; None: whichever there is.
    long: bool | None = None
    #: Client order id of the order that opens a position afterwards; None: nothing is opened.
    opens: str | None = None


class PositionCloser:
    def __init__(
        self, database: Database, placer: OrderPlacer, portfolio: Portfolio, *, connections: int
    ) -> None:
        """`connections`: to the database, of this process."""
        self._database = database
        self._placer = placer
        self._portfolio = portfolio
        # Who writes holds one connection, perhaps while another process has the position's lock, and needs a
        # second one. So half of them are for others; and a user who closes much has one turn at a time.
        self._writing = asyncio.Semaphore(max(1, connections // 2))
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def close_position(
        self, close: PositionClose, wait: float, *, not_after: float | None = None
    ) -> PlacementResult:
        """Places the order that closes the position, and waits for its outcome up to `wait` seconds.

        `not_after`: an instant on `time.monotonic` after which no order is written, and none sent. A repeat
        returns the first order's outcome, without another look at the position. Raises `NoPosition`,
        `CloseInvalid`, `PositionBusy`, `IntentExpired`, what `Portfolio.report` and `OrderPlacer.place_order`
        raise.
        """
        async with self._database.session() as session:
            known = await closing.orders_by_client_ids(session, close.user_id, [close.client_order_id])
        first = known.get(close.client_order_id)
        if first is not None:
            return await self.repeat_order(first, close.fingerprint, close.actor, wait)
        async with self._database.session() as session:
            since = await closing.database_clock(session)
        seconds = (
            POSITIONS_WAIT
            if not_after is None
            else max(0.0, min(POSITIONS_WAIT, not_after - time.monotonic()))
        )
        report = await self._portfolio.report(
            close.user_id, close.account_id, seconds, orders=True, positions=True
        )
        # A fill that the position may not show yet must not be closed, or entered, a second time. What is
        # said of the list of orders holds for positions only where the broker says so.
        behind = timedelta(milliseconds=report.behind_ms)
        certain = report.absence_certain and report.positions_agree
        since -= behind if certain else max(FILL_MARGIN, behind)
        position = position_in(report, close.symbol)
        if position is None or (close.long is not None and close.long != (position.quantity > 0)):
            async with self._database.session() as session:
                where = (close.user_id, close.account_id, close.symbol)
                beside = await closing.conflicting_order(session, *where, "", since, [close.opens or ""])
            if beside is not None:  # it may have made such a position, or make it yet
                raise _position_busy(beside)
            raise NoPosition
        held = abs(position.quantity)
        quantity = close.quantity or held
        if quantity > held:
            raise CloseInvalid(f"the position is {held}")
        if quantity > schemas.MAX_QUANTITY:
            raise CloseInvalid(f"one order takes at most {schemas.MAX_QUANTITY}; close it in parts")
        side = Side.SELL if position.quantity > 0 else Side.BUY
        body = _order_body(close.client_order_id, close, side, quantity)
        leg = OrderLeg(fingerprint=close.fingerprint, origin=close.origin, reduce_only=True)
        # What works on the other side would be filled beside the position that is opened afterwards.
        busy = side.value if close.opens is None else ""
        return await self._write(close.user_id, body, leg, busy, since, wait, close.actor, not_after)

    async def open_position(
        self,
        user_id: str,
        body: schemas.OrderRequest,
        leg: OrderLeg,
        since: datetime,
        wait: float,
        actor: str,
        *,
        after: str | None = None,
        not_after: float | None = None,
    ) -> PlacementResult:
        """Places an order that opens a position, and waits for its outcome up to `wait` seconds.

        Only while no other order works in its account and symbol, and none was filled since `since`; `after`
        is the client order id of the one that closed the other side, `not_after` as in `close`. Raises
        `PositionBusy`, `IntentExpired` and what `OrderPlacer.place_order` raises.
        """
        return await self._write(user_id, body, leg, "", since, wait, actor, not_after, but=[after or ""])

    async def repeat_order(self, first: Row, fingerprint: str, actor: str, wait: float) -> PlacementResult:
        """The outcome of an order that was placed before; raises `ClientOrderIdReused` for another close."""
        body = _order_body(first.client_order_id, first, Side(first.side), first.quantity)
        leg = OrderLeg(fingerprint=fingerprint, origin=first.origin, reduce_only=first.reduce_only)
        return await self._placer.place_order(first.user_id, body, wait, actor, leg=leg)

    @asynccontextmanager
    async def _user_turn(self, user_id: str) -> AsyncIterator[None]:
        lock = self._turns.get(user_id)
        if lock is None:
            lock = self._turns[user_id] = asyncio.Lock()
        async with lock, self._writing:
            yield

    async def _write(
        self,
        user_id: str,
        body: schemas.OrderRequest,
        leg: OrderLeg,
        side: str,
        since: datetime,
        wait: float,
        actor: str,
        not_after: float | None,
        but: Sequence[str] = (),
    ) -> PlacementResult:
        where = (user_id, body.account_id, body.symbol)
        async with self._user_turn(user_id), self._database.session() as session:
            await closing.lock_symbol(session, *where)
            known = await closing.orders_by_client_ids(session, user_id, [body.client_order_id])
            beside = await closing.conflicting_order(session, *where, side, since, but)
            if beside is not None and not known:  # known: an equal request was quicker
                raise _position_busy(beside)
            if not known and not_after is not None and time.monotonic() >= not_after:
                raise IntentExpired("its deadline had passed before the order could be written")
            placed = await self._placer.place_order(user_id, body, 0, actor, leg=leg, not_after=not_after)
        if placed.failure is not None:
            return placed
        again = await self._placer.place_order(user_id, body, wait, actor, leg=leg)
        return PlacementResult(again.order, new=placed.new, failure=again.failure)


def _position_busy(beside: Row) -> PositionBusy:
    return PositionBusy(f"order {beside.id} works on this position, or has just changed it")


def _order_body(
    client_order_id: str, like: PositionClose | Row, side: Side, quantity: int
) -> schemas.OrderRequest:
    return schemas.OrderRequest.model_validate(
        {
            "client_order_id": client_order_id,
            "account_id": like.account_id,
            "symbol": like.symbol,
            "side": side,
            "quantity": quantity,
            "price_type": like.price_type,
            "price": like.price,
            "time_in_force": like.time_in_force,
        }
    )
