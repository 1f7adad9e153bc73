"""The API behind a real nginx, with the configuration of docs/how-to/behind-a-proxy.md."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import subprocess
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from api.http.middleware import MAX_BODY_BYTES, HeadLimitingProtocol
from infra.client.client import AsyncBerthClient
from infra.local.process import free_port
from infra.settings import Settings
from tests.support.api.webhooks import create_webhook, make_signal
from tests.support.needs import server_program
from tests.support.proxies.temporal_tls import CertificateAuthority
from tests.support.systems.api import ServedApi, StartWorker, an_order, running_api
from tests.support.waiting import until

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "behind-a-proxy.md"

pytestmark = [pytest.mark.needs("nginx"), pytest.mark.timeout(180)]


@dataclass
class Front:
    """An nginx in front of the API."""

    api: ServedApi
    #: Where browsers and senders reach the API.
    url: str
    tls: ssl.SSLContext

    def client(self, key: str = "", **how: Any) -> httpx.AsyncClient:
        headers = {"X-API-Key": key} if key else {}
        return httpx.AsyncClient(
            base_url=self.url, headers=headers, verify=self.tls, timeout=40, **how
        )


def blocks() -> list[str]:
    """The configuration of the page: the servers, and two ways to serve a path."""
    examples = re.findall(
        r"^```nginx\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert len(examples) == 3
    return [textwrap.dedent(block) for block in examples]


def configuration(
    folder: Path, port: int, api_port: int, location: str | None, extra: str = ""
) -> str:
    """The page's configuration for these ports; `location`: instead of the one at the root."""
    server = blocks()[0]
    for text, other in (
        ("127.0.0.1:8000", f"127.0.0.1:{api_port}"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/nginx/berth.crt", f"{folder}/nginx.pem"),
        ("/etc/nginx/berth.key", f"{folder}/nginx.key"),
    ):
        assert text in server
        server = server.replace(text, other)
    if location is not None:
        server, count = re.subn(r"location / \{.*?\}", lambda _: location, server, flags=re.DOTALL)
        assert count == 1
    server = server.replace("server_name", f"{extra}\n    server_name")
    user = "user root;" if os.geteuid() == 0 else ""
    temporary = "\n".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return (
        f"{user}\ndaemon off;\nworker_processes 1;\npid {folder}/nginx.pid;\n"
        f"error_log {folder}/error.log info;\nevents {{ worker_connections 256; }}\n"
        f"http {{\n{temporary}\naccess_log {folder}/access.log;\n{server}\n}}\n"
    )


@asynccontextmanager
async def started_nginx(folder: Path, text: str, port: int) -> AsyncIterator[None]:
    (folder / "nginx.conf").write_text(text)
    program = server_program("nginx")
    assert program
    command = [
        program,
        "-p",
        str(folder),
        "-c",
        str(folder / "nginx.conf"),
        "-e",
        str(folder / "error.log"),
    ]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(30):
            while True:
                assert process.returncode is None, (folder / "error.log").read_text()
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    break
        yield
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)


