"""A worker lists its broker's instruments, page by page, and orders do not wait for that."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.exchange.behaviour import Behaviour, FaultPoint
from infra.exchange.client import ExchangeAdmin, ExchangeServer
from infra.exchange.instruments import InstrumentSettings
from infra.exchange.records import LedgerOrder
from tests.support.workers.harness import GENERATION, WorkerHarness
from tests.support.workers.process import PATIENCE, SpawnedWorker
from worker_runtime.protocol.instruments import InstrumentPage
from worker_runtime.protocol.messages import (
    Answer,
    OrderState,
    PlaceOrder,
    PriceType,
    TimeInForce,
    encode,
)
from worker_runtime.protocol.requests import ListInstruments

REAL = ["-m", "worker_runtime"]
MANY = 10_000

_numbers = itertools.count(1)


@pytest.fixture
def exchange(short_directory: Path) -> Iterator[ExchangeServer]:
    with ExchangeServer(short_directory / "exchange") as server:
        yield server


def ask_exchange(
    exchange: ExchangeServer, *calls: Callable[[ExchangeAdmin], Awaitable[Any]]
) -> Any:
    async def run() -> Any:
        result = None
        async with ExchangeAdmin(exchange.admin_url) as admin:
            for call in calls:
                result = await call(admin)
        return result

    return asyncio.run(run())


def connected(harness: WorkerHarness, exchange: ExchangeServer, **settings: Any) -> SpawnedWorker:
    """A real worker with a session at the exchange, which lists what `settings` say."""
    ask_exchange(
        exchange,
        lambda admin: admin.register("a1", "good", "s"),
        lambda admin: admin.set_instruments(InstrumentSettings(**settings)),
    )
    worker = harness.launch(command=REAL, paper_exchange=exchange.address)
    harness.await_ready(worker)
    harness.broker = "paper"
    assert harness.claim(worker, accounts={"a1": "good"}).failure is None
    return worker


def request(harness: WorkerHarness, **changes: Any) -> ListInstruments:
    fields = {"user_id": harness.user, "account_id": "a1", "reply_to": "", "generation": GENERATION}
    return ListInstruments(**fields | {"request_id": f"list-{next(_numbers)}"} | changes)


def ask(harness: WorkerHarness, **changes: Any) -> Answer:
    asked = request(harness, **changes)
    harness.enqueue_raw(asked.request_id, encode(asked))
    return harness.answer(asked.request_id)


def loading(answer: Answer) -> bool:
    return answer.failure is not None and answer.failure.code == "INSTRUMENTS_LOADING"


def page(harness: WorkerHarness, meanwhile: Callable[[], object], **changes: Any) -> InstrumentPage:
    """Asks until the list was read; calls `meanwhile` in between."""
    until = time.monotonic() + PATIENCE
    answer = ask(harness, **changes)
    while loading(answer):
        assert answer.failure is not None
        assert answer.failure.retry_after_ms
        assert time.monotonic() < until
        meanwhile()
        answer = ask(harness, **changes)
    assert answer.failure is None, answer.failure
    assert answer.instruments is not None
    return answer.instruments


def place(harness: WorkerHarness) -> PlaceOrder:
    order = harness.order(price_type=PriceType.MARKET, price=None, time_in_force=TimeInForce.IOC)
    harness.enqueue(order)
    answer = harness.answer(order.request_id)
    assert answer.outcome is not None
    assert answer.outcome.state in (OrderState.SUBMITTED, OrderState.FILLED)
    return order


@pytest.mark.timeout(90)
def test_all_instruments_are_paged_through_while_orders_flow(
    harness: WorkerHarness, exchange: ExchangeServer
) -> None:
    connected(harness, exchange, extra_warrants=MANY)
    placed: list[PlaceOrder] = []

    def order() -> None:
        placed.append(place(harness))

    order()
    pages = [page(harness, order)]
    while pages[-1].next_after:
        pages.append(page(harness, order, after=pages[-1].next_after))
        if len(pages) % 10 == 0:
            order()
    codes = [instrument.code for listed in pages for instrument in listed.instruments]
    assert len(codes) == pages[0].total > MANY
    assert codes == sorted(set(codes))
    assert len({listed.taken_at_ms for listed in pages}) == 1
    ledger: list[LedgerOrder] = ask_exchange(exchange, lambda admin: admin.ledger("a1"))
    assert [entry.client_note for entry in ledger] == [request.order_id for request in placed]
    assert len(placed) > len(pages) // 10


def test_an_order_does_not_wait_for_a_list_that_the_broker_does_not_send(
    harness: WorkerHarness, exchange: ExchangeServer
) -> None:
    connected(harness, exchange)
    lost = Behaviour(faults={FaultPoint.LOST_QUERY: 1})
    ask_exchange(exchange, lambda admin: admin.set_behaviour("a1", lost))
    assert loading(ask(harness))
    place(harness)
    # The list was still being read when the order was done.
    assert loading(ask(harness))
    while loading(answer := ask(harness)):
        time.sleep(0.05)
    assert answer.failure is not None
    assert answer.failure.code == "BROKER_UNREACHABLE"
    assert page(harness, lambda: None).total > 200


def test_contracts_that_are_missing_in_the_morning_are_an_error_until_they_are_there(
    harness: WorkerHarness, exchange: ExchangeServer
) -> None:
    connected(harness, exchange, missing=True)
    while loading(answer := ask(harness)):
        time.sleep(0.01)
    assert answer.failure is not None
    assert (answer.failure.code, answer.failure.retryable) == ("INSTRUMENTS_UNAVAILABLE", True)
    ask_exchange(exchange, lambda admin: admin.set_instruments(InstrumentSettings()))
    assert page(harness, lambda: None).total > 200


def test_a_market_is_listed_by_itself(harness: WorkerHarness, exchange: ExchangeServer) -> None:
    connected(harness, exchange)
    stocks = page(harness, lambda: None, market="stock")
    assert {instrument.market for instrument in stocks.instruments} == {"stock"}
    assert len(stocks.instruments) == stocks.total


def test_a_broker_without_a_list_says_so(harness: WorkerHarness) -> None:
    harness.active()
    answer = ask(harness)
    assert answer.failure is not None
    assert answer.failure.code == "INSTRUMENTS_UNSUPPORTED"
