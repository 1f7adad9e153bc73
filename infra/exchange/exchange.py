"""The exchange itself, without sockets and in one thread:
its orders, market, sessions and accounts.

Every change is in the ledger before a client sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, time
from decimal import Decimal
from itertools import count
from time import time_ns

import msgspec
import structlog

from infra.exchange import matching
from infra.exchange.accounts import ExchangeAccounts
from infra.exchange.behaviour import Behaviour, FillMode, seeded_draw
from infra.exchange.hours import day_begins_ms, last_close_ms, next_close_ms
from infra.exchange.instruments import ExchangeInstruments
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.limits import ExchangeLimits
from infra.exchange.market import ExchangeMarket, PriceWalk
from infra.exchange.matching import MatchResult, OrderTerms, RestingOrders
from infra.exchange.records import (
    LedgerFill,
    LedgerOrder,
    LedgerSession,
    account_balance,
    net_positions,
    order_as_of,
)
from infra.exchange.sessions import ExchangeSessions, OrderEventFeed
from infra.market.calendar import load_calendar
from worker_runtime.brokers.paper.wire import (
    Coverage,
    ExchangeBalance,
    ExchangeOrder,
    ExchangeOrderChanged,
    ExchangePosition,
    Place,
    Replace,
)
from worker_runtime.protocol.errors import OrderRejected
from worker_runtime.protocol.messages import OrderState
from worker_runtime.protocol.order_terms import OrderLot

_log = structlog.get_logger()
#: In these modes orders are filled by a timer.
_ON_TIMER = frozenset({FillMode.DELAYED, FillMode.GRADUAL})


class TakenOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order that the exchange took, with its answer and the events that follow it."""

    order: LedgerOrder
    sent: ExchangeOrder
    events: tuple[ExchangeOrderChanged, ...]


#: Calls a function after some seconds; `loop.call_later` in the server.
CallLater = Callable[[float, Callable[[], None]], object]


def _now_ms() -> int:
    return time_ns() // 1_000_000


