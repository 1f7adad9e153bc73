"""Closes positions. The quantity is the broker's, and two closes of one position are never both sent."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from weakref import WeakValueDictionary

from api.http.errors import CloseInvalid, IntentExpired, NoPosition, PositionBusy
from api.orders.placer import OrderLeg, OrderPlacer, PlacementResult
from api.orders.schemas import MAX_QUANTITY, OrderRequest
from api.positions.schemas import ClosePositionRequest, PricedBody
from api.positions.service import Portfolio
from infra.database.engine import Database
from infra.database.models import Order as Row
from infra.database.orders import checks as closing
from infra.database.trading.reconciliations import FILL_MARGIN
from worker_runtime.protocol.messages import Side

#: Seconds for the broker's positions: as long as a request for them waits by itself.
POSITIONS_WAIT = 20.0


@dataclass(frozen=True, kw_only=True)
class PositionClose:
    """A position to close; `quantity` None: all of it."""

    user_id: str
    account_id: str
    symbol: str
    client_order_id: str
    leg: OrderLeg
    actor: str
    pricing: PricedBody
    quantity: int | None
    #: Only a position on this side; None: on either side.
    long: bool | None = None
    #: Client order id of the order that opens a position afterwards; None: nothing is opened.
    opens: str | None = None

    @classmethod
    def of(
        cls,
        body: ClosePositionRequest,
        user_id: str,
        account_id: str,
        symbol: str,
        actor: str,
        long: bool | None = None,
    ) -> PositionClose:
        fingerprint = body.fingerprint(account_id, symbol)
        return cls(
            user_id=user_id,
            account_id=account_id,
            symbol=symbol,
            client_order_id=body.client_order_id,
            leg=OrderLeg(fingerprint=fingerprint, origin="close", reduce_only=True),
            actor=actor,
            pricing=body,
            quantity=body.quantity,
            long=long,
        )


class PositionCloser:
    def __init__(
        self, database: Database, placer: OrderPlacer, portfolio: Portfolio, *, connections: int
    ) -> None:
        """`connections`: to the database, of this process."""
        self._database = database
        self._placer = placer
        self._portfolio = portfolio
        # A write holds one connection, perhaps while it waits for another process's lock, and needs a second
        # one. So at most half of them write at a time, and a user has one turn at a time.
        self._writing = asyncio.Semaphore(max(1, connections // 2))
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def close_position(
        self, close: PositionClose, wait: float, *, not_after: float = math.inf
    ) -> PlacementResult:
        """Places the order that closes the position, and waits for its outcome up to `wait` seconds.

        `not_after`: an instant on `time.monotonic` after which no order is written, and none sent. A repeat
        returns the first order's outcome, without reading the position again. Raises `NoPosition`,
        `CloseInvalid`, `PositionBusy`, `IntentExpired`, `ClientOrderIdReused` for another close, what
        `Portfolio.report` and `OrderPlacer.place_order` raise.
        """
        async with self._database.session() as session:
            known = await closing.orders_by_client_ids(session, close.user_id, [close.client_order_id])
            since = await closing.database_clock(session)
        if (first := known.get(close.client_order_id)) is not None:
            body = OrderRequest.model_validate(first, from_attributes=True)
            return await self._placer.place_order(close.user_id, body, wait, close.actor, leg=close.leg)
        seconds = max(0.0, min(POSITIONS_WAIT, not_after - time.monotonic()))
        report = await self._portfolio.report(
            close.user_id, close.account_id, seconds, orders=True, positions=True
        )
        # A fill that the position may not show yet must not be closed, or entered, a second time. Positions
        # are as old as the list of orders only where the broker says so.
        behind = timedelta(milliseconds=report.behind_ms)
        certain = report.absence_certain and report.positions_agree
        since -= behind if certain else max(FILL_MARGIN, behind)
        held_now = (one for one in report.positions if one.symbol == close.symbol and one.quantity)
        position = next(held_now, None)
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
        if quantity > MAX_QUANTITY:
            raise CloseInvalid(f"one order takes at most {MAX_QUANTITY}; close it in parts")
        side = Side.SELL if position.quantity > 0 else Side.BUY
        body = close.pricing.order(close.client_order_id, close.account_id, close.symbol, side, quantity)
        # What works on the other side would be filled beside the position that is opened afterwards.
        busy = side.value if close.opens is None else ""
        return await self.place_alone(
            close.user_id, body, close.leg, since, wait, close.actor, side=busy, not_after=not_after
        )

    async def place_alone(
        self,
        user_id: str,
        body: OrderRequest,
        leg: OrderLeg,
        since: datetime,
        wait: float,
        actor: str,
        *,
        side: str = "",
        but: Sequence[str] = (),
        not_after: float = math.inf,
    ) -> PlacementResult:
        """Places an order, and waits for its outcome up to `wait` seconds.

        Only while no other order (on `side`, or on any) works in its account and symbol, and none was filled
        since `since`; those with client order ids in `but` do not count. `not_after` as in `close_position`.
        Raises `PositionBusy`, `IntentExpired` and what `OrderPlacer.place_order` raises.
        """
        where = (user_id, body.account_id, body.symbol)
        async with self._user_turn(user_id), self._database.session() as session:
            await closing.lock_symbol(session, *where)
            known = await closing.orders_by_client_ids(session, user_id, [body.client_order_id])
            beside = await closing.conflicting_order(session, *where, side, since, but)
            if beside is not None and not known:  # known: an equal request was quicker
                raise _position_busy(beside)
            if not known and time.monotonic() >= not_after:
                raise IntentExpired("its deadline had passed before the order could be written")
            placed = await self._placer.place_order(user_id, body, 0, actor, leg=leg, not_after=not_after)
        if placed.failure is not None:
            return placed
        again = await self._placer.place_order(user_id, body, wait, actor, leg=leg)
        return PlacementResult(again.order, new=placed.new, failure=again.failure)

    @asynccontextmanager
    async def _user_turn(self, user_id: str) -> AsyncIterator[None]:
        lock = self._turns.get(user_id)
        if lock is None:
            lock = self._turns[user_id] = asyncio.Lock()
        async with lock, self._writing:
            yield


def _position_busy(beside: Row) -> PositionBusy:
    return PositionBusy(f"order {beside.id} works on this position, or has just changed it")
