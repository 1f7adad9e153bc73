"""Makes the brokers of the contract suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.berth_testing.fixtures import account, broker, heard
from infra.berth_testing.harness import BrokerStage
from infra.exchange.client import ExchangeServer
from tests.support.brokers.harnesses import FakeStage, PaperStage

__all__ = ["account", "broker", "heard"]


@pytest.fixture(scope="session")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExchangeServer]:
    directory: Path = tmp_path_factory.mktemp("exchange")
    with ExchangeServer(directory) as server:
        yield server


@pytest.fixture
def paper(exchange: ExchangeServer) -> PaperStage:
    return PaperStage(exchange.address, exchange.admin_url)


@pytest.fixture(
    params=[
        "fake",
        "paper",
        pytest.param("shioaji", marks=pytest.mark.needs("shioaji")),
        pytest.param("shioaji's futures", marks=pytest.mark.needs("shioaji")),
        pytest.param("shioaji in the lab", marks=pytest.mark.needs("shioaji")),
    ]
)
def stage(request: pytest.FixtureRequest) -> BrokerStage:
    if request.param == "fake":
        return FakeStage()
    if request.param in ("shioaji", "shioaji's futures"):
        from tests.support.brokers.shioaji_market import ShioajiMarketStage  # imports the SDK

        return ShioajiMarketStage(kind="stock" if request.param == "shioaji" else "futures")
    if request.param == "shioaji in the lab":
        from tests.support.brokers.shioaji_lab import ShioajiLabStage

        server: ExchangeServer = request.getfixturevalue("exchange")
        return ShioajiLabStage(server.address, server.admin_url)
    harness: PaperStage = request.getfixturevalue("paper")
    return harness
