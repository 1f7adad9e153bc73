"""What the suite needs of the other side of a broker: one stage for the fake, one for the paper
exchange."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from infra.berth_testing.harness import BookedOrder, StageFacts
from infra.exchange.behaviour import Behaviour, FaultPoint
from infra.exchange.client import ExchangeAdmin
from tests.support.brokers import fake
from tests.support.brokers.fake import FakeBroker, FakeMarket
from worker_runtime.brokers.paper import broker as paper
from worker_runtime.brokers.paper.broker import PaperBroker
from worker_runtime.brokers.port import Broker, OnOrderChanged
from worker_runtime.protocol.requests import ConfirmedQuantityChange

T = TypeVar("T")


def taiwan_facts(*sources: ModuleType) -> StageFacts:
    """Orders of the home markets, to the brokers that trade them."""
    return StageFacts(
        symbols=("1101", "1102", "2317", "2412", "2303"),
        tick=Decimal("0.5"),
        currency="TWD",
        connections=5,
        sources=[Path(str(module.__file__)) for module in sources],
    )


class FakeStage:
    facts = taiwan_facts(fake)
    confirmed: Sequence[ConfirmedQuantityChange] = ()

    def __init__(self) -> None:
        self._market = FakeMarket()

    def register(self, account: str, api_key: str, secret_key: str) -> None:
        self._market.register(account, api_key, secret_key)

    def broker(self, account: str, on_order: OnOrderChanged) -> Broker:
        return FakeBroker(self._market, account, "suite", on_order)

    def set_price(self, symbol: str, price: Decimal) -> None:
        self._market.set_price(symbol, price)

    def reject_next(self, account: str, reason: str) -> None:
        self._market.reject_next[account] = reason

    def drop_next(self, account: str) -> None:
        self._market.drop_next.add(account)

    def silence_next(self, account: str) -> None:
        self._market.silence_next.add(account)

    def other_system(self, account: str, on_order: OnOrderChanged) -> None:
        """The market is the only one."""

    def drop_next_change(self, account: str) -> None:
        self._market.drop_next_change.add(account)

    def silence_next_change(self, account: str) -> None:
        self._market.silence_next_change.add(account)

    def count_changes(self, account: str) -> int:
        return self._market.changes[account]

    def taken(self, account: str) -> list[BookedOrder]:
        return [
            BookedOrder(note, order.tag, order.state)
            for owner, note, order in self._market.taken
            if owner == account
        ]


class PaperStage:
    """A real exchange process, set by its admin API."""

    facts = taiwan_facts(paper)
    confirmed: Sequence[ConfirmedQuantityChange] = ()

    def __init__(self, address: str, admin_url: str) -> None:
        self._address = address
        self._admin_url = admin_url

    def ask(self, call: Callable[[ExchangeAdmin], Awaitable[T]]) -> T:
        async def run() -> T:
            async with ExchangeAdmin(self._admin_url) as admin:
                return await call(admin)

        return asyncio.run(run())

    def register(self, account: str, api_key: str, secret_key: str) -> None:
        self.ask(lambda admin: admin.register(account, api_key, secret_key))

    def broker(self, account: str, on_order: OnOrderChanged) -> PaperBroker:
        return PaperBroker(self._address, account, "suite", on_order)

    def set_price(self, symbol: str, price: Decimal) -> None:
        self.ask(lambda admin: admin.set_price(symbol, price))

    def behave(self, account: str, behaviour: Behaviour) -> None:
        self.ask(lambda admin: admin.set_behaviour(account, behaviour))

    def reject_next(self, account: str, reason: str) -> None:
        self.behave(account, Behaviour(reject_next=1, reject_reason=reason))

    def drop_next(self, account: str) -> None:
        self.behave(account, Behaviour(faults={FaultPoint.DROP_BEFORE_ACK: 1}))

    def silence_next(self, account: str) -> None:
        self.behave(account, Behaviour(faults={FaultPoint.LOST_ACK: 1}))

    def other_system(self, account: str, on_order: OnOrderChanged) -> None:
        """The exchange is the only system: nobody trades for real with it."""

    def drop_next_change(self, account: str) -> None:
        self.behave(account, Behaviour(faults={FaultPoint.DROP_IN_CHANGE: 1}))

    def silence_next_change(self, account: str) -> None:
        self.behave(account, Behaviour(faults={FaultPoint.LOST_CHANGE_ACK: 1}))

    def count_changes(self, account: str) -> int:
        return self.ask(lambda admin: admin.count_changes(account))

    def taken(self, account: str) -> list[BookedOrder]:
        ledger_orders = self.ask(lambda admin: admin.ledger(account))
        return [BookedOrder(order.client_note, order.tag, order.state) for order in ledger_orders]
