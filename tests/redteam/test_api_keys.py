"""What somebody with a user's API key, or with an operator's, cannot do at the API."""

from __future__ import annotations

import asyncio
import re
from decimal import Decimal
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select
from temporalio.exceptions import ApplicationError

from api.http.rights import RIGHTS, Role
from infra.database import images
from infra.database.models import WorkerLaunch
from infra.settings import Settings
from tests.support.activities.harness import ActivityHarness
from tests.support.api.attacks import CREDENTIALS, IMAGE, attack_body, stored_state
from tests.support.systems.api import ServedApi, StartWorker, an_order, make_key, running_api
from tests.support.workers.pool_worker import POOL
from workflows.rollout.messages import Release
from workflows.worker_pool.messages import LaunchPoolWorker


async def test_a_users_key_reaches_nothing_of_another_user_and_nothing_of_the_staff(
    api: ServedApi, start_worker: StartWorker
) -> None:
    """All routes, with ids of an order, a webhook and a job that are really there."""
    await start_worker(api.user)
    async with api.client(api.key) as victim:
        order = (await victim.post(f"/users/{api.user}/orders", json=an_order())).json()
        hook = (
            await victim.post(
                f"/users/{api.user}/webhooks", json={"account_id": "main", "quantity_unit": "lots"}
            )
        ).json()
        statement = {"job": {"type": "statement", "day": "2026-11-20"}}
        job = (await victim.post(f"/users/{api.user}/jobs", json=statement)).json()
    for _ in range(400):  # until the outcome is written
        if "filled" in str((await stored_state(api))["orders"]):
            break
        await asyncio.sleep(0.05)
    async with api.client(api.admin_key) as admin:
        made = await admin.post("/users", json={"user_id": f"{api.user}-evil"})
    parts = {
        "user_id": api.user,
        "account_id": "main",
        "pool": "default",
        "number": "1",
        "symbol": "2330",
    }
    parts |= {"order_id": order["id"], "webhook_id": hook["id"], "job_id": job["id"]}
    parts["broker"] = "paper"
    before = await stored_state(api)
    async with api.client(made.json()["api_key"]) as evil:
        for route in RIGHTS:
            method, _, path = route.partition(" ")
            if path in ("/switches", "/symbols", "/instruments", "/api-keys") or "/self" in path:
                continue  # what every user may see, and what acts for the caller's own key
            named = re.sub(r"{(\w+)}", lambda match: parts.get(match[1], "0" * 32), path)
            answer = await evil.request(
                method, named, json=attack_body(route) if method != "GET" else None
            )
            expected = 404 if Role.USER in RIGHTS[route].roles else 403
            assert (route, answer.status_code) == (route, expected), answer.text
        victims: dict[str, Any] = {"user_id": api.user}
        assert (await evil.get("/api-keys", params=victims)).status_code == 404
        assert (
            await evil.post("/api-keys", json={"role": "admin", "label": "evil"})
        ).status_code == 403
        async with api.client(api.key) as victim:
            victims_key = (await victim.get("/api-keys/self")).json()["id"]
        for method, path in (
            ("POST", f"/api-keys/{victims_key}/rotate"),
            ("DELETE", f"/api-keys/{victims_key}"),
        ):
            answer = await evil.request(method, path, json={} if method == "POST" else None)
            assert answer.status_code == 404
        for whom in ({"scope": "user"}, {"scope": "account", "account_id": "main"}):
            switch = {**whom, **victims, "held_by": "user", "state": "halted", "reason": "evil"}
            assert (await evil.put("/switches", json=switch)).status_code == 404
        assert (await evil.get("/switches", params=victims)).status_code == 404
    assert await stored_state(api) == before


async def test_an_operators_key_neither_gets_credentials_nor_makes_keys_nor_trades_nor_sends(
    api: ServedApi,
) -> None:
    key = await make_key(api.settings, "operator")
    before = await stored_state(api)
    user = f"/users/{api.user}"
    hook = {
        "type": "webhook",
        "url": "https://example.com",
        "recipient": api.user,
        "event": "e",
        "body": 1,
    }
    attempts = [
        ("PUT", f"{user}/accounts/main/credentials", CREDENTIALS),
        ("POST", "/users", {"user_id": "evil"}),
        ("POST", "/api-keys", {"role": "admin", "label": "evil"}),
        ("POST", "/api-keys", {"role": "user", "user_id": api.user, "label": "evil"}),
        ("GET", "/api-keys", None),
        ("DELETE", "/api-keys/00000000-0000-0000-0000-000000000000", None),
        ("PUT", "/images", {"image": IMAGE}),
        ("DELETE", f"/images?image={IMAGE}", None),
        ("POST", f"{user}/orders", an_order()),
        ("POST", f"{user}/webhooks", {"account_id": "main"}),
        ("PUT", f"{user}/statement-addresses", {"email": "evil@example.com"}),
        (
            "POST",
            "/jobs",
            {"job": {"type": "email", "to": "a@example.com", "subject": "s", "text": "t"}},
        ),
        ("POST", "/jobs", {"job": hook}),
    ]
    async with api.client(key) as operator:
        for method, path, body in attempts:
            answer = await operator.request(method, path, json=body)
            assert (path, answer.status_code, answer.json()["code"]) == (path, 403, "FORBIDDEN")
    assert await stored_state(api) == before


