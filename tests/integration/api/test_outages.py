"""A server that is down is named at once, and when it is back, so is the API."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from sqlalchemy import func, select
from temporalio.client import Client

from api.app import create_app
from api.container import VALKEY_TIMEOUT_S
from api.http.errors import ValkeyUnavailable
from api.workers import answers
from api.workers.answers import AnswerListener
from infra.database.migrate import migrate
from infra.database.models import Order
from infra.local.process import free_port
from infra.local.servers import PostgresServer, TemporalServer, ValkeyServer
from infra.settings import Settings
from infra.valkey import client as valkey
from infra.valkey.link import ValkeyLink
from tests.support.api.pages import csrf_header, logged_in_browser
from tests.support.api.webhooks import create_webhook, make_signal, post_signal
from tests.support.message_signing import SECRETS
from tests.support.systems.api import ServedApi, StartWorker, an_order, make_key, running_api
from tests.support.waiting import until
from tests.support.workers.api_worker import ScriptedWorker, filled
from tests.support.workflows.user_worker_stub import LifecycleStub, orchestrator
from workflows.names import SEARCH_ATTRIBUTES

#: Seconds. "At once": no client's timeout was waited for.
AT_ONCE = 1.5


@pytest.fixture
def own_valkey(server_directory: Path, tmp_path: Path) -> Iterator[ValkeyServer]:
    """A Valkey that a test may kill. It keeps its data, as a real one does."""
    with ValkeyServer(tmp_path / "valkey") as server:
        yield server
        server.stop()


@pytest.fixture
def own_postgres(
    server_directory: Path, request: pytest.FixtureRequest
) -> Iterator[PostgresServer]:
    """A PostgreSQL that a test may kill."""
    with PostgresServer(server_directory / f"postgres-{request.node.name[:40]}") as server:
        yield server


@dataclass
class Answered:
    response: httpx.Response
    seconds: float

    @property
    def problem(self) -> tuple[int, str, str]:
        body = self.response.json()
        return self.response.status_code, body["code"], body["dependency"]


async def timed(call: httpx.AsyncClient, method: str, path: str, **options: object) -> Answered:
    began = time.perf_counter()
    response = await call.request(method, path, **options)  # type: ignore[arg-type]
    return Answered(response, time.perf_counter() - began)


async def at_once(call: httpx.AsyncClient, method: str, path: str, **options: object) -> Answered:
    """What is answered at once. Asked again when it was not: a machine that stands still for
    seconds does so once, a client's timeout is waited for each time."""
    for _ in range(3):
        answered = await timed(call, method, path, **options)
        if answered.seconds < AT_ONCE:
            return answered
    raise AssertionError(f"{method} {path} took {answered.seconds:.1f} s")


async def until_shown(call: httpx.AsyncClient, **states: str) -> None:
    """Until `readyz` shows these states. A server that does not answer within 1 s is down there,
    and a machine may stand still for longer."""
    end = time.monotonic() + 30
    while True:
        shown = (await call.get("/readyz")).json()["dependencies"]
        if {name: shown[name]["state"] for name in states} == states:
            return
        assert time.monotonic() < end, shown


@pytest.fixture
async def api_on_own_valkey(
    settings: Settings, own_valkey: ValkeyServer
) -> AsyncIterator[ServedApi]:
    async with running_api(settings.model_copy(update={"valkey_url": own_valkey.url})) as api:
        yield api


async def test_a_kill_of_valkey_is_reported_at_once_and_survived(
    api_on_own_valkey: ServedApi, own_valkey: ValkeyServer
) -> None:
    api = api_on_own_valkey
    worker = ScriptedWorker(own_valkey.url, api.user)
    await worker.start()
    async with api.client(api.key) as user:
        orders = f"/users/{api.user}/orders"
        assert (await user.post(orders, json=an_order(1))).status_code == 201
        own_valkey.kill()
        for number in (2, 3):
            down = await at_once(user, "POST", orders, json=an_order(number))
            assert down.problem == (503, "VALKEY_UNAVAILABLE", "valkey")
        shown = await timed(user, "GET", f"/users/{api.user}/worker")
        assert shown.problem == (503, "VALKEY_UNAVAILABLE", "valkey")
        await until_shown(user, valkey="down", postgresql="up")
        assert (await user.get("/healthz")).status_code == 200

        own_valkey.start()
        await worker.mark()
        end = time.monotonic() + 40
        number = 10
        while (await user.post(orders, json=an_order(number))).status_code != 201:
            assert time.monotonic() < end
            number += 1
            await asyncio.sleep(0.05)
    await worker.stop()


