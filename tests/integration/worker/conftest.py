from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.servers import ValkeyServer
from tests.support.workers.harness import WorkerHarness


@pytest.fixture
def harness(valkey_server: ValkeyServer, tmp_path: Path) -> Iterator[WorkerHarness]:
    harness = WorkerHarness(valkey_server.url, tmp_path)
    harness.client.execute("FLUSHALL")
    yield harness
    harness.close()
