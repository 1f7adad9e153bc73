"""The containers' health checks, against real listeners."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from infra.compose import health
from infra.local.servers import TemporalServer, free_port


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


@workflow.defn(name="Nothing")
class _Nothing:
    @workflow.run
    async def run(self) -> None:
        return None


async def test_only_the_host_that_polls_is_healthy(temporal_server: TemporalServer) -> None:
    address, host = temporal_server.address, socket.gethostname()
    assert not await health.polls(address, "default", "health-test", host)
    client = await Client.connect(address)
    worker = Worker(
        client, task_queue="health-test", workflows=[_Nothing], workflow_runner=UnsandboxedWorkflowRunner()
    )
    async with worker:
        # A finished workflow proves that the worker has polled.
        await client.execute_workflow(_Nothing.run, id="health-test", task_queue="health-test")
        assert await health.polls(address, "default", "health-test", host)
        assert not await health.polls(address, "default", "health-test", "another-host")
