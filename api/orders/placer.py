"""Placing an order: written to PostgreSQL first, then queued, then waited for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256

from redis.exceptions import RedisError

from api.http.errors import ClientOrderIdReused, ValkeyUnavailable
from api.orders import schemas
from api.orders.checks import PreTradeChecks
from api.orders.pending import PendingOrder, PendingOrders
from api.orders.reader import OrderReader, failure_of, view_of
from api.workers.answers import AnswerListener
from infra.database.engine import Database
from infra.database.models import Order as Row
from infra.database.orders import acceptance
from infra.database.trading import limits as trading_limits
from infra.market.calendar import TAIPEI
from infra.valkey.request_queue import place_request
from worker_runtime.protocol.errors import BerthError, CheckFailed, DuplicateOrder
from worker_runtime.protocol.messages import OrderState, PlaceOrder

#: States in which an order may still be waiting in its queue.
_IN_QUEUE = frozenset({OrderState.ACCEPTED, OrderState.QUEUED, OrderState.SUBMITTING})


def trading_day(now: datetime) -> date:
    """The date in Taipei; what is counted for a day is counted for this."""
    return now.astimezone(TAIPEI).date()


def fingerprint_of(body: schemas.OrderRequest) -> str:
    """The same for two bodies that ask for the same order, however the price is written."""
    price = "" if body.price is None else format(body.price.normalize(), "f")
    parts = (
        *(body.account_id, body.symbol, body.side, str(body.quantity)),
        *(body.price_type, price, body.time_in_force),
    )
    return sha256("|".join(parts).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class OrderLeg:
    """What an order is that stands for more than its body says."""

    #: Of what was asked for; a repeat is known by it.
    fingerprint: str
    origin: str
    reduce_only: bool = False


@dataclass(frozen=True, slots=True)
class PlacementResult:
    order: schemas.OrderView
    #: False: the client order id was used before, and this is that order.
    new: bool
    #: Why the order was not executed, or is not known to be on its way.
    failure: BerthError | None = None


class OrderPlacer:
    def __init__(
        self,
        database: Database,
        answers: AnswerListener,
        flights: PendingOrders,
        book: OrderReader,
        checks: PreTradeChecks,
        *,
        deadline: float,
        unknown_blocks: str = "symbol",
    ) -> None:
        self._database = database
        self._answers = answers
        self._flights = flights
        self._book = book
        self._checks = checks
        self._deadline = deadline
        #: What an order of unknown outcome blocks (`acceptance.NewOrder`).
        self._unknown_blocks = unknown_blocks

    async def place(
        self,
        user_id: str,
        body: schemas.OrderRequest,
        wait: float,
        actor: str,
        *,
        leg: OrderLeg | None = None,
        not_after: float | None = None,
    ) -> PlacementResult:
        """Places an order and waits up to `wait` seconds for the worker's answer.

        `not_after`: an instant on `time.monotonic` after which the order must not be sent any more.
        Raises `ClientOrderIdReused`, `CheckFailed`, what `orders.accept` refuses, and before anything is
        written `ValkeyUnavailable` or `DatabaseUnavailable`.
        """
        generation = self._answers.generation
        now = datetime.now(UTC)
        began = time.monotonic()
        lasts = self._deadline
        if not_after is not None:
            lasts = max(0.0, min(lasts, not_after - began))
        new = acceptance.NewOrder(
            user_id=user_id,
            account_id=body.account_id,
            client_order_id=body.client_order_id,
            fingerprint=leg.fingerprint if leg else fingerprint_of(body),
            symbol=body.symbol,
            side=body.side.value,
            quantity=body.quantity,
            price_type=body.price_type.value,
            price=body.price,
            time_in_force=body.time_in_force.value,
            generation=generation,
            deadline_at=now + timedelta(seconds=lasts),
            trading_day=trading_day(now),
            actor=actor,
            unknown_blocks=self._unknown_blocks,
            reduce_only=leg.reduce_only if leg else False,
            origin=leg.origin if leg else "",
        )
        accepted = await self._accept(new)
        if not accepted.same_request:
            raise ClientOrderIdReused
        row = accepted.order
        if accepted.new:
            return await self._fly(PendingOrder(row, self._request(row, lasts), began + lasts), wait)
        order = view_of(row)
        try:
            order = await self._book.with_latest_answer(order)
        except RedisError:
            return PlacementResult(order, new=False, failure=ValkeyUnavailable())
        left = (row.deadline_at - now).total_seconds()
        if order.state not in _IN_QUEUE or row.generation != generation or left <= 0:
            return PlacementResult(order, new=False, failure=failure_of(order))
        return await self._fly(PendingOrder(row, self._request(row, lasts), began + left, seen=order), wait)

    async def _accept(self, new: acceptance.NewOrder) -> acceptance.AcceptedOrder:
        """Checks and writes. A repeat is answered whatever the checks would say of it now."""
        try:
            window = await self._checks.check(new)
        except CheckFailed:
            async with self._database.session(autocommit=True) as session:
                if not await trading_limits.client_id_used(session, new.user_id, new.client_order_id):
                    raise
            window = 0.0
        if not window:
            return await acceptance.accept_order_alone(self._database, new)
        async with self._database.session() as session:
            try:
                await self._checks.refuse_duplicate(session, new, window)
            except DuplicateOrder:
                if not await trading_limits.client_id_used(session, new.user_id, new.client_order_id):
                    raise
            return await acceptance.accept_order(session, new)

    def _request(self, row: Row, lasts: float) -> PlaceOrder:
        """`lasts`: seconds from its acceptance to its deadline."""
        return place_request(row, self._answers.channel, self._unknown_blocks, lasts)

    async def _fly(self, flight: PendingOrder, wait: float) -> PlacementResult:
        task = self._flights.join(flight)
        await asyncio.wait({task}, timeout=wait)
        new = flight.first
        if not task.done():
            return PlacementResult(flight.order, new=new)
        if task.cancelled():  # this process is stopping; the order goes on
            return PlacementResult(flight.order, new=new)
        error = task.exception()
        if isinstance(error, BerthError):
            return PlacementResult(flight.order, new=new, failure=error)
        landed = task.result()
        return PlacementResult(landed.order, new=new, failure=landed.failure)
