"""Entries and exits: the opposite position is closed first; the new one opens only after that is filled.

The legs of an intent are orders with ids of their own (`<id>.close`, `<id>.open`) and the intent in `origin`.
The opening leg is placed by the caller's request and by nothing else: if the request ends before the close is
filled, if this process dies between the legs, or if the close is not filled, nothing is opened. A repeat with
the same id goes on where the first one stopped, but only within the order deadline after the closing leg was
accepted: an entry that nobody waited for is not made at another price. (Alerts are repeated by
`AlertKeeper`.)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID

from api.http.errors import CloseNotFilled, IntentExpired, NoPosition
from api.http.notifications import NotificationListener
from api.http.problems import ProblemError
from api.orders.outcomes import UNANSWERED, OrderReader, failure_of
from api.orders.placer import OrderLeg, PlacementResult
from api.orders.schemas import OrderRequest, OrderView
from api.positions.closer import PositionClose, PositionCloser
from api.positions.schemas import Intent, IntentRequest, IntentView
from infra.database.engine import Database
from infra.database.orders import checks as closing
from infra.database.orders import feed as order_changes
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import OrderState, Side

#: Seconds between two looks at the closing leg, in case a notice was lost.
CHECK_PERIOD = 0.5


class IntentRunner:
    def __init__(
        self,
        database: Database,
        positions: PositionCloser,
        reader: OrderReader,
        notifications: NotificationListener,
        *,
        deadline: float,
    ) -> None:
        self._database = database
        self._positions = positions
        self._reader = reader
        self._notifications = notifications
        self._deadline = deadline

    async def run_intent(
        self,
        user_id: str,
        account_id: str,
        body: IntentRequest,
        wait: float,
        actor: str,
        *,
        not_after: float | None = None,
    ) -> IntentView:
        """Carries an intent out as far as it comes within `wait` seconds.

        `not_after`: an instant on `time.monotonic` after which no leg is written any more, and none sent.
        Raises `ProblemError` with the legs there are: `CloseNotFilled`, `IntentExpired`, or why a leg never
        reached the broker; and what `PositionCloser.close_position` and `open` raise.
        """
        until = time.monotonic() + wait
        ids = f"{body.client_order_id}.close", f"{body.client_order_id}.open"
        async with self._database.session() as session:
            since = await closing.database_clock(session)
            known = await closing.orders_by_client_ids(session, user_id, ids)
        if ids[1] in known:
            legs = await self._read_orders([known[one].id for one in ids if one in known])
            opened = await self._open(user_id, account_id, body, since, until, actor, not_after)
            return _result(body, [*legs[:-1], opened.order], opened.failure)
        close = PositionClose(
            user_id=user_id,
            account_id=account_id,
            symbol=body.symbol,
            client_order_id=ids[0],
            fingerprint=body.fingerprint(account_id),
            origin=_origin(body),
            actor=actor,
            price_type=body.price_type,
            price=body.price,
            time_in_force=body.lasts,
            quantity=None if body.intent.enters else body.quantity,
            long=body.intent.long != body.intent.enters,
            opens=ids[1] if body.intent.enters else None,
        )
        try:
            left = max(0.0, until - time.monotonic())
            closed = await self._positions.close_position(close, left, not_after=not_after)
        except NoPosition:
            if not body.intent.enters:
                raise
            opened = await self._open(user_id, account_id, body, since, until, actor, not_after)
            return _result(body, [opened.order], opened.failure)
        if not body.intent.enters or closed.failure is not None:
            return _result(body, [closed.order], closed.failure)
        return await self._reverse(closed.order, user_id, account_id, body, since, until, actor, not_after)

    async def _reverse(
        self,
        close: OrderView,
        user_id: str,
        account_id: str,
        body: IntentRequest,
        since: datetime,
        until: float,
        actor: str,
        not_after: float | None,
    ) -> IntentView:
        """The opening leg, once the closing one is filled."""
        close = await self._final(close, until)
        failure = failure_of(close)
        if not close.final or failure is not None:
            return _result(body, [close], failure, complete=False)
        if close.state is not OrderState.FILLED:
            raise _problem(CloseNotFilled(f"the closing order is {close.state.value}"), [close])
        if (datetime.now(UTC) - close.accepted_at).total_seconds() > self._deadline:
            raise _problem(IntentExpired(), [close])
        opened = await self._open(user_id, account_id, body, since, until, actor, not_after, after=close)
        return _result(body, [close, opened.order], opened.failure)

    async def _open(
        self,
        user_id: str,
        account_id: str,
        body: IntentRequest,
        since: datetime,
        until: float,
        actor: str,
        not_after: float | None,
        *,
        after: OrderView | None = None,
    ) -> PlacementResult:
        order = OrderRequest.model_validate(
            {
                "client_order_id": f"{body.client_order_id}.open",
                "account_id": account_id,
                "symbol": body.symbol,
                "side": Side.BUY if body.intent is Intent.LONG_ENTRY else Side.SELL,
                "quantity": body.quantity,
                "price_type": body.price_type,
                "price": body.price,
                "time_in_force": body.lasts,
            }
        )
        leg = OrderLeg(fingerprint=body.fingerprint(account_id), origin=_origin(body))
        try:
            left = max(0.0, until - time.monotonic())
            ended = after.client_order_id if after else None
            return await self._positions.open_position(
                user_id, order, leg, since, left, actor, after=ended, not_after=not_after
            )
        except BerthError as error:
            if after is None:
                raise
            raise _problem(error, [after]) from None

    async def _final(self, order: OrderView, until: float) -> OrderView:
        """The order once it is final, or as it is when the time is over."""
        with self._notifications.expect(order_changes.ORDERS_CHANNEL, order.user_id) as news:
            while not order.final and (left := until - time.monotonic()) > 0:
                news.clear()
                order = await self._reader.get(UUID(order.id))
                if not order.final:
                    waiting = asyncio.ensure_future(news.wait())
                    await asyncio.wait({waiting}, timeout=min(CHECK_PERIOD, left))
                    waiting.cancel()
        return order

    async def _read_orders(self, ids: Sequence[UUID]) -> list[OrderView]:
        return [await self._reader.get(order_id) for order_id in ids]


def _origin(body: IntentRequest) -> str:
    return f"{body.intent}:{body.client_order_id}"


def _problem(error: BerthError, legs: Sequence[OrderView]) -> ProblemError:
    return ProblemError(error, {"legs": [order.model_dump(mode="json") for order in legs]})


def _result(
    body: IntentRequest, legs: list[OrderView], failure: BerthError | None, *, complete: bool = True
) -> IntentView:
    if failure is not None:
        raise _problem(failure, legs)
    return IntentView(client_order_id=body.client_order_id, intent=body.intent, legs=legs, complete=complete)


def all_answered(result: IntentView) -> bool:
    """Whether the broker has answered all of it."""
    return result.complete and all(order.state not in UNANSWERED for order in result.legs)
