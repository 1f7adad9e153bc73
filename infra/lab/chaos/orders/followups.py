"""Does what a client does after its order: takes it back, changes it, closes or reverses the
position it made.

Each has one id, and is sent again with it until an answer says how it ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from infra.lab.chaos.orders.shapes import FollowUp, OrderShape
from infra.lab.target import BenchUser
from worker_runtime.protocol.messages import PriceType, Side

#: Method, path, user, body → status and decoded answer; status 0 without an answer.
SendRequest = Callable[[str, str, BenchUser, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
#: Called with each order that an answer shows.
RecordAnswer = Callable[[BenchUser, dict[str, Any]], None]
#: Seconds between the two signals of a pair.
PAIR_PAUSE_S = 0.2
#: The share by which a changed order's price differs from its old one.
_PRICE_STEP_SHARE = 0.01


@dataclass(frozen=True)
class SignalHook:
    """A user's webhook."""

    path: str
    secret: str

    def body(self, action: str, shape: OrderShape, name: str) -> dict[str, Any]:
        return {
            "secret": self.secret,
            "time": datetime.now(UTC).isoformat(),
            "action": action,
            "symbol": shape.symbol,
            "quantity": str(shape.quantity),
            "id": name,
        }


class FollowUpSender:
    """Sends what follows an order. `counts` says how each kind ended."""

    def __init__(
        self,
        ask: SendRequest,
        record_order: RecordAnswer,
        counts: Counter[str],
        *,
        wait: float,
        patience: float,
        pause: float,
        hooks: Mapping[str, SignalHook] | None = None,
    ) -> None:
        """Takes `hooks`, each user's webhook by user id, where signals go."""
        self._hooks = hooks or {}
        self._ask = ask
        self._record_order = record_order
        self._counts = counts
        self._wait = wait
        self._patience = patience
        self._pause = pause

    async def follow(self, shape: OrderShape, user: BenchUser, order: dict[str, Any]) -> None:
        """Carries out what the shape says about an order, as an answer showed it last."""
        await asyncio.sleep(shape.after)
        match shape.then:
            case FollowUp.NOTHING:
                return
            case FollowUp.CANCEL:
                await self._send_until_answered(
                    shape, user, _order(order, "cancel"), {"request_id": "cancel"}
                )
            case FollowUp.REPLACE:
                body = {"request_id": "replace", **_change(shape, order)}
                await self._send_until_answered(shape, user, _order(order, "replace"), body)
            case FollowUp.CLOSE:
                account = f"/v1/users/{user.user_id}/accounts/{user.account_id}"
                path = f"{account}/positions/{shape.symbol}/close"
                body = {"client_order_id": f"{order['client_order_id']}-close"}
                await self._send_until_answered(shape, user, path, body)
            case FollowUp.EXIT | FollowUp.REVERSE:
                path = f"/v1/users/{user.user_id}/accounts/{user.account_id}/intents"
                await self._send_until_answered(shape, user, path, _intent(shape, order))
            case FollowUp.SIGNALS:
                await self._send_pair(shape, user, order)

    async def _send_pair(self, shape: OrderShape, user: BenchUser, order: dict[str, Any]) -> None:
        hook = self._hooks.get(user.user_id)
        if hook is None:
            return
        sides = ("long", "short") if shape.side is Side.BUY else ("short", "long")
        first = hook.body(f"{sides[0]}_exit", shape, f"{order['client_order_id']}-1")
        second = hook.body(f"{sides[1]}_entry", shape, f"{order['client_order_id']}-2")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_signal(hook, user, first))
            await asyncio.sleep(PAIR_PAUSE_S)
            group.create_task(self._send_signal(hook, user, second))

    async def _send_signal(self, hook: SignalHook, user: BenchUser, body: dict[str, Any]) -> None:
        """Sends a signal until it is taken: from then on it is carried out whoever asks."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        while True:
            status, view = await self._ask("POST", hook.path, user, body)
            for shown in _orders(view):
                self._record_order(user, shown)
            if 200 <= status < 300:
                self._counts[
                    f"signal {'taken' if status == 202 else view.get('outcome') or 'done'}"
                ] += 1
                return
            if 400 <= status < 500 and status != 429:
                self._counts[f"signal refused {view.get('code')}"] += 1
                return
            if loop.time() > until:
                self._counts["signal given up"] += 1
                return
            await asyncio.sleep(self._pause)

    async def _send_until_answered(
        self, shape: OrderShape, user: BenchUser, path: str, body: dict[str, Any]
    ) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        while True:
            status, view = await self._ask("POST", f"{path}?wait={self._wait:g}", user, body)
            for shown in _orders(view):
                self._record_order(user, shown)
            if status == 200:
                self._counts[f"{shape.then} done"] += 1
                return
            if 400 <= status < 500 and status != 429:
                self._counts[f"{shape.then} refused {view.get('code')}"] += 1
                return
            if loop.time() > until:
                self._counts[f"{shape.then} given up"] += 1
                return
            await asyncio.sleep(self._pause)


def _order(order: dict[str, Any], verb: str) -> str:
    return f"/v1/orders/{quote(order['id'])}/{verb}"


def _change(shape: OrderShape, order: dict[str, Any]) -> dict[str, Any]:
    """Changes an order: fewer lots if there is more than one, else another price."""
    if shape.quantity > 1:
        return {"quantity": shape.quantity - 1}
    away = -_PRICE_STEP_SHARE if shape.side is Side.BUY else _PRICE_STEP_SHARE
    return {"price": f"{float(order['price']) * (1 + away):.2f}"}


def _intent(shape: OrderShape, order: dict[str, Any]) -> dict[str, Any]:
    """Returns an intent away from the side that the order was on; a reversal by a limit order that
    fills at once is none."""
    long = shape.side is Side.BUY
    name = {
        (FollowUp.EXIT, True): "long_exit",
        (FollowUp.EXIT, False): "short_exit",
        (FollowUp.REVERSE, True): "short_entry",
        (FollowUp.REVERSE, False): "long_entry",
    }[shape.then, long]
    quantity = {} if shape.then is FollowUp.EXIT else {"quantity": shape.quantity}
    return {
        "client_order_id": f"{order['client_order_id']}-{shape.then}",
        "intent": name,
        "symbol": shape.symbol,
        "price_type": PriceType.MARKET.value,
        **quantity,
    }


def _orders(view: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns all orders that an answer or a problem shows."""
    shown = [view, view.get("order"), *(view.get("legs") or ())]
    return [
        entry
        for entry in shown
        if isinstance(entry, dict) and "client_order_id" in entry and "state" in entry
    ]