class PaperExchange:
    """All state of the exchange; `ledger` is its durable part, which the caller closes.

    `limits` and `walk` hold unless an admin call has set others. At `day_closes` (time of day in
    Taipei) resting orders expire; with None only an admin call closes the day. At `day_begins` the
    lists of orders start empty. `now` returns Unix milliseconds.
    """

    def __init__(
        self,
        ledger: ExchangeLedger,
        later: CallLater,
        *,
        seed: int = 1,
        limits: ExchangeLimits | None = None,
        walk: PriceWalk | None = None,
        day_closes: time | None = None,
        day_begins: time = time(),
        now: Callable[[], int] = _now_ms,
    ) -> None:
        self.ledger = ledger
        self.accounts = ExchangeAccounts(ledger)
        self.sessions = ExchangeSessions(
            ledger, self.accounts, later, now, limits or ExchangeLimits()
        )
        self.instruments = ExchangeInstruments(
            ledger, lambda symbol: matching.first_price(symbol, seed), now
        )
        self.market = ExchangeMarket(
            ledger,
            later,
            self._price_moved,
            first_price=self._first_price,
            walk=walk or PriceWalk(),
        )
        self.event_feed = OrderEventFeed(self.accounts, self.sessions.deliver, later, now)
        self._later = later
        self._now = now
        self._day_begins = day_begins
        self._seed = seed
        self._days = load_calendar()
        #: Orders per account so far, for random rejections.
        self._order_counts: dict[str, int] = {}
        #: The valid timer of each resting order.
        self._timers: dict[str, int] = {}
        self._timer_numbers = count()
        self._resting = RestingOrders(ledger.resting_orders())
        if day_closes is not None:
            # The exchange may have been down at that time.
            self.close_day(before_ms=last_close_ms(now(), day_closes))
            self._wait_for_close(day_closes)
        for order in self._resting.all():
            self._rematch(order)

    # --- market and behaviour (admin) -------------------------------------------------------------

    def set_behaviour(self, account: str, behaviour: Behaviour) -> None:
        """Applies a behaviour, also to resting orders. Raises `UnknownAccount`."""
        self.accounts.set_behaviour(account, behaviour)
        for order in self._resting.of_account(account):
            self._timers.pop(order.broker_order_id, None)
            self._rematch(order)

    def close_day(self, before_ms: int | None = None) -> int:
        """Ends the trading day: resting orders (from before that time) expire; returns how many."""
        ending = [o for o in self._resting.all() if before_ms is None or o.received_ms < before_ms]
        for order in ending:
            self._apply(
                order, MatchResult(state=OrderState.EXPIRED, reason="the trading day ended"), None
            )
        _log.info("exchange.day_closed", expired=len(ending))
        return len(ending)

    def fill_by_hand(
        self, broker_order_id: str, quantity: int | None, price: Decimal | None
    ) -> LedgerOrder:
        """Fills a resting order, all of it by default;
        raises `OrderRejected` if that is impossible."""
        order = self._resting_order(broker_order_id)
        quantity = order.remaining if quantity is None else quantity
        if not 1 <= quantity <= order.remaining:
            raise OrderRejected(f"{order.remaining} lots of {broker_order_id} are open")
        done = quantity == order.remaining
        match = MatchResult(
            state=OrderState.FILLED if done else OrderState.PART_FILLED, quantity=quantity
        )
        return self._apply(order, match, price or self.market.price(order.symbol, order.lot))

    def cancel(self, broker_order_id: str, reason: str, account: str | None = None) -> LedgerOrder:
        """Cancels a resting order; raises `OrderRejected`
        if it is final, unknown or someone else's."""
        order = self._resting_order(broker_order_id)
        if account is not None and order.account != account:
            raise OrderRejected(f"no open order {broker_order_id}")
        return self._apply(order, MatchResult(state=OrderState.CANCELLED, reason=reason), None)

    def replace(self, account: str, request: Replace) -> LedgerOrder:
        """Changes a resting order, which keeps its fills;
        raises `OrderRejected` if that is impossible.

        As at TAIFEX and TWSE the quantity can only fall.
        An order reduced to its fills is cancelled.
        """
        order = self._resting_order(request.broker_order_id)
        if order.account != account:
            raise OrderRejected(f"no open order {request.broker_order_id}")
        quantity = order.quantity if request.quantity is None else request.quantity
        if not max(order.filled, 1) <= quantity <= order.quantity:
            raise OrderRejected(
                f"the quantity can only fall, from {order.quantity} to {order.filled} lots"
            )
        if request.price is not None and order.lot is not OrderLot.COMMON:
            raise OrderRejected("of odd lots and at the closing price only the quantity changes")
        if request.price is not None and (
            order.price is None or not matching.is_price(request.price)
        ):
            raise OrderRejected("only a limit order has a price, above zero")
        price = order.price if request.price is None else request.price
        if refused := self._refusal_of_new_price(order, request.price):
            raise OrderRejected(refused)
        order = order.model_copy(update={"quantity": quantity, "price": price})
        state, reason = order.state, None
        if not order.remaining:
            state, reason = OrderState.CANCELLED, "the rest was taken back by the client"
        changed = self._apply(order, MatchResult(state=state, reason=reason), None)
        if not changed.final:
            self._rematch(changed)
        return self.ledger.order(order.broker_order_id) or changed

    def working_order(self, account: str, broker_order_id: str) -> LedgerOrder:
        """Returns a resting order of the account. Raises `OrderRejected` if there is none."""
        order = self._resting_order(broker_order_id)
        if order.account != account:
            raise OrderRejected(f"no open order {broker_order_id}")
        return order

    # --- orders -----------------------------------------------------------------------------------

    def place(self, session: LedgerSession, request: Place) -> TakenOrder:
        """Takes an order and writes it to the ledger.

        Raises `OrderRejected` for invalid terms, without writing anything. An order that the
        account's behaviour rejects is written with the state rejected.
        """
        terms = OrderTerms(
            symbol=request.symbol,
            side=request.side,
            quantity=request.quantity,
            price_type=request.price_type,
            price=request.price,
            time_in_force=request.time_in_force,
            lot=request.lot,
            condition=request.condition,
            open_close=request.open_close,
            tag=request.tag,
        )
        behaviour = self.accounts.behaviour(session.account)
        if refused := matching.refusal(terms) or self._refusal(session.account, terms, behaviour):
            raise OrderRejected(refused)
        match = self._first_match(session.account, terms, behaviour)
        now = self._now()
        order = LedgerOrder(
            broker_order_id=self.ledger.new_order_id(),
            account=session.account,
            session_id=session.session_id,
            client=session.client,
            tag=request.tag,
            client_note=request.client_note[:128],
            symbol=request.symbol,
            side=request.side,
            quantity=request.quantity,
            price_type=request.price_type,
            price=request.price,
            time_in_force=request.time_in_force,
            lot=request.lot,
            condition=request.condition,
            open_close=request.open_close,
            state=match.state,
            reason=match.reason,
            received_ms=now,
            updated_ms=now,
            fills=self._fills(match.quantity, self.market.price(request.symbol, request.lot), now),
        )
        with self.ledger.transaction():
            self.ledger.insert_order(order)
        if not order.final:
            self._resting.put(order)
            if behaviour.fill in _ON_TIMER:
                self._settle_later(order.broker_order_id, behaviour)
        # The answer alone reports a plain acceptance.
        sent = order.as_sent()
        events = (
            ()
            if order.state is OrderState.SUBMITTED
            else self.event_feed.events_of(sent, sent.fills)
        )
        return TakenOrder(order=order, sent=sent, events=events)

    def orders(self, account: str) -> list[LedgerOrder]:
        """Returns the account's orders of this trading day, and older ones that still rest."""
        today = self.ledger.orders(account, since_ms=self._today_ms())
        known = {order.broker_order_id for order in today}
        older = [o for o in self._resting.of_account(account) if o.broker_order_id not in known]
        return [*older, *today]

    def listing(self, session: LedgerSession) -> tuple[list[LedgerOrder], Coverage | None]:
        """Returns the orders that a session is shown, and how complete that list is."""
        behaviour, now = self.accounts.behaviour(session.account), self._now()
        orders = self._as_shown(session.account, self.orders(session.account))
        own_only = behaviour.lists_own_session_only
        if own_only:
            orders = [order for order in orders if order.session_id == session.session_id]
        if behaviour.listing_untold:
            return orders, None
        return orders, Coverage(
            all_sessions=not own_only,
            behind_ms=behaviour.listing_lag_ms,
            reaches_ms=now - self._today_ms(),
        )

    def positions(self, account: str) -> list[ExchangePosition]:
        return net_positions(self._as_shown(account, self.ledger.orders(account)))

    def balance(self, account: str) -> ExchangeBalance:
        """Returns the account's cash after its fills;
        resting purchases reduce what is available."""
        return account_balance(self._as_shown(account, self.ledger.orders(account)))

    # --- inside -----------------------------------------------------------------------------------

    def _refusal(self, account: str, terms: OrderTerms, behaviour: Behaviour) -> str | None:
        """Returns why this account's order is refused now, or None."""
        at = datetime.fromtimestamp(self._now() / 1000, UTC)
        if behaviour.keeps_hours and not self._days.is_open(terms.market, at, terms.lot):
            return f"the {terms.market.value} market takes no orders with lot {terms.lot.value} now"
        if behaviour.keeps_price_rules and (
            refused := matching.refusal_of_price(terms, self.instruments.find(terms.symbol))
        ):
            return refused
        return matching.refusal_of_holdings(terms, lambda: self.ledger.orders(account), behaviour)

    def _refusal_of_new_price(self, order: LedgerOrder, price: Decimal | None) -> str | None:
        if price is None or not self.accounts.behaviour(order.account).keeps_price_rules:
            return None
        terms = OrderTerms(
            symbol=order.symbol,
            side=order.side,
            quantity=order.quantity,
            price_type=order.price_type,
            price=price,
            time_in_force=order.time_in_force,
            lot=order.lot,
        )
        return matching.refusal_of_price(terms, self.instruments.find(order.symbol))

    def _first_price(self, symbol: str) -> Decimal:
        """Returns the first price of a symbol. Contracts begin at their reference price; shares and
        what is not listed at a price that follows from the seed."""
        listed = self.instruments.find(symbol)
        if listed is not None and listed.market == "futures" and listed.reference is not None:
            return listed.reference
        return matching.first_price(symbol, self._seed)

    def _today_ms(self) -> int:
        return day_begins_ms(self._now(), self._day_begins)

    def _first_match(self, account: str, terms: OrderTerms, behaviour: Behaviour) -> MatchResult:
        if behaviour.reject_next:
            self.accounts.set_behaviour(account, behaviour.without_one_rejection())
            return MatchResult(state=OrderState.REJECTED, reason=behaviour.reject_reason)
        if behaviour.reject_rate and self._reject_draw(account) < behaviour.reject_rate:
            return MatchResult(state=OrderState.REJECTED, reason=behaviour.reject_reason)
        match behaviour.fill:
            case FillMode.IMMEDIATE:
                return matching.match_order(
                    terms, 0, self.market.price(terms.symbol, terms.lot), behaviour.liquidity
                )
            case FillMode.NEVER:
                return matching.match_order(terms, 0, None, None)
            case FillMode.DELAYED | FillMode.GRADUAL | FillMode.MANUAL:
                return MatchResult(state=OrderState.SUBMITTED)

    def _reject_draw(self, account: str) -> float:
        """Returns a number from 0 up to 1 that depends on the seed and the number of the account's
        order."""
        number = self._order_counts[account] = self._order_counts.get(account, 0) + 1
        return seeded_draw(self._seed, self.ledger.start, account, "reject", number)

    def _as_shown(self, account: str, orders: list[LedgerOrder]) -> list[LedgerOrder]:
        lag = self.accounts.behaviour(account).listing_lag_ms
        if not lag:
            return orders
        then = self._now() - lag
        return [old for order in orders if (old := order_as_of(order, then)) is not None]

    def _price_moved(self, symbol: str) -> None:
        for order in self._resting.of_symbol(symbol):
            self._rematch(order)

    def _wait_for_close(self, day_closes: time) -> None:
        def close() -> None:
            self.close_day()
            self._wait_for_close(day_closes)

        now = self._now()
        self._later((next_close_ms(now, day_closes) - now) / 1000, close)

    def _rematch(self, order: LedgerOrder) -> None:
        """Matches a resting order again after the market or the behaviour changed."""
        behaviour = self.accounts.behaviour(order.account)
        if behaviour.fill is FillMode.IMMEDIATE:
            self._settle(order.broker_order_id)
        elif behaviour.fill in _ON_TIMER and order.broker_order_id not in self._timers:
            # A running timer stays: a market that moves all the time would postpone it for ever.
            self._settle_later(order.broker_order_id, behaviour)

    def _settle_later(self, broker_order_id: str, behaviour: Behaviour) -> None:
        timer = self._timers[broker_order_id] = next(self._timer_numbers)

        def settle() -> None:
            if self._timers.get(broker_order_id) == timer:
                del self._timers[broker_order_id]
                self._settle(broker_order_id)

        self._later(behaviour.fill_delay_ms / 1000, settle)

    def _settle(self, broker_order_id: str) -> None:
        order = self._resting.get(broker_order_id)
        if order is None:
            return
        behaviour = self.accounts.behaviour(order.account)
        if behaviour.fill is not FillMode.IMMEDIATE and behaviour.fill not in _ON_TIMER:
            return  # changed while the order waited
        terms = OrderTerms(
            symbol=order.symbol,
            side=order.side,
            quantity=order.quantity,
            price_type=order.price_type,
            price=order.price,
            time_in_force=order.time_in_force,
            lot=order.lot,
        )
        market = self.market.price(order.symbol, order.lot)
        match = matching.match_order(terms, order.filled, market, behaviour.liquidity)
        if behaviour.fill is FillMode.GRADUAL and match.quantity > behaviour.lots_per_fill:
            match = MatchResult(state=OrderState.PART_FILLED, quantity=behaviour.lots_per_fill)
        if match.state is order.state and not match.quantity:
            return
        changed = self._apply(order, match, market)
        if match.quantity and behaviour.fill is FillMode.GRADUAL and not changed.final:
            self._settle_later(broker_order_id, behaviour)

    def _apply(self, order: LedgerOrder, match: MatchResult, price: Decimal | None) -> LedgerOrder:
        now = self._now()
        new = self._fills(match.quantity, price or Decimal(0), now)
        changed = order.model_copy(
            update={
                "state": match.state,
                "reason": match.reason,
                "updated_ms": now,
                "fills": (*order.fills, *new),
            }
        )
        with self.ledger.transaction():
            self.ledger.update_order(changed, new)
        if changed.final:
            self._resting.remove(order)
            self._timers.pop(order.broker_order_id, None)
        else:
            self._resting.put(changed)
        fills = [fill.as_sent() for fill in new]
        self.event_feed.publish(order.account, self.event_feed.events_of(changed.as_sent(), fills))
        return changed

    def _resting_order(self, broker_order_id: str) -> LedgerOrder:
        if (order := self._resting.get(broker_order_id)) is None:
            raise OrderRejected(f"no open order {broker_order_id}")
        return order

    def _fills(self, quantity: int, price: Decimal, now: int) -> tuple[LedgerFill, ...]:
        if not quantity:
            return ()
        return (
            LedgerFill(
                fill_id=self.ledger.new_fill_id(), quantity=quantity, price=price, at_ms=now
            ),
        )
