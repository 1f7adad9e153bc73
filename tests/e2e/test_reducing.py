"""What keeps an order or a price from the broker, on the real system: only what reduces passes, and
a price near the reference."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from uuid import uuid4

import httpx
import pytest

from infra.exchange.behaviour import Behaviour, FillMode
from tests.support.systems.local import RunningSystem, Trader, until
from tests.support.systems.trading import (
    account_path,
    hold_broker,
    post_and_wait,
    put_switch,
    read_positions,
    wait_for_fills,
)
from worker_runtime.protocol import keys


@pytest.fixture
def trader(system: RunningSystem) -> Iterator[Trader]:
    new_trader = system.trader()
    yield new_trader
    put_switch(system, "open", system.stack.admin_key, user_id=new_trader.user_id)


def code(answer: httpx.Response) -> tuple[int, str]:
    body = answer.json()
    return answer.status_code, body.get("code") or body["state"]


def rest(system: RunningSystem, trader: Trader, **changes: Any) -> str:
    """An order that rests at the broker."""
    never = Behaviour(fill=FillMode.NEVER)
    system.exchange(lambda admin: admin.set_behaviour(trader.account_id, never))
    terms = {"price_type": "LMT", "price": "90", "time_in_force": "ROD", "quantity": 5, **changes}
    placed = system.order(trader, **terms)
    assert code(placed) == (201, "submitted"), placed.text
    system.exchange(lambda admin: admin.set_behaviour(trader.account_id, Behaviour()))
    return str(placed.json()["id"])


def until_free(system: RunningSystem, trader: Trader, path: str, **body: Any) -> httpx.Response:
    """The answer, once no fill is in its way that the books do not show yet."""

    def answered() -> httpx.Response | None:
        answer = post_and_wait(system, trader, path, **body)
        return None if answer.json().get("code") == "POSITION_BUSY" else answer

    return until(answered, f"an answer of {path}")


def close(system: RunningSystem, trader: Trader, name: str, **fields: Any) -> httpx.Response:
    path = f"{account_path(trader)}/positions/2330/close"
    return until_free(system, trader, path, client_order_id=name, **fields)


def test_while_reducing_only_what_reduces_reaches_the_broker(
    system: RunningSystem, trader: Trader
) -> None:
    resting = f"/orders/{rest(system, trader, symbol='2317')}"
    assert code(system.order(trader, quantity=3)) == (201, "filled")
    all_but = len(system.ledger(trader))
    put_switch(system, "reducing", system.stack.admin_key, user_id=trader.user_id)
    assert code(system.order(trader)) == (423, "REDUCING_ONLY")
    assert code(
        post_and_wait(system, trader, f"{resting}/replace", request_id="p", price="91")
    ) == (
        423,
        "REDUCING_ONLY",
    )
    assert code(
        post_and_wait(system, trader, f"{resting}/replace", request_id="q", quantity=2)
    ) == (
        200,
        "submitted",
    )
    assert code(close(system, trader, uuid4().hex, quantity=1)) == (200, "filled")
    until(lambda: read_positions(system, trader) == [("long", 2)], "the smaller position")
    entry = {
        "client_order_id": uuid4().hex,
        "intent": "short_entry",
        "symbol": "2330",
        "quantity": 1,
    }
    answer = until_free(system, trader, f"{account_path(trader)}/intents", **entry)
    assert code(answer) == (423, "REDUCING_ONLY"), answer.text
    assert [(leg["side"], leg["state"]) for leg in answer.json()["legs"]] == [("sell", "filled")]
    assert read_positions(system, trader) == []
    assert code(post_and_wait(system, trader, f"{resting}/cancel", request_id="c")) == (
        200,
        "cancelled",
    )
    first, bought, *later = system.ledger(trader)
    assert (first.price, bought.quantity) == (Decimal(90), 3)
    assert [(order.side.value, order.quantity) for order in later] == [("sell", 1), ("sell", 2)]
    assert len(later) == len(system.ledger(trader)) - all_but


def test_what_is_queued_already_is_refused_by_the_worker_and_a_price_stays_as_it_is(
    system: RunningSystem, trader: Trader
) -> None:
    resting = rest(system, trader, symbol="2317")
    with hold_broker(system, trader, journaled=3) as (first, queued):
        body = {"request_id": "p", "price": "91"}
        path = f"/v1/orders/{resting}/replace"
        change = system.threads.submit(
            system.call, "POST", path, trader.api_key, json=body, params={"wait": 30}
        )
        until(lambda: asked_for_changes(system, trader) == 1, "the change in the queue")
        answer = put_switch(system, "reducing", system.stack.admin_key, user_id=trader.user_id)
        assert answer["in_force"] is True
    assert first.result(30).json()["state"] == "filled"
    assert [code(future.result(30)) for future in queued] == [(423, "REDUCING_ONLY")] * 3
    assert code(change.result(30)) == (423, "REDUCING_ONLY")
    assert [order.price for order in system.ledger(trader) if order.symbol == "2317"] == [
        Decimal(90)
    ]
    assert code(close(system, trader, uuid4().hex)) == (200, "filled")


def asked_for_changes(system: RunningSystem, trader: Trader) -> int:
    with system.valkey() as client:
        queue = client.lrange(keys.requests(trader.user_id), 0, -1)
    assert isinstance(queue, list)
    return sum(b'"replace_order"' in item for item in queue)


def test_a_large_close_whose_api_is_killed_between_its_parts_sends_each_once(
    system: RunningSystem, trader: Trader
) -> None:
    limits = {"max_notional": "999999999"}  # the reference price is known from the second order on
    answer = system.call(
        "PUT", f"/v1{account_path(trader)}/limits", system.stack.admin_key, json=limits
    )
    assert answer.status_code == 200, answer.text
    for lots in (499, 499, 202):
        assert code(system.order(trader, quantity=lots)) == (201, "filled")
    wait_for_fills(system, trader)
    put_switch(system, "reducing", system.stack.admin_key, user_id=trader.user_id)
    slow = Behaviour(latency_ms=700)
    system.exchange(lambda admin: admin.set_behaviour(trader.account_id, slow))
    name = uuid4().hex

    def sells() -> list[int]:
        return [order.quantity for order in system.ledger(trader) if order.side == "sell"]

    def once() -> httpx.Response | None:
        """The close, as a client sends it that gets no answer, or has to ask again."""
        try:
            answer = post_and_wait(
                system, trader, f"{account_path(trader)}/positions/2330/close", client_order_id=name
            )
        except httpx.HTTPError:
            return None
        busy = answer.json().get("code") in ("POSITION_BUSY", "NO_POSITION") and not sells()
        return None if busy or answer.status_code in (202, 503) else answer

    asked = system.threads.submit(lambda: until(once, "an outcome"))
    until(lambda: sells(), "the first part at the broker")
    system.stack.api.kill()
    system.stack.api.start()
    whole = asked.result(60).json()
    assert (whole["state"], whole["quantity"], whole["filled_quantity"]) == (
        "filled",
        1200,
        1200,
    ), whole
    assert sorted(sells()) == [202, 499, 499]
    assert read_positions(system, trader) == []


def test_a_price_or_a_value_far_from_the_reference_is_refused_by_the_worker(
    system: RunningSystem, trader: Trader
) -> None:
    limits = {"price_band": "0.05", "max_notional": "1000000"}
    answer = system.call(
        "PUT", f"/v1{account_path(trader)}/limits", system.stack.admin_key, json=limits
    )
    assert answer.status_code == 200, answer.text
    system.exchange(lambda admin: admin.set_price("2454", Decimal(500)))

    def limit(price: str) -> httpx.Response:
        terms = {"price_type": "LMT", "price": price, "time_in_force": "ROD"}
        return system.order(trader, symbol="2454", **terms)

    # At 500: the reference from now on.
    assert code(system.order(trader, symbol="2454")) == (201, "filled")
    far = limit("530")
    assert code(far) == (422, "PRICE_BAND"), far.text
    assert far.json()["order"]["state"] == "rejected"
    assert code(system.order(trader, symbol="2454", quantity=3)) == (422, "NOTIONAL_LIMIT")
    assert code(system.order(trader, symbol="2454", quantity=2)) == (201, "filled")
    near = limit("480")
    assert code(near) == (201, "submitted")
    change = f"/orders/{near.json()['id']}/replace"
    assert code(post_and_wait(system, trader, change, request_id="far", price="474")) == (
        422,
        "PRICE_BAND",
    )
    assert code(post_and_wait(system, trader, change, request_id="near", price="476")) == (
        200,
        "submitted",
    )
    sent = [(order.price, order.quantity) for order in system.ledger(trader)]
    assert sent == [(None, 1), (None, 2), (Decimal(476), 1)]
