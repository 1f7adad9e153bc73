"""A user cannot fill the audit trail: what is refused is not noted, and each user has a quota for a
day."""

from __future__ import annotations

from datetime import datetime, timedelta

import httpx
import pytest
from sqlalchemy import func, select, text, update

from api.http.rights import ENDING, RIGHTS, Role, is_counted
from infra.database import api_keys, quotas
from infra.database.engine import Database
from infra.database.models import ApiKey, AuditEntry, DailyActs
from infra.database.quotas import DailyQuotaReached
from infra.market.calendar import HOME_ZONE
from tests.support.systems.api import ServedApi, an_order, on_one_day

NOON = datetime(2026, 11, 27, 12, 0, tzinfo=HOME_ZONE)


async def count_entries(api: ServedApi, prefix: str = "") -> int:
    async with api.services.database.session() as session:
        rows = (
            select(func.count()).select_from(AuditEntry).where(AuditEntry.action.startswith(prefix))
        )
        return int(await session.scalar(rows) or 0)


async def set_acts(api: ServedApi, acts: int) -> None:
    async with api.services.database.session() as session:
        await session.execute(
            update(DailyActs).where(DailyActs.user_id == api.user).values(acts=acts)
        )


def a_switch(api: ServedApi) -> dict[str, str]:
    return {
        "scope": "user",
        "user_id": api.user,
        "held_by": "user",
        "state": "halted",
        "reason": "a test",
    }


async def test_acts_are_counted_for_a_day_in_taipei_and_ends_have_more_room(
    services_database: str,
) -> None:
    async with Database(services_database, pool_size=1) as database:

        async def spend(ends: bool, now: datetime = NOON) -> None:
            await database.write(quotas.spend_act, "user-of-quotas", ends=ends, now=now)

        async def set_count(acts: int) -> None:
            async with database.session() as session:
                await session.execute(update(DailyActs).values(acts=acts))

        await spend(False)
        await set_count(quotas.MAX_DAILY_ACTS - 1)
        await spend(False)
        with pytest.raises(DailyQuotaReached, match="midnight in Asia/Taipei") as refused:
            await spend(False)
        assert refused.value.retry_after == 12 * 3600
        await set_count(quotas.MAX_DAILY_ENDS - 1)
        await spend(True)
        with pytest.raises(DailyQuotaReached):
            await spend(True)
        await spend(False, NOON + timedelta(hours=12))


