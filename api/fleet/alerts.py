"""Alerts operators, by mail and webhook, of errors and of conditions that need attention.

Each API process looks every `CHECK_INTERVAL_S` seconds, one at a time, and writes what it measures
of its host for the others. What was sent is in Valkey next to the job queue that delivers: neither
PostgreSQL nor Temporal nor an orchestrator is needed to say that one is away. A message is stored
before its jobs are made, and their ids are made of its own, so each message is sent once even if a
process dies.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from infra.alerts.book import AlertBook, AlertMessage
from infra.alerts.hosts import HostReport, HostSample, read_reports, write_report
from infra.doctor import measures
from infra.jobs.kept import KeptJobs
from infra.market.list_age import MAX_MISSED_DAYS
from infra.metrics import MetricsPage
from infra.settings import Settings
from infra.valkey.client import number_of, read_clock, reply_of, text_of
from infra.valkey.failures import code_of, refuses_writes
from infra.valkey.memory import ALERT_ABOVE_SHARE
from worker_runtime.jobs.protocol.catalog import DeliverWebhook, SendEmail, make_job
from worker_runtime.jobs.protocol.messages import Job
from worker_runtime.jobs.protocol.telemetry import MAX_ERRORS
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError, MalformedMessage

#: Seconds between two looks.
CHECK_INTERVAL_S = 10.0
#: Seconds for the measurements of a host; the servers' clocks are among them.
MEASURE_TIMEOUT_S = 3.0
#: Delivery attempts; together they span two hours.
MAX_DELIVERY_ATTEMPTS = 60
#: The webhook's event, and the name from which its signing key is made.
EVENT, RECIPIENT = "operators.alert", "operators"

log = structlog.get_logger()


class Condition(NamedTuple):
    """Holds while a sample of `metric` is above or below a number; told after `wait` seconds."""

    metric: str
    labels: dict[str, str]
    #: An open-ended number: it alerts again when it has grown.
    above: float
    wait: float
    text: str
    #: Without it nobody knows. `host`: each API process measures it on its host.
    server: str = "postgresql"
    #: In place of `above`.
    below: float | None = None
    #: In place of `above`: the sample is a time that is fewer seconds ahead.
    within: float | None = None
    #: It holds for each host on its own, and its text names the host.
    by_host: bool = False

    def holds(self, value: float, now: float) -> bool:
        if self.within is not None:
            return value < now + self.within
        return value > self.above if self.below is None else value < self.below

    @property
    def counts(self) -> bool:
        """Return True if its value is a number of things."""
        return not self.above and self.below is None and self.within is None


CONDITIONS = (
    Condition(
        "berth_orders_unsettled",
        {"state": "unknown"},
        0,
        300,
        "{value:.0f} orders have an unknown outcome",
    ),
    Condition(
        "berth_dead_letters", {}, 0, 0, "{value:.0f} of kind {kind} failed or wait for a person"
    ),
    Condition("berth_event_stream_lag_seconds", {"group": "recorder"}, 30, 60, "the recorder lags"),
    Condition("berth_event_stream_lag_seconds", {"group": "relay"}, 120, 60, "the relay lags"),
    Condition("berth_maintenance_age_seconds", {}, 180, 0, "maintenance has stopped"),
    Condition(
        "berth_maintenance_guarded",
        {},
        0,
        300,
        "maintenance holds still: `berth maintenance status`",
    ),
    Condition(
        "berth_differences_open", {}, 0, 0, "{value:.0f} accounts differ from the broker's books"
    ),
    Condition(
        "berth_person_matches_open",
        {},
        0,
        0,
        "{value:.0f} pairs of users log in as one person: `berth users persons`",
    ),
    Condition(
        "berth_certificates_expiring",
        {"days": "30"},
        0,
        0,
        "{value:.0f} certificates of users expire within 30 days: `berth users certificates`",
    ),
    Condition(
        "berth_certificates_expiring",
        {"days": "7"},
        0,
        0,
        "{value:.0f} certificates of users expire within 7 days: `berth users certificates`",
    ),
    Condition(
        "berth_certificates_expiring",
        {"days": "1"},
        0,
        0,
        "{value:.0f} certificates of users expire within a day or have expired: `berth users "
        "certificates`",
    ),
    Condition(
        "berth_instrument_changes_open",
        {},
        0,
        0,
        "{value:.0f} lots of instruments have changed, and orders are checked with the old ones: "
        "`berth instruments changes`",
    ),
    Condition(
        "berth_instrument_loads_failing",
        {"state": "refused"},
        0,
        0,
        "the list of {broker}'s instruments, market {market}, was refused: "
        "`berth instruments source list`",
    ),
    Condition(
        "berth_instrument_loads_failing",
        {"state": "failed"},
        0,
        1800,
        "the instruments of {broker}, market {market}, cannot be loaded: "
        "`berth instruments source list`",
    ),
    Condition(
        "berth_instruments_missed_days",
        {},
        MAX_MISSED_DAYS,
        0,
        "the list of {broker}'s instruments of the market {market} is {value:.0f} trading days "
        "old: `berth instruments source list`",
    ),
    Condition("berth_jobs_oldest_seconds", {}, 300, 0, "jobs in the queue {queue} wait for long"),
    Condition(
        "berth_jobs_without_runner",
        {},
        0,
        60,
        "{value:.0f} jobs of {type} wait: no live runner knows it; `berth jobs types`",
    ),
    Condition("berth_pool_waiting", {}, 0, 60, "{value:.0f} users wait: the pool {pool} is empty"),
    Condition("berth_startup_tasks_open", {}, 0, 1800, "{value:.0f} one-time tasks are not done"),
    Condition(
        "berth_entities",
        {"state": "rebuilt"},
        0,
        0,
        "{value:.0f} of kind {kind} had been ended in Temporal, and were rebuilt: `berth servers`",
    ),
    Condition(
        "berth_entities",
        {"state": "paused"},
        0,
        0,
        "{value:.0f} of kind {kind} are paused: `berth servers`",
    ),
    Condition(
        "berth_entities",
        {"state": "missing"},
        0,
        0,
        "{value:.0f} of kind {kind} are gone and could not be rebuilt yet: `berth servers`",
    ),
    Condition(
        "berth_entities",
        {"state": "ended"},
        0,
        0,
        "{value:.0f} runs were ended in Temporal, and nobody starts them again: `berth servers`",
    ),
    Condition(
        "berth_valkey_evicts",
        {},
        0.5,
        0,
        "Valkey deletes orders and marks when its memory is full: set its maxmemory-policy to "
        "noeviction",
        "valkey",
    ),
    Condition(
        "berth_valkey_save_failed",
        {},
        0.5,
        0,
        "Valkey could not write to its disk: free space there; `berth doctor valkey-persistence`",
        "valkey",
    ),
    Condition(
        "berth_valkey_not_kept",
        {},
        0.5,
        300,
        "a restart of Valkey loses all that is queued: set appendonly to yes, or give it a replica",
        "valkey",
    ),
    Condition(
        "berth_valkey_unlimited",
        {},
        0.5,
        300,
        "Valkey has no maxmemory: new orders are not refused before its host's memory is full, and "
        "the kernel ends it then; `berth doctor valkey-memory`",
        "valkey",
    ),
    Condition(
        "berth_clock_offset_seconds",
        {},
        measures.MAX_CLOCK_OFFSET_S,
        60,
        "the clock of {server} differs by {value:.1f} s from that of {host}: look at their time "
        "services",
        "host",
        by_host=True,
    ),
    Condition(
        "berth_disk_free_bytes",
        {},
        0,
        60,
        "the disk of {folder} on {host} is almost full: free space, `berth doctor disks`",
        "host",
        below=measures.MIN_DISK_FREE_BYTES,
        by_host=True,
    ),
    Condition(
        "berth_disk_inodes_free_ratio",
        {},
        0,
        60,
        "the disk of {folder} on {host} has almost no places for files left: delete files, "
        "`berth doctor disks`",
        "host",
        below=measures.MIN_INODES_FREE_RATIO,
        by_host=True,
    ),
    Condition(
        "berth_limit_used_ratio",
        {"limit": "files"},
        measures.MAX_LIMIT_USED_RATIO,
        60,
        "{value:.0%} of the limit of {limit} are in use on {host}: raise it, `berth doctor limits`",
        "host",
        by_host=True,
    ),
    Condition(
        "berth_limit_used_ratio",
        {"limit": "valkey"},
        measures.MAX_LIMIT_USED_RATIO,
        60,
        "{value:.0%} of the connections of {limit} are in use: raise its limit, `berth doctor "
        "limits`",
        "valkey",
    ),
    Condition(
        "berth_limit_used_ratio",
        {"limit": "postgresql"},
        measures.MAX_LIMIT_USED_RATIO,
        60,
        "{value:.0%} of the connections of {limit} are in use: raise its limit, `berth doctor "
        "limits`",
    ),
    Condition(
        "berth_calendar_ends_timestamp_seconds",
        {},
        0,
        0,
        "the exchanges' holidays are unknown from {day} on: install a newer release, or add them "
        "to BERTH_CALENDAR_FILE",
        "host",
        within=measures.CALENDAR_WARNING_S,
    ),
    Condition(
        "berth_certificate_expires_timestamp_seconds",
        {},
        0,
        0,
        "the certificate or JWT in {setting} ends on {day}, or cannot be read: put a new one "
        "in its place",
        "host",
        within=measures.CERTIFICATE_WARNING_S,
    ),
    Condition(
        "berth_valkey_memory_used_ratio",
        {},
        ALERT_ABOVE_SHARE,
        30,
        "Valkey's memory is {value:.0%} full; above 85% of its maxmemory new orders and claims are "
        "refused",
        "valkey",
    ),
    Condition("berth_users", {"state": "Parked"}, 0, 0, "{value:.0f} users are parked", "temporal"),
)


_HOST_METRICS = sorted({each.metric for each in CONDITIONS if each.server == "host"})


def _of_hosts(
    condition: Condition, reports: Iterable[HostReport]
) -> Iterator[tuple[dict[str, str], float]]:
    """Yields labels and value of each sample of a condition's metric; the host is a label, too."""
    for report in reports:
        host = {"host": report.host} if condition.by_host else {}
        for sample in report.samples:
            if sample.metric == condition.metric:
                yield {**sample.labels, **host}, sample.value


