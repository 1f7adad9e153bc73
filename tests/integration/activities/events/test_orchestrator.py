"""The orchestrator as a process: ready, graceful, and clear about what it lacks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.database.migrate import migrate
from infra.local.process import HOST, free_port
from infra.local.servers import PostgresServer, TemporalServer, ValkeyServer
from infra.vault import key_pairs, secret_versions
from infra.vault import key_pairs as orchestrator_keys
from workflows.names import SEARCH_ATTRIBUTES

READY_FILE = "orchestrator.ready"


class OrchestratorProcess:
    """`python -m activities` with a folder of its own."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.log = folder / "orchestrator.log"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "activities"],
                env={**kept, **environment},
                stdout=log,
                stderr=log,
            )

    def until(self, event: str, timeout: float = 30.0) -> None:
        """Waits for a log line."""
        deadline = time.monotonic() + timeout
        while event not in self.events():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def events(self) -> list[str]:
        return [line.get("event", "") for line in self.lines()]

    def lines(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")
        ]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)


@pytest.fixture
def environment(tmp_path: Path, valkey_server: ValkeyServer, empty_database: str) -> dict[str, str]:
    return {
        "BERTH_DATA_DIR": str(tmp_path),
        "BERTH_VALKEY_URL": valkey_server.url,
        "BERTH_DATABASE_URL": empty_database,
        "BERTH_NODE_SOCKET": str(tmp_path / "node.sock"),
        "BERTH_MASTER_KEY_FILE": str(tmp_path / "master.key"),
        "BERTH_ORCHESTRATOR_KEY_DIR": str(tmp_path),
        "BERTH_MESSAGE_KEY_FILE": str(tmp_path / "message.key"),
        "BERTH_POOL": f"orchestrator-{os.getpid()}",
        "BERTH_STOP_GRACE": "1",
    }


@pytest.fixture
def keys(tmp_path: Path) -> None:
    orchestrator_keys.create_orchestrator_keys(tmp_path)
    secret_versions.create_versions(tmp_path / "message.key")
    key_pairs.create_master_key(tmp_path / "master.key", tmp_path / "master.pub")


@pytest.fixture
def own_temporal(short_directory: Path) -> Iterator[TemporalServer]:
    """Not the suite's: a version that becomes current takes the task queues from unversioned
    workers."""
    with TemporalServer(
        short_directory / "temporal", durable=False, search_attributes=SEARCH_ATTRIBUTES
    ) as server:
        yield server


@pytest.fixture
def started(
    tmp_path: Path, environment: dict[str, str], keys: None, own_temporal: TemporalServer
) -> Iterator[OrchestratorProcess]:
    made = OrchestratorProcess(
        tmp_path, {**environment, "BERTH_TEMPORAL_ADDRESS": own_temporal.address}
    )
    yield made
    made.process.kill()
    made.process.wait(20)


async def test_it_says_when_it_is_ready_and_ends_gracefully(
    started: OrchestratorProcess, postgres_server: PostgresServer, environment: dict[str, str]
) -> None:
    await migrate(environment["BERTH_DATABASE_URL"])
    started.until("ready")
    assert (started.folder / READY_FILE).exists()
    assert started.end() == 0
    assert not (started.folder / READY_FILE).exists()
    assert started.events()[-1] == "stopped"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("signals", [2, 1], ids=["a_second_signal", "time"])
async def test_a_stop_that_waits_for_a_silent_temporal_is_cut_short(
    started: OrchestratorProcess,
    own_temporal: TemporalServer,
    environment: dict[str, str],
    signals: int,
) -> None:
    await migrate(environment["BERTH_DATABASE_URL"])
    started.until("ready")
    os.kill(own_temporal.pid, signal.SIGSTOP)
    try:
        for _ in range(signals):
            started.process.send_signal(signal.SIGTERM)
            started.until("stopping")
        assert started.process.wait(40) == 128 + signal.SIGTERM
    finally:
        os.kill(own_temporal.pid, signal.SIGCONT)
    cut = started.lines()[-1]
    assert cut["event"] == "stopped_at_once"
    assert ("second signal" in cut["reason"]) == (signals == 2)
    assert not (started.folder / READY_FILE).exists()


def test_without_keys_it_ends_at_once_and_says_which(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    orchestrator = OrchestratorProcess(tmp_path, environment)
    assert orchestrator.process.wait(30) == 1
    failed = orchestrator.lines()[-1]
    assert (failed["event"], failed["code"]) == ("start_failed", "KEY_FILE_MISSING")
    assert "signing.key" in failed["reason"]


def test_it_waits_for_a_temporal_that_is_not_there_and_can_be_stopped(
    tmp_path: Path, environment: dict[str, str], keys: None
) -> None:
    address = f"127.0.0.1:{free_port()}"
    orchestrator = OrchestratorProcess(tmp_path, {**environment, "BERTH_TEMPORAL_ADDRESS": address})
    orchestrator.until("temporal_not_reachable")
    assert orchestrator.end() == 0
    assert not (tmp_path / READY_FILE).exists()


@pytest.fixture
def ports_in_use() -> Iterator[int]:
    """The first of two neighbouring ports on which somebody else listens."""
    while True:
        with socket.create_server((HOST, 0)) as first, contextlib.suppress(OSError, OverflowError):
            port: int = first.getsockname()[1]
            with socket.create_server((HOST, port + 1)):
                yield port
                return


@pytest.mark.timeout(240)
async def test_it_serves_though_neither_its_metrics_nor_its_ready_file_can_be_had(
    tmp_path: Path,
    environment: dict[str, str],
    keys: None,
    own_temporal: TemporalServer,
    ports_in_use: int,
) -> None:
    await migrate(environment["BERTH_DATABASE_URL"])
    (tmp_path / "file").write_text("no folder")
    own = {
        "BERTH_DATA_DIR": str(tmp_path / "file" / "data"),
        "BERTH_METRICS_ADDRESS": f"{HOST}:{ports_in_use}",
        "BERTH_TEMPORAL_ADDRESS": own_temporal.address,
    }
    orchestrator = OrchestratorProcess(tmp_path, environment | own)
    try:
        orchestrator.until("ready", 120)
        events = orchestrator.events()
        assert events.count("metrics_unavailable") == 2  # ours, and that of Temporal's SDK
        assert "ready_file_not_written" in events
    finally:
        code = orchestrator.end()
    assert code == 0
