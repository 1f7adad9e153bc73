"""Whatever observes the API may fail: logs that nobody takes, traces that nobody answers. Orders go
on."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from infra.settings import Settings
from tests.support.systems.api import Serve, StartWorker, alive, an_order, make_key
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Orders of one test, each with several lines in the log: more than what a pipe holds (64 KiB).
ORDERS = 300


async def place_orders(
    url: str, settings: Settings, start_worker: StartWorker, count: int = 10
) -> None:
    """Places orders, each of which must be filled."""
    await alive(url)
    await start_worker("alice")
    headers = {"X-API-Key": await make_key(settings, "admin")}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
        await client.post("/users", json={"user_id": "alice"})
        body = {"broker": "paper", "api_key": "canary-key", "secret_key": "canary-secret"}
        await client.put("/users/alice/accounts/main/credentials", json=body)
        for number in range(count):
            order = an_order(number, allow_duplicate=True)
            answer = await client.post("/users/alice/orders", json=order)
            assert (answer.status_code, answer.json()["state"]) == (201, "filled"), answer.text


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        os.close(descriptor)


@pytest.mark.parametrize("processes", [1, 2])
async def test_orders_continue_while_nobody_reads_the_pipe_of_the_log(
    serve: Serve,
    settings: Settings,
    start_worker: StartWorker,
    pipe: tuple[int, int],
    processes: int,
) -> None:
    process, url = serve(processes, output=pipe[1])
    await place_orders(url, settings, start_worker, ORDERS)
    assert len(os.read(pipe[0], 1 << 20)) > 50_000, "the pipe was full"
    process.terminate()
    assert await asyncio.to_thread(process.wait, 60) is not None


async def test_orders_continue_while_the_disk_of_the_log_is_full(
    serve: Serve, settings: Settings, start_worker: StartWorker
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    _, url = serve(output=full)
    os.close(full)
    await place_orders(url, settings, start_worker)


async def test_orders_continue_after_the_reader_of_the_log_has_gone(
    serve: Serve, settings: Settings, start_worker: StartWorker
) -> None:
    reading, writing = os.pipe()
    _, url = serve(output=writing)
    os.close(writing)
    os.close(reading)
    await place_orders(url, settings, start_worker)


async def test_orders_continue_while_a_collector_of_traces_takes_connections_and_never_answers(
    serve: Serve, settings: Settings, start_worker: StartWorker
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        collector = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        process, url = serve(BERTH_TRACES_URL=collector)
        await place_orders(url, settings, start_worker, ORDERS)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) == 0


async def test_orders_continue_and_processes_are_replaced_while_no_byte_can_be_written_to_any_file(
    serve: Serve, settings: Settings, start_worker: StartWorker, tmp_path: Path
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    process, url = serve(TMPDIR=str(folder), PROMETHEUS_MULTIPROC_DIR=str(folder))
    # As on a full disk, for the log, too; the processes inherit it.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
    await alive(url)
    before = psutil.Process(process.pid).children()
    for child in before:
        child.kill()
    await until(
        lambda: len(set(psutil.Process(process.pid).children()) - set(before)) == 2, seconds=200
    )
    await place_orders(url, settings, start_worker, 50)
    assert os.listdir(folder) == []
    process.terminate()
    assert await asyncio.to_thread(process.wait, 60) == 0
