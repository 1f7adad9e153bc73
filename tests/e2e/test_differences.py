"""An order that went to the broker past Berth is a difference, until a person has closed it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from tests.support.systems.local import RunningSystem, Trader, until
from worker_runtime.brokers.paper.wire import ExchangeReply, Login, Place, ServerMessage
from worker_runtime.protocol.messages import PriceType, Side, TimeInForce


class ByHand:
    """A session of the trader's own at the exchange, as the broker's app has one."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lines = link.makefile("rb")

    def ask(self, request: Login | Place) -> ExchangeReply:
        self._link.sendall(msgspec.json.encode(request) + b"\n")
        while True:
            reply = msgspec.json.decode(self._lines.readline(), type=ServerMessage)
            if isinstance(reply, ExchangeReply) and reply.id == request.id:
                assert reply.error is None, reply.detail
                return reply

    def buy(self, symbol: str, number: int) -> str:
        """One lot at the market; the broker's id of the order."""
        reply = self.ask(
            Place(
                id=number,
                symbol=symbol,
                side=Side.BUY,
                quantity=1,
                price_type=PriceType.MARKET,
                price=None,
                time_in_force=TimeInForce.IOC,
                tag="",
            )
        )
        assert reply.order is not None
        return reply.order.broker_order_id


@contextmanager
def by_hand(system: RunningSystem, trader: Trader) -> Iterator[ByHand]:
    host, _, port = system.stack.settings.exchange_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as link:
        session = ByHand(link)
        session.ask(Login(id=1, account=trader.account_id, api_key="key", secret_key="secret"))
        yield session


def log_in_again(system: RunningSystem, trader: Trader) -> None:
    system.exchange(lambda admin: admin.end_sessions(trader.account_id))


def open_difference(system: RunningSystem, trader: Trader) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        path = f"/v1/users/{trader.user_id}/reconciliations"
        rows = system.call("GET", path, trader.api_key).json()["reconciliations"]
        return next((row for row in rows if row["resolved_at"] is None), None)

    return until(found, "open difference", 90.0)


def test_orders_past_berth_are_shown_until_a_person_has_closed_them(system: RunningSystem) -> None:
    trader = system.trader()
    with by_hand(system, trader) as session:
        before = session.buy("2317", 2)  # the account traded before Berth knew it
    assert system.order(trader).json()["state"] == "filled"
    first = open_difference(system, trader)
    assert first["differences"] == {"foreign_orders": [before]}
    staff = system.stack.admin_key
    path, why = "/v1/reconciliations/{}/resolve", {"reason": "bought by hand"}
    assert system.call("POST", path.format(first["id"]), staff, json=why).status_code == 200

    with by_hand(system, trader) as session:
        past = session.buy("2454", 2)
    log_in_again(system, trader)
    second = open_difference(system, trader)
    assert second["differences"] == {
        "foreign_orders": [past],
        "positions": [{"symbol": "2454", "ours": 0, "broker": 1}],
    }
    waiting = system.call("GET", "/v1/reconciliations", staff).json()["reconciliations"]
    assert second["id"] in [row["id"] for row in waiting]
    # Shown, and by default it blocks nothing.
    assert system.order(trader).json()["state"] == "filled"
    assert system.call("POST", path.format(second["id"]), staff, json=why).status_code == 200

    with by_hand(system, trader) as session:
        last = session.buy("2603", 2)
    log_in_again(system, trader)
    assert open_difference(system, trader)["differences"] == {
        "foreign_orders": [last],
        "positions": [{"symbol": "2603", "ours": 0, "broker": 1}],
    }
