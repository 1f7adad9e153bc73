"""Jobs over REST, with the runner that a user's worker or a fleet has."""

from __future__ import annotations

import asyncio
import codecs
import csv
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from sqlalchemy import select

from infra.database.models import AuditEntry
from infra.settings import Settings
from infra.vault.message_secret import MessageSecretFile
from tests.support.systems.api import ServedApi, an_order, on_one_day, running_api
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys
from worker_runtime.protocol.messages import encode

StartRunner = Callable[[str], None]

STATEMENT = {"type": "statement", "day": "2026-11-20"}


@pytest.fixture
async def start_runner(api: ServedApi) -> AsyncIterator[StartRunner]:
    """Starts a runner of a tag, with the jobs that exist."""
    with ExitStack() as stack:

        def start(tag: str) -> None:
            config = RunnerConfig(
                name="test",
                valkey_url=api.settings.valkey_url,
                tag=tag,
                lease=30.0,
                message_keys=MessageSecretFile(api.settings.message_key_file).job_keys(tag),
            )
            command = [sys.executable, "-m", "worker_runtime.jobs"]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
            )
            stack.callback(process.kill)
            assert process.stdin is not None
            process.stdin.write(encode(config))
            process.stdin.close()

        yield start


async def put(client: httpx.AsyncClient, user: str, **job: Any) -> httpx.Response:
    return await client.post(f"/users/{user}/jobs", json={"job": job})


async def test_a_users_export_and_statement_are_made_of_their_orders(
    api: ServedApi, user: httpx.AsyncClient, start_runner: StartRunner
) -> None:
    await on_one_day()
    start_runner(job_keys.user_tag(api.user))
    # Temporal is down: without a mark the orders would be taken back.
    await api.services.valkey.set(keys.mark(api.user), "1:scripted")
    for number in (1, 2):
        made = await user.post(f"/users/{api.user}/orders?wait=0", json=an_order(number))
        assert made.status_code == 202, made.text
    accepted = (await user.get(f"/users/{api.user}/orders")).json()["orders"][0]["accepted_at"]

    asked = await put(user, api.user, type="order_export", job_id="export-1")
    assert asked.status_code == 202
    job = (await user.get(f"/users/{api.user}/jobs/export-1?wait=20")).json()
    assert (job["state"], job["ended"], job["failure"]) == ("done", True, None)
    file = await user.get(f"/users/{api.user}/jobs/export-1/file")
    assert file.headers["content-type"].startswith("text/csv")
    lines = list(csv.DictReader(io.StringIO(file.text, newline="")))
    listed = await user.get(f"/users/{api.user}/orders.csv")
    streamed = list(csv.DictReader(io.StringIO(listed.text, newline="")))
    assert [line["client_order_id"] for line in lines] == ["order-2", "order-1"]
    assert list(lines[0]) == list(streamed[0])  # the same columns
    assert lines[0]["accepted_at"] == streamed[0]["accepted_at"]
    assert lines[0]["price"] == streamed[0]["price"]
    marked = await user.get(f"/users/{api.user}/jobs/export-1/file", params={"bom": "true"})
    assert marked.content == (await user.get(f"/users/{api.user}/orders.csv?bom=1")).content
    assert marked.content.startswith(codecs.BOM_UTF8)

    day = (datetime.fromisoformat(accepted) + timedelta(hours=8)).date().isoformat()  # Taiwan's
    asked = await put(user, api.user, type="statement", day=day)
    job = (await user.get(f"/users/{api.user}/jobs/{asked.json()['id']}?wait=20")).json()
    assert (job["value"]["day"], job["value"]["orders"]) == (day, 2)


async def test_waiting_ends_with_the_job_and_not_before(
    api: ServedApi, user: httpx.AsyncClient, start_runner: StartRunner
) -> None:
    asked = (await put(user, api.user, **STATEMENT)).json()
    assert (asked["state"], asked["type"]) == ("waiting", "statement")
    path = f"/users/{api.user}/jobs/{asked['id']}"
    assert (await user.get(f"{path}?wait=0.05")).json()["state"] == "waiting"
    waiting = asyncio.create_task(user.get(f"{path}?wait=30"))
    await _somebody_waits(api, asked["id"])
    start_runner(job_keys.user_tag(api.user))
    job = (await waiting).json()
    assert (job["state"], job["attempt"], job["value"]["orders"]) == ("done", 1, 0)


