"""Jobs of applications over REST: checked by what runners have announced, kept, taken and
answered."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from redis.exceptions import AuthenticationError
from sqlalchemy import text

from activities.maintenance.kept_jobs import KeptJobSweeper
from api.fleet.alerts import OperatorAlerts
from infra.berth_jobs.manifest import read_manifest
from infra.berth_jobs.options import JobDefaults
from infra.jobs.applications import ApplicationDirectory, add_application, rotate_application
from infra.jobs.registry import MAX_ROWS, TypeRegistry
from infra.settings import Settings
from infra.valkey.client import connect_valkey
from infra.valkey.job_login import job_fleet_url
from infra.valkey.job_users import JobUsers
from infra.vault import key_file
from infra.vault.message_secret import MessageSecretFile, load_fleet_keys
from tests.support.api.pages import csrf_header, logged_in_browser, read_page
from tests.support.commands import CommandForker
from tests.support.jobs.hand_runner import SHOP_TAG, HandRunner, make_manifest
from tests.support.jobs.keeper import NotingStarter
from tests.support.systems.api import ServedApi, make_key, operator, running_api
from worker_runtime.jobs.own_types.failure_handlers import FailureHandlers
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import manifest as wire
from worker_runtime.jobs.protocol.messages import (
    Job,
)
from worker_runtime.process.log import Log
from worker_runtime.protocol import keys

SCHEMA = {
    "type": "object",
    "properties": {
        "url": {"type": "string", "maxLength": 200_000, "pattern": "^https?://"},
        "width": {"type": "integer", "minimum": 1},
    },
    "required": ["url"],
    "additionalProperties": False,
}


def manifest(version: int = 1, schema: Any = SCHEMA, **options: Any) -> bytes:
    body = msgspec.json.decode(make_manifest("jobs.resize", version=version))
    body["types"][0] |= {
        "arguments_schema": schema,
        "options": options,
        "summary": "Resize an image.",
    }
    return msgspec.json.encode(body)


def nested_schema(levels: int) -> dict[str, Any]:
    """Returns the schema of an argument that is nested this deep."""
    part: dict[str, Any] = {}
    for _ in range(levels - 2):
        part = {"not": part}
    return {"type": "object", "properties": {"a": part}}


@pytest.fixture
async def shop(api: ServedApi) -> ServedApi:
    async with api.services.database.session() as session:  # other tests have used it, too
        await session.execute(text("delete from kept_jobs"))
        await session.execute(text("delete from job_settings"))
        await session.execute(text("delete from job_applications"))
        await add_application(session, "shop", "a test")
    return api


@pytest.fixture
def runner(shop: ServedApi) -> Iterator[HandRunner]:
    runner = HandRunner(shop.settings)
    yield runner
    runner.client.close()


@pytest.fixture
async def producer(shop: ServedApi) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose key has the scope `jobs` and no other."""
    key = await make_key(shop.settings, "operator", scopes=("jobs",))
    async with shop.client(key) as client:
        yield client


def resize(**options: Any) -> dict[str, Any]:
    return {"type": "shop/jobs.resize", "args": {"url": "https://a/1.png"}, "options": options}


async def test_a_job_goes_from_the_key_of_a_producer_to_a_runner_and_back(
    producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest(priority=7, timeout_s=30.0))
    accepted = await producer.post("/jobs", json=resize(job_id="r-1", max_attempts=2))
    assert accepted.status_code == 202, accepted.text
    state = accepted.json()
    assert (state["id"], state["type"], state["type_version"]) == ("r-1", "shop/jobs.resize", 1)
    assert (state["state"], state["attempt"], state["waits_for_runner"]) == ("waiting", 0, False)

    [claimed] = runner.claim()
    job = runner.read(claimed)
    assert (job.name, job.type_version, job.priority) == ("shop/jobs.resize", 1, 7)
    assert (job.timeout, job.attempts) == (30.0, 2)
    assert msgspec.json.decode(job.args) == {"url": "https://a/1.png"}
    runner.queue.write_progress("r-1", claimed.fence, b'{"done":3}')
    running = (await producer.get("/jobs/r-1")).json()
    assert (running["state"], running["progress"]) == ("running", {"done": 3})

    waiting = asyncio.create_task(producer.get("/jobs/r-1?wait=20"))
    await asyncio.sleep(0.05)
    runner.end(claimed, {"size": 7})
    ended = (await waiting).json()
    assert (ended["state"], ended["value"], ended["type_version"]) == ("done", {"size": 7}, 1)


