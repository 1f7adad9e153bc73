"""What several API processes have counted together: it is complete, never falls, and stops no
order."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from infra.settings import Settings
from tests.support.systems.api import Serve, StartWorker, alive, an_order, make_key
from tests.support.waiting import until

#: Seconds for the start of processes, which takes 2 s of an idle core; a busy machine has needed
#: 50.
START_S = 200

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class RunningApi:
    """`python -m api` with two processes."""

    process: subprocess.Popen[bytes]
    log: Path
    #: Opens a connection for each request; whichever process accepts it answers.
    client: httpx.AsyncClient

    def serving(self) -> list[psutil.Process]:
        servers = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):  # it may end meanwhile
                if "api.processes.server" in child.cmdline():
                    servers.append(child)
        return servers

    async def scrape(self) -> dict[str, float]:
        answer = await self.client.get("/metrics")
        assert answer.status_code == 200, answer.text
        return {
            f"{sample.name}|{'|'.join(sample.labels.values())}": sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    async def scrape_of_all(self, count: int = 2) -> dict[str, float]:
        """A scrape that this many processes have answered."""
        end = time.monotonic() + START_S
        while True:
            # The processes that had this connection were killed.
            with suppress(httpx.TransportError):
                samples = await self.scrape()
                if samples["berth_api_processes_answered|"] == count:
                    return samples
            assert time.monotonic() < end, "not all processes answer"
            await asyncio.sleep(0.1)

    async def replaced(self, before: set[int]) -> None:
        """Waits until other processes than `before` serve."""
        await until(
            lambda: (
                len(self.serving()) == 2 and not before & {server.pid for server in self.serving()}
            ),
            seconds=START_S,
        )
        await self.scrape_of_all()

    async def order(self, number: int) -> httpx.Response:
        return await self.client.post(
            "/users/alice/orders", json=an_order(number, allow_duplicate=True)
        )

    async def order_until_answered(self, number: int) -> None:
        """Places an order; a connection to a process that was killed is opened again."""
        end = time.monotonic() + START_S
        while True:
            with suppress(httpx.TransportError):
                answer = await self.order(number)
                assert (answer.status_code, answer.json()["state"]) == (201, "filled"), answer.text
                return
            assert time.monotonic() < end
            await asyncio.sleep(0.1)


@asynccontextmanager
async def running(
    serve: Serve, settings: Settings, log: Path, **environment: str
) -> AsyncIterator[RunningApi]:
    process, url = serve(**environment)
    await alive(url)
    headers = {"X-API-Key": await make_key(settings, "admin")}
    alone = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30, limits=alone) as client:
        api = RunningApi(process, log, client)
        await api.scrape_of_all()
        await client.post("/users", json={"user_id": "alice"})
        body = {"broker": "paper", "api_key": "canary-key", "secret_key": "canary-secret"}
        await client.put("/users/alice/accounts/main/credentials", json=body)
        yield api


HEALTHZ = "berth_http_requests_total|GET|/healthz|200"


async def test_any_process_shows_the_sum_over_all_of_them_and_over_the_dead(
    serve: Serve, settings: Settings, tmp_path: Path
) -> None:
    async with running(serve, settings, tmp_path / "api.log") as api:
        before = (await api.scrape_of_all())[HEALTHZ]
        for _ in range(40):
            await api.client.get("/healthz")
        counted = [await api.scrape_of_all() for _ in range(6)]  # any of them answers
        assert {samples[HEALTHZ] for samples in counted} == {before + 40}
        count, bucket = (
            counted[-1][f"berth_http_request_seconds_{part}"]
            for part in ("count|/healthz", "bucket|+Inf|/healthz")
        )
        assert count == bucket == before + 40

        for process in api.serving():  # one after the other, as a rolling crash
            pids = {process.pid}
            process.kill()
            await until(
                lambda pids=pids: not pids & {server.pid for server in api.serving()},  # type: ignore[misc]
                seconds=START_S,
            )
            await until(lambda: len(api.serving()) == 2, seconds=START_S)
            after = await api.scrape_of_all()
            assert after[HEALTHZ] == before + 40
        assert after["berth_api_processes|"] == 2
        assert after["berth_api_processes_died_total|"] == 2
    assert "killed by SIGKILL" in api.log.read_text()


async def test_a_process_that_stands_still_holds_up_a_scrape_for_a_second_and_is_counted_as_it_was(
    serve: Serve, settings: Settings, tmp_path: Path
) -> None:
    async with running(serve, settings, tmp_path / "api.log") as api:
        for _ in range(10):
            await api.client.get("/healthz")
        before = (await api.scrape_of_all())[HEALTHZ]
        stopped = api.serving()[0]
        stopped.suspend()
        try:
            # The stopped one accepts connections, too: only the other one answers.
            end = time.monotonic() + START_S
            while True:
                assert time.monotonic() < end
                with suppress(httpx.ReadTimeout):
                    began = time.monotonic()
                    answer = await api.client.get("/metrics", timeout=5)
                    took = time.monotonic() - began
                    break
        finally:
            stopped.resume()
        assert answer.status_code == 200
        assert "berth_api_processes_answered 1.0" in answer.text
        assert "berth_api_processes 2.0" in answer.text
        assert f'route="/healthz",status="200"}} {before}' in answer.text
        assert took < 2.5, "the deadline is a second; the rest is the machine's"
        assert (await api.scrape_of_all())[HEALTHZ] == before


async def test_a_master_that_stands_still_holds_up_no_order_and_costs_only_the_counts(
    serve: Serve, settings: Settings, start_worker: StartWorker, tmp_path: Path
) -> None:
    async with running(serve, settings, tmp_path / "api.log") as api:
        await start_worker("alice")
        before = (await api.scrape_of_all())[HEALTHZ]
        os.kill(api.process.pid, signal.SIGSTOP)
        try:
            for number in range(10):
                answer = await api.order(number)
                assert (answer.status_code, answer.json()["state"]) == (201, "filled")
            stopped = await api.scrape()
            assert stopped["berth_api_processes_answered|"] == 0
            assert "berth_server_up|valkey" in stopped
            assert HEALTHZ not in stopped  # a part of the sum would look like a counter that fell
        finally:
            os.kill(api.process.pid, signal.SIGCONT)
        after = await api.scrape_of_all()
        assert after[HEALTHZ] == before
        assert after["berth_orders_answered_total||filled"] == 10
        assert after["berth_api_processes_died_total|"] == 0, "a master that was away kills nobody"


async def test_sighup_replaces_one_process_after_the_other_and_no_count_is_lost(
    serve: Serve, settings: Settings, tmp_path: Path
) -> None:
    async with running(serve, settings, tmp_path / "api.log") as api:
        before = {process.pid for process in api.serving()}
        api.process.send_signal(signal.SIGHUP)
        end = time.monotonic() + START_S
        asked = 0
        while before & {process.pid for process in api.serving()}:
            assert time.monotonic() < end
            # Accepted as the old process closed its idle connections.
            with suppress(httpx.ReadError, httpx.RemoteProtocolError):
                assert (await api.client.get("/healthz")).status_code == 200
                asked += 1
        after = await api.scrape_of_all()
        assert after[HEALTHZ] >= asked
        assert after["berth_api_processes_died_total|"] == 0


async def test_without_room_for_temporary_files_processes_are_replaced_and_orders_continue(
    serve: Serve, settings: Settings, start_worker: StartWorker, tmp_path: Path
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    variables = {"TMPDIR": str(folder), "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    async with running(serve, settings, tmp_path / "api.log", **variables) as api:
        await start_worker("alice")
        await api.order_until_answered(1)
        assert list(folder.iterdir()) == []
        folder.rmdir()
        before = {process.pid for process in api.serving()}
        # What was shown is never lost; what a killed process counted within its last second may be.
        assert (await api.scrape_of_all())["berth_orders_answered_total||filled"] == 1
        for process in api.serving():
            process.kill()
        await api.replaced(before)
        await api.order_until_answered(2)
        assert (await api.scrape_of_all())["berth_orders_answered_total||filled"] == 2


async def test_a_process_that_dies_of_a_signal_again_and_again_is_replaced_while_another_one_serves(
    serve: Serve, settings: Settings, tmp_path: Path
) -> None:
    async with running(serve, settings, tmp_path / "api.log") as api:
        secret = settings.api_secret_file
        kept = secret.rename(secret.with_name("kept"))
        broken, healthy = api.serving()
        broken.kill()
        await until(lambda: api.log.read_text().count("api_process_died") >= 7, seconds=400)
        assert healthy.is_running()
        assert api.process.poll() is None, "nobody gives up while a process serves"
        assert (await api.client.get("/healthz")).status_code == 200
        kept.rename(secret)
        after = await api.scrape_of_all()
        assert after["berth_api_processes_died_total|"] >= 7
    assert "KeyFileMissing" in api.log.read_text()


async def test_an_api_that_cannot_start_ends_with_the_cause(
    serve: Serve, settings: Settings, tmp_path: Path
) -> None:
    settings.api_secret_file.unlink()
    process, _ = serve()
    assert await asyncio.to_thread(process.wait, START_S) == 1
    [line] = [
        line for line in (tmp_path / "api.log").read_text().splitlines() if "api_gave_up" in line
    ]
    assert "the API cannot start: KeyFileMissing" in line