async def test_an_operators_limits_are_never_wider_than_the_settings(settings: Settings) -> None:
    changed = settings.model_copy(
        update={"check_max_quantity": 10, "check_max_notional": Decimal(1000)}
    )
    async with (
        running_api(changed) as api,
        api.client(await make_key(changed, "operator")) as operator,
    ):
        path = f"/users/{api.user}/accounts/main/limits"
        for limits, status in (
            ({"max_quantity": 11}, 403),
            ({"max_notional": "1000.01"}, 403),
            ({"max_quantity": 10, "max_notional": "1000"}, 200),
        ):
            assert (await operator.put(path, json=limits)).status_code == status
        async with api.client(api.admin_key) as admin:
            assert (await admin.put(path, json={"max_quantity": 11})).status_code == 200


async def test_an_operator_neither_widens_nor_removes_an_accounts_stricter_limits(
    settings: Settings,
) -> None:
    strict = {
        "max_quantity": 5,
        "max_notional": "500",
        "max_daily_orders": 3,
        "duplicate_window_s": 60,
        "price_band": "0.05",
    }
    async with (
        running_api(settings) as api,
        api.client(await make_key(settings, "operator")) as operator,
    ):
        path = f"/users/{api.user}/accounts/main/limits"
        assert (await operator.put(path, json={"max_daily_orders": 1_000_000})).status_code == 403
        async with api.client(api.admin_key) as admin:
            assert (await admin.put(path, json=strict)).status_code == 200
        wider = {
            "max_quantity": 6,
            "max_notional": "501",
            "max_daily_orders": 4,
            "duplicate_window_s": 59,
            "price_band": "0.06",
        }
        for name, value in wider.items():
            for changed in ({**strict, name: value}, {**strict, name: None}):
                assert (await operator.put(path, json=changed)).status_code == 403
        assert (await operator.get(path)).json()["max_daily_orders"] == 3
        for allowed in (strict, {**strict, "max_quantity": 4, "duplicate_window_s": 90}):
            assert (await operator.put(path, json=allowed)).status_code == 200


async def test_an_operators_rollout_of_an_image_that_is_not_allowed_is_refused(
    api: ServedApi,
) -> None:
    async with api.client(await make_key(api.settings, "operator")) as operator:
        answer = await rollout(operator)
        assert (answer.status_code, answer.json()["code"]) == (422, "IMAGE_NOT_ALLOWED")
        async with api.client(api.admin_key) as admin:
            assert (await admin.put("/images", json={"image": IMAGE})).status_code == 200
        # Temporal is down here: with the image on the list, that is what stops it.
        assert (await rollout(operator)).status_code == 503


async def test_a_key_with_images_alone_allows_an_image_and_launches_no_worker_from_it(
    api: ServedApi,
) -> None:
    """With `fleet` besides, it does: a worker of its own image gets what its users have stored."""
    async with api.client(await make_key(api.settings, "admin", ("images",))) as thief:
        assert (await thief.put("/images", json={"image": IMAGE})).status_code == 200
        before = await stored_state(api)
        credentials = f"/users/{api.user}/accounts/main/credentials"
        for answer, scope in (
            (await rollout(thief), "fleet"),
            (await thief.put(credentials, json=CREDENTIALS), "credentials"),
            (await thief.get(f"/users/{api.user}"), "read"),
        ):
            assert (answer.status_code, answer.json()["code"]) == (403, "SCOPE_MISSING")
            assert f"`{scope}`" in answer.json()["detail"]
        assert await stored_state(api) == before
    async with api.client(await make_key(api.settings, "admin", ("fleet", "images"))) as thief:
        # Temporal is down here: nothing else stops the rollout.
        assert (await rollout(thief)).status_code == 503


async def rollout(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/pools/default/rollout", json={"version": "2", "image": IMAGE})


async def test_anyone_who_reaches_temporal_launches_no_image_that_is_not_allowed(
    harness: ActivityHarness,
) -> None:
    def launch(token: str) -> LaunchPoolWorker:
        release = Release(version="2", image=IMAGE)
        return LaunchPoolWorker(pool=POOL, token=token, timeout=5.0, release=release)

    with pytest.raises(ApplicationError) as refused:
        await harness.run(harness.launching.launch_pool_worker, launch("t1"))
    assert (refused.value.type, refused.value.non_retryable) == ("IMAGE_NOT_ALLOWED", True)
    assert not await harness.launcher.list()
    async with harness.database.session() as session:
        assert not await session.scalar(select(func.count()).select_from(WorkerLaunch))
        await images.allow_image(session, IMAGE, actor="admin", reason="test")
    await harness.run(harness.launching.launch_pool_worker, launch("t1"))
    assert len(await harness.launcher.list()) == 1
    async with harness.database.session() as session:
        await images.forbid_image(session, IMAGE, actor="admin", reason="test")
    with pytest.raises(ApplicationError, match="not on the list"):
        await harness.run(harness.launching.launch_pool_worker, launch("t2"))
