"""The kill switch on the real system: what is queued when it is thrown never reaches the broker."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
from collections.abc import Iterator

import httpx
import pytest
from redis import Redis

from tests.support.systems.local import RunningSystem, until
from tests.support.systems.trading import count_queued_orders, hold_broker, put_switch
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.protocol import keys, scripts


@pytest.fixture
def opened(system: RunningSystem) -> Iterator[RunningSystem]:
    yield system
    put_switch(system, "open", system.stack.admin_key)


@pytest.mark.parametrize("scope", ["user", "all"])
def test_orders_that_are_queued_already_are_refused(opened: RunningSystem, scope: str) -> None:
    system, trader = opened, opened.trader()
    whom = {"user_id": trader.user_id} if scope == "user" else {}
    with hold_broker(system, trader) as (first, queued):
        assert put_switch(system, "halted", system.stack.admin_key, **whom)["in_force"] is True
        assert not first.done()  # it did not wait for the broker
    assert first.result(30).json()["state"] == "filled"  # it was inside the broker's call
    for future in queued:
        answer = future.result(30)
        assert (answer.status_code, answer.json()["code"]) == (423, "TRADING_HALTED"), answer.text
        assert answer.json()["order"]["state"] == "rejected"
    refused: httpx.Response = system.order(trader)
    assert (refused.status_code, refused.json()["code"]) == (423, "TRADING_HALTED")
    assert len(system.ledger(trader)) == 2
    put_switch(system, "open", system.stack.admin_key, **whom)
    assert system.order(trader).json()["state"] == "filled"


def let_workers_in(client: Redis, users: list[str]) -> None:
    """What an orchestrator does first for a server that lost scripts and users; its switches come
    last."""
    for script in (*scripts.ALL, *job_scripts.ALL):
        client.script_load(script.source)
    for user in users:
        _, name, *rights = re.findall(r"\([^)]*\)|\S+", user)
        if name != "default":
            client.execute_command("ACL", "SETUSER", name, *rights)  # type: ignore[no-untyped-call]


def test_a_valkey_that_comes_back_older_opens_nothing(opened: RunningSystem) -> None:
    system, trader = opened, opened.trader()
    valkey, watcher = system.stack.valkey, system.stack.orchestrator.pid
    log, copy = valkey.directory / "appendonlydir", valkey.directory / "lagging"
    try:
        with hold_broker(system, trader) as (first, queued):
            shutil.copytree(log, copy)  # three in the queue, and the switch open
            assert (
                put_switch(system, "halted", system.stack.admin_key, user_id=trader.user_id)[
                    "in_force"
                ]
                is True
            )
            with system.valkey() as client:
                users = client.acl_list()
            os.kill(watcher, signal.SIGSTOP)  # which would put it right
            valkey.kill()
            shutil.rmtree(log)
            copy.rename(log)
            valkey.start()
        with system.valkey() as client:
            assert client.hget(keys.switch(trader.user_id), "*") == b"open"
            let_workers_in(client, users)
            until(
                lambda: client.llen(keys.processing(trader.user_id)) == 0, "the first one answered"
            )
            assert count_queued_orders(client, trader) == 3
    finally:
        os.kill(watcher, signal.SIGCONT)
    assert first.result(30).json()["state"] == "filled"
    for future in queued:
        answer = future.result(30)
        assert (answer.status_code, answer.json()["code"]) == (423, "TRADING_HALTED"), answer.text
    assert len(system.ledger(trader)) == 2
    put_switch(system, "open", system.stack.admin_key, user_id=trader.user_id)


def test_a_flushed_valkey_opens_nothing(opened: RunningSystem) -> None:
    system, trader, other = opened, opened.trader(), opened.trader()
    assert {system.order(user).json()["state"] for user in (trader, other)} == {"filled"}
    put_switch(system, "halted", system.stack.admin_key, user_id=trader.user_id)
    with system.valkey() as client:
        client.flushall()
        restored = until(lambda: client.hgetall(keys.switch(trader.user_id)) or None, "the switch")
        assert restored[b"*"] == b"halted"
    assert system.order(trader).json()["code"] == "TRADING_HALTED"
    assert len(system.ledger(trader)) == 1

    symbols = itertools.count(2301)  # an order that met the flush is unknown, and blocks its symbol

    def filled() -> bool:
        return bool(system.order(other, symbol=str(next(symbols))).json().get("state") == "filled")

    # Each may wait for its answer for 30 s.
    until(filled, "an order of a user who is not halted", 100.0)
