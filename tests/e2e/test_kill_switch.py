"""The kill switch on the real system: what is queued when it is thrown never reaches the broker."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from redis import Redis

from tests.support.systems.local import RunningSystem, Trader, until
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.protocol import keys, scripts


def switch(system: RunningSystem, state: str, key: str, **whom: Any) -> dict[str, Any]:
    body = {"scope": "user" if whom else "all", "state": state, "reason": "a test", **whom}
    answer = system.call("PUT", "/v1/switches", key, json=body)
    assert answer.status_code == 200, answer.text
    answer_body: dict[str, Any] = answer.json()
    return answer_body


@pytest.fixture
def opened(system: RunningSystem) -> Iterator[RunningSystem]:
    yield system
    switch(system, "open", system.stack.admin_key)


def orders_in_the_queue(client: Redis, trader: Trader) -> int:
    """Without the questions to the worker that come when an order takes long."""
    queue = client.lrange(keys.requests(trader.user_id), 0, -1)
    assert isinstance(queue, list)
    return sum(b'"place_order"' in item for item in queue)


@contextmanager
def held(
    system: RunningSystem, trader: Trader, journaled: int = 2
) -> Iterator[tuple[Future[Any], list[Future[Any]]]]:
    """An order that the broker has, and three that wait for it in the queue. The broker stands
    still while this is open, so that the first one holds the session: for at most the 10 s of a
    broker call. `journaled`: orders of the user with it."""
    assert system.order(trader).json()["state"] == "filled"
    exchange = system.stack.exchange.pid
    os.kill(exchange, signal.SIGSTOP)
    try:
        first = system.threads.submit(system.order, trader)
        with system.valkey() as client:
            # Once it is in the journal, no switch is checked before the broker is called.
            entries = keys.journal(trader.user_id, "*")
            until(
                lambda: len(set(client.scan_iter(entries, count=10_000))) == journaled,
                "the first one on its way to the broker",
            )
            queued = [system.threads.submit(system.order, trader) for _ in range(3)]
            until(lambda: orders_in_the_queue(client, trader) == 3, "three in the queue")
        yield first, queued
    finally:
        os.kill(exchange, signal.SIGCONT)


@pytest.mark.parametrize("scope", ["user", "all"])
def test_orders_that_are_queued_already_are_refused(opened: RunningSystem, scope: str) -> None:
    system, trader = opened, opened.trader()
    whom = {"user_id": trader.user_id} if scope == "user" else {}
    with held(system, trader) as (first, queued):
        assert switch(system, "halted", system.stack.admin_key, **whom)["in_force"] is True
        assert not first.done()  # it did not wait for the broker
    assert first.result(30).json()["state"] == "filled"  # it was inside the broker's call
    for future in queued:
        answer = future.result(30)
        assert (answer.status_code, answer.json()["code"]) == (423, "TRADING_HALTED"), answer.text
        assert answer.json()["order"]["state"] == "rejected"
    refused: httpx.Response = system.order(trader)
    assert (refused.status_code, refused.json()["code"]) == (423, "TRADING_HALTED")
    assert len(system.ledger(trader)) == 2
    switch(system, "open", system.stack.admin_key, **whom)
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
        with held(system, trader) as (first, queued):
            shutil.copytree(log, copy)  # three in the queue, and the switch open
            assert (
                switch(system, "halted", system.stack.admin_key, user_id=trader.user_id)["in_force"]
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
            assert orders_in_the_queue(client, trader) == 3
    finally:
        os.kill(watcher, signal.SIGCONT)
    assert first.result(30).json()["state"] == "filled"
    for future in queued:
        answer = future.result(30)
        assert (answer.status_code, answer.json()["code"]) == (423, "TRADING_HALTED"), answer.text
    assert len(system.ledger(trader)) == 2
    switch(system, "open", system.stack.admin_key, user_id=trader.user_id)


def test_a_flushed_valkey_opens_nothing(opened: RunningSystem) -> None:
    system, trader, other = opened, opened.trader(), opened.trader()
    assert {system.order(user).json()["state"] for user in (trader, other)} == {"filled"}
    switch(system, "halted", system.stack.admin_key, user_id=trader.user_id)
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