async def test_an_order_under_way_when_valkey_dies_is_answered_after_its_restart(
    api_on_own_valkey: ServedApi, own_valkey: ValkeyServer
) -> None:
    api = api_on_own_valkey
    worker = ScriptedWorker(own_valkey.url, api.user, lambda order: None)
    await worker.start()
    async with api.client(api.key) as user:
        waiting = asyncio.create_task(
            user.post(f"/users/{api.user}/orders?wait=20", json=an_order())
        )
        await worker.taken.wait()
        # A clean stop writes the log out; what a crash may lose is another test's subject.
        own_valkey.stop()
        own_valkey.start()
        await worker.mark()
        await worker.answer_later(filled(worker.popped[0]))
        answer = await waiting
    assert (answer.status_code, answer.json()["state"]) == (201, "filled")
    await worker.stop()


async def test_a_frozen_valkey_is_reported_within_its_timeout(
    api_on_own_valkey: ServedApi, own_valkey: ValkeyServer
) -> None:
    api = api_on_own_valkey
    async with api.client(api.key) as user:
        os.kill(own_valkey.pid, signal.SIGSTOP)
        try:
            down = await timed(user, "POST", f"/users/{api.user}/orders", json=an_order())
        finally:
            os.kill(own_valkey.pid, signal.SIGCONT)
        assert down.problem == (503, "VALKEY_UNAVAILABLE", "valkey")
        assert down.seconds < 2 * VALKEY_TIMEOUT_S  # waited for once
        assert down.response.json()["order"]["state"] == "accepted"


async def test_a_signal_is_answered_in_time_while_valkey_stands_still(
    api_on_own_valkey: ServedApi, own_valkey: ValkeyServer
) -> None:
    api = api_on_own_valkey
    made = await create_webhook(api)
    os.kill(own_valkey.pid, signal.SIGSTOP)
    try:
        began = time.perf_counter()
        answer = await post_signal(api, made, make_signal(made))
        seconds = time.perf_counter() - began
        async with api.services.database.session() as session:
            assert await session.scalar(select(func.count()).select_from(Order)) == 1
    finally:
        os.kill(own_valkey.pid, signal.SIGCONT)
    assert seconds < 3  # then TradingView gives up
    assert (answer.status_code, answer.json()["complete"]) == (202, False)
    assert answer.json()["legs"] == []


async def test_a_start_waits_for_a_valkey_that_stands_still_and_not_for_one_that_is_gone(
    own_valkey: ValkeyServer,
) -> None:
    async with valkey.connect_valkey(own_valkey.url, socket_timeout=30.0) as client:
        listener = AnswerListener(client, SECRETS)
        os.kill(own_valkey.pid, signal.SIGSTOP)
        try:
            starting = asyncio.create_task(listener.start(30.0))
            await asyncio.sleep(1.5)  # more than a start needs, and than it once waited for
            assert not starting.done()
        finally:
            os.kill(own_valkey.pid, signal.SIGCONT)
        await starting
        assert listener.generation
        await listener.close()
    async with valkey.connect_valkey(f"redis://127.0.0.1:{free_port()}/0") as client:
        listener = AnswerListener(client, SECRETS)
        await listener.start(3600.0)
        with pytest.raises(ValkeyUnavailable):
            _ = listener.generation
        await listener.close()


