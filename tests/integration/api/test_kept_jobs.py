"""What was accepted over REST, and what operators set, outlives a flush of Valkey."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from redis.asyncio import Redis
from sqlalchemy import select, text
from typer.testing import CliRunner

from activities.maintenance.kept_jobs import KeptJobSweeper
from infra.cli.app import app
from infra.database import users
from infra.database.kept_jobs import JobSettings, KeptJob
from infra.jobs import limits as job_limits
from infra.jobs.limits import JobLimits
from infra.valkey.client import reply_of
from tests.support.systems.api import ServedApi, make_key
from worker_runtime.jobs.protocol import keys as job_keys

MAIL = {"type": "email", "to": "ann@example.com", "subject": "s", "text": "t", "job_id": "m-1"}


def sweeper_of(api: ServedApi) -> KeptJobSweeper:
    services = api.services
    return KeptJobSweeper(services.valkey, services.kept_jobs, services.starter)


async def sweep(api: ServedApi) -> None:
    """The next check of all jobs is due."""
    async with api.services.database.session() as session:
        await session.execute(
            text("update kept_jobs set check_at = now() where check_at is not null")
        )
    await sweeper_of(api).sweep()


async def forget_jobs(client: Redis, tag: str = job_keys.FLEET_TAG) -> None:
    """A flush, of jobs only: other tests share the server."""
    job_names = [key async for key in client.scan_iter(job_keys.every_key(tag))]
    if job_names:
        await client.delete(*job_names)


async def berth(api: ServedApi, *words: str, code: int = 0) -> None:
    """`berth jobs …`, which goes to Valkey and PostgreSQL itself."""
    environment = {
        "BERTH_VALKEY_URL": api.settings.valkey_url,
        "BERTH_DATABASE_URL": api.settings.database_url,
        "BERTH_MESSAGE_KEY_FILE": str(api.settings.message_key_file),
    }
    done = await asyncio.to_thread(CliRunner().invoke, app, ["jobs", *words], env=environment)
    assert done.exit_code == code, done.output


async def test_an_accepted_job_is_listed_after_a_flush_enqueued_again_and_known_by_its_id(
    api: ServedApi,
) -> None:
    client = api.services.valkey
    async with api.client(api.admin_key) as admin:
        asked = await admin.post("/jobs", json={"job": MAIL, "delay": 600})
        assert (asked.status_code, asked.json()["state"]) == (202, "delayed")
        await forget_jobs(client)
        shown = (await admin.get("/jobs/m-1")).json()
        assert (shown["state"], shown["ended"]) == ("waiting", False)
        again = await admin.post("/jobs", json={"job": MAIL, "delay": 600})
        assert (again.status_code, again.json()["state"]) == (202, "waiting")
        other = await admin.post("/jobs", json={"job": {**MAIL, "text": "another"}, "delay": 600})
        assert (other.status_code, other.json()["code"]) == (409, "JOB_ID_REUSED")
        assert await reply_of(client.exists(job_keys.job(job_keys.FLEET_TAG, "m-1"))) == 0
        await sweep(api)  # a mail waits until a run of before has ended
        await sweep(api)
        assert (await admin.get("/jobs/m-1")).json()["state"] == "delayed"


@pytest.mark.parametrize(
    "job_id", ["statement-mail.2026-11-20.ann", "report-mail.2026-11-20.x", "alert-1795410000-1-0"]
)
async def test_nobody_takes_the_ids_of_the_jobs_that_berth_makes_itself(
    api: ServedApi, job_id: str
) -> None:
    """A statement, a report or an alert whose id is another job's would never go out."""
    for key in (await make_key(api.settings, "operator"), api.admin_key):
        async with api.client(key) as staff:
            asked = await staff.post("/jobs", json={"job": {"type": "ping", "job_id": job_id}})
            assert (asked.status_code, asked.json()["code"]) == (422, "INVALID_REQUEST")
    async with api.services.database.session() as session:
        assert await session.get(KeptJob, ("", job_id)) is None


async def test_a_job_is_cancelled_while_valkey_does_not_know_it(
    api: ServedApi, user: httpx.AsyncClient
) -> None:
    tag, path = job_keys.user_tag(api.user), f"/users/{api.user}/jobs"
    job = {"type": "statement", "day": "2026-11-20", "job_id": "s-1"}
    assert (await user.post(path, json={"job": job})).status_code == 202
    await forget_jobs(api.services.valkey, tag)
    assert (await user.post(f"{path}/s-1/cancel")).json()["state"] == "cancelled"
    await sweep(api)
    assert await reply_of(api.services.valkey.exists(job_keys.job(tag, "s-1"))) == 0
    assert (await user.get(f"{path}/s-1")).json()["state"] == "cancelled"
    assert (await user.post(path, json={"job": job})).json()["state"] == "waiting"


async def test_limits_and_suspensions_come_back_after_a_flush_and_what_was_taken_back_does_not(
    api: ServedApi,
) -> None:
    client, meta = api.services.valkey, job_keys.meta(job_keys.FLEET_TAG)
    limits = JobLimits(running=3, per_second=0.5, burst=2)
    async with api.client(api.admin_key) as admin:
        body = {"running": 3, "per_second": 0.5, "burst": 2}
        assert (await admin.put("/job-limits/webhook", json=body)).status_code == 200
    for words in (("suspend",), ("suspend", "--queue", "email"), ("resume",)):
        await berth(api, *words)
    await berth(api, "suspend", "--queue", "nobody-has-it", code=1)
    for _ in range(2):
        await forget_jobs(client)
        await sweeper_of(api).restore_settings()
        assert (await job_limits.read_limits(client))["webhook"] == limits
        stored = await reply_of(client.hgetall(meta))
        assert sorted(name for name in stored if name.startswith(b"halt")) == [b"halt_queue:email"]
    await berth(api, "resume", "--queue", "email")
    await sweeper_of(api).restore_settings()
    await forget_jobs(client)
    await sweeper_of(api).restore_settings()
    assert await reply_of(client.hget(meta, "halt_queue:email")) is None
    assert (await job_limits.read_limits(client))["webhook"] == limits


async def test_a_removed_users_jobs_and_settings_go(api: ServedApi) -> None:
    path = f"/users/{api.user}"
    async with api.client(api.admin_key) as admin:
        job = {"type": "statement", "day": "2026-11-20"}
        assert (await admin.post(f"{path}/jobs", json={"job": job})).status_code == 202
    await berth(api, "suspend", "--user", api.user)
    async with api.services.database.session() as session:
        await users.put_disabled(session, api.user, True, actor="a", reason="r")
        for expected_count in (1, 0):
            jobs = (
                await session.scalars(select(KeptJob.job_id).where(KeptJob.user_id == api.user))
            ).all()
            mine = select(JobSettings.user_id).where(JobSettings.user_id == api.user)
            assert (len(jobs), len((await session.scalars(mine)).all())) == (
                expected_count,
                expected_count,
            )
            if expected_count:
                await users.remove_user(session, api.user, actor="a", reason="r")
