"""Limits of requests, as one process counts them; with Valkey:
tests/integration/api/test_limits.py."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.http.auth import Authenticator, Principal
from api.http.errors import TooManyRequests
from api.http.limits import RequestLimit, RequestLimits
from api.http.middleware import RequestMiddleware
from api.http.proxies import UNKNOWN_SOURCE
from api.http.rights import Role
from infra.networks import parse_network
from infra.settings import Settings

HOOKS = {f"hook-{number}" for number in range(100)}
KEYS = {
    "berth_alice-1": "alice",
    "berth_alice-2": "alice",
    "berth_bob-1": "bob",
    "berth_staff": None,
}


async def find(key: str) -> Principal | None:
    if key not in KEYS:
        return None
    return Principal(key, Role.USER if KEYS[key] else Role.ADMIN, KEYS[key])


class Gate:
    """Holds the limits of a process whose clock the test sets: 2, 3 and 1 a second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.authenticator = Authenticator(find, 1e9, lambda: self.now)
        settings = Settings(limit_key=2, limit_user=3, limit_address=1)
        self.limits = RequestLimits(
            Redis(),
            settings,
            self.authenticator,
            lambda token: token in KEYS or token in HOOKS or "revoked" in token,
            clock=lambda: self.now,
        )

    def through(self, key: str = "", peer: str = "192.0.2.1", **fields: Any) -> int:
        """Returns how many of 100 requests at once are let through."""
        headers = [(b"x-api-key", key.encode())] * bool(key) + fields.pop("headers", [])
        scope = {"path": "/v1/orders/1", "client": (peer, 1), "headers": headers, **fields}
        for count in range(100):
            try:
                self.limits.charge_request(scope, dict(headers))
            except TooManyRequests:
                return count
        return 100


@given(st.lists(st.floats(min_value=0, max_value=3), max_size=200))
def test_no_pattern_gets_more_than_the_rate_and_one_burst(pauses: list[float]) -> None:
    limit = RequestLimit("key", 1 / 10, 2.0)
    now = let_through = 0.0
    for pause in pauses:
        now += pause
        while not limit.charge(now):
            let_through += 1
            assert let_through <= 10 * (now + 2.0) + 1e-6
        assert limit.charge(now) <= 1 / 10 + 1e-6


async def test_each_key_has_a_limit_and_refills(gate: Gate) -> None:
    for key in KEYS:
        await gate.authenticator.principal(key)
    assert gate.through("berth_bob-1") == 10
    assert gate.through("berth_staff") == 10
    gate.now += 1.0
    assert gate.through("berth_bob-1") == 2


async def test_the_keys_of_a_user_share_the_users_limit(gate: Gate) -> None:
    for key in KEYS:
        await gate.authenticator.principal(key)
    assert gate.through("berth_alice-1") == 10
    assert gate.through("berth_alice-2") == 5
    assert gate.through("berth_bob-1") == 10


def test_made_up_keys_share_their_address_and_shut_out_no_genuine_key(gate: Gate) -> None:
    assert gate.through("evil-1") == 5
    assert gate.through("evil-2") == gate.through() == 0
    assert gate.through("evil-2", peer="192.0.2.2") == 5
    assert gate.through("berth_bob-1") == 10


def test_a_hundred_own_webhooks_tokens_as_keys_are_one_address(gate: Gate) -> None:
    assert sum(gate.through(token) for token in HOOKS) == 5


def test_a_hundred_revoked_keys_share_one_limit_of_their_address(gate: Gate) -> None:
    assert sum(gate.through(f"berth_revoked-{number}") for number in range(100)) == 10
    assert gate.through("berth_revoked-1", peer="192.0.2.2") == 10


async def test_a_known_key_keeps_its_limit_next_to_revoked_ones_after_its_cache_expired(
    gate: Gate,
) -> None:
    authenticator = gate.authenticator = gate.limits.authenticator = Authenticator(
        find, 10.0, lambda: gate.now
    )
    await authenticator.principal("berth_bob-1")
    gate.now += 60.0
    assert gate.through("berth_revoked-1") == 10
    assert gate.through("berth_bob-1") == 10


