from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.exchange.client import ExchangeServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExchangeServer]:
    with ExchangeServer(tmp_path_factory.mktemp("exchange")) as started:
        yield started
