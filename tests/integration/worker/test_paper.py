"""A worker with the real paper exchange: its ledger says what really happened."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from infra.exchange.client import ExchangeAdmin
from infra.exchange.process import ExchangeServer
from infra.exchange.records import LedgerOrder
from tests.integration.worker.stage import Stage, Worker, eventually
from worker_runtime.protocol.messages import Claim, OrderState, PriceType, TimeInForce

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


def _claim(stage: Stage, exchange: ExchangeServer, api_key: str = "good") -> tuple[Worker, str]:
    """Launches and claims a real worker; returns it with the code of the failure or ''."""
    worker = stage.launch(command=REAL, paper_exchange=exchange.address)
    stage.await_ready(worker)
    stage.take("c1")
    stage.own(worker.worker_id, 1)
    message: Claim = stage.claim_message(worker, "c1", accounts={"a1": api_key})
    accounts = [msgspec.structs.replace(account, broker="paper") for account in message.accounts]
    stage.push(worker, msgspec.structs.replace(message, accounts=accounts))
    reply = stage.reply("c1")
    return worker, reply.failure.code if reply.failure else ""


def test_an_order_is_filled_and_stands_once_in_the_ledger(stage: Stage, exchange: ExchangeServer) -> None:
    asyncio.run(_register(exchange))
    worker, failure = _claim(stage, exchange)
    assert failure == ""
    answer = stage.send(price_type=PriceType.MARKET, price=None, time_in_force=TimeInForce.IOC)
    assert answer.outcome is not None
    order_id = answer.outcome.order_id
    eventually(lambda: "filled" in stage.states(order_id), "the order is filled")
    assert stage.states(order_id).count("filled") == 1
    assert answer.outcome.state in (OrderState.SUBMITTED, OrderState.FILLED)
    assert [order.client_note for order in asyncio.run(_ledger(exchange))] == [order_id]
    assert worker.end() == 0


def test_a_wrong_key_is_a_rejected_login(stage: Stage, exchange: ExchangeServer) -> None:
    asyncio.run(_register(exchange))
    assert _claim(stage, exchange, "bad")[1] == "LOGIN_REJECTED"


def test_a_crash_of_the_exchange_is_survived(stage: Stage, exchange: ExchangeServer) -> None:
    asyncio.run(_register(exchange))
    worker, _ = _claim(stage, exchange)
    assert stage.send().failure is None
    exchange.stop(signal.SIGKILL)
    answer = stage.send()
    assert answer.failure is not None
    assert answer.failure.code in ("SESSION_DOWN", "BROKER_UNREACHABLE", "OUTCOME_UNKNOWN")
    exchange.start()
    assert stage.send().failure is None
    assert worker.process.poll() is None
    lost = answer.outcome
    assert lost is not None
    assert lost.order_id not in [order.client_note for order in asyncio.run(_ledger(exchange))]
