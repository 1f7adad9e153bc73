"""Parts of the system die in the middle of a claim. The user gets one worker, one session, one epoch."""

from __future__ import annotations

import threading

import httpx
import pytest
from redis import Redis

from infra.local.process import Server
from tests.e2e.conftest import House, Trader, until
from worker_runtime.protocol import keys

#: Seconds that the broker takes for a login: the claim's middle.
LOGIN = 2.5


def assert_one_owner(house: House, trader: Trader, worker_id: str) -> None:
    """Exactly one living session at the broker, of the worker that the user's mark names."""
    [session] = until(
        lambda: sessions if len(sessions := house.open_sessions(trader)) == 1 else None, "single session"
    )
    assert worker_id in session.client
    with house.valkey() as client:
        mark = client.get(keys.mark(trader.user_id))
    assert isinstance(mark, bytes)
    assert mark.decode().split(":", 1)[1] == worker_id
    order = house.order(trader)
    assert order.status_code == 201, order.text
    assert [entry.client_note for entry in house.ledger(trader)] == [order.json()["id"]]


def test_a_worker_killed_while_it_is_claimed_is_replaced_and_the_caller_does_not_notice(
    house: House,
) -> None:
    trader = house.trader()
    house.slow_login(trader, LOGIN)
    before = house.claims()
    started = house.begin(trader)
    _, worker_id = house.next_claim(before)
    house.kill_worker(worker_id)
    house.slow_login(trader, 0)
    answer = started.result(45)
    assert answer.status_code == 200, answer.text
    assert answer.json()["worker_id"] != worker_id
    assert_one_owner(house, trader, answer.json()["worker_id"])


def test_a_claim_whose_reply_is_dropped_is_found_again(house: House) -> None:
    trader = house.trader()
    house.slow_login(trader, LOGIN)
    before = house.claims()
    started = house.begin(trader)
    claim_id, worker_id = house.next_claim(before)
    stolen = threading.Event()

    def steal(client: Redis) -> None:
        """Takes the worker's answer away from whoever waits for it."""
        if client.blpop([keys.pool_reply(house.stack.settings.pool, claim_id)], timeout=20):
            stolen.set()

    thieves = [
        threading.Thread(target=steal, args=(Redis(host="127.0.0.1", port=house.stack.valkey.port),))
        for _ in range(2)
    ]
    for thief in thieves:
        thief.start()
    answer = started.result(45)
    for thief in thieves:
        thief.join(30)
    assert stolen.is_set()
    assert answer.status_code == 200, answer.text
    assert answer.json()["worker_id"] == worker_id
    assert_one_owner(house, trader, worker_id)


@pytest.mark.parametrize("part", ["orchestrator", "temporal", "api", "node"])
def test_a_part_that_is_killed_in_the_middle_of_a_claim_costs_time_and_nothing_else(
    house: House, part: str
) -> None:
    trader = house.trader()
    house.slow_login(trader, LOGIN)
    before = house.claims()
    started = house.begin(trader)
    house.next_claim(before)
    server: Server = getattr(house.stack, part)
    server.kill()
    server.start()
    try:
        started.result(45)
    except httpx.HTTPError:
        assert part == "api"
    worker = house.start_until_active(trader)
    assert_one_owner(house, trader, worker["worker_id"])
    view = house.call("GET", f"/v1/users/{trader.user_id}/worker", trader.api_key).json()
    assert view["live"]
    assert view["lifecycle"]["state"] == "Active"


def test_a_user_keeps_trading_while_temporal_and_the_orchestrator_are_down(house: House) -> None:
    trader = house.trader()
    house.start_until_active(trader)
    house.stack.orchestrator.kill()
    house.stack.temporal.kill()
    try:
        assert house.order(trader).status_code == 201
        newcomer = house.trader()
        refused = house.begin(newcomer).result(20)
        assert refused.status_code == 503
        assert "TEMPORAL" in refused.json()["code"]
        assert house.call("GET", "/v1/readyz", trader.api_key).status_code == 503
    finally:
        house.stack.temporal.start()
        house.stack.orchestrator.start()
    house.start_until_active(newcomer)
    assert house.order(newcomer).status_code == 201
