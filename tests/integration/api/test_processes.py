"""`python -m api`: several real processes on one port, gone when asked to or when their parent is
killed."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from api.http.middleware import MAX_HEAD_BYTES
from api.http.server import STOP_GRACE_S
from infra.settings import Settings
from tests.support.systems.api import Serve, StartWorker, alive, an_order, make_key
from tests.support.waiting import until
from worker_runtime.protocol import keys


def assert_refuses_a_huge_head(url: httpx.URL) -> None:
    with socket.create_connection((url.host, url.port or 0), timeout=30) as link:
        link.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * 2 * MAX_HEAD_BYTES)
        assert link.recv(13) == b"HTTP/1.1 431 "


async def ended(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 30)
    assert alive == []


@pytest.mark.slow
async def test_orders_are_answered_by_all_processes_and_all_end_on_sigterm(
    serve: Serve, settings: Settings, start_worker: StartWorker, tmp_path: Path
) -> None:
    process, url = serve()
    await alive(url)
    await asyncio.to_thread(assert_refuses_a_huge_head, httpx.URL(url))
    admin = {"X-API-Key": await make_key(settings, "admin")}
    worker = await start_worker("alice")
    reply_to: set[str] = set()
    async with httpx.AsyncClient(base_url=url, headers=admin, timeout=30) as client:
        await client.post("/users", json={"user_id": "alice"})
        body = {"broker": "paper", "api_key": "canary-key", "secret_key": "canary-secret"}
        await client.put("/users/alice/accounts/main/credentials", json=body)
    end = time.monotonic() + 30
    number = 0
    while len(reply_to) < 2:
        assert time.monotonic() < end
        number += 1
        # A new connection each time.
        async with httpx.AsyncClient(base_url=url, headers=admin, timeout=30) as client:
            answer = await client.post("/users/alice/orders", json=an_order(number))
            assert (answer.status_code, answer.json()["state"]) == (201, "filled")
        reply_to = {order.reply_to for order in worker.popped}
    assert reply_to == {keys.answers(name.removeprefix("berth:answers:")) for name in reply_to}

    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    await ended(children)
    assert await asyncio.to_thread(process.wait, 30) == 0
    log = (tmp_path / "api.log").read_text()
    assert "canary" not in log
    assert admin["X-API-Key"] not in log
    assert '"event":"request"' in log
    assert "Traceback" not in log


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
async def test_an_open_event_stream_does_not_hold_up_the_stop(
    serve: Serve, settings: Settings, processes: int
) -> None:
    process, url = serve(processes)
    await alive(url)
    headers = {"X-API-Key": await make_key(settings, "admin")}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
        await client.post("/users", json={"user_id": "alice"})
        async with client.stream("GET", "/users/alice/worker/events") as stream:
            lines = stream.aiter_lines()
            while await anext(lines) != "event: state":
                pass
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            async for _ in lines:  # to its clean end; a cut connection would raise
                pass
    ended_by = await asyncio.to_thread(process.wait, 20)
    # uvicorn alone ends by the signal itself.
    assert ended_by == (0 if processes > 1 else -signal.SIGTERM)
    assert time.monotonic() - began < STOP_GRACE_S / 2


@pytest.mark.slow
@pytest.mark.parametrize("serving", [True, False], ids=["serving", "still starting"])
async def test_no_process_is_left_when_the_parent_is_killed(serve: Serve, serving: bool) -> None:
    process, url = serve()
    if serving:
        await alive(url)
    parent = psutil.Process(process.pid)
    await until(lambda: len(parent.children(recursive=True)) == 2, seconds=60)
    children = parent.children(recursive=True)
    process.kill()
    await ended(children)
