"""Contains what tests of a whole system do as traders and operators."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import httpx
import msgspec
from redis import Redis

from tests.support.systems.local import RunningSystem, Trader, until
from worker_runtime.brokers.paper.wire import ExchangeReply, Login, Place, ServerMessage
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import PriceType, Side, TimeInForce


def account_path(trader: Trader) -> str:
    return f"/users/{trader.user_id}/accounts/{trader.account_id}"


def post_and_wait(system: RunningSystem, trader: Trader, path: str, **body: Any) -> httpx.Response:
    return system.call("POST", f"/v1{path}", trader.api_key, json=body, params={"wait": 30})


def read_positions(system: RunningSystem, trader: Trader) -> list[tuple[str, int]]:
    answer = system.call("GET", f"/v1{account_path(trader)}/positions", trader.api_key)
    assert answer.status_code == 200, answer.text
    return [
        (position["direction"], position["quantity"]) for position in answer.json()["positions"]
    ]


def list_orders(system: RunningSystem, trader: Trader) -> list[tuple[str, int, str | None]]:
    orders = system.call("GET", f"/v1/users/{trader.user_id}/orders", trader.api_key).json()[
        "orders"
    ]
    return [(order["state"], order["quantity"], order["price"]) for order in orders]


def wait_for_fills(system: RunningSystem, trader: Trader) -> None:
    """Waits until PostgreSQL has the fills that the answers reported.

    It follows some 40 ms behind, and an order that it shows as working prevents a close
    (`POSITION_BUSY`).
    """
    until(
        lambda: all(state == "filled" for state, *_ in list_orders(system, trader)),
        "fills in the books",
    )


def read_position_terms(system: RunningSystem, trader: Trader) -> list[tuple[str, int, int, str]]:
    answer = system.call("GET", f"/v1{account_path(trader)}/positions", trader.api_key)
    assert answer.status_code == 200, answer.text
    names = ("direction", "quantity", "odd_shares", "condition")
    return [
        (position[names[0]], position[names[1]], position[names[2]], position[names[3]])
        for position in answer.json()["positions"]
    ]


def set_price(system: RunningSystem, symbol: str, price: int = 100) -> None:
    system.exchange(lambda admin: admin.set_price(symbol, Decimal(price)))


def wait_for_final_orders(system: RunningSystem, trader: Trader) -> None:
    """Waits until PostgreSQL shows no open order: one that works prevents a close."""

    def none_open() -> bool:
        path, params = f"/v1/users/{trader.user_id}/orders", {"state": "open"}
        return not system.call("GET", path, trader.api_key, params=params).json()["orders"]

    until(none_open, "final orders in the books")


def count_queued_orders(client: Redis, trader: Trader) -> int:
    """Without the questions to the worker that come when an order takes long."""
    queue = client.lrange(keys.requests(trader.user_id), 0, -1)
    assert isinstance(queue, list)
    return sum(b'"place_order"' in item for item in queue)


@contextmanager
def hold_broker(
    system: RunningSystem, trader: Trader, journaled: int = 2
) -> Iterator[tuple[Future[Any], list[Future[Any]]]]:
    """Yields an order that the broker has, and three that wait for it in the queue.

    The exchange is stopped while this is open, so the first order keeps the session busy: for at
    most the 10 s of a broker call. `journaled` counts the user's orders in the journal, with it.
    """
    assert system.order(trader).json()["state"] == "filled"
    exchange = system.stack.exchange.pid
    os.kill(exchange, signal.SIGSTOP)
    try:
        first = system.threads.submit(system.order, trader)
        with system.valkey() as client:
            # Once it is in the journal, no switch is checked before the broker is called.
            entries = keys.journal(trader.user_id, "*")
            until(
                lambda: len(set(client.scan_iter(entries, count=10_000))) == journaled,
                "the first one on its way to the broker",
            )
            queued = [system.threads.submit(system.order, trader) for _ in range(3)]
            until(lambda: count_queued_orders(client, trader) == 3, "three in the queue")
        yield first, queued
    finally:
        os.kill(exchange, signal.SIGCONT)


def put_switch(system: RunningSystem, state: str, key: str, **whom: Any) -> dict[str, Any]:
    body = {"scope": "user" if whom else "all", "state": state, "reason": "a test", **whom}
    answer = system.call("PUT", "/v1/switches", key, json=body)
    assert answer.status_code == 200, answer.text
    answer_body: dict[str, Any] = answer.json()
    return answer_body


class ExchangeSession:
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
def open_exchange_session(system: RunningSystem, trader: Trader) -> Iterator[ExchangeSession]:
    host, _, port = system.stack.settings.exchange_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as link:
        session = ExchangeSession(link)
        session.ask(Login(id=1, account=trader.account_id, api_key="key", secret_key="secret"))
        yield session


def wait_for_difference(system: RunningSystem, trader: Trader) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        path = f"/v1/users/{trader.user_id}/reconciliations"
        rows = system.call("GET", path, trader.api_key).json()["reconciliations"]
        return next((row for row in rows if row["resolved_at"] is None), None)

    return until(found, "open difference", 90.0)


def find_task_id(system: RunningSystem, worker_id: str) -> str:
    [task_id] = [task.task_id for task in system.stack.tasks() if task.worker_id == worker_id]
    return task_id
