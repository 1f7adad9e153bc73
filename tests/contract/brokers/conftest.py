"""The brokers of the suite, and one that counts what it hears."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from infra.exchange.client import ExchangeServer
from tests.contract.brokers.stages import BrokerStage, FakeStage, PaperStage
from worker_runtime.brokers.port import Broker
from worker_runtime.protocol.broker_reports import BrokerOrder, OrderChanged
from worker_runtime.protocol.messages import Credentials, OrderState, PlaceOrder, PriceType, Side, TimeInForce

_numbers = itertools.count(1)
API_KEY, SECRET_KEY = "anApiKey1234", "aSecretKey1234"
#: Seconds that a machine may stand still.
STANDSTILL = 3.5
CREDENTIALS = Credentials(
    api_key=API_KEY, secret_key=SECRET_KEY, ca_certificate=b"certificate", ca_password="password"
)


class HeardOrders:
    """Collects order changes from any thread; `wait` until they are what they should be."""

    def __init__(self) -> None:
        self.changes: list[OrderChanged] = []
        self._arrived = threading.Condition()

    def __call__(self, change: OrderChanged) -> None:
        with self._arrived:
            self.changes.append(change)
            self._arrived.notify_all()

    def outcome(self, order: BrokerOrder, state: OrderState) -> BrokerOrder:
        """The order in this state: as the call answered, or as an event says later."""
        if order.state is state:
            return order
        same = order.broker_order_id, state

        def reached(changes: list[OrderChanged]) -> bool:
            return any((change.order.broker_order_id, change.order.state) == same for change in changes)

        changes = self.wait(reached)
        return [change.order for change in changes if change.order.broker_order_id == same[0]][-1]

    def wait(self, enough: Callable[[list[OrderChanged]], bool], timeout: float = 20.0) -> list[OrderChanged]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: enough(self.changes), timeout), self.changes
            return list(self.changes)


def order(
    *,
    symbol: str = "2330",
    side: Side = Side.BUY,
    quantity: int = 2,
    price: Decimal | None = None,
    time_in_force: TimeInForce = TimeInForce.ROD,
    **terms: Any,
) -> PlaceOrder:
    """A new order; without a price a market order."""
    number = next(_numbers)
    return PlaceOrder(
        request_id=f"request-{number}",
        order_id=f"order-{number}",
        user_id="user",
        account_id="account",
        symbol=symbol,
        side=side,
        quantity=quantity,
        price_type=terms.pop("price_type", PriceType.MARKET if price is None else PriceType.LIMIT),
        price=price,
        time_in_force=time_in_force,
        tag=f"t{number}",
        reply_to="channel",
        generation="generation",
        **terms,
    )


def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Waits for a condition that nothing announces."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExchangeServer]:
    directory: Path = tmp_path_factory.mktemp("exchange")
    with ExchangeServer(directory) as server:
        yield server


@pytest.fixture
def paper(exchange: ExchangeServer) -> PaperStage:
    return PaperStage(exchange.address, exchange.admin_url)


@pytest.fixture(
    params=[
        "fake",
        "paper",
        pytest.param("shioaji", marks=pytest.mark.needs("shioaji")),
        pytest.param("shioaji in the lab", marks=pytest.mark.needs("shioaji")),
    ]
)
def stage(request: pytest.FixtureRequest) -> BrokerStage:
    if request.param == "fake":
        return FakeStage()
    if request.param == "shioaji":
        from tests.contract.brokers.shioaji_market import ShioajiMarketStage  # imports the SDK

        return ShioajiMarketStage()
    if request.param == "shioaji in the lab":
        from tests.contract.brokers.shioaji_lab import ShioajiLabStage

        server: ExchangeServer = request.getfixturevalue("exchange")
        return ShioajiLabStage(server.address, server.admin_url)
    found: PaperStage = request.getfixturevalue("paper")
    return found


@pytest.fixture
def account(request: pytest.FixtureRequest) -> str:
    """An account that no other test uses."""
    return f"account-{next(_numbers)}"


@pytest.fixture
def heard() -> HeardOrders:
    return HeardOrders()


@pytest.fixture
def broker(stage: BrokerStage, account: str, heard: HeardOrders) -> Iterator[Broker]:
    """Logged in."""
    stage.register(account, API_KEY, SECRET_KEY)
    made = stage.broker(account, heard)
    made.login(CREDENTIALS, 20.0)
    yield made
    made.close()
