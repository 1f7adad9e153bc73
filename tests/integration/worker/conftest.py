from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.servers import ValkeyServer
from tests.support.workers.harness import WorkerStage


@pytest.fixture
def stage(valkey_server: ValkeyServer, tmp_path: Path) -> Iterator[WorkerStage]:
    stage = WorkerStage(valkey_server.url, tmp_path)
    stage.client.execute("FLUSHALL")
    yield stage
    stage.close()
