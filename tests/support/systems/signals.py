"""Contains webhooks of a whole system's traders, and what they send to them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Any

import httpx

from tests.support.systems.local import RunningSystem, Trader, until
from worker_runtime.protocol.messages import Side
from worker_runtime.protocol.order_terms import OrderLot

_numbers = count(1)


@dataclass(frozen=True)
class TraderHook:
    """A webhook of a trader."""

    system: RunningSystem
    trader: Trader
    id: str
    path: str
    secret: str

    def body(self, action: str, **fields: Any) -> dict[str, Any]:
        said = {"secret": self.secret, "time": datetime.now(UTC).isoformat(), "action": action}
        return said | {"symbol": "2330", "id": f"{next(_numbers)}"} | fields

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return self.system.call("POST", self.path, "", json=body)

    def send(self, action: str, **fields: Any) -> httpx.Response:
        """A signal, and its outcome: it comes again as long as it is under way."""
        body = self.body(action, **fields)
        answer = self.post(body)
        until(
            lambda: (again := self.post(body)).status_code != 202 and again, "the signal's outcome"
        )
        return self.post(body) if answer.status_code == 202 else answer

    def net(self) -> int:
        """The exchange's fills in lots or contracts; odd lots in shares count apart."""
        orders = [
            order for order in self.system.ledger(self.trader) if order.lot is OrderLot.COMMON
        ]
        return sum(order.filled if order.side is Side.BUY else -order.filled for order in orders)


def make_hook(system: RunningSystem, trader: Trader | None = None, **settings: Any) -> TraderHook:
    trader = trader or system.trader()
    body = {"account_id": trader.account_id, "quantity_unit": "shares", **settings}
    made = system.call("POST", f"/v1/users/{trader.user_id}/webhooks", trader.api_key, json=body)
    assert made.status_code == 201, made.text
    shown = made.json()
    return TraderHook(system, trader, shown["id"], shown["path"], shown["secret"])


def ledger_of(hook: TraderHook) -> list[tuple[str, int, str]]:
    return [
        (order.side.value, order.quantity, order.lot.value)
        for order in hook.system.ledger(hook.trader)
    ]
