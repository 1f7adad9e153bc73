"""The clients of a chaos run are careful: one id until there is an outcome, and no second order for
it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import httpx
import pytest

from infra.lab.chaos.orders.client import TradingClients
from infra.lab.chaos.orders.shapes import FollowUp, OrderShape
from infra.lab.target import BenchUser
from worker_runtime.protocol.messages import PriceType, Side, TimeInForce

USER = BenchUser("u", "key", "acc")
Answer = Callable[[int, httpx.Request], httpx.Response]


class ScriptedApi:
    """Answers the n-th order with `answer(n)`, and each follow-up with `later`."""

    def __init__(self, answer: Answer, later: Answer | None = None) -> None:
        self.placed: list[dict[str, Any]] = []
        self.others: list[tuple[str, dict[str, Any]]] = []
        #: With which these came.
        self.keys: list[str] = []
        self._answer = answer
        self._later = later or (
            lambda attempt, request: httpx.Response(200, json=order("cancelled"))
        )

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path.endswith("/orders"):
            self.placed.append(body)
            return self._answer(len(self.placed), request)
        self.others.append((request.url.path, body))
        self.keys.append(request.headers["X-API-Key"])
        return self._later(len(self.others), request)


def shape(then: FollowUp = FollowUp.NOTHING) -> OrderShape:
    return OrderShape(
        number=4,
        at=0.0,
        lot=0.0,
        symbol="C001",
        side=Side.BUY,
        quantity=2,
        price_type=PriceType.LIMIT,
        time_in_force=TimeInForce.ROD,
        distance=-0.05,
        then=then,
    )


async def run(
    api: ScriptedApi, order_shape: OrderShape | None = None, *, patience: float = 60.0
) -> TradingClients:
    async with httpx.AsyncClient(transport=httpx.MockTransport(api), base_url="http://api") as http:
        prices = {"C001": Decimal(100)}
        clients = TradingClients(
            http, 9, [USER], prices, operator_key="operator", patience=patience, pause=0.0
        )
        await clients.run([order_shape or shape()], asyncio.get_running_loop().time())
        return clients


def order(state: str) -> dict[str, Any]:
    return {
        "id": "o1",
        "state": state,
        "client_order_id": "chaos-9-4",
        "quantity": 2,
        "price": "95",
    }


async def test_an_order_without_an_answer_is_sent_again_with_the_same_id() -> None:
    def answer(attempt: int, request: httpx.Request) -> httpx.Response:
        if attempt == 1:
            raise httpx.ReadTimeout("", request=request)
        if attempt == 2:
            return httpx.Response(503, json={"code": "VALKEY_UNAVAILABLE"})
        if attempt == 3:
            return httpx.Response(202, json=order("queued"))
        return httpx.Response(200, json=order("submitted"))

    api = ScriptedApi(answer)
    clients = await run(api)
    assert [body["client_order_id"] for body in api.placed] == ["chaos-9-4"] * 4
    assert len({json.dumps(body) for body in api.placed}) == 1
    [placed] = clients.placed
    assert (placed.order_id, placed.state, placed.tries) == ("o1", "submitted", 4)
    assert api.placed[0]["price"] == "95.00"


async def test_an_outcome_that_came_with_a_problem_ends_it() -> None:
    api = ScriptedApi(
        lambda attempt, request: httpx.Response(422, json={"code": "X", "order": order("expired")})
    )
    [placed] = (await run(api)).placed
    assert (placed.order_id, placed.state, placed.tries, placed.refused) == ("o1", "expired", 1, "")


async def test_a_refused_order_is_not_sent_again() -> None:
    api = ScriptedApi(lambda attempt, request: httpx.Response(409, json={"code": "SYMBOL_BLOCKED"}))
    clients = await run(api)
    assert (clients.placed[0].refused, clients.placed[0].order_id) == ("SYMBOL_BLOCKED", "")
    assert clients.counts["refused SYMBOL_BLOCKED"] == len(api.placed) == 1


async def test_a_parked_user_is_resumed_and_the_order_sent_again() -> None:
    def answer(attempt: int, request: httpx.Request) -> httpx.Response:
        if attempt == 1:
            return httpx.Response(409, json={"code": "PARKED"})
        return httpx.Response(201, json=order("filled"))

    api = ScriptedApi(answer)
    [placed] = (await run(api)).placed
    assert placed.state == "filled"
    assert api.others == [("/v1/users/u/worker/resume", {})]
    assert api.keys == ["operator"]  # users may not resume themselves


async def test_all_orders_that_work_are_cancelled_once_and_the_answer_is_recorded() -> None:
    states = iter(["filled", "submitted", "unknown"])

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path.endswith("/orders"):
            name = body["client_order_id"]
            shown = {**order(next(states)), "id": f"o-{name}", "client_order_id": name}
            return httpx.Response(201, json=shown)
        cancelled.append((request.url.path, body))
        if len(cancelled) > 1:
            return httpx.Response(503, json={"code": "VALKEY_UNAVAILABLE"})
        return httpx.Response(200, json={**order("cancelled"), "client_order_id": "chaos-9-5"})

    cancelled: list[tuple[str, dict[str, Any]]] = []
    async with httpx.AsyncClient(
        transport=httpx.MockTransport(answer), base_url="http://api"
    ) as http:
        clients = TradingClients(
            http, 9, [USER], {"C001": Decimal(100)}, operator_key="operator", pause=0.0
        )
        for number in (4, 5, 6):
            await clients.run([replace(shape(), number=number)], asyncio.get_running_loop().time())
        await clients.cancel_working()
    assert [path for path, _ in cancelled] == [f"/v1/orders/o-chaos-9-{n}/cancel" for n in (5, 6)]
    assert len({body["request_id"] for _, body in cancelled}) == 1
    assert [(placed.state, placed.ends) for placed in clients.placed] == [
        ("filled", {"filled"}),
        ("cancelled", {"cancelled"}),
        ("unknown", set()),
    ]


@pytest.mark.parametrize(
    ("then", "path", "body"),
    [
        (FollowUp.CANCEL, "/v1/orders/o1/cancel", {"request_id": "cancel"}),
        (FollowUp.REPLACE, "/v1/orders/o1/replace", {"request_id": "replace", "quantity": 1}),
        (
            FollowUp.CLOSE,
            "/v1/users/u/accounts/acc/positions/C001/close",
            {"client_order_id": "chaos-9-4-close"},
        ),
        (
            FollowUp.REVERSE,
            "/v1/users/u/accounts/acc/intents",
            {
                "client_order_id": "chaos-9-4-reverse",
                "intent": "short_entry",
                "symbol": "C001",
                "price_type": "MKT",
                "quantity": 2,
            },
        ),
    ],
)
async def test_what_follows_an_order_is_asked_for_under_one_id_until_it_is_answered(
    then: FollowUp, path: str, body: dict[str, Any]
) -> None:
    def later(attempt: int, request: httpx.Request) -> httpx.Response:
        if attempt == 1:
            raise httpx.ReadTimeout("", request=request)
        return httpx.Response(202 if attempt == 2 else 200, json=order("submitted"))

    api = ScriptedApi(lambda attempt, request: httpx.Response(201, json=order("submitted")), later)
    clients = await run(api, shape(then))
    assert api.others == [(path, body)] * 3
    assert clients.counts[f"{then} done"] == 1


async def test_the_legs_of_a_reversal_are_orders_that_the_client_knows_of() -> None:
    legs = [
        {**order("filled"), "id": "o2", "client_order_id": "chaos-9-4-reverse.close"},
        {**order("filled"), "id": "o3", "client_order_id": "chaos-9-4-reverse.open"},
    ]
    api = ScriptedApi(
        lambda attempt, request: httpx.Response(201, json=order("filled")),
        lambda attempt, request: httpx.Response(200, json={"legs": legs, "complete": True}),
    )
    orders = {
        placed.client_order_id: (placed.order_id, placed.ends)
        for placed in (await run(api, shape(FollowUp.REVERSE))).placed
    }
    assert orders == {
        "chaos-9-4": ("o1", {"filled"}),
        "chaos-9-4-reverse.close": ("o2", {"filled"}),
        "chaos-9-4-reverse.open": ("o3", {"filled"}),
    }


async def test_a_follow_up_that_is_refused_is_not_asked_for_again() -> None:
    api = ScriptedApi(
        lambda attempt, request: httpx.Response(201, json=order("submitted")),
        lambda attempt, request: httpx.Response(
            409, json={"code": "ORDER_SETTLED", "order": order("filled")}
        ),
    )
    clients = await run(api, shape(FollowUp.CANCEL))
    assert clients.counts["cancel refused ORDER_SETTLED"] == len(api.others) == 1
    assert clients.placed[0].ends == {"filled"}


async def test_patience_ends() -> None:
    api = ScriptedApi(
        lambda attempt, request: httpx.Response(503, json={"code": "TEMPORAL_UNAVAILABLE"})
    )
    clients = await run(api, patience=0.0)
    assert clients.counts["given_up"] == len(api.placed) == 1
