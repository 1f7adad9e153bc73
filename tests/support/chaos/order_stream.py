"""A client of one user that places orders one after the other, and never forgets one."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx

from tests.support.chaos.ledger_judge import SETTLED, AnsweredOrder
from tests.support.systems.local import PATIENCE, Trader, until

#: Seconds; orders of one stream come this close to each other, unless an answer takes longer.
PAUSE = 0.05


@dataclass
class OrderStream:
    """Use it as a context manager: orders flow inside. `settle` asks for what is still open."""

    api_url: str
    trader: Trader
    pause: float = PAUSE
    #: Client order id → what the API said last; None while it said nothing.
    answers: dict[str, AnsweredOrder | None] = field(default_factory=dict)
    #: Of each order that was filled: when it was sent and when its answer came, monotonic seconds.
    fills: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._flow, daemon=True)
        self._http = httpx.Client(base_url=self.api_url, timeout=PATIENCE, trust_env=False)

    def __enter__(self) -> OrderStream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(2 * PATIENCE)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self._http.close()

    def _flow(self) -> None:
        while not self._stopping.is_set():
            self.place()
            self._stopping.wait(self.pause)

    def place(self, client_order_id: str = "", wait: float = 20.0) -> AnsweredOrder | None:
        """One order; the same id again is the same order."""
        name = client_order_id or uuid4().hex
        self.answers.setdefault(name, None)
        body = {
            "client_order_id": name,
            "account_id": self.trader.account_id,
            "symbol": self._symbol_of(name),
            "side": "buy",
            "quantity": 1,
            "price_type": "MKT",
            "time_in_force": "IOC",
        }
        began = time.monotonic()
        try:
            answer = self._ask(
                "POST", f"/v1/users/{self.trader.user_id}/orders", json=body, wait=wait
            )
        except httpx.HTTPError:
            return None
        view = answer.json()
        order = view if answer.is_success else view.get("order")
        if order is None:  # refused before it was an order: nothing may be at the broker
            self.answers[name] = None
            return None
        shown = AnsweredOrder(order["id"], order["state"], order.get("code"), order.get("reason"))
        self.answers[name] = shown
        if shown.state == "filled":
            self.fills.append((began, time.monotonic()))
        return shown

    def _symbol_of(self, name: str) -> str:
        """One of its own for each order: an order whose outcome is unknown blocks its symbol."""
        return f"S{list(self.answers).index(name) + 1}"

    def settle(self, patience: float = PATIENCE) -> dict[str, AnsweredOrder]:
        """Every order that was accepted, by client order id, once each has an outcome.

        An order that got no answer at all is asked for by its own id: a repeat places nothing new.
        Raises AssertionError after `patience` seconds.
        """
        for name, shown in list(self.answers.items()):
            if shown is None or shown.state not in SETTLED:
                until(lambda name=name: self._settled(name), f"outcome of {name}", patience)  # type: ignore[misc]
        return {name: shown for name, shown in self.answers.items() if shown is not None}

    def _settled(self, name: str) -> AnsweredOrder | None:
        shown = self.answers[name]
        if shown is None:
            shown = self.place(name, wait=5.0)
        else:
            try:
                view = self._ask("GET", f"/v1/orders/{shown.order_id}").json()
            except httpx.HTTPError:
                return None
            shown = AnsweredOrder(
                shown.order_id, view.get("state", ""), view.get("code"), view.get("reason")
            )
            self.answers[name] = shown
        return shown if shown is not None and shown.state in SETTLED else None

    def _ask(self, method: str, path: str, wait: float | None = None, **how: Any) -> httpx.Response:
        params = {} if wait is None else {"wait": wait}
        headers = {"X-API-Key": self.trader.api_key}
        return self._http.request(method, path, params=params, headers=headers, **how)


def wait_filled(stream: OrderStream, after: float, patience: float = PATIENCE) -> float:
    """When the first order that was sent after `after` was filled; both monotonic seconds."""

    def filled() -> float | None:
        return next((answered for sent, answered in list(stream.fills) if sent > after), None)

    return until(filled, "fill after the fault", patience)
