"""What a test does at the exchange: log in, place, and hear what it reports."""

from __future__ import annotations

from decimal import Decimal

from infra.exchange.exchange import PaperExchange
from infra.exchange.records import LedgerSession
from worker_runtime.brokers.paper.wire import ExchangeOrderChanged, Login, Place
from worker_runtime.protocol.messages import PriceType, Side, TimeInForce


class TraderClient:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[ExchangeOrderChanged] = []
        self.ended: list[str] = []

    def deliver(self, event: ExchangeOrderChanged) -> None:
        self.events.append(event)

    def end(self, reason: str, *, abrupt: bool) -> None:
        self.ended.append(reason)


def login(
    exchange: PaperExchange,
    account: str = "a",
    client: TraderClient | None = None,
    address: str = "10.0.0.1",
) -> LedgerSession:
    request = Login(id=1, account=account, api_key="k", secret_key="s", client="test")
    return exchange.sessions.login(request, client or TraderClient(), address)


def limit(price: str, quantity: int = 2, symbol: str = "2330") -> Place:
    return Place(
        id=2,
        symbol=symbol,
        side=Side.BUY,
        quantity=quantity,
        price_type=PriceType.LIMIT,
        price=Decimal(price),
        time_in_force=TimeInForce.ROD,
        tag="tag",
        client_note="note",
    )


def market(
    symbol: str = "2330", quantity: int = 1, time_in_force: TimeInForce = TimeInForce.ROD
) -> Place:
    return Place(
        id=3,
        symbol=symbol,
        side=Side.BUY,
        quantity=quantity,
        price_type=PriceType.MARKET,
        price=None,
        time_in_force=time_in_force,
        tag="tag",
    )