async def test_arguments_are_checked_with_sentences_that_show_no_value(
    producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest())
    body = {
        "type": "shop/jobs.resize",
        "args": {"url": "ftp://secret", "width": 0, "colour": "red"},
    }
    refused = await producer.post("/jobs", json=body)
    assert (refused.status_code, refused.json()["code"]) == (422, "JOB_ARGUMENTS_INVALID")
    told = {".".join(error["loc"]): error["msg"] for error in refused.json()["errors"]}
    assert told == {
        "args.url": "It does not match the pattern ^https?://.",
        "args.width": "It is less than 1.",
        "args": "It has an argument that this type does not take: colour.",
    }
    assert "secret" not in refused.text
    missing = await producer.post("/jobs", json={"type": "shop/jobs.resize", "args": {}})
    assert missing.json()["errors"][0]["msg"] == "An argument is missing: url."

    large = {"url": "https://" + "ä" * 33_000}
    refused = await producer.post("/jobs", json={"type": "shop/jobs.resize", "args": large})
    assert (refused.status_code, refused.json()["code"]) == (413, "JOB_ARGUMENTS_TOO_LARGE")
    assert "at most 65536 are allowed" in refused.json()["detail"]
    fits = {"url": "https://" + "ä" * 32_000}
    assert (
        await producer.post("/jobs", json={"type": "shop/jobs.resize", "args": fits})
    ).status_code == 202

    for name, code in (
        ("shop/jobs.send", "JOB_TYPE_UNKNOWN"),
        ("bank/jobs.send", "APPLICATION_NOT_FOUND"),
    ):
        unknown = await producer.post("/jobs", json={"type": name, "args": {}})
        assert (unknown.status_code, unknown.json()["code"]) == (404, code)
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"a": deep}
    nested = await producer.post("/jobs", json={"type": "shop/jobs.resize", "args": deep})
    assert nested.status_code == 422
    assert "at most 32 levels deep" in nested.json()["detail"]


async def test_a_job_remembers_the_version_that_has_checked_it_and_waits_for_a_runner_of_that_one(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest())
    newer = HandRunner(shop.settings, "newer")
    wide = {"type": "object", "properties": {"urls": {"type": "array"}}, "required": ["urls"]}
    newer.announce(manifest(version=2, schema=wide))
    old = (await producer.post("/jobs", json=resize())).json()
    new = {"type": "shop/jobs.resize", "args": {"urls": []}, "options": {"job_id": "new"}}
    assert (await producer.post("/jobs", json=new)).json()["type_version"] == 2
    assert old["type_version"] == 1
    assert [job.job_id for job in runner.claim(5)] == [old["id"]]
    newer.queue.sign_off()
    newer.client.close()
    await asyncio.sleep(2.1)  # the API looks every 2 s
    waits = (await producer.get("/jobs/new")).json()
    assert (waits["state"], waits["attempt"], waits["waits_for_runner"]) == ("waiting", 0, True)
    [kind] = (await producer.get("/job-types")).json()["types"]
    told = [
        (version["version"], version["runners"], version["waiting"], version["waits_for_runner"])
        for version in kind["versions"]
    ]
    assert told == [(2, 0, 1, True), (1, 1, 0, False)]
    metrics = [
        line
        async for line in _metrics(shop)
        if line.startswith(("berth_jobs_without", "berth_app"))
    ]
    assert 'berth_application_jobs_waiting{application="shop"} 1.0' in metrics
    assert metrics[1:] == [
        'berth_jobs_without_runner{application="shop",type="shop/jobs.resize@2"} 1.0'
    ]


async def _metrics(api: ServedApi) -> AsyncIterator[str]:
    async with api.client(api.admin_key) as admin:
        for line in (await admin.get("/metrics")).text.splitlines():
            yield line


async def test_the_list_of_types_and_one_type(
    producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest(priority=7))
    [kind] = (await producer.get("/job-types")).json()["types"]
    assert (kind["type"], kind["application"]) == ("shop/jobs.resize", "shop")
    assert kind["summary"] == "Resize an image."
    assert kind["versions"][0]["arguments_schema"] is None
    [version] = (await producer.get("/job-types/shop/jobs.resize")).json()["versions"]
    assert version["arguments_schema"] == SCHEMA
    assert version["options"]["priority"] == 7
    assert (version["package"], version["package_version"], version["runners"]) == (
        "shop-jobs",
        "1.0",
        1,
    )
    assert (await producer.get("/job-types/shop/other")).json()["code"] == "JOB_TYPE_UNKNOWN"
    [application] = (await producer.get("/job-applications")).json()["applications"]
    assert (application["name"], application["types"]) == ("shop", 1)


async def test_a_schema_with_parts_that_the_api_cannot_bound_is_refused_with_a_sentence(
    producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest(schema={"type": "object", "$ref": "https://example.com/schema"}))
    refused = await producer.post("/jobs", json=resize())
    assert (refused.status_code, refused.json()["code"]) == (409, "JOB_TYPE_REFUSED")
    assert "A $ref in a job's schema is" in refused.json()["detail"]
    [version] = (await producer.get("/job-types/shop/jobs.resize")).json()["versions"]
    assert version["refusal"].startswith("A $ref")


@pytest.mark.parametrize(
    "changes",
    [
        {"summary": "Splits a text at \0."},
        {"arguments_schema": {"type": "object", "properties": {"a": {"enum": ["\0", ","]}}}},
        {"arguments_schema": nested_schema(300)},
    ],
    ids=["summary", "schema", "depth"],
)
async def test_a_manifest_that_cannot_be_stored_harms_no_other_application_and_no_alert(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner, changes: dict[str, Any]
) -> None:
    services = shop.services
    async with services.database.session() as session:
        await add_application(session, "bank", "a test")
    bank = HandRunner(shop.settings, "bank", "bank")
    broken = msgspec.json.decode(make_manifest("jobs.split", application="bank"))
    broken["types"][0] |= changes
    bank.publish(msgspec.json.encode(broken))
    runner.announce(manifest())
    assert (await producer.post("/jobs", json=resize(job_id="s-1"))).status_code == 202
    assert (await producer.get("/jobs/s-1")).status_code == 200
    types = (await producer.get("/job-types")).json()["types"]
    assert [kind["type"] for kind in types] == ["shop/jobs.resize"]
    async with shop.client(shop.admin_key) as admin:
        for path in ("/job-limits", "/metrics"):
            assert (await admin.get(path)).status_code == 200
    told = shop.settings.model_copy(update={"alert_mails": ("ops@example.com",)})
    await services.valkey.xadd(keys.ERRORS, {"key": "api|x", "text": "x failed", "count": 1})
    alerts = OperatorAlerts(
        services.valkey, services.kept_jobs, told, services.write_metrics, services.write_host
    )
    await alerts.look()
    assert await services.valkey.keys(job_keys.job(job_keys.FLEET_TAG, "alert-*"))
    # The next manifest of the application itself is taken, too.
    bank.announce(make_manifest("jobs.split", application="bank"))
    status = 0
    async with asyncio.timeout(30):
        while status != 200:
            await asyncio.sleep(0.2)
            status = (await producer.get("/job-types/bank/jobs.split")).status_code
    bank.client.close()