class SilentLine:
    """A way to a server, whose connections can be cut without a word to anybody."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: list[asyncio.Event] = []

    def cut(self) -> None:
        for cut in self._open:
            cut.set()

    @property
    def made(self) -> int:
        return len(self._open)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, away = await asyncio.open_connection("127.0.0.1", self._port)
        cut = asyncio.Event()
        self._open.append(cut)

        async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                if not cut.is_set():
                    target.write(data)
            target.close()

        await asyncio.gather(carry(reader, away), carry(there, writer))


async def test_a_connection_that_was_cut_without_a_word_is_replaced_though_no_order_comes(
    own_valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "CHECK_INTERVAL_S", 0.1)
    line = SilentLine(own_valkey.port)
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    connect = ValkeyLink.connect
    async with (
        server,
        valkey.connect_valkey(own_valkey.url) as client,
        valkey.connect_valkey(url, socket_timeout=0.5) as over_the_line,
    ):
        monkeypatch.setattr(
            ValkeyLink, "connect", lambda _client, heard: connect(over_the_line, heard)
        )
        listener = AnswerListener(client, SECRETS)
        await listener.start()
        first = listener.link
        assert first is not None
        line.cut()
        await until(lambda: listener.link not in (first, None))
        assert first.lost.done()
        assert line.made == 2
        await listener.close()


async def test_a_kill_of_postgresql_is_reported_at_once_and_survived(
    settings: Settings, own_postgres: PostgresServer, start_worker: StartWorker
) -> None:
    url = own_postgres.create_database("berth")
    await migrate(url)
    changed = settings.model_copy(update={"database_url": url, "api_key_cache": 60.0})
    async with running_api(changed) as api, api.client(api.key) as user:
        await start_worker(api.user)
        orders = f"/users/{api.user}/orders"
        assert (await user.post(orders, json=an_order(1))).status_code == 201
        own_postgres.kill()
        for number in (2, 3):
            down = await at_once(user, "POST", orders, json=an_order(number))
            # A connection that breaks under a statement leaves open whether it was carried out.
            status, code, dependency = down.problem
            assert (status, dependency) == (503, "postgresql")
            assert code in ("DATABASE_UNAVAILABLE", "DATABASE_OUTCOME_UNKNOWN")
        async with api.client(api.services.tokens.make()) as other:
            unknown = await timed(other, "POST", orders, json=an_order(4))
        assert unknown.problem == (503, "DATABASE_UNAVAILABLE", "postgresql")
        ready = (await user.get("/readyz")).json()
        assert ready["dependencies"]["postgresql"]["state"] == "down"

        own_postgres.start()
        end = time.monotonic() + 40
        number = 10
        while (await user.post(orders, json=an_order(number))).status_code != 201:
            assert time.monotonic() < end
            number += 1
            await asyncio.sleep(0.05)


async def test_metrics_are_served_while_postgresql_and_valkey_are_away(
    settings: Settings, own_postgres: PostgresServer, own_valkey: ValkeyServer
) -> None:
    url = own_postgres.create_database("berth")
    await migrate(url)
    away = {"database_url": url, "valkey_url": own_valkey.url, "api_key_cache": 0.1}
    async with (
        running_api(settings.model_copy(update=away)) as api,
        api.client(api.admin_key) as admin,
    ):
        assert "berth_pool_ready" in (await admin.get("/metrics")).text
        own_postgres.kill()
        await asyncio.sleep(0.2)  # what the process remembers of the key has ended
        told = await timed(admin, "GET", "/metrics")
        assert told.response.status_code == 200, told.response.text
        assert told.seconds < 5  # Prometheus waits for 10
        for line in (
            'berth_server_up{server="postgresql"} 0.0',
            'berth_server_up{server="valkey"} 1.0',
        ):
            assert line in told.response.text
        assert "berth_http_requests_total" in told.response.text
        assert "berth_pool_ready" not in told.response.text
        own_valkey.kill()
        told = await timed(admin, "GET", "/metrics")
        assert 'berth_server_up{server="valkey"} 0.0' in told.response.text
        assert told.seconds < 5
        async with api.client(api.services.tokens.make()) as other:
            assert (await timed(other, "GET", "/metrics")).problem[1] == "DATABASE_UNAVAILABLE"


async def test_operators_see_what_runs_while_postgresql_and_valkey_are_away(
    settings: Settings, own_postgres: PostgresServer, own_valkey: ValkeyServer
) -> None:
    url = own_postgres.create_database("berth")
    await migrate(url)
    away = {"database_url": url, "valkey_url": own_valkey.url, "api_key_cache": 0.1}
    async with (
        running_api(settings.model_copy(update=away)) as api,
        logged_in_browser(api, api.admin_key) as client,
    ):
        headers = await csrf_header(client)
        own_valkey.kill()
        assert "Valkey" in (await client.get("/page/jobs")).text
        own_postgres.kill()
        await asyncio.sleep(0.2)  # what the process remembers of the key has ended
        for path in ("/", "/page/servers", "/page/pools", "/page/jobs"):
            page = await timed(client, "GET", path)
            assert (page.response.status_code, path) == (200, path)
            assert ("Valkey" if path == "/page/jobs" else "PostgreSQL") in page.response.text
            assert page.seconds < 5
        assert (await client.get("/page/keys")).status_code == 503
        refused = await timed(client, "POST", "/v1/fleet/maintenance", headers=headers)
        assert refused.problem[1] == "DATABASE_UNAVAILABLE"  # who may act is not taken from memory


async def test_the_api_starts_before_postgresql_and_serves_when_its_tables_are_there(
    settings: Settings, own_postgres: PostgresServer
) -> None:
    url = own_postgres.create_database("late")
    own_postgres.stop()
    changed = settings.model_copy(update={"database_url": url})
    app = create_app(changed)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://api/v1") as client,
    ):
        down = await timed(client, "GET", "/readyz")
        assert down.response.status_code == 503
        assert down.response.json()["dependencies"]["postgresql"]["state"] == "down"
        genuine = app.state.services.tokens.make()  # else it is refused without a look
        refused = await timed(client, "POST", "/users", json={}, headers={"X-API-Key": genuine})
        assert refused.problem == (503, "DATABASE_UNAVAILABLE", "postgresql")
        own_postgres.start()
        end = time.monotonic() + 40
        while "berth migrate" not in (await client.get("/readyz")).text:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        await migrate(url)  # the API makes no table itself
        while (await client.get("/readyz")).json()["dependencies"]["postgresql"]["state"] != "up":
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        key = await make_key(changed, "admin")
        made = await client.post("/users", json={}, headers={"X-API-Key": key})
        assert made.status_code == 201


async def test_without_temporal_a_live_worker_takes_orders_and_nothing_starts(
    api: ServedApi, user: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    none = await at_once(user, "POST", f"/users/{api.user}/orders", json=an_order(1))
    assert none.problem == (503, "TEMPORAL_UNAVAILABLE", "temporal")
    assert none.response.json()["order"]["state"] == "rejected"
    await start_worker(api.user)
    assert (await user.post(f"/users/{api.user}/orders", json=an_order(2))).status_code == 201
    for path in ("start", "stop", "reload-credentials"):
        down = await at_once(user, "POST", f"/users/{api.user}/worker/{path}")
        assert down.problem == (503, "TEMPORAL_UNAVAILABLE", "temporal")
    await until_shown(user, temporal="down", valkey="up")


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_kill_of_temporal_is_reported_at_once_and_survived(
    settings: Settings, tmp_path: Path
) -> None:
    with TemporalServer(tmp_path / "temporal", search_attributes=SEARCH_ATTRIBUTES) as own_temporal:
        changed = settings.model_copy(update={"temporal_address": own_temporal.address})
        lifecycle = LifecycleStub(settings.valkey_url)
        client = await Client.connect(own_temporal.address)
        async with (
            orchestrator(client, lifecycle),
            running_api(changed) as api,
            api.client(api.key) as user,
        ):
            start = f"/users/{api.user}/worker/start"
            assert (await user.post(start)).status_code == 200
            own_temporal.kill()
            for path in (start, f"/users/{api.user}/worker/stop"):
                down = await at_once(user, "POST", path)
                assert down.problem == (503, "TEMPORAL_UNAVAILABLE", "temporal")
            assert (
                await user.post(f"/users/{api.user}/orders", json=an_order(1))
            ).status_code == 201
            own_temporal.start()
            end = time.monotonic() + 40
            while (await user.post(start)).status_code != 200:
                assert time.monotonic() < end
                await asyncio.sleep(0.1)

            # A restart in the middle of a start: the caller is answered when it is back.
            lifecycle.go.clear()
            calls = len(lifecycle.calls)
            starting = asyncio.create_task(user.post(start))
            await until(lambda: len(lifecycle.calls) > calls)
            own_temporal.kill()
            own_temporal.start()
            lifecycle.go.set()
            assert (await starting).status_code == 200
        await lifecycle.close()
