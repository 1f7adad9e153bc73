"""The way through the system: an order of a user who has no worker."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.systems.local import RunningSystem, until
from worker_runtime.protocol import keys


def test_an_order_of_a_user_without_a_worker_claims_one_and_is_filled(
    system: RunningSystem,
) -> None:
    trader = system.trader()
    answer = system.order(trader)
    assert answer.status_code == 201, answer.text
    order = answer.json()
    assert (order["state"], order["filled_quantity"]) == ("filled", 1)
    [entry] = system.ledger(trader)
    assert entry.client_note == order["id"]
    assert len(system.open_sessions(trader)) == 1

    def timeline() -> list[str] | None:
        view = system.call("GET", f"/v1/orders/{order['id']}", trader.api_key).json()
        names = [step["step"] for step in view["timeline"]]
        return names if names[-1] == "filled" else None

    names = until(timeline, "complete timeline")
    steps = ["accepted", "claimed", "connected", "submitting", "filled"]
    assert [name for name in names if name in steps] == steps


def test_a_repeat_returns_the_first_outcome_and_the_broker_sees_one_order(
    system: RunningSystem,
) -> None:
    trader = system.trader()
    first = system.order(trader, "my-id")
    again = system.order(trader, "my-id")
    other = system.order(trader, "my-id", quantity=2)
    assert again.json()["id"] == first.json()["id"]
    assert again.json()["state"] == "filled"
    assert other.status_code == 409
    assert other.headers["content-type"] == "application/problem+json"
    assert len(system.ledger(trader)) == 1


def test_two_simultaneous_orders_give_one_claim_and_arrive_in_order(system: RunningSystem) -> None:
    trader = system.trader()
    claims = system.claims()
    system.slow_login(trader, 1.0)
    first = system.threads.submit(system.order, trader, "order-0")
    with system.valkey() as client:
        # The first one is in the queue, and its worker is not there yet (unless we were too
        # slow to see).
        queue = keys.requests(trader.user_id)
        until(lambda: client.llen(queue) == 1 or first.done(), "first order in the queue")
    second = system.threads.submit(system.order, trader, "order-1")
    orders = [future.result(45).json() for future in (first, second)]
    assert {order["state"] for order in orders} == {"filled"}
    assert len(set(system.claims()) - set(claims)) == 1
    assert len(system.sessions(trader)) == 1
    assert [entry.client_note for entry in system.ledger(trader)] == [
        order["id"] for order in orders
    ]


def test_a_wrong_login_is_tried_once_and_named_and_its_worker_ends(system: RunningSystem) -> None:
    trader = system.trader(wrong_key=True)
    before = system.claims()
    answer = system.begin(trader).result(45)
    assert answer.status_code in {409, 422, 502}, answer.text
    assert answer.json()["code"] == "LOGIN_REJECTED"
    [worker] = [worker for claim, worker in system.claims().items() if claim not in before]
    until(
        lambda: worker not in {task.worker_id for task in system.stack.node.tasks()},
        "end of the worker",
    )
    order = system.order(trader)
    assert order.json()["code"] == "LOGIN_REJECTED"
    assert system.ledger(trader) == []


def test_a_stopped_worker_logs_out_and_the_next_order_starts_another(system: RunningSystem) -> None:
    trader = system.trader()
    first = system.start_until_active(trader)
    stopped = system.call(
        "POST", f"/v1/users/{trader.user_id}/worker/stop", trader.api_key, json={}
    )
    assert stopped.status_code == 202
    until(lambda: not system.open_sessions(trader), "end of the broker session")
    assert system.order(trader).status_code == 201
    second = system.start_until_active(trader)
    assert second["worker_id"] != first["worker_id"]
    assert second["epoch"] == first["epoch"] + 1
    assert len(system.open_sessions(trader)) == 1


def test_new_credentials_are_loaded_without_a_restart(system: RunningSystem) -> None:
    trader = system.trader()
    before = system.start_until_active(trader)
    old = {session.session_id for session in system.open_sessions(trader)}
    system.exchange(
        lambda admin: admin.register(trader.account_id, "new-key", "new-secret", trader.user_id)
    )
    stored = system.call(
        "PUT",
        f"/v1/users/{trader.user_id}/accounts/{trader.account_id}/credentials",
        trader.api_key,
        json={"broker": "paper", "api_key": "new-key", "secret_key": "new-secret"},
    )
    assert stored.is_success
    reload = f"/v1/users/{trader.user_id}/worker/reload-credentials"
    assert system.call("POST", reload, trader.api_key).status_code == 202
    until(
        lambda: [s for s in system.open_sessions(trader) if s.session_id not in old],
        "session with the new credentials",
    )
    assert system.order(trader).status_code == 201
    assert system.start_until_active(trader)["worker_id"] == before["worker_id"]


@pytest.mark.parametrize(
    "body", [{"quantity": -1}, {"quantity": 1.5}, {"symbol": ""}, {"side": "up"}]
)
def test_bad_input_is_a_problem_with_a_code_and_nothing_happens(
    system: RunningSystem, body: dict[str, Any]
) -> None:
    trader = system.trader()
    answer = system.order(trader, **body)
    assert answer.status_code == 422
    assert answer.json()["code"]
    assert system.ledger(trader) == []
    assert system.sessions(trader) == []