async def test_what_postgresql_refuses_of_an_application_is_left_out(
    shop: ServedApi, runner: HandRunner
) -> None:
    """Its row is gone while its runner announces, its keys hold something else, or a release to
    come has written a type that this one cannot read."""
    services = shop.services
    for name in ("bank", "club"):
        async with services.database.session() as session:
            await add_application(session, name, "a test")
    directory = ApplicationDirectory(services.database, services.message_secrets)
    registry = TypeRegistry(services.database, services.valkey, services.message_secrets, directory)
    await directory.load()
    bank = HandRunner(shop.settings, "bank", "bank")
    bank.announce(make_manifest("jobs.split", application="bank"))
    await services.valkey.set(job_keys.announced(job_keys.application_tag("club")), "no set")
    runner.announce(manifest(), manifest(version=2))
    async with services.database.session() as session:
        await session.execute(text("delete from job_applications where name = 'bank'"))
    types = await registry.types()
    assert {name: [row.runners for row in versions] for name, versions in types.items()} == {
        "shop/jobs.resize": [1, 1]
    }
    async with services.database.session() as session:
        await session.execute(
            text("update job_types set definition = '{\"name\": 7}' where version = 2")
        )
    types = await registry.types(max_age_s=0)
    assert [row.kind.version for row in types["shop/jobs.resize"]] == [1]
    bank.client.close()


_OLD_TYPES = """
insert into job_types
select 'shop/old.' || number, 1, 'shop', 'p', '1',
  jsonb_build_object('name', 'shop/old.1', 'arguments_schema', jsonb_build_object()),
  'too old', now() - number * interval '1 minute'
from generate_series(1, cast(:number as integer)) number
on conflict do nothing
"""


