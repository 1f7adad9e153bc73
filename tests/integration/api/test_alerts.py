"""Operators are told: by real mails and webhooks, of errors and conditions, once, whoever is
killed."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from email import message_from_bytes
from email.policy import default
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from sqlalchemy import text

from api.fleet.alerts import OperatorAlerts
from infra.alerts.book import AlertBook, AlertMessage, OperatorAlert
from infra.alerts.errors import collector
from infra.alerts.hosts import HostReport, HostSample, read_reports
from infra.database.dead_letters import DeadLetter, DeadLetters
from infra.database.engine import Database, DatabaseUnavailable
from infra.local.servers import ValkeyServer
from infra.metrics import MetricsPage
from infra.settings import Settings
from infra.valkey.client import connect_valkey, read_clock, reply_of
from tests.support.jobs.queue import QueueHarness
from tests.support.jobs.runners import RunnerFleet
from tests.support.receivers.mail import port_of, serving
from tests.support.receivers.webhooks import receiving
from tests.support.systems.api import ServedApi, running_api
from tests.support.waiting import until
from worker_runtime.jobs.config import MailOutlet, WebhookOutlet
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import read_job
from worker_runtime.jobs.protocol.webhook_signing import SIGNATURE_HEADER, sign_delivery
from worker_runtime.protocol import keys
from worker_runtime.protocol.worker_reports import payload_of

KEY = b"k" * 32
TO = "ops@example.com"


@pytest.fixture
def fleet(valkey_server: ValkeyServer, short_directory: Path) -> Iterator[RunnerFleet]:
    harness = QueueHarness(valkey_server.url)
    fleet = RunnerFleet(harness, short_directory)
    yield fleet
    fleet.close()
    harness.close()


@pytest.fixture
async def calling(settings: Settings) -> AsyncIterator[ServedApi]:
    """An API whose operators get mails and webhooks, and which looks only when the test says so."""
    collector.take()
    changes = {"alert_mails": (TO,), "alert_webhooks": ("https://hooks.example/secret-path",)}
    async with looking(settings, changes) as api:
        yield api


@asynccontextmanager
async def looking(settings: Settings, changes: Mapping[str, object]) -> AsyncIterator[ServedApi]:
    client = connect_valkey(settings.valkey_url)
    await client.set(keys.ALERTS_TURN, 1)  # its own loop never has the turn
    await client.config_set("appendonly", "yes")  # without it there would be one more alert
    try:
        async with running_api(settings.model_copy(update=dict(changes))) as api:
            yield api
    finally:
        await client.config_set("appendonly", "no")
        await client.aclose()


async def jobs(client: Redis) -> dict[str, str]:
    """What the jobs of alerts are to send, by id."""
    bodies = {}
    async for key in client.scan_iter(job_keys.job(job_keys.FLEET_TAG, "alert-*")):
        job = read_job(payload_of(await reply_of(client.hget(key, "body"))))
        bodies[job.job_id] = bytes(job.args).decode()
    return bodies


async def no_host(page: MetricsPage) -> None:
    """Stands for a host that measures nothing."""


async def report(client: Redis, key: str, said: str) -> None:
    await client.xadd(keys.ERRORS, {"key": key, "text": said, "count": 1})


async def age(client: Redis, seconds: float) -> None:
    """Makes all that the book knows so much older."""
    book = json.loads(await reply_of(client.get(keys.ALERTS)))
    for alert in book["alerts"].values():
        for name in ("first_at", "last_at", "told_at"):
            alert[name] -= seconds if alert[name] else 0
    await client.set(keys.ALERTS, json.dumps(book))


async def seen(probe: Callable[[], Awaitable[object]]) -> None:
    """Waits until the answer is true."""
    async with asyncio.timeout(30):
        while True:
            if await probe():
                return
            await asyncio.sleep(0.005)


async def put_letter(database: Database, kind: str = "event", subject: str = "") -> None:
    letter = DeadLetter(
        kind=kind, subject=subject, source="s", reason="r", message=b"canary of an order"
    )
    await DeadLetters(database).put([letter])


async def test_a_mail_and_a_signed_webhook_arrive(settings: Settings, fleet: RunnerFleet) -> None:
    with serving() as server, receiving() as receiver:
        outlet = {"host": "127.0.0.1", "port": port_of(server), "sender": "berth@example.com"}
        mail = MailOutlet(**outlet, security="none")  # type: ignore[arg-type]
        fleet.start(real=True, mail=mail, webhook=WebhookOutlet(keys=(KEY,), allow_private=True))
        changes = {"alert_mails": ("no address", TO), "alert_webhooks": (receiver.url,)}
        async with looking(settings, changes) as api:
            await report(api.services.valkey, "api|x", "request_failed in api on host-1")
            await api.services.alerts.look()
            await until(lambda: bool(server.mails) and bool(receiver.got))
    mailed = message_from_bytes(server.mails[0], policy=default)
    assert mailed["To"] == TO
    assert str(mailed["Subject"]).strip().startswith("Berth: ERROR request_failed in api on host-1")
    _, headers, body = receiver.got[0]
    posted = json.loads(body)
    assert posted["lines"][0].startswith("ERROR request_failed in api on host-1 (1 since ")
    assert posted["lines"][0] in posted["text"]
    at = int(headers[SIGNATURE_HEADER].partition(",")[0].removeprefix("t="))
    assert headers[SIGNATURE_HEADER] == sign_delivery((KEY,), "operators", at, body)
    assert len(server.mails) == len(receiver.got) == 1


async def test_an_error_that_a_process_logs_alerts_once_and_is_counted(calling: ServedApi) -> None:
    client, alerts = calling.services.valkey, calling.services.alerts
    for _ in range(5):
        collector.put({("api|e", "e in api"): 1})
    await seen(lambda: reply_of(client.xlen(keys.ERRORS)))
    await alerts.look()
    told = await jobs(client)
    assert len(told) == 2, "one for each target"
    assert all("e in api (5 since" in body for body in told.values())
    for _ in range(5):
        await report(client, "api|e", "e in api")
        await alerts.look()
    assert await jobs(client) == told


@pytest.mark.parametrize("where", ["stream", "book"])
async def test_anyone_who_has_valkey_suppresses_and_makes_up_alerts_but_does_not_say_who_gets_them(
    calling: ServedApi, where: str
) -> None:
    """Errors on their way are unsigned, and so is what was sent."""
    client, alerts = calling.services.valkey, calling.services.alerts
    await report(client, "api|lost", "lost in api")
    if where == "stream":
        await client.delete(keys.ERRORS)
        await report(client, "api|made-up", "made up")
    else:
        now = time.time()
        told = OperatorAlert(text="", first_at=now, last_at=now, told=1e9, told_at=now)
        forged = AlertMessage(number=7, at=int(now), subject="made up", lines=["made up"])
        book = AlertBook(alerts={"error|api|lost": told}, message=forged)
        await client.set(keys.ALERTS, msgspec.json.encode(book))
    await alerts.look()
    sent = [json.loads(body) for body in (await jobs(client)).values()]
    assert len(sent) == 2
    assert all("made up" in repr(job) and "lost in api" not in repr(job) for job in sent)
    assert {job.get("to") or job["url"] for job in sent} == {
        TO,
        "https://hooks.example/secret-path",
    }


async def test_a_dead_letter_alerts_when_it_comes_and_when_it_is_gone(calling: ServedApi) -> None:
    client, alerts = calling.services.valkey, calling.services.alerts
    await put_letter(calling.services.database)
    await alerts.look()
    told = await jobs(client)
    assert len(told) == 2
    assert all("1 of kind event failed or wait for a person" in body for body in told.values())
    assert "canary" not in repr(told)
    await alerts.look()
    assert await jobs(client) == told
    async with calling.services.database.session() as session:
        await session.execute(text("delete from dead_letters"))
    await age(client, 61)
    await alerts.look()
    new = [body for name, body in (await jobs(client)).items() if name not in told]
    assert len(new) == 2
    assert all("OVER 1 of kind event failed or wait for a person" in body for body in new)
    assert all("temporal cannot be used" in body for body in new), (
        "for over 30 s, as far as the book knows"
    )


async def test_a_one_time_task_that_hangs_alerts_after_half_an_hour(calling: ServedApi) -> None:
    client, alerts = calling.services.valkey, calling.services.alerts
    async with calling.services.database.session() as session:
        await session.execute(text("insert into startup_tasks (name) values ('hanging')"))
    for seconds, told in ((0, False), (600, False), (1801, True)):
        await age(client, seconds) if seconds else None
        await alerts.look()
        assert (
            any("one-time tasks are not done" in body for body in (await jobs(client)).values())
            is told
        )


async def test_an_alert_that_failed_for_good_is_reported_once(calling: ServedApi) -> None:
    client, services = calling.services.valkey, calling.services
    await put_letter(services.database, "alert", "alert-1-1-0")
    await services.alerts.look()
    told = await jobs(client)
    assert len(told) == 2
    for number in range(3):
        await put_letter(services.database, "alert", f"alert-1-{number}-1")
        await age(client, services.settings.alert_window)
        await services.alerts.look()
    new = [body for name, body in (await jobs(client)).items() if name not in told]
    assert not [body for body in new if "kind alert" in body and "OVER" not in body]


async def test_without_postgresql_nothing_counts_as_over(calling: ServedApi) -> None:
    client, services = calling.services.valkey, calling.services
    await put_letter(services.database)
    await services.alerts.look()
    told = await jobs(client)

    async def unread(page: MetricsPage) -> None:
        page.add("berth_server_up", 0, "postgresql")
        raise DatabaseUnavailable

    await age(client, 600)
    alerts = OperatorAlerts(client, services.kept_jobs, services.settings, unread, no_host)
    await alerts.look()
    assert await jobs(client) == told
    await age(client, 600)
    await services.alerts.look()
    assert await jobs(client) == told, "what was away for a moment does not alert"


async def test_a_condition_that_cannot_be_read_silences_no_other_one_and_no_error(
    calling: ServedApi,
) -> None:
    client, services = calling.services.valkey, calling.services

    async def broken(page: MetricsPage) -> None:
        page.add("berth_valkey_save_failed", 1)
        raise RecursionError

    await report(client, "api|e", "e in api")
    alerts = OperatorAlerts(client, services.kept_jobs, services.settings, broken, no_host)
    await alerts.look()
    bodies = (await jobs(client)).values()
    assert len(bodies) == 2
    assert all("e in api (1 since" in body for body in bodies)
    assert all("could not write to its disk" in body for body in bodies)


async def test_what_nobody_sent_before_its_death_is_sent_by_the_next(calling: ServedApi) -> None:
    client, alerts = calling.services.valkey, calling.services.alerts
    await report(client, "api|e", "e in api")
    await alerts.look()
    told = await jobs(client)
    await client.delete(*[job_keys.job(job_keys.FLEET_TAG, name) for name in told])
    async with calling.services.database.session() as session:
        await session.execute(text("delete from kept_jobs"))
    assert await jobs(client) == {}
    await alerts.look()
    assert await jobs(client) == told


async def test_garbage_in_the_stream_keeps_nobody_from_the_next_error(calling: ServedApi) -> None:
    client, alerts = calling.services.valkey, calling.services.alerts
    entries: list[dict[str, str | bytes]] = [
        {"x": "y"},
        {"key": "k" * 10_000, "text": b"\xff\x00\x1b[2J" * 5_000, "count": "-1"},
        {"key": "k", "text": "t", "count": "9" * 30},
        {"key": "good", "text": "a good one", "count": "1"},
    ]
    for entry in entries:
        await client.xadd(keys.ERRORS, entry)  # type: ignore[arg-type]
    await client.set(keys.ALERTS, b'{"alerts": 7')
    await alerts.look()
    bodies = (await jobs(client)).values()
    assert len(bodies) == 2
    assert all("a good one (1 since" in body for body in bodies)


_LOOKER = """
import asyncio, sys
from api.fleet.alerts import OperatorAlerts
from infra.database.engine import Database
from infra.jobs.client import JobClient
from infra.jobs.kept import KeptJobs
from infra.settings import Settings
from infra.valkey.client import connect_valkey
from tests.support.message_signing import SECRETS
async def nothing(page): pass
async def main():
    settings = Settings(alert_mails=("ops@example.com",), alert_limit=1_000_000)
    client = connect_valkey(sys.argv[1])
    away = Database("postgresql+asyncpg://nobody@127.0.0.1:1/none")
    jobs = KeptJobs(away, JobClient(client, SECRETS))
    await OperatorAlerts(client, jobs, settings, nothing, nothing).run(period=0.01)
