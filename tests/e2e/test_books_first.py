"""Where differences block an account, no order goes to the broker before the books were compared;
nor the order that brought the worker, which PostgreSQL took when nobody knew of a difference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.local.stack import LocalStack
from tests.e2e.test_differences import by_hand, open_difference
from tests.support.systems.local import House, house_of, until


@pytest.fixture
def blocking_house() -> Iterator[House]:
    with house_of(
        lambda folder: LocalStack(folder, pool_target=1, differences_block=True)
    ) as house:
        yield house


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_order_that_brings_a_worker_waits_until_the_books_were_compared(
    blocking_house: House,
) -> None:
    house = blocking_house
    trader = house.trader()
    worker = f"/v1/users/{trader.user_id}/worker"
    assert house.order(trader).json()["state"] == "filled"
    assert house.call("POST", f"{worker}/stop", trader.api_key, json={}).is_success
    until(
        lambda: house.call("GET", worker, trader.api_key).json()["state"] == "Terminated", "its end"
    )
    with by_hand(house, trader) as session:
        past = session.buy("2454", 2)

    refused = house.order(trader)
    assert (refused.status_code, refused.json()["code"]) == (409, "ACCOUNT_BLOCKED"), refused.text
    orders = f"/v1/users/{trader.user_id}/orders"
    until(  # it was accepted, and its worker refused it; the outcome is written behind the answer
        lambda: (
            house.call("GET", orders, trader.api_key).json()["orders"][0]["state"] == "rejected"
        ),
        "its outcome",
    )
    ledger = house.exchange(lambda admin: admin.ledger(trader.account_id))
    assert [order.symbol for order in ledger] == ["2330", "2454"]
    assert house.order(trader).status_code == 409
    found = open_difference(house, trader)
    assert found["blocks"]
    assert found["differences"]["foreign_orders"] == [past]

    path, why = f"/v1/reconciliations/{found['id']}/resolve", {"reason": "bought by hand"}
    assert house.call("POST", path, house.stack.admin_key, json=why).status_code == 200
    assert house.order(trader).json()["state"] == "filled"
