"""Every act through the API is in the audit trail, under the name of its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.http.rights import RIGHTS
from tests.support.commands import CommandForker
from tests.support.systems.api import ServedApi, operator

#: Acts that need no worker and no Temporal, or are noted before these are asked: route, body, noted
#: action.
ACTS: list[tuple[str, dict[str, Any] | None, str]] = [
    ("POST /users", {"user_id": "new"}, "user.created"),
    ("POST /api-keys", {"role": "operator", "label": "Erika"}, "api_key.created"),
    ("POST /api-keys/{key}/rotate", {}, "api_key.rotated"),
    ("POST /api-keys/self/rotate", {}, "api_key.rotated"),
    ("DELETE /api-keys/{key}", None, "api_key.revoked"),
    (
        "PUT /users/{user}/accounts/main/credentials",
        {"broker": "paper", "api_key": "a", "secret_key": "b"},
        "credentials.stored",
    ),
    ("POST /users/{user}/accounts/main/retry", None, "account.login_retried"),
    ("PUT /users/{user}/accounts/main/limits", {"max_quantity": 1}, "limits.set"),
    ("PUT /users/{user}/statement-addresses", {"email": "a@example.com"}, "statements.set"),
    ("POST /users/{user}/disable", {"reason": "a test"}, "user.disabled"),
    ("POST /users/{user}/enable", None, "user.enabled"),
    (
        "POST /users/{user}/webhooks",
        {"account_id": "main", "quantity_unit": "lots"},
        "webhook.created",
    ),
    ("PATCH /users/{user}/webhooks/{webhook}", {"odd": "split"}, "webhook.changed"),
    ("POST /users/{user}/webhooks/{webhook}/pause", None, "webhook.paused"),
    ("POST /users/{user}/webhooks/{webhook}/resume", None, "webhook.resumed"),
    ("POST /users/{user}/webhooks/{webhook}/rotate", {}, "webhook.rotated"),
    ("PUT /symbols/FITX", {"symbol": "TXF1!"}, "symbol_name.set"),
    ("DELETE /symbols/FITX", None, "symbol_name.deleted"),
    ("DELETE /users/{user}/webhooks/{webhook}", None, "webhook.revoked"),
    ("PUT /images", {"image": "worker@sha256:1"}, "image.allowed"),
    ("DELETE /images?image=worker@sha256:1", None, "image.forbidden"),
    ("PUT /switches", {"scope": "all", "state": "open", "reason": "a test"}, "switch.set"),
    ("POST /users/{user}/jobs", {"job": {"type": "order_export", "job_id": "1"}}, "job.requested"),
    ("POST /users/{user}/jobs/1/cancel", None, "job.cancel_requested"),
    ("POST /jobs", {"job": {"type": "ping", "text": "x", "job_id": "1"}}, "job.requested"),
    ("PUT /job-queues/email", {"weight": 2}, "job_queue.set"),
    ("POST /jobs/1/cancel", None, "job.cancel_requested"),
    ("PUT /job-limits/ping", {"running": 1, "reason": "a test"}, "job_limits.set"),
    ("POST /users/{user}/worker/start", {}, "worker.start_requested"),
    ("POST /fleet/maintenance", {}, "maintenance.run_requested"),
    ("POST /fleet/maintenance", {"override_guard": True}, "maintenance.guard_overridden"),
    ("POST /pools/default/pause", {}, "pool.pause_requested"),
    ("POST /pools/default/drain", {}, "pool.drain_requested"),
    ("POST /pools/default/resume", {}, "pool.resume_requested"),
]


@pytest.fixture
async def erika(api: ServedApi) -> str:
    """The key of an administrator with a name."""
    async with api.client(api.admin_key) as first:
        made = await first.post("/api-keys", json={"role": "admin", "label": "Erika's laptop"})
    return str(made.json()["api_key"])


async def test_every_act_is_noted_under_the_label_of_the_key(api: ServedApi, erika: str) -> None:
    places = {"user": api.user, "key": "", "webhook": ""}
    async with api.client(erika) as admin:
        for route, body, action in ACTS:
            method, _, path = route.partition(" ")
            answer = await admin.request(method, path.format(**places), json=body)
            newest = (await admin.get("/audit", params={"limit": 1})).json()["entries"][0]
            assert (route, newest["action"]) == (route, action), answer.text
            assert newest["actor"].startswith("Erika's laptop (key:")
            if route in ("POST /api-keys", "POST /users/{user}/webhooks"):
                places["key" if "api-keys" in route else "webhook"] = answer.json()["id"]


def test_no_act_was_forgotten() -> None:
    """What is not in `ACTS` is noted in a test of its own, as are orders and what becomes of
    them."""
    tried = {_shape(route.split("?")[0]) for route, _, _ in ACTS}
    untested = {
        route for route in RIGHTS if not route.startswith("GET") and _shape(route) not in tried
    }
    assert untested == {
        # In `test_instruments.py`.
        "PUT /instruments/sources/{broker}",
        "DELETE /instruments/sources/{broker}",
        "POST /instruments/sources/{broker}/load",
        "POST /instruments/changes/{number}/approve",
        "DELETE /api-keys/self",  # in `accounts/test_scopes.py`
        "DELETE /users/{user_id}",  # in `accounts/test_user_life.py`, as that of an account
        "DELETE /users/{user_id}/accounts/{account_id}",
        "POST /dead-letters/{letter_id}/{act}",  # in `test_dead_letters.py`
        "POST /users/{user_id}/orders",
        "POST /orders/{order_id}/cancel",
        "POST /orders/{order_id}/replace",
        "POST /orders/{order_id}/recheck",
        "POST /orders/{order_id}/resolve",
        "POST /users/{user_id}/accounts/{account_id}/positions/{symbol}/close",
        "POST /users/{user_id}/accounts/{account_id}/intents",
        "POST /reconciliations/{number}/resolve",
        "POST /person-matches/{number}/resolve",  # in `accounts/test_person_matches.py`
        "POST /users/{user_id}/worker/stop",  # in `workers/test_workers.py`
        "POST /users/{user_id}/worker/resume",
        "POST /users/{user_id}/worker/reload-credentials",
        "POST /jobs/batch",  # jobs of applications: PostgreSQL keeps each of them
        "PUT /job-limits/{application}/{name}",  # in `test_own_jobs.py`
        "PUT /pools/{pool}",
        "POST /users/{user_id}/webhooks/{webhook_id}/test",  # it places nothing and changes nothing
        "POST /pools/{pool}/rollout",
        "POST /pools/{pool}/rollout/abort",
    }


def _shape(route: str) -> str:
    """Returns the route without the names of its parameters."""
    fixed = {"main": "{}", "FITX": "{}", "default": "{}", "ping": "{}", "email": "{}", "1": "{}"}
    return "/".join(
        "{}" if part.startswith("{") else fixed.get(part, part) for part in route.split("/")
    )


async def test_a_reason_may_be_in_any_script(api: ServedApi, erika: str) -> None:
    async with api.client(erika) as admin:
        for method, path in (
            ("PUT", "/images"),
            ("DELETE", "/images"),
            ("DELETE", f"/users/{api.user}"),
        ):
            image = {"image": "worker@sha256:1"} if path == "/images" else {}
            for reason, status in (("離職", (200, 204)), ("a\nb", (422,))):
                if path.startswith("/users"):
                    await admin.post(f"{path}/disable", json={"reason": reason})
                given = {**image, "reason": reason}
                body, query = (given, None) if method == "PUT" else (None, given)
                answer = await admin.request(method, path, json=body, params=query)
                assert answer.status_code in status, answer.text
        entries = (await admin.get("/audit", params={"limit": 4})).json()["entries"]
    assert {entry["data"]["reason"] for entry in entries} == {"離職"}


async def test_the_trail_is_filtered_and_paged(
    api: ServedApi, erika: str, commands: CommandForker, tmp_path: Path
) -> None:
    async with api.client(erika) as admin:
        for number in range(5):
            await admin.put(
                "/images", json={"image": f"worker@sha256:{number}", "reason": "release"}
            )
    async with operator(api, commands, tmp_path) as berth:
        shown = await berth("audit", "--actor", "Erika", "--action", "image.")
        assert shown.out.count("Erika's laptop  image.allowed") == 5, shown.out
        assert "key:" not in shown.out
        rows = json.loads((await berth("audit", "--actor", "Erika", "--limit", "2", "--json")).out)
        assert [row["subject"] for row in rows] == [
            "image:worker@sha256:4",
            "image:worker@sha256:3",
        ]
        assert (await berth("audit", "--subject", "user:nobody")).out == "no such entry\n"
        assert f"user:{api.user}" in (await berth("audit", "--subject", f"user:{api.user}")).out
        assert "no such entry" in (await berth("audit", "--hours", "0")).out
    async with api.client(erika) as admin:
        for field in ("actor", "action", "subject"):  # PostgreSQL's texts have no NUL
            refused = await admin.get("/audit", params={field: "a\x00b"})
            assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_REQUEST")
        halt = {"scope": "all", "state": "reducing"}
        for reason in ("a\x00b", " ", ""):
            assert (
                await admin.put("/switches", json={**halt, "reason": reason})
            ).status_code == 422
    async with api.client(api.key) as user:
        assert (await user.get("/audit")).status_code == 403


async def pages(client: httpx.AsyncClient, **query: Any) -> list[int]:
    """Ids of all entries, read two by two."""
    ids: list[int] = []
    cursor = None
    while True:
        given = {**query, "limit": 2, **({"cursor": cursor} if cursor else {})}
        page = (await client.get("/audit", params=given)).json()
        ids += [entry["id"] for entry in page["entries"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return ids


async def test_pages_leave_nothing_out(api: ServedApi, erika: str) -> None:
    async with api.client(erika) as admin:
        whole = [
            entry["id"]
            for entry in (await admin.get("/audit", params={"limit": 1000})).json()["entries"]
        ]
        assert await pages(admin) == whole == sorted(whole, reverse=True)
