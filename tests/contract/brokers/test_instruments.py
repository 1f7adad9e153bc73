"""Berth's built-in brokers keep the contract of brokers that list their instruments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.berth_testing.harness import API_KEY, CREDENTIALS, SECRET_KEY, BrokerStage, HeardOrders
from infra.berth_testing.instrument_suite import *  # noqa: F403 - its tests
from infra.berth_testing.instrument_suite import listing
from infra.exchange.behaviour import Behaviour, FaultPoint
from infra.exchange.client import ExchangeServer
from infra.exchange.instruments import InstrumentSettings
from infra.exchange.limits import ExchangeLimits
from tests.support.brokers.harnesses import PaperStage
from worker_runtime.brokers.port import Broker
from worker_runtime.protocol.errors import (
    BrokerUnreachable,
    InstrumentsUnavailable,
    RateLimited,
    SessionDown,
)


@pytest.fixture(
    params=[
        "paper",
        pytest.param("shioaji in the lab", marks=pytest.mark.needs("shioaji")),
    ]
)
def stage(request: pytest.FixtureRequest, exchange: ExchangeServer) -> BrokerStage:
    if request.param == "paper":
        return PaperStage(exchange.address, exchange.admin_url)
    from tests.support.brokers.shioaji_lab import ShioajiLabStage  # imports the SDK

    return ShioajiLabStage(exchange.address, exchange.admin_url)


@pytest.fixture
def without_contracts(paper: PaperStage) -> Iterator[None]:
    paper.ask(lambda admin: admin.set_instruments(InstrumentSettings(missing=True)))
    yield
    paper.ask(lambda admin: admin.set_instruments(InstrumentSettings()))


def test_contracts_that_are_missing_before_the_market_opens_are_an_error_and_no_empty_list(
    broker: Broker, paper: PaperStage, without_contracts: None
) -> None:
    with pytest.raises(InstrumentsUnavailable):
        listing(broker)
    paper.ask(lambda admin: admin.set_instruments(InstrumentSettings()))
    assert len(listing(broker)) > 20


def test_the_paper_exchange_counts_one_query_for_a_whole_list(
    paper: PaperStage, account: str, heard: HeardOrders
) -> None:
    paper.register(account, API_KEY, SECRET_KEY)
    paper_broker = paper.broker(account, heard)
    paper_broker.login(CREDENTIALS, 5.0)
    limits = paper.ask(lambda admin: admin.limits())
    paper.ask(lambda admin: admin.set_limits(ExchangeLimits(queries=1)))
    try:
        assert len(listing(paper_broker)) > 200
        with pytest.raises(RateLimited):
            listing(paper_broker)
    finally:
        paper.ask(lambda admin: admin.set_limits(limits))
        paper_broker.close()


@pytest.mark.parametrize(
    ("fault", "error"),
    [(FaultPoint.DROP_IN_QUERY, SessionDown), (FaultPoint.LOST_QUERY, BrokerUnreachable)],
)
def test_a_page_that_gets_lost_ends_the_list_with_an_error(
    paper: PaperStage, account: str, heard: HeardOrders, fault: FaultPoint, error: type[Exception]
) -> None:
    paper.register(account, API_KEY, SECRET_KEY)
    paper_broker = paper.broker(account, heard)
    paper_broker.login(CREDENTIALS, 5.0)
    entries = paper_broker.instruments(0.5)
    next(entries)
    paper.behave(account, Behaviour(faults={fault: 1}))
    with pytest.raises(error):
        list(entries)
    paper_broker.close()


def test_a_huge_list_arrives_whole(paper: PaperStage, account: str, heard: HeardOrders) -> None:
    paper.register(account, API_KEY, SECRET_KEY)
    paper_broker = paper.broker(account, heard)
    paper_broker.login(CREDENTIALS, 5.0)
    before = len(listing(paper_broker))
    paper.ask(lambda admin: admin.set_instruments(InstrumentSettings(extra_warrants=5000)))
    try:
        assert len(listing(paper_broker)) == before + 5000
    finally:
        paper.ask(lambda admin: admin.set_instruments(InstrumentSettings()))
        paper_broker.close()