@asynccontextmanager
async def served_api(settings: Settings) -> AsyncIterator[tuple[ServedApi, int]]:
    """The API as `python -m api` serves it, in this process; and its port."""
    async with running_api(settings) as api:
        port = free_port()
        config = uvicorn.Config(
            api.app,
            port=port,
            lifespan="off",
            log_config=None,
            http=HeadLimitingProtocol,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=settings.api_keep_alive,
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        try:
            yield api, port
        finally:
            api.services.streams.end()
            server.should_exit = True
            await asyncio.wait_for(task, 30)


Serve = Callable[..., AbstractAsyncContextManager[Front]]


@pytest.fixture
def front(settings: Settings, tmp_path: Path) -> Serve:
    """Starts an API and an nginx before it, with a block of the page or other text."""

    @asynccontextmanager
    async def start(
        location: int | str | None = None, extra: str = "", **changes: Any
    ) -> AsyncIterator[Front]:
        root = "/berth" if location is not None else ""
        given = {"trusted_proxies": ("127.0.0.1",), "api_root_path": root, **changes}
        authority = CertificateAuthority(tmp_path, "authority")
        authority.issue("nginx", names=("localhost",))
        port = free_port()
        block = blocks()[location] if isinstance(location, int) else location
        async with served_api(settings.model_copy(update=given)) as (api, api_port):
            text = configuration(tmp_path, port, api_port, block, extra)
            async with started_nginx(tmp_path, text, port):
                tls = ssl.create_default_context(cafile=str(authority.certificate))
                yield Front(api, f"https://localhost:{port}{root}", tls)

    return start


@pytest.mark.parametrize(
    "location", [None, 1, 2], ids=["at the root", "path passed on", "path cut off"]
)
async def test_orders_pages_and_webhooks_work_through_it(
    front: Serve, start_worker: StartWorker, location: int | None
) -> None:
    async with front(location) as nginx:
        api = nginx.api
        root = api.settings.api_root_path
        await start_worker(api.user)
        async with nginx.client(api.key) as user:
            placed = await user.post(f"/v1/users/{api.user}/orders", json=an_order())
            assert (placed.status_code, placed.json()["state"]) == (201, "filled"), placed.text
            assert placed.headers["location"] == f"{root}/v1/orders/{placed.json()['id']}"
            address = nginx.url.removesuffix(root) + placed.headers["location"]
            assert (await user.get(address)).json()["id"] == placed.json()["id"]
            assert (await user.head("/v1/readyz")).status_code == (
                await user.get("/v1/readyz")
            ).status_code
            webhook = await create_webhook(api, sources=["127.0.0.0/8"])
            for end in ("", "/"):
                address = nginx.url.removesuffix(root) + webhook["path"] + end
                signal = await user.post(address, json=make_signal(webhook, id=f"end{end}"))
                assert signal.status_code in (201, 202), signal.text
                assert not signal.history
        async with nginx.client() as browser:
            origin = {"Origin": nginx.url.removesuffix(root)}
            away = await browser.get("/page/orders")
            assert (away.status_code, away.headers["location"]) == (303, f"{root}/page/login")
            entered = await browser.post("/page/login", data={"key": api.admin_key}, headers=origin)
            assert (entered.status_code, entered.headers["location"]) == (303, f"{root}/")
            assert {"Secure", f"Path={root or '/'}"} <= set(
                entered.headers["set-cookie"].split("; ")
            )
            page = await browser.get("/")
            assert page.status_code == 200
            for path in re.findall(r'(?:href|src)="(/[^"]*)"', page.text):
                answer = await browser.get(nginx.url.removesuffix(root) + path)
                assert answer.status_code == 200, path
        transport = httpx.AsyncHTTPTransport(verify=nginx.tls)
        async with AsyncBerthClient(nginx.url, api.key, transport=transport) as berth:
            assert (await berth.list_orders(api.user)).orders


async def test_the_source_is_the_senders_and_not_what_it_claims(front: Serve) -> None:
    async with front(limit_address=2.0) as nginx:
        webhook = await create_webhook(nginx.api, sources=["52.89.214.238"])
        # From an address that is not the proxy's own: anyone who has that one is believed.
        transport = httpx.AsyncHTTPTransport(verify=nginx.tls, local_address="127.0.0.2")
        async with nginx.client(transport=transport) as sender:
            for name, value in (
                ("X-Forwarded-For", "52.89.214.238"),
                ("X-Forwarded-For", "52.89.214.238:443"),
                ("Forwarded", "for=52.89.214.238"),
                ("X-Real-IP", "52.89.214.238"),
            ):
                claimed = await sender.post(
                    webhook["path"], json=make_signal(webhook), headers={name: value}
                )
                assert claimed.json()["code"] == "SOURCE_NOT_ALLOWED", name
            for number in range(60):
                claimed = await sender.get(
                    "/v1/orders", headers={"X-Forwarded-For": f"198.51.100.{number}:{number}"}
                )
        assert claimed.status_code == 429


@pytest.mark.parametrize(
    "http", ["", "proxy_http_version 1.0;"], ids=["http 1.1", "nginx's old default"]
)
async def test_an_event_comes_through_at_once(
    front: Serve, start_worker: StartWorker, http: str
) -> None:
    location = f"location /berth/ {{ proxy_pass http://berth; {http} }}"
    async with front(location) as nginx:
        api = nginx.api
        await start_worker(api.user)
        async with nginx.client(api.key) as user, asyncio.timeout(60):
            async with user.stream("GET", f"/v1/users/{api.user}/orders/events") as stream:
                lines = stream.aiter_lines()

                async def wait_for(word: str) -> None:
                    async for line in lines:
                        if word in line:
                            return

                await wait_for("event: orders")
                placed = await user.post(f"/v1/users/{api.user}/orders", json=an_order())
                assert placed.status_code == 201
                began = asyncio.get_running_loop().time()
                await wait_for('"client_order_id":"order-1"')
                # The heartbeat comes after 15 s.
                assert asyncio.get_running_loop().time() - began < 10
            exported = await user.get(f"/v1/users/{api.user}/orders.csv?bom=1")
            assert exported.text.count("\r\n") == 2
            head = await user.head(f"/v1/users/{api.user}/orders/events")
            assert (head.status_code, head.content) == (200, b"")
        await until(lambda: api.services.streams.open == 0)


@pytest.mark.parametrize("buffering", ["on", "off"])
async def test_what_is_too_large_is_refused_with_its_reason(front: Serve, buffering: str) -> None:
    extra = f"proxy_request_buffering {buffering}; large_client_header_buffers 4 300k;"
    async with front(extra=extra) as nginx, nginx.client(nginx.api.key) as user:
        body = b" " * (MAX_BODY_BYTES + 1)
        address = f"/v1/users/{nginx.api.user}/orders"
        for content in (body, _chunks(body), _chunks(b" " * 900_000)):
            refused = await user.post(address, content=content)
            assert (refused.status_code, refused.json()["code"]) == (413, "BODY_TOO_LARGE")
        headed = await user.get("/v1/readyz", headers={"x-large": "y" * 250_000})
        assert headed.status_code == 431
        assert (await user.get("/v1/healthz")).status_code == 200


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 16_384):
        yield body[start : start + 16_384]


async def test_a_slow_client_holds_up_nginx_and_not_the_api(front: Serve) -> None:
    """A body that takes longer than the API gives it."""

    async def drip(body: bytes) -> AsyncIterator[bytes]:
        for position in range(len(body)):
            await asyncio.sleep(11 / len(body))
            yield body[position : position + 1]

    async with front() as nginx, nginx.client(nginx.api.admin_key) as admin:
        body = b'{"user_id": "slow"}'
        headers = {"Content-Type": "application/json"}
        made = await admin.post("/v1/users", content=drip(body), headers=headers)
        assert made.status_code == 201, made.text
