"""The ledger stays true after any sequence of calls of the exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from infra.exchange.behaviour import ALL_ACCOUNTS, Behaviour, FaultPlan, FaultPoint, FillMode
from infra.exchange.exchange import PaperExchange
from infra.exchange.ledger import ExchangeLedger
from infra.exchange.limits import ExchangeLimits
from infra.exchange.market import PriceWalk
from infra.exchange.records import AccountRegistration, LedgerOrder
from tests.support.brokers.exchange_clock import ExchangeClock
from tests.support.brokers.exchange_traders import TraderClient, login
from worker_runtime.brokers.paper.wire import Place, Replace
from worker_runtime.protocol.errors import OrderRejected
from worker_runtime.protocol.messages import OrderState, PriceType, Side, TimeInForce

_ACCOUNTS = st.sampled_from(["a", "b"])
_SYMBOLS = st.sampled_from(["2330", "2317"])
_PRICES = st.integers(90, 110).map(Decimal)
_LOTS = st.integers(1, 9)
_NOISE = FaultPlan(
    seed=1,
    rates={FaultPoint.DUPLICATE_FILL: 0.3, FaultPoint.LATE_EVENT: 0.3, FaultPoint.EVENT_GAP: 0.1},
)


class ExchangeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.final: dict[str, LedgerOrder] = {}
        self.open()
        for name in ("a", "b"):
            self.exchange.accounts.register(
                AccountRegistration(account=name, api_key="k", secret_key="s", person_id=name)
            )
        self.exchange.accounts.set_fault_plan(ALL_ACCOUNTS, _NOISE)
        for symbol in ("2330", "2317"):
            self.exchange.market.set_price(symbol, Decimal(100))
        self.enter()

    def open(self) -> None:
        self.ledger = ExchangeLedger(Path(self.folder.name) / "ledger.db")
        self.clock = ExchangeClock()  # the timers of the last one are gone with it
        self.exchange = PaperExchange(
            self.ledger, self.clock.later, now=self.clock.now, limits=ExchangeLimits(orders=10**6)
        )

    def enter(self) -> None:
        self.clients = {name: TraderClient() for name in ("a", "b")}
        self.sessions = {
            name: login(self.exchange, name, self.clients[name]) for name in ("a", "b")
        }

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    def any_of(self, index: int) -> LedgerOrder | None:
        orders = self.ledger.orders()
        return orders[index % len(orders)] if orders else None

    def perhaps(self, action: Callable[[], object]) -> None:
        with contextlib.suppress(OrderRejected):
            action()

    @rule(
        account=_ACCOUNTS,
        symbol=_SYMBOLS,
        side=st.sampled_from(Side),
        quantity=_LOTS,
        price=st.none() | _PRICES,
        time_in_force=st.sampled_from(TimeInForce),
    )
    def place(
        self,
        account: str,
        symbol: str,
        side: Side,
        quantity: int,
        price: Decimal | None,
        time_in_force: TimeInForce,
    ) -> None:
        request = Place(
            id=1,
            symbol=symbol,
            side=side,
            quantity=quantity,
            price_type=PriceType.MARKET if price is None else PriceType.LIMIT,
            price=price,
            time_in_force=time_in_force,
            tag="t",
        )
        taken = self.exchange.place(self.sessions[account], request)
        assert self.ledger.order(taken.order.broker_order_id) == taken.order
        self.exchange.event_feed.publish(account, taken.events)

    @rule(index=st.integers(0, 50))
    def cancel(self, index: int) -> None:
        if (order := self.any_of(index)) is not None:
            self.perhaps(lambda: self.exchange.cancel(order.broker_order_id, "cancelled"))

    @rule(index=st.integers(0, 50), quantity=st.none() | _LOTS, price=st.none() | _PRICES)
    def replace(self, index: int, quantity: int | None, price: Decimal | None) -> None:
        if (order := self.any_of(index)) is not None:
            change = Replace(
                id=1, broker_order_id=order.broker_order_id, quantity=quantity, price=price
            )
            self.perhaps(lambda: self.exchange.replace(order.account, change))

    @rule(index=st.integers(0, 50), quantity=st.none() | _LOTS)
    def fill(self, index: int, quantity: int | None) -> None:
        if (order := self.any_of(index)) is not None:
            self.perhaps(lambda: self.exchange.fill_by_hand(order.broker_order_id, quantity, None))

    @rule(symbol=_SYMBOLS, price=_PRICES)
    def move(self, symbol: str, price: Decimal) -> None:
        self.exchange.market.set_price(symbol, price)

    @rule(walks=st.booleans())
    def walk(self, walks: bool) -> None:
        self.exchange.market.set_walk(PriceWalk(every_ms=100 if walks else 0, step=0.02))

    @rule(
        account=_ACCOUNTS, fill=st.sampled_from(FillMode), liquidity=st.none() | st.integers(0, 4)
    )
    def behave(self, account: str, fill: FillMode, liquidity: int | None) -> None:
        self.exchange.set_behaviour(
            account, Behaviour(fill=fill, liquidity=liquidity, fill_delay_ms=250, lots_per_fill=2)
        )

    @rule(seconds=st.floats(0.05, 5))
    def wait(self, seconds: float) -> None:
        self.clock.pass_by(seconds)

    @rule()
    def close_day(self) -> None:
        self.exchange.close_day()
        assert self.ledger.resting_orders() == []

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.open()
        self.enter()

    @invariant()
    def the_ledger_is_true(self) -> None:
        for order in self.ledger.orders():
            assert 0 <= order.filled <= order.quantity
            assert (order.filled == order.quantity) == (order.state is OrderState.FILLED) or (
                order.state is OrderState.CANCELLED  # reduced to what was filled
            )
            if order.state is OrderState.SUBMITTED:
                assert order.filled == 0
            assert self.final.get(order.broker_order_id, order) == order
            if order.final:
                self.final[order.broker_order_id] = order

    @invariant()
    def clients_hear_of_true_fills_only(self) -> None:
        known = {
            fill.fill_id: (order.broker_order_id, fill.quantity)
            for order in self.ledger.orders()
            for fill in order.fills
        }
        for client in self.clients.values():
            for event in client.events:
                if event.fill is not None:
                    assert known[event.fill.fill_id] == (
                        event.order.broker_order_id,
                        event.fill.quantity,
                    )


TestExchange = ExchangeMachine.TestCase
TestExchange.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
