"""The containers' health checks, against real listeners."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from redis.asyncio import Redis
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from infra.compose import health
from infra.local.components import JobFleetComponent
from infra.local.process import free_port
from infra.local.servers import TemporalServer, ValkeyServer
from infra.settings import Settings
from tests.support.message_signing import create_message_secret


class _Status(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/good" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def site() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Status)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_http_is_healthy_only_with_200(site: str) -> None:
    assert health.main(["http", f"{site}/good"]) == 0
    assert health.main(["http", f"{site}/bad"]) == 1
    assert health.main(["http", "file:///etc/hostname"]) == 1


def test_a_port_that_nobody_listens_on_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert health.main(["tcp", f"127.0.0.1:{free_port()}"]) == 1
    assert "refused" in capsys.readouterr().err


def test_tcp_and_unix_accept(short_directory: Path) -> None:
    path = short_directory / "s"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        assert health.main(["tcp", f"127.0.0.1:{tcp.getsockname()[1]}"]) == 0
        assert health.main(["unix", str(path)]) == 0
    assert health.main(["unix", str(path)]) == 1


def test_a_check_that_takes_too_long_ends_itself() -> None:
    """The server sends a byte now and then, so that no wait for it is too long."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        check = subprocess.Popen([sys.executable, "-m", "infra.compose.health", "http", url])
        try:
            link, _ = server.accept()
            with link, contextlib.suppress(OSError):
                deadline = time.monotonic() + health.MAX_LIFE_S + 10
                while check.poll() is None and time.monotonic() < deadline:
                    link.sendall(b"H")
                    time.sleep(health.CHECK_TIMEOUT_S / 4)
            assert check.wait(5) == -signal.SIGALRM
        finally:
            check.kill()
            check.wait()


@workflow.defn(name="Nothing")
class _Nothing:
    @workflow.run
    async def run(self) -> None:
        return None


async def test_only_the_host_that_polls_is_healthy(temporal_server: TemporalServer) -> None:
    settings, host = Settings(temporal_address=temporal_server.address), socket.gethostname()
    assert not await health.is_polling(settings, "health-test", host)
    client = await Client.connect(temporal_server.address)
    worker = Worker(
        client,
        task_queue="health-test",
        workflows=[_Nothing],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    async with worker:
        # A finished workflow proves that the worker has polled.
        await client.execute_workflow(_Nothing.run, id="health-test", task_queue="health-test")
        assert await health.is_polling(settings, "health-test", host)
        assert not await health.is_polling(settings, "health-test", "another-host")


def test_an_orchestrator_that_served_stays_healthy_while_temporal_is_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another one would wait for Temporal, and record no order until then."""
    monkeypatch.setenv("BERTH_TEMPORAL_ADDRESS", f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("BERTH_DATA_DIR", str(tmp_path))
    assert health.main(["poller", "berth-lifecycle"]) == 1
    (tmp_path / f"{Settings().orchestrator_name}.ready").write_text("3\n")
    assert health.main(["poller", "berth-lifecycle"]) == 0


async def test_only_the_host_whose_runner_renews_its_lease_is_healthy(
    tmp_path: Path, valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    url, host = valkey_server.url, socket.gethostname()
    key = tmp_path / "message.key"
    create_message_secret(key)
    own = Settings(data_dir=tmp_path, valkey_url=url, jobs_runner="fleet", message_key_file=key)
    with JobFleetComponent(tmp_path, own):
        assert health.is_registered(url, "fleet", host, 60.0)
        assert not health.is_registered(url, "fleet", "another-host", 60.0)
        assert not health.is_registered(url, "another-name", host, 60.0)
        assert not health.is_registered(url, "fleet", host, -60.0), "not seen for too long"
    assert not health.is_registered(url, "fleet", host, 60.0), "it has signed off"


def test_a_runner_whose_valkey_is_away_is_unhealthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BERTH_VALKEY_URL", f"redis://127.0.0.1:{free_port()}/0")
    assert health.main(["runner", "fleet"]) == 1
    assert "runner fleet: Valkey cannot be reached." in capsys.readouterr().err