async def test_a_stolen_key_that_is_used_from_elsewhere_costs_its_owner_nothing(gate: Gate) -> None:
    async def find_bound(key: str) -> Principal:
        return Principal(key, Role.USER, "alice", sources=(parse_network("192.0.2.0/24"),))

    gate.limits.authenticator = Authenticator(find_bound, 10.0, lambda: gate.now)
    await gate.limits.authenticator.principal("berth_alice-1")
    assert gate.through("berth_alice-1", peer="198.51.100.1") == 5
    assert gate.through("berth_alice-1") == 10


def test_the_network_of_an_ipv6_address_counts(gate: Gate) -> None:
    assert gate.through(peer="2001:db8::1") == 5
    assert gate.through(peer="2001:db8::2") == 0
    assert gate.through(peer="2001:db8:0:1::1") == 5


def test_an_ipv4_address_in_ipv6_counts_as_itself(gate: Gate) -> None:
    assert gate.through(peer="::ffff:192.0.2.1") == 5
    assert gate.through(peer="192.0.2.1") == 0
    assert gate.through(peer="::ffff:192.0.2.2") == 5


async def test_of_a_repeated_key_the_first_one_counts_as_it_does_for_the_rights(gate: Gate) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(Request(scope).headers["x-api-key"])(scope, receive, send)

    for key in KEYS:
        await gate.authenticator.principal(key)
    transport = httpx.ASGITransport(RequestMiddleware(app, limits=lambda: gate.limits))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        twice = [("X-API-Key", "berth_bob-1"), ("X-API-Key", "berth_staff")]
        answers = [await client.get("/", headers=twice) for _ in range(11)]
        assert (await client.get("/", headers=twice[1:])).status_code == 200
    assert answers[0].text == "berth_bob-1"
    assert [answer.status_code for answer in answers] == [200] * 10 + [429]


def test_requests_whose_source_no_proxy_names_share_a_limit(gate: Gate) -> None:
    assert gate.through(peer=UNKNOWN_SOURCE) == 5
    assert gate.through(peer="") == 0
    assert gate.through(peer="not:an:address") == 0
    assert gate.through(peer="192.0.2.7") == 5


def test_a_webhooks_token_has_a_limit_for_each_sender(gate: Gate) -> None:
    gate.limits.note_webhook("hook-1", is_known=True)
    assert gate.through(path="/v1/webhooks/hook-1/orders") == 10
    assert gate.through(path="/v1/webhooks/hook-1/orders", peer="192.0.2.2") == 10
    assert gate.through(path="/v1/webhooks/evil/orders") == 5


def test_tokens_of_no_webhook_share_the_limits_of_their_address(gate: Gate) -> None:
    assert sum(gate.through(path=f"/v1/webhooks/{token}/signals") for token in HOOKS) == 10
    gate.limits.note_webhook("hook-1", is_known=True)
    assert gate.through(path="/v1/webhooks/hook-1/signals") == 10
    gate.limits.note_webhook("hook-1", is_known=False)  # it was revoked
    assert gate.through(path="/v1/webhooks/hook-1/signals") == 0
    keys = (f"/v1/webhooks/berth_revoked-{number}/signals" for number in range(100))
    assert sum(gate.through(path=path) for path in keys) == 5


def test_the_health_of_a_process_is_answered_whatever_floods_it(gate: Gate) -> None:
    assert gate.through() == 5
    assert gate.through(path="/v1/healthz") == 100


def test_what_is_remembered_is_bounded(gate: Gate) -> None:
    gate.limits.max_remembered = 10
    for number in range(100):
        limit = gate.limits.charge("address", str(number))
        assert limit is not None
        limit.unsettled = 0
    assert len(gate.limits._limits) <= 10


@pytest.fixture
def gate() -> Gate:
    return Gate()
