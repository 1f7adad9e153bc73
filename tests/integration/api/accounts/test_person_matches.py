"""Users who log in to a broker as one person: an operator decides whether they share a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.database import accounts
from infra.database.models import FailedLogin, PersonMatch, User
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, make_key, operator

PAIR = ("first_user", "second_user", "shares_budget", "resolved_by")


@pytest.fixture
async def number(api: ServedApi) -> int:
    """A pair that waits: the served user, and another one."""
    async with api.services.database.session() as session:
        session.add(User(id=f"{api.user}-twin"))
        await session.flush()
        row = PersonMatch(
            broker="shioaji",
            first_user=api.user,
            second_user=f"{api.user}-twin",
            persons=["1-hash"],
        )
        session.add(row)
        await session.flush()
        return row.id


async def test_an_operator_links_a_pair_or_keeps_it_apart_and_it_is_audited(
    api: ServedApi, number: int
) -> None:
    path, key = f"/person-matches/{number}/resolve", await make_key(api.settings, "operator")
    behind = {"after": number - 1}
    async with api.client(api.key) as user:
        assert (await user.get("/person-matches")).status_code == 403
        assert (
            await user.post(path, json={"share_budget": True, "reason": "me"})
        ).status_code == 403
    async with api.client(key) as staff:
        [waiting] = (await staff.get("/person-matches", params=behind)).json()["person_matches"]
        assert [waiting[name] for name in PAIR] == [api.user, f"{api.user}-twin", False, None]
        assert "1-hash" not in str(waiting)
        linked = await staff.post(path, json={"share_budget": True, "reason": "both said so"})
        assert (linked.status_code, linked.json()["shares_budget"]) == (200, True)
        open_now = await staff.get("/person-matches", params=behind)
        assert open_now.json() == {"person_matches": []}
        parted = await staff.post(path, json={"share_budget": False, "reason": "they differ"})
        assert parted.json()["shares_budget"] is False
        missing = await staff.post(
            "/person-matches/999999/resolve", json={"share_budget": True, "reason": "x"}
        )
        assert missing.json()["code"] == "PERSON_MATCH_NOT_FOUND"
        entries = (await staff.get("/audit", params={"limit": 2})).json()["entries"]
    assert [(entry["action"], entry["data"]["reason"]) for entry in entries] == [
        ("person_match.kept_apart", "they differ"),
        ("person_match.linked", "both said so"),
    ]


async def test_the_command_line_does_the_same(
    api: ServedApi, number: int, commands: CommandForker, tmp_path: Path
) -> None:
    async with operator(api, commands, tmp_path) as berth:
        shown = await berth("users", "persons", "--json")
        assert f"{api.user}-twin" in shown.out, shown.err
        for command, word in (("link", "shares a budget"), ("keep-apart", "is kept apart")):
            done = await berth("users", command, str(number), "--reason", "a test")
            assert (done.code, word in done.out) == (0, True), done.err
        assert f"{api.user}-twin" not in (await berth("users", "persons", "--json")).out
        assert f"{api.user}-twin" in (await berth("users", "persons", "--resolved", "--json")).out


async def test_a_user_with_too_many_rejected_logins_waits_and_an_administrator_does_not(
    api: ServedApi,
) -> None:
    async with api.services.database.session() as session:
        session.add_all(FailedLogin(user_id=api.user) for _ in range(accounts.MAX_FAILED_LOGINS))
    path = f"/users/{api.user}/accounts/main/credentials"
    body = {"broker": "paper", "api_key": "k", "secret_key": "s"}
    async with api.client(api.key) as user_client, api.client(api.admin_key) as admin:
        for refused in (
            await user_client.put(path, json=body),
            await user_client.post(f"/users/{api.user}/accounts/main/retry"),
        ):
            assert (refused.status_code, refused.json()["code"]) == (429, "LOGIN_LIMITED")
            assert 0 < int(refused.headers["Retry-After"]) <= accounts.FAILED_LOGIN_WINDOW_S
        assert (await admin.put(path, json=body)).status_code == 200
