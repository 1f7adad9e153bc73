"""Credentials that are tried when they are stored, at a real paper exchange and at what is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.exchange.client import ExchangeAdmin, ExchangeServer
from infra.exchange.limits import ExchangeLimits
from infra.local.process import HOST
from infra.settings import Settings
from tests.support.systems.api import ServedApi, running_api

KEYS = {"broker": "paper", "api_key": "good", "secret_key": "secret", "person_id": "P1"}


@pytest.fixture
def exchange(short_directory: Path) -> Iterator[ExchangeServer]:
    with ExchangeServer(short_directory / "exchange") as server:
        yield server


async def store(api: ServedApi, account: str = "main", **changes: Any) -> dict[str, Any]:
    async with api.client(api.key) as user:
        path = f"/users/{api.user}/accounts/{account}/credentials"
        answer = await user.put(path, json=KEYS | changes)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def login_of(stored: dict[str, Any]) -> tuple[str, str]:
    return stored["login"], stored["login_detail"]


async def test_paper_credentials_are_verified_or_rejected_at_once_without_a_session(
    exchange: ExchangeServer, settings: Settings
) -> None:
    at_exchange = settings.model_copy(update={"exchange_address": exchange.address})
    async with running_api(at_exchange) as api, ExchangeAdmin(exchange.admin_url) as admin:
        assert login_of(await store(api)) == (
            "rejected",
            "LOGIN_REJECTED: unknown account or wrong key",
        )
        await admin.register("main", "good", "secret", "P1")
        await admin.set_limits(ExchangeLimits(connections_per_person=0, logins_per_day=0))
        assert login_of(await store(api)) == ("verified", "")
        assert login_of(await store(api, secret_key="other"))[0] == "rejected"
        assert login_of(await store(api, person_id="P2")) == (
            "rejected",
            "LOGIN_REJECTED: the account belongs to another person",
        )
        assert await admin.sessions() == []  # nothing counts, nobody is banned
        assert await admin.incidents() == []
        await admin.begin_maintenance(60)
        login, why = login_of(await store(api))
        assert (login, why.partition(":")[0]) == ("not_tried", "BROKER_MAINTENANCE")
        async with api.client(api.admin_key) as operator:
            entries = (await operator.get("/audit", params={"action": "credentials"})).json()[
                "entries"
            ]
        assert entries[0]["data"]["login"] == "not_tried"


@asynccontextmanager
async def answering(reply: bytes | None) -> AsyncIterator[str]:
    """Something at an address that sends `reply` to everybody; None: nothing, ever."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if reply is not None:
            writer.write(reply)
            writer.close()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    async with server:
        yield f"{HOST}:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"no json\n", "MalformedMessage"),
        (b"", "MalformedMessage"),
        (b"x" * 200_000, "ValueError"),
        (None, "TimeoutError"),
    ],
)
async def test_an_exchange_that_does_not_answer_keeps_nobody_from_storing(
    settings: Settings, reply: bytes | None, error: str
) -> None:
    async with (
        answering(reply) as address,
        running_api(settings.model_copy(update={"exchange_address": address})) as api,
    ):
        expected = ("not_tried", f"the broker's server did not answer: {error}")
        assert login_of(await store(api)) == expected


@pytest.mark.parametrize("address", ["no-port", f"{HOST}:1", f"{HOST}:99999"])
async def test_an_address_of_nobody_is_said(settings: Settings, address: str) -> None:
    async with running_api(settings.model_copy(update={"exchange_address": address})) as api:
        login, why = login_of(await store(api))
        assert login == "not_tried"
        assert why.startswith("the broker's server did not answer: ")


async def test_a_real_brokers_credentials_are_not_tried(api: ServedApi) -> None:
    assert login_of(await store(api, "real", broker="shioaji")) == (
        "not_tried",
        "shioaji counts each login: the user's worker tries them",
    )
