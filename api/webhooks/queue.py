"""Carries signals out: one at a time for each account and symbol, in the order in which they came.

Signals wait in PostgreSQL (`infra.database.trading.signals`). Any API process takes the first one
of a lane by a lease, which it renews; when the process dies, another one takes the signal over. No
order is placed twice: its client order id is made of the signal's text, and it is written only by
the process that holds the lease, by a plan that was stored before. Until the first order of a plan
is written, the plan is made anew at each try.

A signal waits for temporary obstacles: another order that works on the position, a fill that the
position may not show yet, an order of unknown outcome, a worker that starts. If one is still there
at the deadline, the refusal names it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from uuid import UUID, uuid4

import structlog
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncSession

from api.http import errors
from api.http.notifications import NotificationListener, heard_within
from api.orders.outcomes import UNANSWERED, OrderReader, failure_of
from api.orders.placer import ParentRequest
from api.orders.schemas import MAX_QUANTITY, OrderPriceRounding, OrderRequest, OrderView
from api.positions.closer import Holdings, PositionCloser, QuietRule
from api.positions.parts import part_ids, read_again
from api.webhooks.meaning import stored_meaning
from api.webhooks.planning import (
    Meaning,
    Outcome,
    PlannedOrder,
    PriceRounding,
    QuantityUnit,
    SignalAction,
    SignalPlan,
    plan_signal,
)
from api.webhooks.schemas import actor_of
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.models import Order
from infra.database.orders import checks as order_checks
from infra.database.orders import feed as order_changes
from infra.database.trading import signals
from infra.database.trading.models import WebhookCall
from infra.database.trading.signals import HeldSignal, Lane
from infra.tasks import cancel_tasks
from infra.tracing import Traces
from infra.valkey.failures import explain_failure
from infra.worker_calls.client import NoAnswer
from worker_runtime.protocol.broker_reports import Position
from worker_runtime.protocol.contract_codes import may_be_same_contract
from worker_runtime.protocol.errors import BerthError, SymbolBlocked, from_code
from worker_runtime.protocol.messages import OrderState, Side
from worker_runtime.protocol.order_terms import ODD_LOTS, OrderCondition

#: Seconds that a signal stays with the process that carries it out, unless that renews the lease.
LEASE_TTL_S = 10.0
#: Lanes, or signals that came too late, that one round looks at.
MAX_LANES_PER_ROUND = 50
#: Seconds between the first two attempts of a signal that cannot be carried out yet; each further
#: pause is 1.5 times as long.
RETRY_INTERVAL_S = 0.2
#: Seconds between two attempts of such a signal, at most.
MAX_RETRY_INTERVAL_S = 1.0
#: Seconds between two reads of an order that is waited for, in case a notice was lost.
CHECK_INTERVAL_S = 0.5
#: Seconds past its deadline for which a signal stays in the queue while its last order is
#: unanswered.
ANSWER_GRACE_S = 3.0


@dataclass(eq=False)
class SignalRun:
    """Holds one signal that this process carries out."""

    held: HeldSignal
    holder: UUID
    meaning: Meaning
    #: Instant of its deadline on `time.monotonic`.
    until: float
    #: Its orders so far.
    orders: dict[str, OrderView] = field(default_factory=dict)
    #: Orders that PostgreSQL has of it, perhaps of the process before this one.
    written_ids: Sequence[UUID] = ()

    @property
    def call(self) -> WebhookCall:
        return self.held.call

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.until - time.monotonic())

    @property
    def where(self) -> tuple[str, str, str]:
        return self.call.user_id, self.call.account_id, self.meaning.symbol

    @property
    def names(self) -> list[str]:
        """Returns all client order ids that its orders may have."""
        return [
            name
            for base, in_parts in self.meaning.names.both
            for name in (part_ids(base) if in_parts else [base])
        ]

    @property
    def order_ids(self) -> list[UUID]:
        views = [
            part
            for order in self.orders.values()
            for part in getattr(order, "parts", ()) or [order]
        ]
        return list(dict.fromkeys([*self.written_ids, *(UUID(view.id) for view in views)]))


class SignalQueue:
    def __init__(
        self,
        database: Database,
        positions: PositionCloser,
        reader: OrderReader,
        notifications: NotificationListener,
        traces: Traces | None = None,
    ) -> None:
        self._database = database
        self._positions = positions
        self._reader = reader
        self._notifications = notifications
        self._traces = traces
        self._log = structlog.get_logger()
        #: Lanes at work, and those that may have another signal.
        self._lanes: dict[Lane, asyncio.Task[None]] = {}
        self._wanted: set[Lane] = set()
        #: Names of the runs whose leases are renewed.
        self._holders: set[UUID] = set()
        self._waiting: dict[int, asyncio.Event] = {}

    @property
    def lanes_at_work(self) -> Sequence[Lane]:
        return list(self._lanes)

    async def close(self) -> None:
        """Stops all runs and releases their leases, so that other processes take the signals over
        at once."""
        holders = list(self._holders)
        await cancel_tasks(*self._lanes.values())
        if holders:
            with suppress(BerthError):
                async with self._database.session() as session:
                    await signals.release_leases(session, holders)

    def work(self, lane: Lane) -> None:
        """Carries out what waits in a lane, in a task of its own."""
        self._wanted.add(lane)
        if lane not in self._lanes:
            self._lanes[lane] = asyncio.create_task(self._work(lane), name=f"signals {lane}")

    async def wait(self, call_id: int, seconds: float) -> None:
        """Waits until a signal is completed, by this process or another one, or `seconds` have
        passed."""
        until = time.monotonic() + seconds
        event = self._waiting.setdefault(call_id, asyncio.Event())
        try:
            while (remaining_s := until - time.monotonic()) > 0:
                if await heard_within(event, min(CHECK_INTERVAL_S / 2, remaining_s)):
                    return
                call = await self._database.fetch(signals.get_call, call_id)
                if call is None or call.completed_at is not None:
                    return
        finally:
            self._waiting.pop(call_id, None)

    async def keep(self) -> int:
        """Renews leases, expires signals that waited too long, and takes up lanes that no process
        works on.

        Returns the number of lanes that it took up. Raises `DatabaseUnavailable`.
        """
        async with self._database.session() as session:
            if self._holders:
                await signals.renew_leases(session, self._holders, LEASE_TTL_S)
        await self._expire_queued()
        lanes = await self._database.fetch(signals.lanes_to_work, MAX_LANES_PER_ROUND)
        taken = [lane for lane in lanes if lane not in self._lanes]
        for lane in lanes:
            self.work(lane)
        return len(taken)

    async def _expire_queued(self) -> None:
        late = await self._database.fetch(signals.expire_queued, MAX_LANES_PER_ROUND)
        for call, head in late:
            error = _expired(_behind(head))
            async with self._database.session() as session:
                done = await signals.complete_signal(
                    session,
                    call,
                    None,
                    state=signals.REFUSED,
                    outcome=error.code,
                    reason=error.detail,
                )
            if done:
                self._completed(call.id)

    async def _work(self, lane: Lane) -> None:
        try:
            while lane in self._wanted:
                self._wanted.discard(lane)
                while True:
                    holder = uuid4()
                    async with self._database.session() as session:
                        held = await signals.take_head(session, lane, holder, LEASE_TTL_S)
                    if held is None:
                        break
                    self._holders.add(holder)
                    try:
                        await self._carry_out(held, holder)
                    finally:
                        self._holders.discard(holder)
        except BerthError as error:  # PostgreSQL is away, or another process has taken it over
            self._log.warning(
                "signals_wait", account=lane.account_id, lane=lane.name, code=error.code
            )
        except Exception:
            # The boundary of a task: the keeper of some process takes the lane up again.
            self._log.exception("signals_crashed", account=lane.account_id, lane=lane.name)
        finally:
            del self._lanes[lane]

    async def _carry_out(self, held: HeldSignal, holder: UUID) -> None:
        """Carries one signal out to its end. Raises `SignalLeaseLost`, `DatabaseUnavailable`."""
        call, until = held.call, time.monotonic() + held.remaining_s
        if held.taken_over:
            self._log.warning("signal_taken_over", signal=call.id, left=round(held.remaining_s, 1))
        state, reason = signals.DONE, ""
        run: SignalRun | None = None
        try:
            run = SignalRun(held, holder, stored_meaning(call), until)
            # The path of its request is a secret, so that has no span.
            about = {"webhook": str(call.webhook_id)}
            with self._traces.span("webhook signal", **about) if self._traces else nullcontext():
                plan = await self._try_until_deadline(run)
            outcome, reason = _outcome_of(plan, run), _reason_of(plan, run)
        except (signals.SignalLeaseLost, DatabaseUnavailable):
            raise
        except (BerthError, _Refused) as raised:
            error = raised.failure if isinstance(raised, _Refused) else raised
            state, outcome, reason = signals.REFUSED, error.code, error.detail
            self._log.warning("signal_refused", signal=call.id, code=error.code)
        except Exception:
            if time.monotonic() < until:
                raise  # it is tried again when the lease is over
            self._log.exception("signal_crashed", signal=call.id)
            state, outcome, reason = (
                signals.REFUSED,
                BerthError.code,
                "an error on our side; the log has it",
            )
        orders = run.order_ids if run is not None else []
        async with self._database.session() as session:
            await signals.complete_signal(
                session, call, holder, state=state, outcome=outcome, reason=reason, order_ids=orders
            )
        self._completed(call.id)

    def _completed(self, call_id: int) -> None:
        if (event := self._waiting.get(call_id)) is not None:
            event.set()

    async def _try_until_deadline(self, run: SignalRun) -> SignalPlan:
        """Tries again until the deadline while the obstacle is temporary. Raises why the signal is
        refused.

        A try never submits an order a second time: it finds the orders that an earlier try has
        written.
        """
        pause = RETRY_INTERVAL_S
        obstacle = run.call.reason or ""
        while True:
            try:
                return await self._try(run)
            except (signals.SignalLeaseLost, DatabaseUnavailable):
                raise
            except errors.IntentExpired as error:
                raise (_expired(obstacle) if obstacle else error) from None
            except BerthError as error:
                if not (
                    error.retryable or isinstance(error, SymbolBlocked) or type(error) is BerthError
                ):
                    raise
                # A question for the position that the deadline cut short says nothing new: what was
                # in the way before is still the reason.
                cut_short = isinstance(error, NoAnswer) and run.remaining_s <= pause
                if error.detail != obstacle and not (cut_short and obstacle):
                    obstacle = error.detail
                    async with self._database.session() as session:
                        await signals.note_obstacle(session, run.call.id, run.holder, obstacle)
            except RedisError as error:
                obstacle = explain_failure(error)
            if run.remaining_s <= pause:
                await asyncio.sleep(run.remaining_s)
                raise _expired(obstacle)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, MAX_RETRY_INTERVAL_S)

    async def _try(self, run: SignalRun) -> SignalPlan:
        async with self._database.session(autocommit=True) as session:
            known = await order_checks.orders_by_client_ids(session, run.call.user_id, run.names)
        # Before anything refuses it: the record of a refused signal names its orders, too.
        run.written_ids = [known[name].id for name in dict.fromkeys(run.names) if name in known]
        if run.held.webhook.revoked_at is not None:
            raise errors.WebhookUnknown("the webhook was revoked")
        plan = SignalPlan.from_json(run.call.plan) if run.call.plan is not None else None
        if plan is None and known:
            plan = _plan_of_release_before(run, known)
        if plan is None or not known:
            if not run.remaining_s:
                before = await self._database.fetch(signals.find_predecessor, run.call)
                raise _expired(_behind(before) if before is not None else "its turn came too late")
            plan = await self._plan(run)
            async with self._database.session() as session:
                await signals.note_plan(session, run.call.id, run.holder, plan.to_json())
            run.call.plan = plan.to_json()
        closes = [order for order in plan.orders if order.closes]
        opens = [order for order in plan.orders if not order.closes]
        if closes:
            await self._place(run, plan, closes)
        if closes and opens:
            plan = await self._await_closes(run, plan, closes)
        if opens:
            await self._place(run, plan, opens)
        await self._await_rest(run)
        return plan

    async def _plan(self, run: SignalRun) -> SignalPlan:
        """Plans by the position that the broker reports now."""
        meaning = run.meaning
        if meaning.wish.is_plain:
            return plan_signal(meaning, 0)
        holdings = await self._positions.read_holdings(*run.where[:2], run.until)
        held, condition = _held(meaning, holdings)
        plan = plan_signal(meaning, held, condition=condition, since=holdings.since)
        if not plan.orders:  # it may be another order's turn to make such a position, or to end it
            await self._positions.require_quiet(*run.where, QuietRule(holdings.since))
        return plan

    async def plan_from_position(
        self, user_id: str, account_id: str, meaning: Meaning, *, held: int | None, until: float
    ) -> SignalPlan:
        """Plans a signal and checks its orders without placing anything: from the position `held`,
        or from what the broker reports.

        `until` is an instant on `time.monotonic`. Raises what a signal is refused with.
        """
        if meaning.wish.is_plain or held is not None:
            plan = plan_signal(meaning, held or 0)
        else:
            holdings = await self._positions.read_holdings(user_id, account_id, until)
            position, condition = _held(meaning, holdings)
            plan = plan_signal(meaning, position, condition=condition, since=holdings.since)
        orders = _requests_of(plan.orders, meaning, account_id)
        await self._positions.check_together(user_id, orders)
        return plan

    async def find_obstacle(
        self, user_id: str, account_id: str, meaning: Meaning, plan: SignalPlan
    ) -> str | None:
        """Returns the order that a planned signal would wait for now, in a sentence; None: it waits
        for none. Plain orders never do."""
        if meaning.wish.is_plain:
            return None
        # Without a position of the broker, whatever was filled by now is in the one that was given.
        since = plan.since
        if since is None:
            since = await self._database.fetch(order_checks.database_clock)
        quiet = _quiet_rule(plan, since)
        try:
            await self._positions.require_quiet(user_id, account_id, meaning.symbol, quiet)
        except errors.PositionBusy as error:
            return error.detail
        return None

    async def _place(
        self, run: SignalRun, plan: SignalPlan, orders: Sequence[PlannedOrder]
    ) -> None:
        """Writes orders together and sends them. Raises why one of them never reached the
        broker."""
        call = run.call
        origin = "" if run.meaning.wish.is_plain else f"{run.meaning.wish.action}:{call.id}"
        legs = _requests_of(orders, run.meaning, call.account_id, origin)

        async def holds_lease(session: AsyncSession) -> None:
            await signals.require_lease(session, call.id, run.holder)
            # It was perhaps revoked while the signal waited: nothing is placed after that was
            # answered.
            if await signals.is_revoked(session, call.webhook_id):
                raise errors.WebhookUnknown("the webhook was revoked")

        quiet = None
        if not run.meaning.wish.is_plain:
            quiet = _quiet_rule(plan, plan.since or call.received_at, run.names)
        placed = await self._positions.place_together(
            call.user_id,
            legs,
            run.remaining_s + ANSWER_GRACE_S,
            actor_of(run.held.webhook),
            quiet=quiet,
            not_after=run.until,
            guard=holds_lease,
        )
        for result in placed:
            run.orders[result.order.client_order_id] = result.order
        for result in placed:
            if result.failure is not None:
                if result.order.final:
                    raise _Refused(result.failure)
                raise result.failure

    async def _await_closes(
        self, run: SignalRun, plan: SignalPlan, closes: Sequence[PlannedOrder]
    ) -> SignalPlan:
        """Waits until the closing orders are filled. Raises `CloseNotFilled` or why it waits no
        longer."""
        closed = [
            run.orders[order.client_order_id]
            for order in closes
            if order.client_order_id in run.orders
        ]
        for order in closed:
            final = await self._order_when(run, order, lambda view: view.final, run.until)
            run.orders[final.client_order_id] = final
            if not final.final:
                late = _expired(
                    f"the closing order {final.id} is {final.state.value}, and not filled"
                )
                raise _Refused(late)
            if (failure := failure_of(final)) is not None:
                raise _Refused(failure)
            if final.state is not OrderState.FILLED:
                raise errors.CloseNotFilled(
                    f"the closing order {final.id} is {final.state.value} with "
                    f"{final.filled_quantity} of {final.quantity} filled, so nothing was opened"
                )
        # What was filled after the closes were accepted has changed the position, too.
        accepted = min(order.accepted_at for order in closed)
        return replace(plan, since=min(plan.since or accepted, accepted))

    async def _await_rest(self, run: SignalRun) -> None:
        """Waits until each order rests at the broker or is final."""
        end = run.until + ANSWER_GRACE_S
        for name, order in list(run.orders.items()):
            run.orders[name] = await self._order_when(
                run, order, lambda view: view.final or view.state not in UNANSWERED, end
            )

    async def _order_when(
        self, run: SignalRun, order: OrderView, fits: Callable[[OrderView], bool], end: float
    ) -> OrderView:
        """Returns the order once `fits` accepts it, or as it is at `end`, an instant on
        `time.monotonic`."""
        with self._notifications.expect(order_changes.ORDERS_CHANNEL, order.user_id) as news:
            while not fits(order) and time.monotonic() < end:
                news.clear()
                with suppress(RedisError):
                    order = await read_again(self._reader, order)
                if not fits(order):
                    await heard_within(
                        news, min(CHECK_INTERVAL_S, max(0.0, end - time.monotonic()))
                    )
        return order


def _quiet_rule(plan: SignalPlan, since: datetime, except_ids: Sequence[str] = ()) -> QuietRule:
    """Returns the rule for a plan's orders: those that only close wait for orders on their side.

    An order that works on the other side could be filled after a new position is opened.
    """
    side = plan.orders[0].side.value if plan.orders and not plan.opens else ""
    return QuietRule(since, side, except_ids)


class _Refused(Exception):
    """Ends a signal whose order never reached the broker, whether or not the error is retryable."""

    def __init__(self, failure: BerthError) -> None:
        super().__init__(failure.detail)
        self.failure = failure


def _expired(obstacle: str) -> errors.IntentExpired:
    return errors.IntentExpired(f"it could not be carried out before its deadline: {obstacle}")


def _behind(call: WebhookCall) -> str:
    """Names a signal that was carried out before another one, and what that signal met."""
    because = f": {call.reason}" if call.reason else ""
    return (
        f"signal {call.id} ({(call.signal or {}).get('action', '?')} {call.symbol}) was in "
        f"its way{because}"
    )


def _rejected(run: SignalRun) -> list[OrderView]:
    return [order for order in run.orders.values() if order.state is OrderState.REJECTED]


def _outcome_of(plan: SignalPlan, run: SignalRun) -> str:
    return Outcome.REJECTED if _rejected(run) else plan.outcome


def _reason_of(plan: SignalPlan, run: SignalRun) -> str:
    notes = [plan.note] if plan.note else []
    notes += [
        f"the broker rejected order {order.id}: {order.reason or 'it gave no reason'}"
        for order in _rejected(run)
    ]
    open_ends = [
        order for order in run.orders.values() if not order.final and order.state in UNANSWERED
    ]
    notes += [f"the outcome of order {order.id} is not known yet" for order in open_ends]
    return "; ".join(notes)


def _requests_of(
    orders: Sequence[PlannedOrder], meaning: Meaning, account_id: str, origin: str = ""
) -> list[tuple[OrderRequest, ParentRequest]]:
    """Returns the requests for planned orders. Raises `CloseInvalid` for too large a close."""
    requests = []
    for order in orders:
        if order.closes and order.quantity > MAX_QUANTITY:
            raise errors.CloseInvalid(
                f"One close is at most {MAX_QUANTITY}. Close the position in several steps."
            )
        body = order_request(order, meaning, account_id)
        parent = ParentRequest(
            fingerprint=body.fingerprint, origin=origin, reduce_only=order.closes
        )
        requests.append((body, parent))
    return requests


def order_request(order: PlannedOrder, meaning: Meaning, account_id: str) -> OrderRequest:
    """Returns the request for a planned order. It is not validated: callers may not use our ids.

    The duplicate check does not apply to `position`. The order is what is missing from the position
    that was read under the lane's lease, so the same order again within the window (from 0 to 1,
    then from 1 to 2) is meant.

    A price that the webhook rounds, or that was made from a market signal's, is rounded once more
    as the order is checked: by the broker's list of that moment.
    """
    pricing = order.pricing
    is_rounded = meaning.rounding is PriceRounding.SAFE or meaning.pricing.price is None
    rounding = OrderPriceRounding.REFUSE
    if pricing.price is not None and is_rounded:
        rounding = OrderPriceRounding.PASSIVE
    return OrderRequest.model_construct(
        client_order_id=order.client_order_id,
        account_id=account_id,
        symbol=meaning.symbol,
        side=order.side,
        quantity=order.quantity,
        price_type=pricing.price_type,
        price=pricing.price,
        time_in_force=pricing.time_in_force,
        lot=pricing.lot,
        condition=pricing.condition or OrderCondition.CASH,
        open_close=pricing.open_close,
        price_rounding=rounding,
        allow_duplicate=meaning.wish.action is SignalAction.POSITION,
    )


def _held(meaning: Meaning, holdings: Holdings) -> tuple[int, OrderCondition | None]:
    """Returns the position that a signal means, in its unit, and its condition. Raises
    `CloseInvalid`."""
    wish, lot = meaning.wish, meaning.pricing.lot
    near = [
        position
        for position in holdings.positions
        if position.shares and may_be_same_contract(position.symbol, meaning.symbol)
    ]
    positions = [position for position in near if position.symbol == meaning.symbol]
    if near and not positions:
        raise errors.CloseInvalid(
            f"{meaning.symbol} may mean {near[0].symbol}, in which there is a position. Name that"
            " symbol."
        )
    enters = wish.opens_side is not None

    def in_unit(position: Position) -> int:
        if meaning.unit is QuantityUnit.SHARES and lot not in ODD_LOTS:
            return position.quantity * meaning.lot_units + position.odd_shares
        # An entry in odd shares may not open while there are lots on the other side.
        return position.held(lot) or (position.quantity if enters else 0)

    if wish.action is not SignalAction.POSITION:
        long = wish.closes_long
        positions = [
            position
            for position in positions
            if in_unit(position) and long in (None, in_unit(position) > 0)
        ] or (positions if enters else [])
    if not enters and meaning.pricing.condition is not None:
        positions = [
            position for position in positions if position.condition == meaning.pricing.condition
        ]
    closes = [
        position
        for position in positions
        if not enters or (in_unit(position) > 0) is wish.closes_long
    ]
    if len(closes) > 1:
        kinds = ", ".join(sorted(position.condition for position in closes))
        raise errors.CloseInvalid(
            f"There are several positions ({kinds}). Name the condition of the one to close."
        )
    if closes and enters and lot in ODD_LOTS and not closes[0].odd_shares:
        raise errors.CloseInvalid(
            f"the position on the other side is {abs(closes[0].quantity)} full lots"
        )
    return sum(in_unit(position) for position in positions), closes[0].condition if closes else None


def _plan_of_release_before(run: SignalRun, known: Mapping[str, Order]) -> SignalPlan:
    """Rebuilds the plan of a signal that the release before has begun, from the orders it has
    written."""
    meaning = run.meaning
    orders: list[PlannedOrder] = []
    for base, _ in meaning.names.both:
        if (row := known.get(base)) is not None and all(
            base != order.client_order_id for order in orders
        ):
            pricing = replace(
                meaning.pricing, price=row.price, condition=OrderCondition(row.condition)
            )
            orders.append(
                PlannedOrder(
                    client_order_id=base,
                    closes=row.reduce_only,
                    side=Side(row.side),
                    quantity=row.quantity,
                    pricing=pricing,
                )
            )
    side = meaning.wish.opens_side
    if side is not None and not meaning.wish.is_plain and meaning.names.open not in known:
        orders.append(
            PlannedOrder(
                client_order_id=meaning.names.open,
                closes=False,
                side=side,
                quantity=meaning.wish.quantity or 0,
                pricing=meaning.pricing,
            )
        )
    since = min((row.created_at for row in known.values()), default=datetime.now(UTC))
    return SignalPlan(
        before=None, after=None, outcome=Outcome.PLACED, note="", orders=orders, since=since
    )


def stored_error(call: WebhookCall) -> BerthError:
    """Returns the error that refused a signal."""
    return from_code(call.outcome or "", call.reason or "")