@dataclass(frozen=True, eq=False, repr=False)
class OperatorAlerts:
    client: Redis
    jobs: KeptJobs
    settings: Settings
    write_metrics: Callable[[MetricsPage], Awaitable[None]]
    #: Writes what this host tells, which the others cannot measure.
    write_host: Callable[[MetricsPage], Awaitable[None]]
    host: str = field(default_factory=socket.gethostname)

    async def run(self, period: float = CHECK_INTERVAL_S) -> None:
        """Alerts operators in a background loop."""
        refused = False
        while True:
            try:
                # One process checks at a time, and keeps its turn at most until the next check.
                if await self.client.set(keys.ALERTS_TURN, 1, nx=True, px=int(period * 900)):
                    await self.look()
                    refused = False
                await self.report_host()
            except (RedisError, OSError) as error:  # Valkey is away, or another process was faster
                if refuses_writes(error) and not refused:  # the alerts' state is stored in Valkey
                    log.error("valkey_refuses_writes", code=code_of(error))
                    refused = True
                log.warning("alerts_not_looked_at", error=code_of(error) or type(error).__name__)
            except Exception:  # the boundary of a loop
                log.exception("alerts_failed")
            await asyncio.sleep(period)

    async def report_host(self) -> None:
        """Has whichever process looks next know how this host is. Raises `RedisError`."""
        page = MetricsPage()
        try:
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                await self.write_host(page)
        except (BerthError, SQLAlchemyError, TimeoutError) as error:  # some of it is on the page
            log.warning("host_not_measured", error=type(error).__name__)
        samples = [
            HostSample(metric, labels, value)
            for metric in _HOST_METRICS
            for labels, value in page.samples(metric)
        ]
        await write_report(self.client, f"{self.host}:{os.getpid()}", self.host, samples)

    async def look(self) -> None:
        """Tells what is new. Raises `RedisError`, also if another process has looked meanwhile."""
        async with self.client.pipeline(transaction=True) as pipe:
            await pipe.watch(keys.ALERTS)
            now = await read_clock(self.client) / 1000
            book = AlertBook.read(await reply_of(pipe.get(keys.ALERTS)), now)
            await self._deliver(book.message)  # again: who made it may have died
            book.message = None
            errors: Any = await self.client.xrange(keys.ERRORS, f"({book.cursor}", count=MAX_ERRORS)
            for entry, fields in errors:
                book.cursor = text_of(entry)
                key, text = (text_of(fields.get(name))[:500] for name in (b"key", b"text"))
                book.count_error(f"error|{key}", text, number_of(fields.get(b"count")), now)
            await self._observe(book, now)
            book.make_message(
                now, window=self.settings.alert_window, limit=self.settings.alert_limit
            )
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.set(keys.ALERTS, msgspec.json.encode(book))
            await pipe.execute()
        await self._deliver(book.message)

    async def _observe(self, book: AlertBook, now: float) -> None:
        page, known = MetricsPage(), {"server", "host"}
        try:
            await self.write_metrics(page)
            known |= {labels["server"] for labels, up in page.samples("berth_server_up") if up}
        except (BerthError, SQLAlchemyError, RedisError, OSError) as error:
            # Some of it may be on the page.
            log.warning("conditions_not_read", error=type(error).__name__)
        except Exception:  # one condition that cannot be read keeps no other one from operators
            log.exception("conditions_not_read")
        for labels, up in page.samples("berth_server_up"):
            if not up:
                book.observe(
                    f"server|{labels['server']}",
                    f"{labels['server']} cannot be used: `berth servers`",
                    1,
                    30,
                    now,
                )
        reports = await read_reports(self.client, now)
        for condition in CONDITIONS:
            samples = page.samples(condition.metric)
            if condition.server == "host":
                samples = list(_of_hosts(condition, reports))
            for labels, value in samples:
                if condition.holds(value, now) and condition.labels.items() <= labels.items():
                    key = "|".join((condition.server, condition.metric, *labels.values()))
                    day = measures.day_of(value) if condition.within is not None else ""
                    text = condition.text.format(**{"value": value, "day": day, **labels})
                    # Alerts that fail are told once: each message more would be another one.
                    counts = condition.counts and labels.get("kind") != "alert"
                    book.observe(key, text, value if counts else 1, condition.wait, now)
        book.keep(lambda key: key.partition("|")[0] not in known, now)

    async def _deliver(self, message: AlertMessage | None) -> None:
        if message is not None:
            for job in self._make_jobs(message):
                await self.jobs.enqueue(job, without_database=True)

    def _make_jobs(self, message: AlertMessage) -> list[Job]:
        text = "\n".join(message.lines)
        body = msgspec.json.encode({"text": f"{message.subject}\n{text}", "lines": message.lines})
        to_post = DeliverWebhook(url="", recipient=RECIPIENT, event=EVENT, body=msgspec.Raw(body))
        to_mail = SendEmail(to="", subject=message.subject, text=f"{text}\n")
        work = [
            *(
                msgspec.structs.replace(to_mail, to=address)
                for address in self.settings.alert_mails
            ),
            *(msgspec.structs.replace(to_post, url=url) for url in self.settings.alert_webhooks),
        ]
        jobs = []
        for number, payload in enumerate(work):
            job_id = f"alert-{message.at}-{message.number}-{number}"
            try:
                jobs.append(make_job(job_id, payload, priority=9, attempts=MAX_DELIVERY_ATTEMPTS))
            except MalformedMessage as error:  # a wrong address keeps nobody else from the message
                log.warning("alert_not_sent", job_id=job_id, reason=error.detail)
        return jobs
