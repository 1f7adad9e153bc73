"""The way through the house: an order of a user who has no worker."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.systems.local import House, until
from worker_runtime.protocol import keys


def test_an_order_of_a_user_without_a_worker_claims_one_and_is_filled(house: House) -> None:
    trader = house.trader()
    answer = house.order(trader)
    assert answer.status_code == 201, answer.text
    order = answer.json()
    assert (order["state"], order["filled_quantity"]) == ("filled", 1)
    [entry] = house.ledger(trader)
    assert entry.client_note == order["id"]
    assert len(house.open_sessions(trader)) == 1

    def timeline() -> list[str] | None:
        view = house.call("GET", f"/v1/orders/{order['id']}", trader.api_key).json()
        names = [step["step"] for step in view["timeline"]]
        return names if names[-1] == "filled" else None

    names = until(timeline, "complete timeline")
    wanted = ["accepted", "claimed", "connected", "submitting", "filled"]
    assert [name for name in names if name in wanted] == wanted


def test_a_repeat_returns_the_first_outcome_and_the_broker_sees_one_order(house: House) -> None:
    trader = house.trader()
    first = house.order(trader, "my-id")
    again = house.order(trader, "my-id")
    other = house.order(trader, "my-id", quantity=2)
    assert again.json()["id"] == first.json()["id"]
    assert again.json()["state"] == "filled"
    assert other.status_code == 409
    assert other.headers["content-type"] == "application/problem+json"
    assert len(house.ledger(trader)) == 1


def test_two_simultaneous_orders_give_one_claim_and_arrive_in_order(house: House) -> None:
    trader = house.trader()
    claims = house.claims()
    house.slow_login(trader, 1.0)
    first = house.threads.submit(house.order, trader, "order-0")
    with house.valkey() as client:
        # The first one stands in the queue, and its worker is not there yet (unless we were too
        # slow to see).
        queue = keys.requests(trader.user_id)
        until(lambda: client.llen(queue) == 1 or first.done(), "first order in the queue")
    second = house.threads.submit(house.order, trader, "order-1")
    orders = [future.result(45).json() for future in (first, second)]
    assert {order["state"] for order in orders} == {"filled"}
    assert len(set(house.claims()) - set(claims)) == 1
    assert len(house.sessions(trader)) == 1
    assert [entry.client_note for entry in house.ledger(trader)] == [
        order["id"] for order in orders
    ]


def test_a_wrong_login_is_tried_once_and_named_and_its_worker_ends(house: House) -> None:
    trader = house.trader(wrong_key=True)
    before = house.claims()
    answer = house.begin(trader).result(45)
    assert answer.status_code in {409, 422, 502}, answer.text
    assert answer.json()["code"] == "LOGIN_REJECTED"
    [worker] = [worker for claim, worker in house.claims().items() if claim not in before]
    until(
        lambda: worker not in {task.worker_id for task in house.stack.node.tasks()},
        "end of the worker",
    )
    order = house.order(trader)
    assert order.json()["code"] == "LOGIN_REJECTED"
    assert house.ledger(trader) == []


def test_a_stopped_worker_logs_out_and_the_next_order_starts_another(house: House) -> None:
    trader = house.trader()
    first = house.start_until_active(trader)
    stopped = house.call("POST", f"/v1/users/{trader.user_id}/worker/stop", trader.api_key, json={})
    assert stopped.status_code == 202
    until(lambda: not house.open_sessions(trader), "end of the broker session")
    assert house.order(trader).status_code == 201
    second = house.start_until_active(trader)
    assert second["worker_id"] != first["worker_id"]
    assert second["epoch"] == first["epoch"] + 1
    assert len(house.open_sessions(trader)) == 1


def test_new_credentials_are_loaded_without_a_restart(house: House) -> None:
    trader = house.trader()
    before = house.start_until_active(trader)
    old = {session.session_id for session in house.open_sessions(trader)}
    house.exchange(
        lambda admin: admin.register(trader.account_id, "new-key", "new-secret", trader.user_id)
    )
    stored = house.call(
        "PUT",
        f"/v1/users/{trader.user_id}/accounts/{trader.account_id}/credentials",
        trader.api_key,
        json={"broker": "paper", "api_key": "new-key", "secret_key": "new-secret"},
    )
    assert stored.is_success
    reload = f"/v1/users/{trader.user_id}/worker/reload-credentials"
    assert house.call("POST", reload, trader.api_key).status_code == 202
    until(
        lambda: [s for s in house.open_sessions(trader) if s.session_id not in old],
        "session with the new credentials",
    )
    assert house.order(trader).status_code == 201
    assert house.start_until_active(trader)["worker_id"] == before["worker_id"]


@pytest.mark.parametrize(
    "body", [{"quantity": -1}, {"quantity": 1.5}, {"symbol": ""}, {"side": "up"}]
)
def test_bad_input_is_a_problem_with_a_code_and_nothing_happens(
    house: House, body: dict[str, Any]
) -> None:
    trader = house.trader()
    answer = house.order(trader, **body)
    assert answer.status_code == 422
    assert answer.json()["code"]
    assert house.ledger(trader) == []
    assert house.sessions(trader) == []