async def _somebody_waits(api: ServedApi, job_id: str) -> None:
    client: Redis = api.services.valkey
    channel = job_keys.done(job_keys.user_tag(api.user), job_id)
    for _ in range(1000):
        if (await client.pubsub_numsub(channel))[0][1]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nobody waits for the job")


async def test_the_same_call_under_an_id_is_one_job_and_another_one_is_refused(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    first = await put(user, api.user, **STATEMENT, job_id="s-1")
    again = await put(user, api.user, **STATEMENT, job_id="s-1")
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json() == again.json()
    assert await api.services.valkey.zcard(
        job_keys.subqueue(job_keys.user_tag(api.user), "default", "statement")
    ) == (1)
    other = await put(user, api.user, type="statement", day="2026-11-19", job_id="s-1")
    assert (other.status_code, other.json()["code"]) == (409, "JOB_ID_REUSED")


async def test_jobs_of_one_group_of_a_user_wait_for_each_other_and_count_as_waiting(
    settings: Settings,
) -> None:
    async with running_api(settings.model_copy(update={"jobs_waiting": 3})) as api:
        path = f"/users/{api.user}/jobs"
        async with api.client(api.key) as user:
            for number in range(3):
                body = {"job": {**STATEMENT, "job_id": f"g-{number}"}, "group": "reports"}
                assert (await user.post(path, json=body)).status_code == 202
            states = [(await user.get(f"{path}/g-{n}")).json()["state"] for n in range(3)]
            assert states == ["waiting", "grouped", "grouped"]
            refused = await user.post(path, json={"job": STATEMENT, "group": "others"})
            assert (refused.status_code, refused.json()["code"]) == (429, "TOO_MANY_JOBS")
            await user.post(f"{path}/g-0/cancel")
            assert (await user.get(f"{path}/g-1")).json()["state"] == "waiting"
            wrong = await user.post(path, json={"job": STATEMENT, "group": "a group"})
            assert wrong.status_code == 422


async def test_a_waiting_job_is_cancelled_and_stays_so(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    asked = (await put(user, api.user, **STATEMENT)).json()
    path = f"/users/{api.user}/jobs/{asked['id']}"
    for _ in range(2):
        cancelled = (await user.post(f"{path}/cancel")).json()
        assert (cancelled["state"], cancelled["ended"]) == ("cancelled", True)
        assert cancelled["failure"]["code"] == "JOB_CANCELLED"
    assert (await user.get(f"{path}/file")).status_code == 404


async def test_a_user_has_a_maximum_of_waiting_jobs(settings: Settings) -> None:
    narrow = settings.model_copy(update={"jobs_waiting": 3})
    async with running_api(narrow) as api, api.client(api.key) as user:
        for number in range(3):
            assert (await put(user, api.user, **STATEMENT, job_id=f"s-{number}")).status_code == 202
        refused = await put(user, api.user, **STATEMENT)
        assert (refused.status_code, refused.json()["code"]) == (429, "TOO_MANY_JOBS")
        # A repeat of one that is there is no further one.
        assert (await put(user, api.user, **STATEMENT, job_id="s-0")).status_code == 202


async def test_a_user_enqueues_a_maximum_of_jobs_while_results_are_kept(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    async def asks_and_cancels() -> str:
        asked = (await put(user, api.user, **STATEMENT)).json()
        if "id" not in asked:
            return str(asked["code"])
        await user.post(f"/users/{api.user}/jobs/{asked['id']}/cancel")
        return "cancelled"

    seen = [await asks_and_cancels() for _ in range(51)]
    assert seen == ["cancelled"] * 50 + ["TOO_MANY_JOBS"]
    client: Redis = api.services.valkey
    assert 0 < await client.ttl(job_keys.recent_requests(job_keys.user_tag(api.user))) <= 500


async def test_calls_that_come_at_once_get_no_more_than_one_after_the_other(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    replies = await asyncio.gather(*(put(user, api.user, **STATEMENT) for _ in range(55)))
    assert sorted(reply.status_code for reply in replies) == [202] * 50 + [429] * 5


async def test_nobody_sees_the_jobs_of_others(api: ServedApi, user: httpx.AsyncClient) -> None:
    mine = (await put(user, api.user, **STATEMENT)).json()["id"]
    async with api.client(api.admin_key) as admin:
        assert (await admin.get(f"/users/{api.user}/jobs/{mine}")).status_code == 200
        await admin.post("/users", json={"user_id": f"{api.user}-b"})
        assert (await put(admin, f"{api.user}-b", **STATEMENT)).status_code == 202
        assert (await put(admin, "nobody", **STATEMENT)).status_code == 404
        assert (await admin.get(f"/users/{api.user}-b/jobs/{mine}")).status_code == 404
    assert (await put(user, f"{api.user}-b", **STATEMENT)).status_code == 404
    assert (await user.get(f"/users/{api.user}-b/jobs/{mine}")).status_code == 404
    unknown = await put(user, api.user, type="position_snapshot", account_id="none")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "ACCOUNT_NOT_FOUND")


async def test_the_fleets_jobs_are_for_operators(
    api: ServedApi, user: httpx.AsyncClient, start_runner: StartRunner
) -> None:
    ping = {"job": {"type": "ping", "text": "hello", "job_id": f"ping-{api.user}"}}
    for method, path in (("POST", "/jobs"), ("GET", "/jobs/x"), ("POST", "/jobs/x/cancel")):
        refused = await user.request(method, path, json=ping if path == "/jobs" else None)
        assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")
    start_runner(job_keys.FLEET_TAG)
    async with api.client(api.admin_key) as admin:
        assert (await admin.post("/jobs", json=ping)).status_code == 202
        job = (await admin.get(f"/jobs/ping-{api.user}?wait=20")).json()
        assert (job["state"], job["value"]["text"]) == ("done", "hello")
        mail = {
            "type": "email",
            "to": "a@example.com\nBcc: b@example.com",
            "subject": "s",
            "text": "t",
        }
        assert (await admin.post("/jobs", json={"job": mail})).status_code == 422
        both = {"type": "whatsapp", "to": "+886912345678", "text": "a", "template": "HX" + "a" * 32}
        sms = {"type": "sms", "to": "0912345678", "text": "a"}
        push = {"type": "push", "token": "t", "title": "a", "text": "b", "data": {"": "c"}}
        for bad in (both, {**both, "text": None, "template": None}, sms, push):
            refused = await admin.post("/jobs", json={"job": bad})
            assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_REQUEST")
        large = {"type": "webhook", "url": "https://example.com", "recipient": "a", "event": "e"}
        broken = {**large, "url": "https://[::1", "body": 1}
        assert (await admin.post("/jobs", json={"job": broken})).status_code == 422
        for number in ("NaN", "1e400", "-Infinity"):
            endless = json.dumps({"job": {**large, "body": "?"}}).replace(
                '"?"', f'[{{"a": {number}}}]'
            )
            refused = await admin.post(
                "/jobs", content=endless, headers={"Content-Type": "application/json"}
            )
            assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_REQUEST")
        refused = await admin.post("/jobs", json={"job": {**large, "body": "é" * 30_000}})
        assert (refused.status_code, refused.json()["code"]) == (422, "INVALID_REQUEST")


async def test_who_asked_for_a_job_of_the_fleet_is_in_the_audit_trail_without_what_it_says(
    api: ServedApi,
) -> None:
    async with api.client(api.admin_key) as admin:
        mail = {"type": "email", "to": "a@example.com", "subject": "canary", "text": "canary"}
        hook = {
            "type": "webhook",
            "url": "https://example.com/canary",
            "recipient": "alice",
            "event": "e",
        }
        sms = {"type": "sms", "to": "+886912345678", "text": "canary"}
        push = {"type": "push", "token": "phone", "title": "canary", "text": "canary"}
        asked = [
            (await admin.post("/jobs", json={"job": job})).json()["id"]
            for job in (mail, {**hook, "body": "canary"}, {"type": "ping"}, sms, push)
        ]
        await admin.post(f"/jobs/{asked[0]}/cancel")
    async with api.services.database.session() as session:
        entries = await session.scalars(
            select(AuditEntry)
            .where(AuditEntry.subject == "fleet", AuditEntry.data["job_id"].astext.in_(asked))
            .order_by(AuditEntry.id)
        )
        rows = [(row.actor.partition(":")[0], row.action, row.data) for row in entries]
    assert rows == [
        (
            "key",
            "job.requested",
            {"job_id": asked[0], "type": "email", "recipient": "a@example.com"},
        ),
        ("key", "job.requested", {"job_id": asked[1], "type": "webhook", "recipient": "alice"}),
        ("key", "job.requested", {"job_id": asked[2], "type": "ping"}),
        ("key", "job.requested", {"job_id": asked[3], "type": "sms", "recipient": "+886912345678"}),
        ("key", "job.requested", {"job_id": asked[4], "type": "push", "recipient": "phone"}),
        ("key", "job.cancel_requested", {"job_id": asked[0]}),
    ]