async def test_a_user_who_used_up_the_day_still_trades_halts_and_ends_and_fills_nothing(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    await on_one_day()
    hook = {"account_id": "main", "quantity_unit": "lots"}
    made = (await user.post(f"/users/{api.user}/webhooks", json=hook)).json()
    await set_acts(api, quotas.MAX_DAILY_ACTS)
    path = f"/users/{api.user}/webhooks/{made['id']}"
    before = await count_entries(api)
    for _ in range(5):
        refused = await user.patch(path, json={"label": "again"})
        assert (refused.status_code, refused.json()["code"]) == (429, "DAILY_QUOTA")
        assert int(refused.headers["retry-after"]) <= 86_400
    assert await count_entries(api) == before
    assert (await user.post(f"{path}/pause")).status_code == 200
    assert (await user.put("/switches", json=a_switch(api))).status_code == 200
    assert (await user.delete(path)).status_code == 200
    placed = await user.post(f"/users/{api.user}/orders", json=an_order())
    assert placed.json()["code"] == "TRADING_HALTED"  # of the switch, not of the quota
    await set_acts(api, quotas.MAX_DAILY_ENDS)
    assert (await user.put("/switches", json=a_switch(api))).status_code == 429
    async with api.client(api.admin_key) as admin:  # the staff has no quota
        answer = await admin.put("/switches", json=a_switch(api) | {"held_by": "operator"})
    assert answer.status_code == 200


async def test_a_job_that_is_refused_is_not_noted(api: ServedApi, user: httpx.AsyncClient) -> None:
    path, answers = f"/users/{api.user}/jobs", []
    for _ in range(80):
        answers.append((await user.post(path, json={"job": {"type": "order_export"}})).status_code)
    assert {202, 429} == set(answers)
    assert await count_entries(api, "job.requested") == answers.count(202)
    assert (await user.post(f"{path}/nothing/cancel")).status_code == 404
    assert await count_entries(api, "job.cancel_requested") == 0
    named = {"job": {"type": "order_export", "job_id": "again"}}
    await user.post(path, json=named)
    noted = await count_entries(api, "job.requested")
    for _ in range(3):
        await user.post(path, json=named)  # a repeat is no other job
    assert await count_entries(api, "job.requested") == noted


async def test_a_key_has_a_maximum_of_sessions_and_the_oldest_ends(api: ServedApi) -> None:
    cookies = []
    for _ in range(api_keys.MAX_SESSIONS + 2):
        async with api.client(None) as browser:
            login = await browser.post("http://api/page/login", data={"key": api.key})
            assert login.status_code == 303
            cookies.append(login.headers["set-cookie"].partition(";")[0])
    async with api.services.database.session() as session:
        held = select(func.count()).select_from(ApiKey).where(ApiKey.session_of.is_not(None))
        assert await session.scalar(held.where(ApiKey.user_id == api.user)) == api_keys.MAX_SESSIONS
    async with api.client(None) as browser:
        page = f"http://api/page/users/{api.user}"
        assert (await browser.get(page, headers={"Cookie": cookies[0]})).status_code == 303
        assert (await browser.get(page, headers={"Cookie": cookies[-1]})).status_code == 200


async def test_a_user_has_a_maximum_of_keys(api: ServedApi) -> None:
    to_create = api_keys.MAX_USER_KEYS - 1  # the user has one
    async with api.client(api.admin_key) as admin:
        body = {"role": "user", "user_id": api.user, "label": "one more"}
        codes = [
            (await admin.post("/api-keys", json=body)).status_code for _ in range(to_create + 2)
        ]
        assert codes == [201] * to_create + [409, 409]
        own = (await admin.get("/api-keys", params={"user_id": api.user})).json()["api_keys"]
        rotated = await admin.post(f"/api-keys/{own[0]['id']}/rotate", json={"overlap_hours": 0})
        assert rotated.json()["code"] == "API_KEY_LIMIT"
        await admin.delete(f"/api-keys/{own[0]['id']}")
        assert (await admin.post("/api-keys", json=body)).status_code == 201


def test_what_a_user_may_change_is_counted_or_has_limits_of_its_own() -> None:
    changes = {
        route for route, right in RIGHTS.items() if Role.USER in right.roles and "GET " not in route
    }
    assert {route for route in changes if not is_counted(route)} == {
        "POST /users/{user_id}/orders",
        "POST /orders/{order_id}/cancel",
        "POST /orders/{order_id}/replace",
        "POST /users/{user_id}/accounts/{account_id}/positions/{symbol}/close",
        "POST /users/{user_id}/accounts/{account_id}/intents",
        "POST /users/{user_id}/webhooks/{webhook_id}/test",
    }
    assert changes >= ENDING


async def test_expired_webhooks_do_not_stay_for_ever(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    from infra.database.retention import PURGED

    made = (
        await user.post(
            f"/users/{api.user}/webhooks", json={"account_id": "main", "quantity_unit": "lots"}
        )
    ).json()
    async with api.services.database.session() as session:
        ended = text(
            "update webhooks set expires_at = now() - interval '1 day' where user_id = :user"
        )
        await session.execute(ended, {"user": api.user})
        condition = PURGED["webhooks"][1].replace(":before", "now()")
        due = text(f"select id from webhooks where user_id = :user and {condition}")  # noqa: S608
        assert str(await session.scalar(due, {"user": api.user})) == made["id"]
