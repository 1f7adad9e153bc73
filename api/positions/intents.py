"""Entries and exits: the opposite position is closed first; the new one opens only after that is
filled.

The legs of an intent are orders with ids of their own (`<id>.close`, `<id>.open`) and the intent in
`origin`. The opening leg is placed by the caller's request and by nothing else: if the request ends
before the close is filled, if this process dies between the legs, or if the close is not filled,
nothing is opened. A repeat with the same id continues where the first one stopped, but only within
the order deadline after the closing leg was accepted: an entry that nobody waited for is not made
at another price. (Alerts are repeated by `AlertProcessor`.)
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from api.http.errors import ClientOrderIdReused, CloseNotFilled, IntentExpired, NoPosition
from api.http.notifications import NotificationListener, heard_within
from api.http.problems import ProblemError
from api.orders.outcomes import UNANSWERED, OrderReader, failure_of
from api.orders.placer import ParentRequest, PlacementResult
from api.orders.schemas import OrderView
from api.positions.closer import PositionClose, PositionCloser, QuietRule
from api.positions.parts import part_ids, read_again, whole_of
from api.positions.schemas import Intent, IntentRequest, IntentView
from infra.database.engine import Database
from infra.database.orders import checks as order_checks
from infra.database.orders import feed as order_changes
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.messages import OrderState, Side

#: Seconds between two reads of the closing leg, in case a notice was lost.
CHECK_INTERVAL_S = 0.5


@dataclass(frozen=True)
class IntentRun:
    """A call that carries out an intent."""

    user_id: str
    account_id: str
    body: IntentRequest
    actor: str
    #: Instants on `time.monotonic`: how long the caller waits, and after which no leg is written or
    #: sent.
    until: float
    not_after: float
    #: PostgreSQL's time before orders and positions are read first.
    since: datetime

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.until - time.monotonic())

    @property
    def closing_id(self) -> str:
        return f"{self.body.client_order_id}.close"

    @property
    def opening_id(self) -> str:
        return f"{self.body.client_order_id}.open"

    def parent_request(self, *, reduce_only: bool) -> ParentRequest:
        return ParentRequest(
            fingerprint=self.body.fingerprint(self.account_id),
            origin=f"{self.body.intent}:{self.body.client_order_id}",
            reduce_only=reduce_only,
        )

    def result(
        self, legs: list[OrderView], failure: BerthError | None, *, complete: bool = True
    ) -> IntentView:
        """Raises `ProblemError` with the legs there are if the last one failed."""
        if failure is not None:
            raise ProblemError(failure, legs=legs)
        body = self.body
        return IntentView(
            client_order_id=body.client_order_id, intent=body.intent, legs=legs, complete=complete
        )


@dataclass(frozen=True, eq=False)
class IntentRunner:
    database: Database
    positions: PositionCloser
    reader: OrderReader
    notifications: NotificationListener
    deadline: float

    async def run_intent(
        self,
        user_id: str,
        account_id: str,
        body: IntentRequest,
        wait: float,
        actor: str,
        *,
        not_after: float = math.inf,
    ) -> IntentView:
        """Carries an intent out as far as it comes within `wait` seconds.

        `not_after`: an instant on `time.monotonic` after which no leg is written any more, and none
        sent. Raises `ProblemError` with the legs there are: `CloseNotFilled`, `IntentExpired`, or
        why a leg never reached the broker; and what `PositionCloser.close_position` and
        `place_alone` raise.
        """
        until = time.monotonic() + wait
        async with self.database.session() as session:
            since = await order_checks.database_clock(session)
            run = IntentRun(user_id, account_id, body, actor, until, not_after, since)
            ids = part_ids(run.closing_id)
            known = await order_checks.orders_by_client_ids(
                session, user_id, [*ids, run.opening_id]
            )
        if run.opening_id in known:
            if not body.intent.enters:
                raise ClientOrderIdReused
            parts = [
                await self.reader.get(known[client_id].id)
                for client_id in ids
                if client_id in known
            ]
            opened = await self._open(run)
            return run.result([*([whole_of(parts)] if parts else []), opened.order], opened.failure)
        enters = body.intent.enters
        close = PositionClose(
            user_id=user_id,
            account_id=account_id,
            symbol=body.symbol,
            client_order_id=run.closing_id,
            parent=run.parent_request(reduce_only=True),
            actor=actor,
            pricing=body,
            quantity=None if enters else body.quantity,
            is_long=body.intent.long != enters,
            opening_order_id=run.opening_id if enters else None,
        )
        try:
            closed = await self.positions.close_position(
                close, run.remaining_s, not_after=not_after
            )
        except NoPosition:
            if not enters:
                raise
            opened = await self._open(run)
            return run.result([opened.order], opened.failure)
        if not enters or closed.failure is not None:
            return run.result([closed.order], closed.failure)
        return await self._reverse(run, closed.order)

    async def _reverse(self, run: IntentRun, close: OrderView) -> IntentView:
        """Opens the position once the closing leg is filled."""
        close = await self._final(close, run)
        failure = failure_of(close)
        if not close.final or failure is not None:
            return run.result([close], failure, complete=False)
        if close.state is not OrderState.FILLED:
            raise ProblemError(
                CloseNotFilled(f"the closing order is {close.state.value}"), legs=[close]
            )
        async with self.database.session(autocommit=True) as session:
            now = await order_checks.database_clock(session)
        if (now - close.accepted_at).total_seconds() > self.deadline:
            raise ProblemError(IntentExpired(), legs=[close])
        # Also of a repeat: what was filled after the first one's look has changed the position.
        run = replace(run, since=min(run.since, close.accepted_at))
        try:
            opened = await self._open(run, except_ids=part_ids(close.client_order_id))
        except BerthError as error:
            raise ProblemError(error, legs=[close]) from None
        return run.result([close, opened.order], opened.failure)

    async def _open(self, run: IntentRun, except_ids: Sequence[str] = ()) -> PlacementResult:
        """Opens the position; orders with client order ids in `except_ids` are not in its way."""
        body = run.body
        assert body.quantity is not None  # an entry has one  # noqa: S101
        side = Side.BUY if body.intent is Intent.LONG_ENTRY else Side.SELL
        order = body.order(run.opening_id, run.account_id, body.symbol, side, body.quantity)
        return await self.positions.place_alone(
            run.user_id,
            order,
            run.parent_request(reduce_only=False),
            run.remaining_s,
            run.actor,
            quiet=QuietRule(run.since, except_ids=except_ids),
            not_after=run.not_after,
        )

    async def _final(self, order: OrderView, run: IntentRun) -> OrderView:
        """Returns the order once it is final, or as it is when the time is over."""
        with self.notifications.expect(order_changes.ORDERS_CHANNEL, order.user_id) as news:
            while not order.final and run.remaining_s:
                news.clear()
                order = await read_again(self.reader, order)
                if not order.final:
                    await heard_within(news, min(CHECK_INTERVAL_S, run.remaining_s))
        return order


def all_answered(result: IntentView) -> bool:
    """Returns True if the broker has answered all of it."""
    return result.complete and all(order.state not in UNANSWERED for order in result.legs)
