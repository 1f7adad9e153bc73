"""A worker with the real paper exchange: its ledger says what really happened."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.exchange.behaviour import Behaviour, FaultPoint
from infra.exchange.client import ExchangeAdmin, ExchangeServer
from infra.exchange.records import LedgerOrder
from tests.support.waiting import eventually
from tests.support.workers.harness import WorkerHarness
from tests.support.workers.process import SpawnedWorker
from worker_runtime.protocol.messages import OrderState, PriceType, TimeInForce

REAL = ["-m", "worker_runtime"]


@pytest.fixture
def exchange(short_directory: Path) -> Iterator[ExchangeServer]:
    with ExchangeServer(short_directory / "exchange") as server:
        yield server


async def _register(exchange: ExchangeServer) -> None:
    async with ExchangeAdmin(exchange.admin_url) as admin:
        await admin.register("a1", "good", "s")


async def _ledger(exchange: ExchangeServer) -> list[LedgerOrder]:
    async with ExchangeAdmin(exchange.admin_url) as admin:
        return await admin.ledger("a1")


def _claim(
    harness: WorkerHarness, exchange: ExchangeServer, api_key: str = "good"
) -> tuple[SpawnedWorker, str]:
    """Launches and claims a real worker; returns it with the code of the failure or ''."""
    worker = harness.launch(command=REAL, paper_exchange=exchange.address)
    harness.await_ready(worker)
    harness.take("c1")
    harness.own(worker.worker_id, 1)
    harness.broker = "paper"
    harness.push(worker, harness.claim_message(worker, "c1", accounts={"a1": api_key}))
    reply = harness.reply("c1")
    return worker, reply.failure.code if reply.failure else ""


def test_an_order_is_filled_and_stands_once_in_the_ledger(
    harness: WorkerHarness, exchange: ExchangeServer
) -> None:
    asyncio.run(_register(exchange))
    worker, failure = _claim(harness, exchange)
    assert failure == ""
    answer = harness.send(price_type=PriceType.MARKET, price=None, time_in_force=TimeInForce.IOC)
    assert answer.outcome is not None
    order_id = answer.outcome.order_id
    eventually(lambda: "filled" in harness.states(order_id), "the order is filled")
    assert harness.states(order_id).count("filled") == 1
    assert answer.outcome.state in (OrderState.SUBMITTED, OrderState.FILLED)
    assert [order.client_note for order in asyncio.run(_ledger(exchange))] == [order_id]
    assert worker.end() == 0


def test_a_wrong_key_is_a_rejected_login(harness: WorkerHarness, exchange: ExchangeServer) -> None:
    asyncio.run(_register(exchange))
    assert _claim(harness, exchange, "bad")[1] == "LOGIN_REJECTED"


def test_a_crash_of_the_exchange_is_survived(
    harness: WorkerHarness, exchange: ExchangeServer
) -> None:
    asyncio.run(_register(exchange))
    worker, _ = _claim(harness, exchange)
    assert harness.send().failure is None
    exchange.stop(signal.SIGKILL)
    order = harness.order()
    harness.enqueue(order, ttl_ms=60_000)
    exchange.start()
    answer = harness.answer(order.request_id)
    there = [entry.client_note for entry in asyncio.run(_ledger(exchange))]
    if answer.failure is None:  # it waited; else it was sent into the session that had just ended
        assert there.count(order.order_id) == 1
    else:
        assert answer.failure.code in ("SESSION_DOWN", "OUTCOME_UNKNOWN")
        assert order.order_id not in there
    assert harness.send().failure is None
    assert worker.process.poll() is None


def test_an_order_in_the_hands_of_a_killed_session_stands_once_in_the_ledger(
    harness: WorkerHarness, exchange: ExchangeServer
) -> None:
    async def hold_answers() -> None:
        async with ExchangeAdmin(exchange.admin_url) as admin:
            await admin.register("a1", "good", "s")
            await admin.set_behaviour("a1", Behaviour(faults={FaultPoint.LOST_ACK: 1}))

    asyncio.run(hold_answers())
    worker, _ = _claim(harness, exchange)
    order = harness.order()
    harness.enqueue(order)
    eventually(
        lambda: asyncio.run(_ledger(exchange)), "the exchange has the order, the worker no answer"
    )
    os.kill(worker.both()[0], signal.SIGKILL)
    answer = harness.answer(order.request_id)
    assert answer.failure is not None
    assert answer.failure.code == "OUTCOME_UNKNOWN"
    assert harness.revive(worker).failure is None
    # The list that follows the login has it, so nobody has to wait for an operator.
    again = harness.send(order_id=order.order_id)
    assert again.outcome is not None
    assert (again.outcome.state, again.failure) == (OrderState.SUBMITTED, None)
    assert harness.states(order.order_id)[-2:] == ["unknown", "submitted"]
    new = harness.send()
    assert new.outcome is not None
    notes = [taken.client_note for taken in asyncio.run(_ledger(exchange))]
    assert notes == [order.order_id, new.outcome.order_id]


def test_a_link_that_the_exchange_closed_is_rebuilt_and_the_next_order_is_executed(
    harness: WorkerHarness, exchange: ExchangeServer
) -> None:
    async def end_sessions() -> int:
        async with ExchangeAdmin(exchange.admin_url) as admin:
            return await admin.end_sessions("a1", "maintenance")

    asyncio.run(_register(exchange))
    _claim(harness, exchange)
    assert asyncio.run(end_sessions()) == 1
    eventually(lambda: "reconnecting" in harness.kinds(), "the worker has heard of it")
    assert harness.send().failure is None
    assert harness.kinds() == ["connected", "reconnecting", "connected"]


def test_maintenance_degrades_the_worker_until_it_is_over(
    harness: WorkerHarness, exchange: ExchangeServer
) -> None:
    async def maintenance(begins: bool) -> None:
        async with ExchangeAdmin(exchange.admin_url) as admin:
            await (admin.begin_maintenance(600) if begins else admin.end_maintenance())

    asyncio.run(_register(exchange))
    worker, _ = _claim(harness, exchange)
    asyncio.run(maintenance(True))
    eventually(lambda: "degraded" in harness.kinds(), "the worker tells that its broker is away")
    refused = harness.send()
    assert refused.failure is not None
    assert refused.failure.code == "BROKER_MAINTENANCE"
    assert asyncio.run(_ledger(exchange)) == []
    asyncio.run(maintenance(False))
    eventually(lambda: harness.kinds()[-1] == "connected", "the worker comes back by itself")
    assert harness.send().failure is None
    assert worker.process.poll() is None
