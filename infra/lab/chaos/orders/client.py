"""Careful clients: each order has an id of its own,
and is sent again with it until there is an answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import httpx

from infra.lab.chaos.orders.followups import FollowUpSender, SignalHook
from infra.lab.chaos.orders.shapes import FollowUp, OrderShape
from infra.lab.target import BenchUser
from worker_runtime.protocol.errors import (
    LoginLimited,
    LoginRejected,
    Parked,
    RateLimited,
    TradingHalted,
)
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState

#: Seconds the API may hold one call.
CALL_TIMEOUT_S = 10.0
#: Seconds in which a client tries to get an answer to one order.
ORDER_TIMEOUT_S = 60.0
#: Seconds between two attempts.
RETRY_INTERVAL_S = 0.5
#: At the broker, or an outcome that nobody knows yet: asking again would tell nothing new.
_ANSWERED = FINAL_ORDER_STATES | {
    OrderState.SUBMITTED,
    OrderState.PART_FILLED,
    OrderState.UNKNOWN,
    OrderState.NEEDS_ATTENTION,
}
#: Not at its end, as far as the client heard.
_WORKING = frozenset(OrderState) - FINAL_ORDER_STATES - {OrderState.NEEDS_ATTENTION}
#: Refusals that pass by themselves, or by somebody's hand.
_AGAIN = frozenset(
    error.code for error in (Parked, TradingHalted, RateLimited, LoginLimited, LoginRejected)
)


@dataclass
class ClientOrder:
    """Holds what a client knows of one order."""

    client_order_id: str
    user_id: str
    account_id: str
    quantity: int
    #: Our id of it; empty while no answer showed one.
    order_id: str = ""
    state: str = ""
    #: The code with which it was refused; nothing may be at the broker then.
    refused: str = ""
    #: The number of times that it was sent.
    tries: int = 0
    #: Final states that answers showed: never more than one, and the one of the books.
    ends: set[str] = field(default_factory=set)
    #: The answers, in order.
    heard: list[str] = field(default_factory=list)

    def record_answer(self, view: Mapping[str, Any]) -> None:
        """Records an order as an answer showed it."""
        self.order_id, self.state = view["id"], view["state"]
        if self.state in FINAL_ORDER_STATES:
            self.ends.add(self.state)


def open_http_client(url: str) -> httpx.AsyncClient:
    """Opens a client with as many connections as there are calls under way; a call ends a while
    after the API should have."""
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(CALL_TIMEOUT_S + 5.0, connect=2.0),
        trust_env=False,
        limits=httpx.Limits(max_connections=None),
    )


class TradingClients:
    """All users' clients, over one pool of connections (see `open_http_client`)."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        seed: int,
        users: Sequence[BenchUser],
        prices: Mapping[str, Decimal],
        *,
        operator_key: str,
        patience: float = ORDER_TIMEOUT_S,
        pause: float = RETRY_INTERVAL_S,
        hooks: Mapping[str, SignalHook] | None = None,
    ) -> None:
        """Takes `operator_key`, an administrator's: a parked user cannot resume their own
        worker."""
        self._answered: dict[tuple[str, str], ClientOrder] = {}
        self.counts: Counter[str] = Counter()
        self._seed = seed
        self._users = users
        self._prices = prices
        self._patience = patience
        self._pause = pause
        self._http = http
        self._operator_key = operator_key
        self._follow_ups = FollowUpSender(
            self._ask,
            self._record_order,
            self.counts,
            wait=CALL_TIMEOUT_S,
            patience=patience,
            pause=pause,
            hooks=hooks,
        )

    @property
    def placed(self) -> Sequence[ClientOrder]:
        """All orders that were sent, and those that closes and intents were answered with."""
        return list(self._answered.values())

    async def run(self, shapes: Sequence[OrderShape], began: float) -> None:
        """Sends each order at its time after `began` (the loop's clock); returns when all are
        answered or given up."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for shape in shapes:
                await asyncio.sleep(began + shape.at - loop.time())
                group.create_task(self._one(shape))

    async def resume(self, user: BenchUser) -> None:
        """Resumes a user whose worker crashed too often, as an operator does it."""
        operator = BenchUser(user.user_id, self._operator_key, user.account_id)
        await self._ask("POST", f"/v1/users/{user.user_id}/worker/resume", operator, {})

    async def retry_login(self, user: BenchUser) -> None:
        """Retries a login, as users do who have put their account right at the broker."""
        await self._ask(
            "POST", f"/v1/users/{user.user_id}/accounts/{user.account_id}/retry", user, {}
        )

    async def cancel_working(self) -> None:
        """Cancels all orders that may still work, at the same moment, and records the answers.

        Each cancel is sent once: the books show the rest.
        """
        users = {user.user_id: user for user in self._users}
        working = [order for order in self.placed if order.order_id and order.state in _WORKING]
        await asyncio.gather(*(self._cancel(users[order.user_id], order) for order in working))

    async def _cancel(self, user: BenchUser, order: ClientOrder) -> None:
        path = f"/v1/orders/{order.order_id}/cancel?wait={CALL_TIMEOUT_S:g}"
        status, view = await self._ask("POST", path, user, {"request_id": "amid-a-flush"})
        if order_view := _order_in(status, view):
            self._record_order(user, order_view)
        self.counts[f"cancel amid a flush {view.get('code') or status}"] += 1

    async def _one(self, shape: OrderShape) -> None:
        user = self._users[int(shape.lot * len(self._users))]
        order = ClientOrder(
            client_order_id=f"chaos-{self._seed}-{shape.number}",
            user_id=user.user_id,
            account_id=user.account_id,
            quantity=shape.quantity,
        )
        self._answered[user.user_id, order.client_order_id] = order
        view = await self._send_until_answered(order, self._body(order, shape), user)
        if shape.then is not FollowUp.NOTHING and view is not None:
            await self._follow_ups.follow(shape, user, view)

    def _record_order(self, user: BenchUser, view: dict[str, Any]) -> None:
        """Records an order that an answer showed; also one that this client did not name itself."""
        name = view["client_order_id"]
        order = self._answered.get((user.user_id, name))
        if order is None:
            order = ClientOrder(
                client_order_id=name,
                user_id=user.user_id,
                account_id=user.account_id,
                quantity=view["quantity"],
            )
            self._answered[user.user_id, name] = order
        order.heard.append(f"later: {view['state']}")
        order.record_answer(view)

    def _body(self, order: ClientOrder, shape: OrderShape) -> dict[str, Any]:
        price = shape.price(self._prices[shape.symbol])
        return {
            "client_order_id": order.client_order_id,
            "account_id": order.account_id,
            "symbol": shape.symbol,
            "side": shape.side.value,
            "quantity": shape.quantity,
            "price_type": shape.price_type.value,
            "price": None if price is None else str(price),
            "time_in_force": shape.time_in_force.value,
        }

    async def _send_until_answered(
        self, order: ClientOrder, body: dict[str, Any], user: BenchUser
    ) -> dict[str, Any] | None:
        """Sends the same order again until its outcome is known, it is refused, or patience ends.

        Returns the order as it was shown last; None if no answer showed it.
        """
        order_view: dict[str, Any] | None = None
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        path = f"/v1/users/{user.user_id}/orders?wait={CALL_TIMEOUT_S:g}"
        while True:
            order.tries += 1
            status, view = await self._ask("POST", path, user, body)
            order_view = _order_in(status, view) or order_view
            if self._record_answer(order, status, view):
                return order_view
            if order.refused == Parked.code:
                self.counts["resumed"] += 1
                await self.resume(user)
            if order.refused == LoginRejected.code:
                self.counts["login retried"] += 1
                await self.retry_login(user)
            if loop.time() > until:
                self.counts["given_up"] += 1
                return order_view
            await asyncio.sleep(self._pause)

    def _record_answer(self, order: ClientOrder, status: int, view: dict[str, Any]) -> bool:
        """Records an answer. Returns whether the client has nothing more to ask."""
        order_view = _order_in(status, view)
        code = str(view.get("code") or "")
        order.heard.append(f"{status} {(order_view or {}).get('state', '')} {code}".strip())
        order.refused = ""
        if order_view:
            order.record_answer(order_view)
            return order.state in _ANSWERED
        if 400 <= status < 500:
            order.refused = code
            self.counts[f"refused {code}"] += 1
            return code not in _AGAIN
        return False

    async def _ask(
        self, method: str, path: str, user: BenchUser, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """Returns status and body; status 0 when there was no answer."""
        try:
            answer = await self._http.request(
                method, path, headers={"X-API-Key": user.api_key}, json=body
            )
            view = answer.json()
        except (httpx.HTTPError, ValueError):
            self.counts["unanswered"] += 1
            return 0, {}
        return answer.status_code, view if isinstance(view, dict) else {}


def _order_in(status: int, view: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the order that an answer to a placement shows."""
    order: dict[str, Any] | None = view if 200 <= status < 300 else view.get("order")
    return order or None
