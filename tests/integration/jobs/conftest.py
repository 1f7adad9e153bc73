"""A harness and a fleet for each test, on an empty Valkey."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.servers import ValkeyServer
from tests.support.jobs.queue import QueueHarness
from tests.support.jobs.runners import RunnerFleet


@pytest.fixture
def harness(valkey_server: ValkeyServer) -> Iterator[QueueHarness]:
    harness = QueueHarness(valkey_server.url)
    harness.client.execute("FLUSHALL")
    yield harness
    harness.close()


@pytest.fixture
def fleet(harness: QueueHarness, short_directory: Path) -> Iterator[RunnerFleet]:
    fleet = RunnerFleet(harness, short_directory)
    yield fleet
    fleet.close()