async def test_types_that_nobody_announces_any_more_make_room_for_new_ones(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    async def fill() -> None:
        async with shop.services.database.session() as session:
            await session.execute(text(_OLD_TYPES), {"number": MAX_ROWS})

    async def count() -> int:
        async with shop.services.database.session() as session:
            return await session.scalar(text("select count(*) from job_types")) or 0

    await fill()
    runner.announce(manifest())
    assert (await producer.post("/jobs", json=resize())).status_code == 202
    assert await count() == MAX_ROWS
    # All of them are of manifests in Valkey, so there is no room.
    await fill()
    of_manifest = job_keys.announced_types(SHOP_TAG, wire.digest_of(manifest()))
    names = [f"shop/old.{number}@1" for number in range(1, MAX_ROWS + 1)]
    await shop.services.valkey.sadd(of_manifest, *names)
    runner.announce(manifest(), make_manifest("jobs.send"))
    sentence, detail = "the application shop has more than 5000 job types", ""
    async with asyncio.timeout(30):
        while sentence not in detail:
            await asyncio.sleep(0.2)
            unknown = await producer.post("/jobs", json={"type": "shop/jobs.send", "args": {}})
            assert unknown.json()["code"] == "JOB_TYPE_UNKNOWN"
            detail = unknown.json()["detail"]
    assert (await producer.post("/jobs", json=resize())).status_code == 202


async def test_a_batch_is_enqueued_in_its_order_whole_or_not_at_all(
    producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest())
    jobs = [resize(job_id=f"b-{number}") for number in range(60)]
    made = await producer.post("/jobs/batch", json={"jobs": jobs})
    assert made.status_code == 202, made.text
    assert [job["id"] for job in made.json()["jobs"]] == [f"b-{number}" for number in range(60)]
    again = await producer.post("/jobs/batch", json={"jobs": jobs})
    assert again.status_code == 202
    assert [job.job_id for job in runner.claim(100)] == [f"b-{number}" for number in range(60)]

    bad = {**resize(job_id="c-1"), "args": {}}
    refused = await producer.post("/jobs/batch", json={"jobs": [resize(job_id="c-0"), bad]})
    assert refused.status_code == 422
    assert "jobs.1" in refused.json()["detail"]
    reused = await producer.post(
        "/jobs/batch", json={"jobs": [resize(job_id="c-0"), resize(job_id="b-1", priority=1)]}
    )
    assert (reused.status_code, reused.json()["code"]) == (409, "JOB_ID_REUSED")
    assert (await producer.get("/jobs/c-0")).status_code == 404


async def test_delays_groups_and_unique_keys(
    producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest())
    at = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    later = (await producer.post("/jobs", json=resize(run_at=at))).json()
    assert later["state"] == "delayed"
    assert (
        abs(datetime.fromisoformat(later["due_at"]) - datetime.fromisoformat(at)).total_seconds()
        < 5
    )
    short = (await producer.post("/jobs", json=resize(delay_s=60))).json()
    assert short["state"] == "delayed"
    both = await producer.post("/jobs", json=resize(delay_s=60, run_at=at))
    assert both.status_code == 422

    first = (await producer.post("/jobs", json=resize(group="g"))).json()
    second = (await producer.post("/jobs", json=resize(group="g"))).json()
    assert (first["state"], second["state"]) == ("waiting", "grouped")

    unique = (await producer.post("/jobs", json=resize(unique="u", job_id="u-1"))).json()
    double = (await producer.post("/jobs", json=resize(unique="u", job_id="u-2"))).json()
    assert (unique["id"], double["id"]) == ("u-1", "u-1")
    assert (await producer.get("/jobs/u-2")).status_code == 404

    cancelled = (await producer.post("/jobs/u-1/cancel")).json()
    assert (cancelled["state"], cancelled["failure"]["code"]) == ("cancelled", "JOB_CANCELLED")
    free = (await producer.post("/jobs", json=resize(unique="u", job_id="u-3"))).json()
    assert free["id"] == "u-3"


async def test_a_flush_of_valkey_loses_no_job(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest(idempotent=True))
    for number in range(3):
        assert (await producer.post("/jobs", json=resize(job_id=f"f-{number}"))).status_code == 202
    [claimed] = runner.claim()
    runner.end(claimed, 1)
    sweeper = KeptJobSweeper(shop.services.valkey, shop.services.kept_jobs, NotingStarter())
    await sweeper.load_applications()
    await sweeper.mark_ended_jobs_due(block=10)
    await sweeper.sweep()
    assert await shop.services.valkey.ttl(job_keys.result(SHOP_TAG, "f-0")) <= 500
    await shop.services.valkey.flushdb()
    assert (await producer.get("/jobs/f-0")).json()["state"] == "done"
    lost = (await producer.get("/jobs/f-1")).json()
    assert (lost["state"], lost["type"], lost["type_version"]) == ("waiting", "shop/jobs.resize", 1)
    async with shop.services.database.session() as session:
        await session.execute(text("update kept_jobs set check_at = now() where outcome is null"))
    await sweeper.sweep()
    runner.queue.join()
    runner.announce(manifest(idempotent=True))
    assert [job.job_id for job in runner.claim(5)] == ["f-1", "f-2"]


@pytest.mark.parametrize("is_enqueued", [False, True])
async def test_a_flush_of_valkey_loses_no_failure_handler_of_a_kept_job(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner, is_enqueued: bool
) -> None:
    """`is_enqueued`: the handler waited already. Else no runner has enqueued it yet."""
    body = msgspec.json.decode(manifest(on_failed="shop/jobs.note"))
    body["types"].append({**body["types"][0], "name": "shop/jobs.note", "options": {}})
    announced = msgspec.json.encode(body)
    runner.announce(announced)
    services = shop.services
    sweeper = KeptJobSweeper(services.valkey, services.kept_jobs, NotingStarter())
    await sweeper.load_applications()

    async def look() -> None:
        async with services.database.session() as session:  # the next check is due
            await session.execute(
                text("update kept_jobs set check_at = now() where check_at is not null")
            )
        await sweeper.sweep()

    def enqueue_handlers() -> None:
        handlers = FailureHandlers(SHOP_TAG, runner.keys, JobDefaults(), Log())
        handlers.types = {kind.name: kind for kind in read_manifest(announced).types}
        handlers.enqueue_due(runner.client)

    assert (await producer.post("/jobs", json=resize(job_id="h-1"))).status_code == 202
    [claimed] = runner.claim()
    runner.fail(claimed, "no such picture")
    if is_enqueued:
        enqueue_handlers()
    await look()
    runner.client.execute("FLUSHALL")
    runner.queue.join()
    runner.announce(announced)
    await look()  # the handler may not run twice: it waits for the end of a run that may be
    async with services.database.session() as session:
        await session.execute(text("update kept_jobs set missing = true where outcome is null"))
    await look()
    [handler] = runner.claim(5)
    assert handler.job_id.startswith("h-1.failed.")
    report = msgspec.json.decode(runner.read(handler).args)
    assert report == {
        "job_id": "h-1",
        "type": "shop/jobs.resize",
        "code": "JOB_FAILED",
        "detail": "no such picture",
        "attempt": 1,
        "arguments": {"url": "https://a/1.png"},
    }
    runner.end(handler, "noted")
    await look()
    assert (await producer.get(f"/jobs/{handler.job_id}")).json()["state"] == "done"
    await look()
    assert runner.claim(5) == []


async def test_a_failure_handler_that_a_runner_has_enqueued_runs_once_though_it_is_kept(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    body = msgspec.json.decode(manifest(on_failed="shop/jobs.note"))
    body["types"].append({**body["types"][0], "name": "shop/jobs.note", "options": {}})
    announced = msgspec.json.encode(body)
    runner.announce(announced)
    services = shop.services
    sweeper = KeptJobSweeper(services.valkey, services.kept_jobs, NotingStarter())
    await sweeper.load_applications()
    assert (await producer.post("/jobs", json=resize(job_id="h-2"))).status_code == 202
    [claimed] = runner.claim()
    runner.fail(claimed, "no such picture")
    handlers = FailureHandlers(SHOP_TAG, runner.keys, JobDefaults(), Log())
    handlers.types = {kind.name: kind for kind in read_manifest(announced).types}
    handlers.enqueue_due(runner.client)
    [handler] = runner.claim(5)
    runner.end(handler, "noted")  # before anybody has kept it
    for _ in range(3):
        async with services.database.session() as session:
            await session.execute(
                text("update kept_jobs set check_at = now() where check_at is not null")
            )
        await sweeper.sweep()
    assert runner.claim(5) == []
    async with services.database.session() as session:
        rows = await session.execute(text("select job_id, outcome from kept_jobs"))
        outcomes = {row.job_id: row.outcome for row in rows}
        assert outcomes == {"h-2": "failed", handler.job_id: "done"}
    # The result is no longer kept for as long as PostgreSQL might not know of it.
    assert await services.valkey.ttl(job_keys.result(SHOP_TAG, handler.job_id)) <= 500


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_failed_job_is_a_dead_letter_and_runs_again_when_it_is_redriven(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner, is_lost: bool
) -> None:
    """`is_lost`: also when Valkey has lost it since."""
    runner.announce(manifest())
    services = shop.services
    async with services.database.session() as session:
        await session.execute(text("delete from dead_letters"))
    sweeper = KeptJobSweeper(services.valkey, services.kept_jobs, NotingStarter())
    await sweeper.load_applications()

    async def look() -> None:
        async with services.database.session() as session:  # the next check is due
            await session.execute(
                text("update kept_jobs set check_at = now() where check_at is not null")
            )
        await sweeper.sweep()

    assert (await producer.post("/jobs", json=resize(job_id="d-1"))).status_code == 202
    [claimed] = runner.claim()
    runner.fail(claimed, "no such picture")
    await look()
    async with shop.client(shop.admin_key) as admin:
        [letter] = (await admin.get("/dead-letters", params={"kind": "job"})).json()["letters"]
        assert (letter["subject"], letter["source"], letter["reason"]) == (
            "d-1",
            SHOP_TAG,
            "JOB_FAILED: no such picture",
        )
        if is_lost:
            runner.client.execute("FLUSHALL")
            runner.queue.join()
            runner.announce(manifest())
        done = await admin.post(f"/dead-letters/{letter['id']}/redrive", json={"reason": "a test"})
        assert done.status_code == 200, done.text
        await look()
        [again] = runner.claim()
        assert (again.job_id, runner.read(again)) == ("d-1", runner.read(claimed))
        runner.end(again, "resized")
        await look()
        assert (await producer.get("/jobs/d-1")).json()["value"] == "resized"
        assert (await admin.get("/dead-letters", params={"kind": "job"})).json()["letters"] == []


async def test_berths_own_types_take_the_new_form_too(shop: ServedApi) -> None:
    async with shop.client(shop.admin_key) as admin:
        ping = {"type": "ping", "args": {"text": "x"}, "options": {"job_id": "p-1", "priority": 6}}
        made = await admin.post("/jobs", json=ping)
        assert (made.status_code, made.json()["type"]) == (202, "ping")
        same = {"job": {"type": "ping", "text": "x", "job_id": "p-1"}, "priority": 6}
        assert (await admin.post("/jobs", json=same)).status_code == 202
        wrong = await admin.post("/jobs", json={"type": "ping", "options": {"group": "g"}})
        assert wrong.json()["detail"] == "Jobs of Berth's built-in types take no option group."
        typo = await admin.post("/jobs", json={"type": "ping", "args": {"txt": "x"}})
        assert typo.status_code == 422
    key = await make_key(shop.settings, "operator", scopes=("jobs",))
    async with shop.client(key) as operator:
        mail = {"type": "email", "args": {"to": "a@b.c", "subject": "s", "text": "t"}}
        assert (await operator.post("/jobs", json=mail)).status_code == 403


async def test_limits_of_a_type_come_from_its_options_and_from_operators(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest(max_running=1))
    for number in range(3):
        await producer.post("/jobs", json=resize(job_id=f"l-{number}"))
    assert len(runner.claim(3)) == 1
    async with shop.client(shop.admin_key) as admin:
        limits = {
            limit["type"]: limit for limit in (await admin.get("/job-limits")).json()["limits"]
        }
        assert (
            limits["shop/jobs.resize"]["running"],
            limits["shop/jobs.resize"]["running_now"],
        ) == (1, 1)
        wider = await admin.put("/job-limits/shop/jobs.resize", json={"running": 2})
        assert wider.json()["running"] == 2
        newest = (await admin.get("/audit", params={"limit": 1})).json()["entries"][0]
        assert (newest["action"], newest["subject"]) == (
            "job_limits.set",
            "job-type:shop/jobs.resize",
        )
        assert (await admin.put("/job-limits/shop/none", json={"running": 2})).status_code == 404
    assert len(runner.claim(3)) == 1


async def test_a_limit_of_an_operator_outlives_other_options_of_its_type_and_a_flush(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    async def limit() -> Any:
        async with shop.client(shop.admin_key) as admin:
            rows = (await admin.get("/job-limits")).json()["limits"]
        return {row["type"]: row for row in rows}["shop/jobs.resize"]["running"]

    runner.announce(manifest(max_running=1))
    await producer.get("/job-types")  # the API has read the manifest
    async with shop.client(shop.admin_key) as admin:
        await admin.put("/job-limits/shop/jobs.resize", json={"running": 2})
    for changed in (manifest(max_running=1, timeout_s=9.0), manifest(max_running=5)):
        runner.announce(changed)
        await shop.services.job_types.types(max_age_s=0.0)
        assert await limit() == 2
    kept = shop.services.kept_jobs
    sweeper = KeptJobSweeper(shop.services.valkey, kept, NotingStarter())
    runner.client.execute("FLUSHALL")
    runner.queue.join()
    runner.announce(manifest(max_running=5))
    await sweeper.restore_settings()
    assert await limit() == 2


async def test_a_job_has_the_numbers_of_the_settings_where_type_and_call_say_nothing(
    settings: Settings, services_database: str
) -> None:
    changed = {
        "jobs_timeout": 66.0,
        "jobs_attempts": 4,
        "jobs_retry_delay": 7.0,
        "jobs_result_ttl": 2 * 86_400,
    }
    async with running_api(settings.model_copy(update=changed)) as api:
        async with api.services.database.session() as session:
            await session.execute(text("delete from kept_jobs"))
            await session.execute(text("delete from job_applications"))
            await add_application(session, "shop", "a test")
        runner = HandRunner(api.settings)
        runner.announce(manifest())
        async with api.client(await make_key(settings, "operator", scopes=("jobs",))) as client:
            for body in (resize(job_id="as-set"), resize(job_id="as-asked", timeout_s=5)):
                assert (await client.post("/jobs", json=body)).status_code == 202
        by_id = {job.job_id: job for job in map(runner.read, runner.claim(2))}
        runner.client.close()
    job = by_id["as-set"]
    assert (job.timeout, job.attempts, job.retry_delay, job.result_ttl) == (66, 4, 7, 172_800)
    assert (by_id["as-asked"].timeout, by_id["as-asked"].attempts) == (5, 4)


async def test_a_job_that_was_sent_straight_into_valkey_is_shown(
    producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    job = Job(job_id="direct", name="shop/jobs.resize", type_version=3)
    runner.client.run(*job_calls.enqueue(job, runner.keys, SHOP_TAG))
    shown = (await producer.get("/jobs/direct")).json()
    assert (shown["type"], shown["type_version"]) == ("shop/jobs.resize", 3)
    assert shown["waits_for_runner"]
    [kind] = (await producer.get("/job-types")).json()["types"]
    assert [version["waits_for_runner"] for version in kind["versions"]] == [True]


async def test_an_id_that_a_direct_producer_has_given_to_another_job_is_refused(
    producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest())
    other = Job(job_id="taken", name="shop/jobs.resize", type_version=1, args=msgspec.Raw(b"{}"))
    runner.client.run(*job_calls.enqueue(other, runner.keys, SHOP_TAG))

    async def is_refused() -> None:
        answer = await producer.post("/jobs", json=resize(job_id="taken"))
        assert (answer.status_code, answer.json()["code"]) == (409, "JOB_ID_REUSED")
        batch = {"jobs": [resize(job_id="free"), resize(job_id="taken")]}
        answer = await producer.post("/jobs/batch", json=batch)
        assert (answer.status_code, answer.json()["code"]) == (409, "JOB_ID_REUSED")

    await is_refused()
    [claimed] = runner.claim(5)  # nothing of the batch was enqueued
    runner.end(claimed, "direct")
    assert (await producer.get("/jobs/taken")).json()["value"] == "direct"
    await is_refused()
    # The same job may be there already: PostgreSQL was restored from a backup of before it.
    args = {"url": "https://a/1.png", "width": 3}
    asked = {"type": "shop/jobs.resize", "args": args, "options": {"job_id": "same"}}
    same = msgspec.structs.replace(
        other, job_id="same", args=msgspec.Raw(msgspec.json.encode(args))
    )
    runner.client.run(*job_calls.enqueue(same, runner.keys, SHOP_TAG))
    assert (await producer.post("/jobs", json=asked)).status_code == 202
    assert [each.job_id for each in runner.claim(5)] == ["same"]


@pytest.mark.slow
@pytest.mark.timeout(240)  # a dozen processes of the command line
async def test_the_command_line_makes_an_application_and_enqueues_its_jobs(
    shop: ServedApi, runner: HandRunner, commands: CommandForker, tmp_path: Path
) -> None:
    environment = {
        "BERTH_DATABASE_URL": shop.settings.database_url,
        "BERTH_MESSAGE_KEY_FILE": str(shop.settings.message_key_file),
        "BERTH_DATA_DIR": str(tmp_path),
    }

    async def cli(*words: str, code: int = 0) -> str:
        done = await asyncio.to_thread(commands.run, "jobs", "application", *words, **environment)
        assert done.code == code, done
        return done.err if code else done.out

    made = json.loads(await cli("add", "bank", "--json"))
    path = Path(made["key_file"])
    assert key_file.read_key_file(path, private=True)  # nobody else may read it
    secrets = MessageSecretFile(shop.settings.message_key_file)
    assert load_fleet_keys(path) == secrets.application_keys("bank", (1,))
    assert "already an application bank" in await cli("add", "bank", code=1)
    assert "a letter and up to 31" in await cli("add", "Bank", code=1)
    assert "There is no application none" in await cli("rotate", "none", code=1)
    assert json.loads(await cli("rotate", "bank", "--json"))["generation"] == 2
    assert load_fleet_keys(path) == secrets.application_keys("bank", (2, 1))
    assert "Generation 1 of bank still counts" in await cli("rotate", "bank", code=1)
    assert "only key 2 of bank counts" in await cli("rotate", "bank", "--retire")
    assert load_fleet_keys(path) == secrets.application_keys("bank", (2,))
    async with shop.client(shop.admin_key) as admin:
        entries = (await admin.get("/audit", params={"limit": 3})).json()["entries"]
    assert [entry["action"] for entry in entries] == [
        "job_application.key_retired",
        "job_application.rotated",
        "job_application.added",
    ]

    runner.announce(manifest())
    async with operator(shop, commands, tmp_path) as berth:
        listed = await berth("jobs", "application", "list")
        assert [line.split()[0] for line in listed.out.splitlines()[-2:]] == ["bank", "shop"]
        kind = await berth("jobs", "types", "shop/jobs.resize")
        assert "url: string" in kind.out
        assert "width: integer (optional)" in kind.out
        [shown] = json.loads((await berth("jobs", "types", "--json")).out)
        assert shown["type"] == "shop/jobs.resize"
        words = (
            "--arg",
            "url=https://a/1.png",
            "--arg",
            "width=3",
            "--priority",
            "7",
            "--job-id",
            "c-1",
        )
        made = json.loads(
            (await berth("jobs", "enqueue", "shop/jobs.resize", *words, "--json")).out
        )
        assert (made["id"], made["state"]) == ("c-1", "waiting")
        wrong = await berth("jobs", "enqueue", "shop/jobs.resize", "--arg", "url=ftp://a")
        assert (wrong.code, "JOB_ARGUMENTS_INVALID" in wrong.err) == (1, True)
    [claimed] = runner.claim()
    assert msgspec.json.decode(runner.read(claimed).args) == {"url": "https://a/1.png", "width": 3}


async def test_weights_of_queues_are_set_for_the_fleet_and_for_an_application(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest(queue="fast"))
    await producer.post("/jobs", json=resize())
    for number in range(2):
        await producer.post("/jobs", json=resize(queue="slow", job_id=f"s-{number}"))
    async with shop.client(shop.admin_key) as admin:
        body = {"weight": 0.5, "application": "shop", "reason": "a test"}
        changed = await admin.put("/job-queues/slow", json=body)
        assert changed.json() == {"queue": "slow", "weight": 0.5, "suspended": False, "waiting": 2}
        queues = (await admin.get("/job-queues", params={"application": "shop"})).json()["queues"]
        assert [(row["queue"], row["weight"], row["waiting"]) for row in queues] == [
            ("fast", 1.0, 1),
            ("slow", 0.5, 2),
        ]
        fleet = {row["queue"]: row for row in (await admin.get("/job-queues")).json()["queues"]}
        assert {"email", "webhook", "default"} <= fleet.keys()
        assert (fleet["email"]["weight"], "slow" in fleet) == (1.0, False)
        back = await admin.put("/job-queues/slow", json={"application": "shop"})
        assert back.json()["weight"] == 1.0
        unknown = await admin.get("/job-queues", params={"application": "none"})
        assert unknown.json()["code"] == "APPLICATION_NOT_FOUND"
        for wrong in ({"weight": -1}, {"weight": 1001}, {"weight": "x"}):
            assert (await admin.put("/job-queues/slow", json=wrong)).status_code == 422
    assert not await shop.services.valkey.hexists(job_keys.meta(SHOP_TAG), "weight:slow")


async def test_the_page_of_jobs_shows_types_and_those_without_a_runner(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest())
    await producer.post("/jobs", json=resize())
    runner.queue.sign_off()
    await asyncio.sleep(2.1)  # the API looks every 2 s
    async with logged_in_browser(shop, shop.admin_key) as client:
        page = await read_page(client, "/page/jobs")
    assert "<td>shop/jobs.resize</td><td>1</td><td>shop-jobs 1.0</td><td>0</td><td>1</td>" in page
    assert "No live runner takes its jobs." in page


async def test_the_page_of_jobs_shows_weights_of_queues_and_its_form_sets_them(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    runner.announce(manifest(queue="fast"))
    await producer.post("/jobs", json=resize(queue="slow"))
    async with logged_in_browser(shop, shop.admin_key) as client:
        page = await read_page(client, "/page/jobs")
        assert "<td>shop</td><td>slow</td><td>1</td>" in page
        assert "<td>the fleet</td><td>email</td><td>1</td>" in page
        form = page.partition('data-act="PUT /v1/job-queues/{queue}"')[2].partition("</form>")[0]
        fields = set(re.findall(r'name="(\w+)"', form))
        assert fields == {"application", "queue", "weight", "reason"}
        assert "<option>shop</option>" in form
        body = {"application": "shop", "weight": 0.25, "reason": "a test"}
        headers = await csrf_header(client, "/page/jobs")
        changed = await client.put("/v1/job-queues/slow", json=body, headers=headers)
        assert changed.status_code == 200, changed.text
        page = await read_page(client, "/page/jobs")
        assert "<td>shop</td><td>slow</td><td>0.25</td>" in page
        [act] = re.findall(r'data-act="PUT (/v1/job-queues/slow)" data-body="(.*?})"', page)
        back = json.loads(act[1])
        assert (await client.put(act[0], json=back, headers=headers)).json()["weight"] == 1.0
        assert "<td>shop</td><td>slow</td><td>1</td>" in await read_page(client, "/page/jobs")
    async with shop.client(shop.admin_key) as admin:
        made = {"role": "operator", "label": "looks", "scopes": ["read"]}
        key = (await admin.post("/api-keys", json=made)).json()["api_key"]
    async with logged_in_browser(shop, key) as client:
        page = await read_page(client, "/page/jobs")
        assert "<td>shop</td><td>slow</td><td>1</td>" in page
        assert 'data-act="PUT' not in page


async def test_orchestrators_make_the_login_of_an_application_and_end_that_of_a_retired_key(
    shop: ServedApi,
) -> None:
    services, client = shop.services, shop.services.valkey

    async def look_anew() -> None:
        logins = JobUsers(client, services.message_secrets)
        await KeptJobSweeper(
            client, services.kept_jobs, NotingStarter(), logins
        ).load_applications()

    async def logs_in(*generations: int) -> bool:
        keys = services.message_secrets.application_keys("shop", generations)
        async with connect_valkey(job_fleet_url(shop.settings.valkey_url, SHOP_TAG, keys)) as own:
            try:
                return bool(await own.ping())
            except AuthenticationError:
                return False

    await look_anew()
    assert await logs_in(1)
    for retire, expected in ((False, (True, True)), (True, (False, True))):
        async with services.database.session() as session:
            await rotate_application(session, "shop", retire=retire)
        await look_anew()
        assert (await logs_in(1), await logs_in(2)) == expected
    await JobUsers(client, services.message_secrets).delete(SHOP_TAG)


async def test_a_key_for_one_application_reaches_nothing_of_another(
    shop: ServedApi, producer: httpx.AsyncClient, runner: HandRunner
) -> None:
    """It is made, rotated and given on like other keys, and never reaches more."""
    runner.announce(manifest())
    async with shop.services.database.session() as session:
        await add_application(session, "bank", "a test")
    requested = {"role": "operator", "label": "bank", "scopes": ["jobs:bank", "keys"]}
    async with shop.client(shop.admin_key) as admin:
        made = await admin.post("/api-keys", json=requested)
        assert made.status_code == 201, made.text
        unknown = await admin.post("/api-keys", json={**requested, "scopes": ["jobs:none"]})
        assert (unknown.status_code, unknown.json()["code"]) == (404, "APPLICATION_NOT_FOUND")
        for scopes in (["jobs:Bank"], ["jobs:" + "b" * 28]):
            assert (
                await admin.post("/api-keys", json={**requested, "scopes": scopes})
            ).status_code == 422
        of_user = {**requested, "role": "user", "user_id": shop.user}
        assert (await admin.post("/api-keys", json=of_user)).status_code == 422
    async with shop.client(made.json()["api_key"]) as bank:
        rotated = await bank.post("/api-keys/self/rotate", json={"overlap_hours": 1})
        assert rotated.json()["scopes"] == ["jobs:bank", "keys"]
    assert (await producer.post("/jobs", json=resize(job_id="s-1"))).status_code == 202

    async with shop.client(rotated.json()["api_key"]) as bank:
        ping = {"type": "ping", "args": {"text": "x"}}
        for method, path, body in (
            ("POST", "/jobs", resize()),
            ("POST", "/jobs/batch", {"jobs": [resize()]}),
            ("POST", "/jobs", ping),
            ("POST", "/jobs", {"job": {"type": "ping", "text": "x"}}),
            ("GET", "/job-types/shop/jobs.resize", None),
            ("PUT", "/job-limits/shop/jobs.resize", {"running": 1}),
            ("GET", "/job-applications", None),
            ("GET", "/users", None),
        ):
            refused = await bank.request(method, path, json=body)
            assert (refused.status_code, refused.json()["code"]) == (403, "SCOPE_MISSING"), path
        for method, path in (("GET", "/jobs/s-1"), ("POST", "/jobs/s-1/cancel")):
            assert (await bank.request(method, path)).status_code == 404
        assert (await bank.get("/job-types")).json() == {"types": []}
        assert (await producer.get("/jobs/s-1")).json()["state"] == "waiting"

    async with shop.client(shop.admin_key) as admin:
        own = await admin.post("/api-keys", json={**requested, "scopes": ["jobs:shop", "trade"]})
    async with shop.client(own.json()["api_key"]) as mine:
        assert (await mine.get("/jobs/s-1")).json()["state"] == "waiting"
        assert (await mine.post("/jobs/s-1/cancel")).json()["state"] == "cancelled"
        assert (await mine.post("/jobs", json=resize())).status_code == 202
        [kind] = (await mine.get("/job-types")).json()["types"]
        assert kind["type"] == "shop/jobs.resize"


@pytest.mark.parametrize(("held", "granted"), [("jobs", 201), ("jobs:bank", 403), ("read", 403)])
async def test_a_key_gives_on_no_other_application_than_its_own(
    shop: ServedApi, held: str, granted: int
) -> None:
    async with shop.services.database.session() as session:
        await add_application(session, "bank", "a test")
    maker = await make_key(shop.settings, "admin", scopes=("keys", held))
    body = {"role": "operator", "label": "a shop's", "scopes": ["jobs:shop"]}
    async with shop.client(maker) as admin:
        assert (await admin.post("/api-keys", json=body)).status_code == granted
