"""Where differences block an account, no order goes to the broker before the books were compared;
nor the order that brought the worker, which PostgreSQL took when nobody knew of a difference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.local.stack import LocalStack
from tests.support.systems.local import RunningSystem, run_system, until
from tests.support.systems.trading import open_exchange_session, wait_for_difference


@pytest.fixture
def blocking_system() -> Iterator[RunningSystem]:
    with run_system(
        lambda folder: LocalStack(folder, pool_target=1, differences_block=True)
    ) as system:
        yield system


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_order_that_brings_a_worker_waits_until_the_books_were_compared(
    blocking_system: RunningSystem,
) -> None:
    system = blocking_system
    trader = system.trader()
    worker = f"/v1/users/{trader.user_id}/worker"
    assert system.order(trader).json()["state"] == "filled"
    assert system.call("POST", f"{worker}/stop", trader.api_key, json={}).is_success
    until(
        lambda: system.call("GET", worker, trader.api_key).json()["state"] == "Terminated",
        "its end",
    )
    with open_exchange_session(system, trader) as session:
        past = session.buy("2454", 2)

    refused = system.order(trader)
    assert (refused.status_code, refused.json()["code"]) == (409, "ACCOUNT_BLOCKED"), refused.text
    orders = f"/v1/users/{trader.user_id}/orders"
    until(  # it was accepted, and its worker refused it; the outcome is written behind the answer
        lambda: (
            system.call("GET", orders, trader.api_key).json()["orders"][0]["state"] == "rejected"
        ),
        "its outcome",
    )
    ledger = system.exchange(lambda admin: admin.ledger(trader.account_id))
    assert [order.symbol for order in ledger] == ["2330", "2454"]
    assert system.order(trader).status_code == 409
    difference = wait_for_difference(system, trader)
    assert difference["blocks"]
    assert difference["differences"]["foreign_orders"] == [past]

    path, why = f"/v1/reconciliations/{difference['id']}/resolve", {"reason": "bought by hand"}
    assert system.call("POST", path, system.stack.admin_key, json=why).status_code == 200
    assert system.order(trader).json()["state"] == "filled"
