"""The API as a proxy reaches it: below a root path, with the proxy's headers, with HEAD and odd
slashes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from structlog.testing import capture_logs

from api.http.auth import COOKIE
from api.http.errors import MethodNotAllowed
from infra.settings import Settings
from tests.support.api.webhooks import (
    await_signal_outcome,
    create_webhook,
    make_signal,
    post_signal,
)
from tests.support.systems.api import ServedApi, StartWorker, an_order, running_api

SENDER = "52.89.214.238"


def client(api: ServedApi, key: str | None = None, root: str = "") -> httpx.AsyncClient:
    """A client whose paths are those of the whole address."""
    headers = {"X-API-Key": key} if key else {}
    transport = httpx.ASGITransport(api.app)
    return httpx.AsyncClient(
        transport=transport, base_url=f"http://api{root}", headers=headers, timeout=40
    )


@pytest.fixture
async def proxied(settings: Settings) -> AsyncIterator[ServedApi]:
    """An API below /berth, behind a proxy on this machine."""
    changed = {"trusted_proxies": ("127.0.0.1",), "api_root_path": "/berth", "limit_address": 4.0}
    async with running_api(settings.model_copy(update=changed)) as api:
        yield api


@pytest.mark.parametrize("source", [f"{SENDER}:41234", "[2001:db8::1]:443", "::ffff:52.89.214.238"])
async def test_a_signal_through_a_proxy_that_adds_the_port_is_from_its_source(
    proxied: ServedApi, start_worker: StartWorker, source: str
) -> None:
    await start_worker(proxied.user)
    made = await create_webhook(proxied, sources=[SENDER, "2001:db8::/64"])
    through = {"x-forwarded-for": source}
    answer = await await_signal_outcome(proxied, made, make_signal(made), headers=through)
    assert (answer.status_code, answer.json()["state"]) == (201, "filled")


@pytest.mark.parametrize(
    "source", ["unknown", "_hidden", "", "203.0.113.9:443", f"{SENDER}, unknown"]
)
async def test_a_signal_whose_source_nobody_names_is_not_from_an_allowed_address(
    proxied: ServedApi, source: str
) -> None:
    made = await create_webhook(proxied, sources=[SENDER, "127.0.0.0/8"])
    refused = await post_signal(
        proxied, made, make_signal(made), headers={"x-forwarded-for": source}
    )
    assert (refused.status_code, refused.json()["code"]) == (403, "SOURCE_NOT_ALLOWED")


@pytest.mark.parametrize(
    "source", ["198.51.100.7:{}", "[2001:db8:1:2::{:x}]:443", "_name{}", "garbage {}"]
)
async def test_requests_without_a_key_meet_the_limit_whatever_their_port(
    proxied: ServedApi, source: str
) -> None:
    async with client(proxied) as anybody:
        answers = [
            await anybody.get(
                "/v1/orders", headers={"x-forwarded-for": source.format(1024 + number)}
            )
            for number in range(250)
        ]
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(401) < 150
    assert statuses[-1] == 429


@pytest.mark.parametrize(
    "slashes", ["/v1/webhooks/{}/orders/", "//v1/webhooks/{}//orders", "/v1/webhooks/{}/orders"]
)
@pytest.mark.parametrize("root", ["", "/berth"])
async def test_a_webhook_is_served_with_a_slash_at_its_end_and_never_by_a_redirect(
    proxied: ServedApi, start_worker: StartWorker, slashes: str, root: str
) -> None:
    await start_worker(proxied.user)
    made = await create_webhook(proxied)
    assert made["path"] == f"/berth/v1/webhooks/{made['token']}/signals"
    async with client(proxied) as anybody:
        address = f"http://api{root}{slashes.format(made['token'])}"
        answer = await anybody.post(address, json=make_signal(made))
    assert answer.status_code in (201, 202)
    assert "location" not in answer.headers


@pytest.mark.parametrize(
    "path", ["/v1/webhooks/canary", "/x//v1/webhooks/canary/orders", "/v1/WEBHOOKS/canary/"]
)
async def test_an_address_that_does_not_exist_repeats_no_token(
    proxied: ServedApi, path: str
) -> None:
    with capture_logs() as logs:
        async with client(proxied) as anybody:
            answer = await anybody.post(path, json={})
    assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")
    assert "canary" not in f"{answer.headers} {answer.text} {logs}"


async def test_every_path_that_an_answer_names_is_below_the_root_path(
    proxied: ServedApi, start_worker: StartWorker
) -> None:
    await start_worker(proxied.user)
    async with client(proxied, proxied.key, "/berth/v1") as user:
        placed = await user.post(f"/users/{proxied.user}/orders", json=an_order())
        location = placed.headers["location"]
        assert location == f"/berth/v1/orders/{placed.json()['id']}"
        assert (await user.get(f"http://api{location}")).json()["id"] == placed.json()["id"]
        missing = await user.get("/users/somebody-else/orders")
        assert missing.json()["instance"] == "/berth/v1/users/somebody-else/orders"
    for root in ("", "/berth"):
        async with client(proxied, None, root) as anybody:
            document = (await anybody.get("/v1/openapi.json")).json()
            assert document["servers"] == [{"url": "/berth"}]
            docs = (await anybody.get("/v1/docs")).text
            assert 'data-url="/berth/v1/openapi.json"' in docs
            assert 'src="/berth/page/swagger/swagger-ui-bundle.js"' in docs
            assert (await anybody.get("/page/swagger/swagger-ui-bundle.js")).status_code == 200
            assert (await anybody.get("/page/static/page.js")).status_code == 200


async def test_a_browser_logs_in_and_out_below_the_root_path(proxied: ServedApi) -> None:
    through = {"x-forwarded-for": SENDER, "x-forwarded-proto": "https", "host": "10.0.0.7:8000"}
    async with client(proxied, None, "/berth") as browser:
        sent_away = await browser.get("/page/orders")
        assert (sent_away.status_code, sent_away.headers["location"]) == (303, "/berth/page/login")
        entered = await browser.post(
            "/page/login", data={"key": proxied.admin_key}, headers=through
        )
        assert (entered.status_code, entered.headers["location"]) == (303, "/berth/")
        cookie = entered.headers["set-cookie"]
        assert all(part in cookie for part in ("Path=/berth;", "Secure", "HttpOnly"))
        assert cookie.startswith(f"__Secure-{COOKIE}=")
        session = {"cookie": cookie.partition(";")[0]}
        fleet = await browser.get("/", headers=session)
        assert fleet.status_code == 200
        paths = {
            part.partition('"')[0]
            for part in fleet.text.replace("action=", "href=").split('href="')[1:]
        }
        assert all(path.startswith(("/berth/", "#")) for path in paths), paths
        assert 'data-events="/berth/page/changes?of=workers"' in fleet.text
        for path in paths - {"#main"}:
            assert (await browser.get(f"http://api{path}", headers=session)).status_code == 200, (
                path
            )
        token = {"X-CSRF-Token": fleet.text.partition('csrf-token" content="')[2][:32]}
        logged_out = await browser.post("/page/logout", headers=session | token)
        assert (logged_out.status_code, "Path=/berth;" in logged_out.headers["set-cookie"]) == (
            204,
            True,
        )
    async with client(proxied, None) as browser:
        user = await browser.post("/page/login", data={"key": proxied.key})
        assert user.headers["location"] == f"/berth/page/users/{proxied.user}"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://berth.example", "x-forwarded-host": "berth.example"}, 303),
        ({"origin": "http://evil.example", "x-forwarded-host": "berth.example"}, 403),
        ({"origin": "http://berth.example"}, 403),
        ({"origin": "null", "x-forwarded-host": "berth.example"}, 403),
        ({"origin": "http://evil.example", "sec-fetch-site": "same-origin"}, 303),
        (
            {
                "origin": "http://berth.example",
                "x-forwarded-host": "berth.example",
                "sec-fetch-site": "cross-site",
            },
            403,
        ),
    ],
)
async def test_the_host_that_a_browser_asked_for_may_be_the_proxys_word(
    proxied: ServedApi, headers: dict[str, str], status: int
) -> None:
    async with client(proxied, None, "/berth") as browser:
        answer = await browser.post("/page/login", data={"key": proxied.admin_key}, headers=headers)
    assert answer.status_code == status


async def test_a_cookie_is_secure_where_the_browser_used_tls(api: ServedApi) -> None:
    async def cookie(**headers: str) -> str:
        async with client(api) as browser:
            answer = await browser.post("/page/login", data={"key": api.admin_key}, headers=headers)
        header: str = answer.headers["set-cookie"]
        return header

    # From nobody whom we trust.
    assert "Secure" not in await cookie(**{"x-forwarded-proto": "https"})
    assert "Secure" in await cookie(origin="https://berth.example", host="berth.example")
    assert "Path=/;" in await cookie()


async def test_head_is_a_get_without_a_body_and_with_its_rights(api: ServedApi) -> None:
    async with (
        client(api, api.key) as user,
        client(api) as anybody,
        client(api, api.admin_key) as admin,
    ):
        for path, someone in (
            ("/v1/healthz", anybody),
            ("/v1/readyz", anybody),
            ("/v1/docs", anybody),
            ("/page/login", anybody),
            ("/page/static/page.js", anybody),
            ("/v1/openapi.json", anybody),
            (f"/v1/users/{api.user}/orders", user),
            (f"/v1/users/{api.user}/orders.csv", user),
            ("/v1/metrics", admin),
            ("/v1/orders", admin),
        ):
            got, head = await someone.get(path), await someone.head(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers.get("content-type") == got.headers.get("content-type"), path
        assert (await anybody.head(f"/v1/users/{api.user}/orders")).status_code == 401
        assert (await user.head("/v1/orders")).status_code == 403
        assert (await user.head("/v1/users/somebody-else/orders")).status_code == 404
        assert (await user.head(f"/v1/users/{api.user}/worker/stop")).status_code == 405


@pytest.mark.parametrize("stream", ["orders/events", "worker/events"])
async def test_head_opens_no_stream(api: ServedApi, stream: str) -> None:
    async with client(api, api.key) as user:
        for _ in range(20):  # more than one key may have on one subject
            answer = await user.head(f"/v1/users/{api.user}/{stream}")
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert api.services.streams.open == 0


async def test_the_answer_to_a_method_that_is_not_served_names_all_that_are(api: ServedApi) -> None:
    async with client(api, api.key) as user:
        for method in ("OPTIONS", "PATCH", "TRACE"):
            answer = await user.request(method, f"/v1/users/{api.user}/orders")
            assert (answer.status_code, answer.json()["code"]) == (405, MethodNotAllowed.code)
            assert answer.headers["allow"] == "GET, HEAD, POST"
        assert (await user.options("/v1/users")).headers["allow"] == "GET, HEAD, POST"


async def test_no_answer_repeats_the_host_that_a_request_names(api: ServedApi) -> None:
    """A host in a redirect or a link would be one that anybody can choose."""
    named = {
        "host": "evil.example",
        "x-forwarded-host": "evil.example",
        "x-forwarded-proto": "https",
    }
    async with client(api) as anybody, client(api, api.admin_key) as admin:
        for path in (
            "/",
            "/page/orders/",
            "/page/static",
            "/page/swagger/",
            "/v1",
            "/v1/docs/",
            "/page/login/",
        ):
            answer = await anybody.get(path, headers=named)
            assert "evil.example" not in f"{answer.headers}{answer.text}", path
            assert answer.headers.get("location", "/page/login") == "/page/login", path
        document = await admin.get("/v1/openapi.json", headers=named)
        assert "evil.example" not in document.text
