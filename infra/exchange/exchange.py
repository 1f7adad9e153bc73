"""The exchange itself: accounts, logins, orders and what becomes of them. No sockets, one thread.

Every change is in the ledger before anybody hears of it.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Protocol

from infra.exchange import matching
from infra.exchange.accounts import Accounts
from infra.exchange.behaviour import Behaviour, FillMode
from infra.exchange.faults import FaultPoint
from infra.exchange.ledger import Ledger
from infra.exchange.matching import Match, Terms
from infra.exchange.positions import positions
from infra.exchange.records import LedgerFill, LedgerOrder, LedgerSession
from worker_runtime.protocol.errors import LoginLimited, OrderRejected
from worker_runtime.protocol.exchange import Login, OrderChanged, Place, Position
from worker_runtime.protocol.messages import OrderState

#: Connections a person may have, as at the real broker (SinoPac: one a login, the sixth gets 451).
CONNECTIONS_PER_PERSON = 5
#: The trading day is Taipei's.
_TAIPEI = timezone(timedelta(hours=8))


class Listener(Protocol):
    """One logged-in connection."""

    def deliver(self, event: OrderChanged) -> None: ...

    def end(self, reason: str, *, abrupt: bool) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Taken:
    """An order that the exchange took, and what it has to tell about it after the answer."""

    order: LedgerOrder
    events: tuple[OrderChanged, ...]


#: Calls something later: seconds, what. `loop.call_later` in the server.
Later = Callable[[float, Callable[[], None]], object]


class Exchange:
    """All state; `ledger` is its durable half. The caller closes the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        later: Later,
        *,
        seed: int = 1,
        connections_per_person: int = CONNECTIONS_PER_PERSON,
    ) -> None:
        self.ledger = ledger
        self.accounts = Accounts(ledger)
        self._later = later
        self._seed = seed
        self._connections_per_person = connections_per_person
        self._random = random.Random(seed)  # noqa: S311 - simulated rejections, no secret
        self._boot = secrets.token_hex(4)
        self._events = 0
        self._prices = ledger.prices()
        self._listeners: dict[str, tuple[LedgerSession, Listener]] = {}
        ledger.close_all_sessions(_now_ms(), "the exchange restarted")
        self._resting = {order.broker_order_id: order for order in ledger.resting_orders()}
        for order in list(self._resting.values()):
            self._rematch(order)

    # --- market and behaviour (admin) -----------------------------------------------------------------

    def set_behaviour(self, account: str, behaviour: Behaviour) -> None:
        """Raises `UnknownAccount`. Orders that rest meet the new behaviour at once."""
        self.accounts.set_behaviour(account, behaviour)
        for order in [o for o in self._resting.values() if o.account == account]:
            self._rematch(order)

    def price(self, symbol: str) -> Decimal:
        if symbol not in self._prices:
            self._prices[symbol] = matching.first_price(symbol, self._seed)
        return self._prices[symbol]

    def set_price(self, symbol: str, price: Decimal) -> None:
        """Moves the market; resting orders that it crosses are filled."""
        self.ledger.save_price(symbol, price)
        self._prices[symbol] = price
        for order in [o for o in self._resting.values() if o.symbol == symbol]:
            self._rematch(order)

    def fill_by_hand(self, broker_order_id: str, quantity: int | None, price: Decimal | None) -> LedgerOrder:
        """Fills a resting order (all of it by default); raises `OrderRejected` if that cannot be."""
        order = self._resting_order(broker_order_id)
        quantity = order.remaining if quantity is None else quantity
        if not 1 <= quantity <= order.remaining:
            raise OrderRejected(f"{order.remaining} lots of {broker_order_id} are open")
        done = quantity == order.remaining
        found = Match(state=OrderState.FILLED if done else OrderState.PART_FILLED, quantity=quantity)
        return self._apply(order, found, price or self.price(order.symbol))

    def cancel(self, broker_order_id: str, reason: str, account: str | None = None) -> LedgerOrder:
        """Cancels a resting order; raises `OrderRejected` if it is final, unknown or someone else's."""
        order = self._resting_order(broker_order_id)
        if account is not None and order.account != account:
            raise OrderRejected(f"no open order {broker_order_id}")
        return self._apply(order, Match(state=OrderState.CANCELLED, reason=reason), None)

    # --- sessions -------------------------------------------------------------------------------------

    def login(self, request: Login, listener: Listener) -> LedgerSession:
        """Opens a session; raises `LoginRejected` or `LoginLimited`."""
        person_id = self.accounts.check_login(request)
        connected = sum(s.person_id == person_id for s, _ in self._listeners.values())
        if connected >= self._connections_per_person:
            raise LoginLimited(f"{connected} connections are open for this person")
        session = LedgerSession(
            session_id=self.ledger.new_session_id(),
            account=request.account,
            person_id=person_id,
            client=request.client[:128],
            opened_ms=_now_ms(),
            closed_ms=None,
            close_reason=None,
        )
        self.ledger.open_session(session)
        self._listeners[session.session_id] = (session, listener)
        return session

    def logout(self, session_id: str, reason: str) -> None:
        if self._listeners.pop(session_id, None) is not None:
            self.ledger.close_session(session_id, _now_ms(), reason)

    def end_sessions(self, account: str, reason: str, *, abrupt: bool) -> int:
        """Ends all sessions of an account, with or without telling them; returns how many."""
        chosen = [entry for entry in self._listeners.values() if entry[0].account == account]
        for session, listener in chosen:
            self.logout(session.session_id, reason)
            listener.end(reason, abrupt=abrupt)
        return len(chosen)

    @property
    def connections(self) -> int:
        return len(self._listeners)

    # --- orders ---------------------------------------------------------------------------------------

    def place(self, session: LedgerSession, request: Place) -> Taken:
        """Takes one order: once this returns it is in the ledger, whoever is killed next.

        Raises `OrderRejected` for what is no order at all (nothing is written). An order that this
        account's behaviour rejects is in the ledger with state rejected.
        """
        terms = Terms(
            symbol=request.symbol,
            side=request.side,
            quantity=request.quantity,
            price_type=request.price_type,
            price=request.price,
            time_in_force=request.time_in_force,
            tag=request.tag,
        )
        if refused := matching.refusal(terms):
            raise OrderRejected(refused)
        behaviour = self.accounts.behaviour(session.account)
        found = self._first_match(session.account, terms, behaviour)
        now = _now_ms()
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
            state=found.state,
            reason=found.reason,
            received_ms=now,
            updated_ms=now,
            fills=self._fills(found.quantity, self.price(request.symbol), now),
        )
        with self.ledger.transaction():
            self.ledger.insert_order(order)
        if not order.final:
            self._resting[order.broker_order_id] = order
            if behaviour.fill is FillMode.DELAYED:
                self._settle_later(order.broker_order_id, behaviour)
        # A plain acceptance is told by the answer alone.
        events = () if order.state is OrderState.SUBMITTED else self._events_of(order, order.fills)
        return Taken(order=order, events=events)

    def orders(self, account: str) -> list[LedgerOrder]:
        """The account's orders of this trading day, and older ones that still rest."""
        midnight = datetime.now(_TAIPEI).replace(hour=0, minute=0, second=0, microsecond=0)
        today = self.ledger.orders(account, since_ms=int(midnight.timestamp() * 1000))
        known = {order.broker_order_id for order in today}
        older = [o for o in self._resting.values() if o.account == account and o.broker_order_id not in known]
        return [*older, *today]

    def positions(self, account: str) -> list[Position]:
        return positions(self.ledger.orders(account))

    def publish(self, account: str, events: tuple[OrderChanged, ...]) -> None:
        """Sends events to every session of the account."""
        for event in events:
            if self.accounts.strikes(account, FaultPoint.LOST_EVENT):
                continue
            copies = [event]
            if event.fill is not None and self.accounts.strikes(account, FaultPoint.DUPLICATE_FILL):
                copies.append(OrderChanged(event_id=self._new_event_id(), order=event.order, fill=event.fill))
            for session, listener in list(self._listeners.values()):
                if session.account == account:
                    for copy in copies:
                        listener.deliver(copy)

    # --- inside ---------------------------------------------------------------------------------------

    def _first_match(self, account: str, terms: Terms, behaviour: Behaviour) -> Match:
        if behaviour.reject_next:
            self.accounts.set_behaviour(account, behaviour.without_one_rejection())
            return Match(state=OrderState.REJECTED, reason=behaviour.reject_reason)
        if behaviour.reject_rate and self._random.random() < behaviour.reject_rate:
            return Match(state=OrderState.REJECTED, reason=behaviour.reject_reason)
        match behaviour.fill:
            case FillMode.IMMEDIATE:
                return matching.match(terms, 0, self.price(terms.symbol), behaviour.liquidity)
            case FillMode.NEVER:
                return matching.match(terms, 0, None, None)
            case FillMode.DELAYED | FillMode.MANUAL:
                return Match(state=OrderState.SUBMITTED)

    def _rematch(self, order: LedgerOrder) -> None:
        """Looks at a resting order again, after the market or the behaviour changed."""
        behaviour = self.accounts.behaviour(order.account)
        if behaviour.fill is FillMode.IMMEDIATE:
            self._settle(order.broker_order_id)
        elif behaviour.fill is FillMode.DELAYED:
            self._settle_later(order.broker_order_id, behaviour)

    def _settle_later(self, broker_order_id: str, behaviour: Behaviour) -> None:
        self._later(behaviour.fill_delay_ms / 1000, lambda: self._settle(broker_order_id))

    def _settle(self, broker_order_id: str) -> None:
        order = self._resting.get(broker_order_id)
        if order is None:
            return
        behaviour = self.accounts.behaviour(order.account)
        if behaviour.fill not in (FillMode.IMMEDIATE, FillMode.DELAYED):
            return  # changed while the order waited
        terms = Terms(
            symbol=order.symbol,
            side=order.side,
            quantity=order.quantity,
            price_type=order.price_type,
            price=order.price,
            time_in_force=order.time_in_force,
        )
        market = self.price(order.symbol)
        found = matching.match(terms, order.filled, market, behaviour.liquidity)
        if found.state is not order.state or found.quantity:
            self._apply(order, found, market)

    def _apply(self, order: LedgerOrder, found: Match, price: Decimal | None) -> LedgerOrder:
        now = _now_ms()
        new = self._fills(found.quantity, price or Decimal(0), now)
        changed = order.model_copy(
            update={
                "state": found.state,
                "reason": found.reason,
                "updated_ms": now,
                "fills": (*order.fills, *new),
            }
        )
        with self.ledger.transaction():
            self.ledger.update_order(changed, new)
        if changed.final:
            self._resting.pop(order.broker_order_id, None)
        else:
            self._resting[order.broker_order_id] = changed
        self.publish(order.account, self._events_of(changed, new))
        return changed

    def _resting_order(self, broker_order_id: str) -> LedgerOrder:
        try:
            return self._resting[broker_order_id]
        except KeyError:
            raise OrderRejected(f"no open order {broker_order_id}") from None

    def _fills(self, quantity: int, price: Decimal, now: int) -> tuple[LedgerFill, ...]:
        if not quantity:
            return ()
        return (LedgerFill(fill_id=self.ledger.new_fill_id(), quantity=quantity, price=price, at_ms=now),)

    def _events_of(self, order: LedgerOrder, fills: tuple[LedgerFill, ...]) -> tuple[OrderChanged, ...]:
        sent = order.as_sent()
        if not fills:
            return (OrderChanged(event_id=self._new_event_id(), order=sent),)
        return tuple(
            OrderChanged(event_id=self._new_event_id(), order=sent, fill=fill.as_sent()) for fill in fills
        )

    def _new_event_id(self) -> str:
        self._events += 1
        return f"{self._boot}-{self._events}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