asyncio.run(main())
"""


@pytest.mark.slow
async def test_each_error_alerts_once_while_the_alerting_process_is_killed(
    valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    async def looker() -> asyncio.subprocess.Process:
        nothing = asyncio.subprocess.DEVNULL
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", _LOOKER, valkey_server.url, stdout=nothing, stderr=nothing
        )

    async def end(process: asyncio.subprocess.Process) -> None:
        process.kill()
        await process.wait()

    number = 0
    lookers = [await looker(), await looker()]
    try:
        for _ in range(6):
            before = await reply_of(valkey_client.get(keys.ALERTS))
            for _ in range(18):
                number += 1
                await report(valkey_client, f"e{number}", f"error-{number}.")
                await asyncio.sleep(0.005)
            await seen(lambda old=before: is_new(valkey_client, old))  # type: ignore[misc]
            await end(lookers.pop(0))
            lookers.append(await looker())
        await seen(lambda: told_all(valkey_client, number))
    finally:
        for process in lookers:
            await end(process)
    assert Counter(await named(valkey_client)) == {
        f"error-{index}": 1 for index in range(1, number + 1)
    }


async def is_new(client: Redis, before: object) -> bool:
    return bool(await reply_of(client.get(keys.ALERTS)) != before)


async def told_all(client: Redis, number: int) -> bool:
    return len(await named(client)) >= number


async def named(client: Redis) -> list[str]:
    """The errors in the texts of all mails."""
    return [
        error
        for body in (await jobs(client)).values()
        for error in re.findall(r"error-\d+", json.loads(body)["text"])
    ]


async def test_findings_name_what_valkey_depends_on(
    calling: ServedApi, valkey_client: Redis
) -> None:
    client, alerts = calling.services.valkey, calling.services.alerts
    await valkey_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        await alerts.look()
    finally:
        await valkey_client.config_set("maxmemory-policy", "noeviction")
    assert b"valkey|berth_valkey_evicts" in await reply_of(client.get(keys.ALERTS))
    assert all(
        "set its maxmemory-policy to noeviction" in body for body in (await jobs(client)).values()
    )
    assert await jobs(client)


@pytest.mark.parametrize(
    ("metric", "labels", "value", "quiet", "said"),
    [
        ("berth_valkey_save_failed", (), 1, 0, "could not write to its disk"),
        ("berth_valkey_not_kept", (), 1, 0, "a restart of Valkey loses all"),
        (
            "berth_clock_offset_seconds",
            ("valkey",),
            3.04,
            0.9,
            "the clock of valkey differs by 3.0 s from that of host-1",
        ),
        (
            "berth_disk_free_bytes",
            ("/data",),
            10,
            2**31,
            "the disk of /data on host-1 is almost full",
        ),
        (
            "berth_disk_inodes_free_ratio",
            ("/data",),
            0.001,
            0.5,
            "/data on host-1 has almost no places for files",
        ),
        ("berth_limit_used_ratio", ("files",), 0.91, 0.5, "91% of the limit of files are in use"),
        ("berth_limit_used_ratio", ("valkey",), 0.91, 0.5, "91% of the connections of valkey"),
        (
            "berth_limit_used_ratio",
            ("postgresql",),
            0.91,
            0.5,
            "91% of the connections of postgresql",
        ),
        (
            "berth_calendar_ends_timestamp_seconds",
            (),
            60,
            61 * 86_400,
            "holidays are unknown from 20",
        ),
        (
            "berth_certificate_expires_timestamp_seconds",
            ("BERTH_X",),
            60,
            15 * 86_400,
            "in BERTH_X ends on",
        ),
    ],
)
async def test_findings_name_what_a_host_depends_on(
    calling: ServedApi, metric: str, labels: tuple[str, ...], value: float, quiet: float, said: str
) -> None:
    """The last two are seconds from now."""
    client, shown = calling.services.valkey, quiet

    async def write(page: MetricsPage) -> None:
        base = time.time() if metric.endswith("timestamp_seconds") else 0.0
        page.add("berth_server_up", 1, "valkey")
        page.add(metric, base + shown, *labels)

    known = calling.services.alerts
    alerts = OperatorAlerts(client, known.jobs, known.settings, write, write, "host-1")
    await alerts.report_host()
    await alerts.look()
    assert not await jobs(client)
    shown = value
    await alerts.report_host()
    await alerts.look()
    await age(client, 301)
    await alerts.look()
    told = list((await jobs(client)).values())
    assert len(told) == 2
    assert all(said in body for body in told), told


async def test_a_full_disk_of_one_of_three_hosts_alerts_in_time_whoever_looks(
    calling: ServedApi,
) -> None:
    client, known = calling.services.valkey, calling.services.alerts
    free = {"host-a": 2**40, "host-b": 10, "host-c": 2**40}

    def alerts_of(host: str) -> OperatorAlerts:
        async def write(page: MetricsPage) -> None:
            page.add("berth_disk_free_bytes", free[host], "/data")

        async def nothing_else(page: MetricsPage) -> None:
            for server in ("postgresql", "valkey", "temporal"):
                page.add("berth_server_up", 1, server)

        return OperatorAlerts(client, known.jobs, known.settings, nothing_else, write, host)

    hosts = {host: alerts_of(host) for host in free}

    async def look(host: str) -> None:
        """Has this host look, ten seconds after the look before."""
        await age(client, 10)
        for alerts in hosts.values():
            await alerts.report_host()
        await hosts[host].look()

    await hosts["host-a"].look()
    for _ in range(4):  # the host with the full disk never has the turn
        await look("host-a")
        await look("host-c")
    told = await jobs(client)
    assert len(told) == 2
    assert all("the disk of /data on host-b is almost full" in body for body in told.values())
    free["host-b"] = 2**40
    for _ in range(4):
        await look("host-a")
        await look("host-b")
    new = [body for name, body in (await jobs(client)).items() if name not in told]
    assert len(new) == 2
    assert all("OVER the disk of /data on host-b" in body for body in new)


async def test_a_host_that_reports_no_more_is_forgotten(valkey_client: Redis) -> None:
    client = valkey_client
    now = await read_clock(client) / 1000
    full = [HostSample("berth_disk_free_bytes", {"folder": "/data"}, 1)]
    for host, at in (("present", now - 10), ("gone", now - 60)):
        report = msgspec.json.encode(HostReport(host, at, full))
        await reply_of(client.hset(keys.HOST_REPORTS, host, report))
    await reply_of(client.hset(keys.HOST_REPORTS, "garbage", "{"))
    assert [report.host for report in await read_reports(client, now)] == ["present"]
    assert await reply_of(client.hkeys(keys.HOST_REPORTS)) == [b"present"]
