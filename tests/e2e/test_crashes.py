"""Parts of the system die in the middle of a claim. The user gets one worker, one session, one
epoch."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from redis import Redis

from infra.local.process import Server
from infra.temporal.connection import open_client
from tests.support.systems.local import RunningSystem, Trader, until
from worker_runtime.protocol import keys

#: Seconds that the broker takes for a login: the claim's middle.
LOGIN = 2.5


def assert_one_owner(system: RunningSystem, trader: Trader, worker_id: str) -> None:
    """Exactly one living session at the broker, of the worker that the user's mark names."""
    [session] = until(
        lambda: sessions if len(sessions := system.open_sessions(trader)) == 1 else None,
        "single session",
    )
    assert worker_id in session.client
    with system.valkey() as client:
        mark = client.get(keys.mark(trader.user_id))
    assert isinstance(mark, bytes)
    assert mark.decode().split(":", 1)[1] == worker_id
    order = system.order(trader)
    assert order.status_code == 201, order.text
    assert [entry.client_note for entry in system.ledger(trader)] == [order.json()["id"]]


def logs_in(system: RunningSystem, trader: Trader) -> bool:
    """Whether a worker has taken one of the person's connections, right before its login. A later
    worker of a person who has no count yet waits for 10 s: it may have been lost."""
    with system.valkey() as client:
        held = [
            name
            for key in client.scan_iter("broker:budget:*:holders")
            for name in client.hkeys(key)
        ]
    return any(name.startswith(f"{trader.user_id}/".encode()) for name in held)


def test_a_worker_killed_while_it_is_claimed_is_replaced_and_the_caller_does_not_notice(
    system: RunningSystem,
) -> None:
    trader = system.trader()
    # The worker must not be Active when it is killed, however slow we are.
    system.slow_login(trader, 4.5)
    before = system.claims()
    started = system.begin(trader)
    _, worker_id = system.next_claim(before)
    until(lambda: logs_in(system, trader), "login that has begun")
    system.kill_worker(worker_id)
    system.slow_login(trader, 0)
    answer = started.result(45)
    assert answer.status_code == 200, answer.text
    assert answer.json()["worker_id"] != worker_id
    assert_one_owner(system, trader, answer.json()["worker_id"])


def test_a_claim_whose_reply_is_dropped_is_found_again(system: RunningSystem) -> None:
    trader = system.trader()
    system.slow_login(trader, LOGIN)
    before = system.claims()
    started = system.begin(trader)
    claim_id, worker_id = system.next_claim(before)
    stolen = threading.Event()

    def steal(client: Redis) -> None:
        """Takes the worker's answer away before its reader gets it."""
        if client.blpop(
            [keys.pool_reply(system.stack.settings.pool, worker_id, claim_id)], timeout=20
        ):
            stolen.set()

    url = system.stack.settings.valkey_url
    thieves = [
        threading.Thread(target=steal, args=(Redis.from_url(url, socket_timeout=30.0),))
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
    assert_one_owner(system, trader, worker_id)


@pytest.mark.parametrize("part", ["orchestrator", "temporal", "api", "node"])
def test_a_part_that_is_killed_in_the_middle_of_a_claim_costs_time_and_nothing_else(
    system: RunningSystem, part: str
) -> None:
    trader = system.trader()
    system.slow_login(trader, LOGIN)
    before = system.claims()
    started = system.begin(trader)
    system.next_claim(before)
    server: Server = getattr(system.stack, part)
    server.kill()
    server.start()
    try:
        started.result(45)
    except httpx.HTTPError:
        assert part == "api"
    worker = system.start_until_active(trader)
    assert_one_owner(system, trader, worker["worker_id"])
    view = system.call("GET", f"/v1/users/{trader.user_id}/worker", trader.api_key).json()
    assert view["live"]
    assert view["lifecycle"]["state"] == "Active"


def test_a_user_keeps_trading_while_temporal_and_the_orchestrator_are_down(
    system: RunningSystem,
) -> None:
    trader = system.trader()
    system.start_until_active(trader)
    system.stack.orchestrator.kill()
    system.stack.temporal.kill()
    try:
        assert system.order(trader).status_code == 201
        newcomer = system.trader()
        refused = system.begin(newcomer).result(20)
        assert refused.status_code == 503
        assert "TEMPORAL" in refused.json()["code"]
        assert system.call("GET", "/v1/readyz", trader.api_key).status_code == 503
    finally:
        system.stack.temporal.start()
        system.stack.orchestrator.start()
    system.start_until_active(newcomer)
    assert system.order(newcomer).status_code == 201


def test_a_terminated_workflow_leaves_no_second_session_of_its_user(system: RunningSystem) -> None:
    """The next run asks PostgreSQL first, and takes the worker that is logged in."""
    trader = system.trader()
    first = system.start_until_active(trader)

    async def terminate() -> None:
        settings = system.stack.settings
        client = await open_client(settings)
        await client.get_workflow_handle(f"user-worker-{trader.user_id}").terminate()

    asyncio.run(terminate())
    second = system.start_until_active(trader)
    assert second["worker_id"] == first["worker_id"]
    assert second["epoch"] == first["epoch"]
    [session] = system.sessions(trader)
    assert session.closed_ms is None
    assert_one_owner(system, trader, second["worker_id"])
