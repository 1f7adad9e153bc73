"""Requests with a user's key that no client of ours makes: each is refused, and none is an error of
the server."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

from api.http.rights import RIGHTS, Role
from infra.settings import Settings
from tests.support.api.attacks import attack_body
from tests.support.systems.api import ServedApi, running_api

#: Texts that JSON, or a percent-encoded path, can hold and PostgreSQL cannot.
HALF_A_PAIR, NUL = "\ud800", "\x00"
ODD_PARTS = ["%00", "%ED%A0%80", "%FF", "a%2Fb", "%E2%80%AE", "%0D%0A", "x" * 4_000]
#: What a process answers that has no Temporal, as here.
UNAVAILABLE = 503


def spoiled(value: Any, text: str) -> Any:
    """Returns the value with this text at the end of each text in it."""
    match value:
        case dict():
            return {key: spoiled(part, text) for key, part in value.items()}
        case list():
            return [spoiled(part, text) for part in value]
        case str():
            return value + text
        case _:
            return value


def filled(path: str, parts: dict[str, str]) -> str:
    return re.sub(r"{(\w+)}", lambda match: parts.get(match[1], "0" * 32), path)


def user_routes() -> list[tuple[str, str]]:
    routes = [route for route, right in RIGHTS.items() if Role.USER in right.roles]
    split = [(method, path) for method, _, path in (route.partition(" ") for route in routes)]
    # Not the streams, whose answers have no end, and not what ends or replaces the caller's key.
    return [(method, path) for method, path in split if "events" not in path and "self" not in path]


@pytest.mark.timeout(120)
async def test_odd_bodies_paths_and_parameters_are_refused_and_never_an_error_of_the_server(
    settings: Settings,
) -> None:
    unlimited = settings.model_copy(update={"limit_key": 0.0, "limit_user": 0.0})
    async with running_api(unlimited) as api:
        await send_odd_requests(api)


async def send_odd_requests(api: ServedApi) -> None:
    parts = {"user_id": api.user, "account_id": "main", "symbol": "2330", "broker": "paper"}
    statuses = Counter[int]()
    faults = []
    async with api.client(api.key) as user:

        async def call(method: str, path: str, fault: str, **words: Any) -> None:
            answer = await user.request(method, path, **words)
            statuses[answer.status_code] += 1
            if answer.status_code >= 500 and answer.status_code != UNAVAILABLE:
                faults.append((method, path[:80], fault, answer.status_code))

        for method, path in user_routes():
            known = filled(path, parts)
            for odd in ODD_PARTS:
                for name in re.findall(r"{(\w+)}", path):
                    await call(method, filled(path, {**parts, name: odd}), odd[:9])
                if method == "GET":
                    names = ("cursor", "limit", "user_id", "state", "day", "after")
                    query = "&".join(f"{name}={odd}" for name in names)
                    await call(method, f"{known}?{query}", odd[:9])
            if method not in ("POST", "PUT", "PATCH"):
                continue
            for body in (
                "[" * 60_000,
                '{"a":' * 10_000 + "1" + "}" * 10_000,
                '{"quantity": 1e999999, "price": -1e-999999}',
                json.dumps({"job": {"type": "x", "arguments": {"a": HALF_A_PAIR}}}),
                *(
                    json.dumps(spoiled(attack_body(f"{method} {path}"), text))
                    for text in (HALF_A_PAIR, NUL)
                ),
            ):
                headers = {"Content-Type": "application/json"}
                await call(method, known, body[:20], content=body.encode(), headers=headers)
    assert not faults
    assert 401 not in statuses, "the key did not count any more"
