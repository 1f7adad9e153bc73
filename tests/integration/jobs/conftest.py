"""A stage and a fleet for each test, on an empty Valkey."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.servers import ValkeyServer
from tests.support.jobs.queue import QueueStage
from tests.support.jobs.runners import RunnerFleet


@pytest.fixture
def stage(valkey_server: ValkeyServer) -> Iterator[QueueStage]:
    stage = QueueStage(valkey_server.url)
    stage.client.execute("FLUSHALL")
    yield stage
    stage.close()


@pytest.fixture
def fleet(stage: QueueStage, short_directory: Path) -> Iterator[RunnerFleet]:
    fleet = RunnerFleet(stage, short_directory)
    yield fleet
    fleet.close()
