"""Metrics that PostgreSQL and Valkey tell, read when somebody asks. Every API process gives the
same.

What our processes count by themselves is in `process_metrics.py`.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import dead_letters, fleet_counts
from infra.database.startup import read_holder
from infra.database.workers import passes
from infra.doctor import measures
from infra.market.calendar import Calendar
from infra.process_metrics import MetricFamily
from infra.settings import Settings
from infra.valkey.client import read_clock, reply_of, text_of
from infra.valkey.memory import read_memory
from worker_runtime.jobs.protocol.telemetry import BOUNDS_MS
from worker_runtime.protocol import keys

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _gauge(about: str, *labels: str) -> MetricFamily:
    return MetricFamily("gauge", labels, about)


def _counted(prefix: str, whose: str) -> dict[str, MetricFamily]:
    """Returns the families of what job runners have counted. `whose` begins each description; empty
    for the fleet's."""
    return {
        f"{prefix}_wait_seconds": MetricFamily(
            "histogram", ("queue", "priority"), f"{whose}From when a job could run to its start."
        ),
        f"{prefix}_run_seconds": MetricFamily(
            "histogram", ("job",), f"{whose}From a job's start to its end."
        ),
        f"{prefix}_runs_total": MetricFamily(
            "counter",
            ("queue", "job", "outcome"),
            f"{whose}Runs by how they ended: done, failed, retry or cancelled.",
        ),
        f"{prefix}_reaped_total": MetricFamily(
            "counter", ("outcome",), f"{whose}Jobs of dead runners, by what became of them."
        ),
        f"{prefix}_late_renewals_total": MetricFamily(
            "counter", (), f"{whose}Leases renewed more than a third of a lease after their time."
        ),
    }


FAMILIES = {
    "berth_server_up": _gauge(
        "1: the API can use this server; 0: it is away, or refuses.", "server"
    ),
    "berth_api_processes": _gauge("Processes that the API which is asked should have."),
    "berth_api_processes_answered": _gauge(
        "Those that answered the scrape within a second; of the others the last known counts are "
        "shown. 0: not even their master answered, so what they counted is missing."
    ),
    "berth_api_processes_died_total": MetricFamily(
        "counter", (), "Processes of this API that ended by themselves and were replaced."
    ),
    "berth_primary": _gauge("1: one of the API processes is the primary."),
    "berth_startup_tasks_open": _gauge(
        "One-time tasks of the primary that were begun and are not done."
    ),
    "berth_certificate_expires_timestamp_seconds": _gauge(
        "Unix time at which the certificate or JWT in this setting's file ends; 0: it cannot "
        "be read.",
        "setting",
    ),
    "berth_valkey_memory_used_ratio": _gauge(
        "Share of its `maxmemory`, or without one of its host's memory, that Valkey uses; above "
        "0.85 of a `maxmemory` new orders and claims are refused."
    ),
    "berth_valkey_unlimited": _gauge(
        "1: Valkey has no `maxmemory`: nothing is refused before its host's memory is full."
    ),
    "berth_valkey_evicts": _gauge(
        "1: Valkey deletes keys when its memory is full; `noeviction` is needed."
    ),
    "berth_valkey_save_failed": _gauge("1: Valkey's last write to its disk failed."),
    "berth_valkey_not_kept": _gauge(
        "1: a restart of Valkey loses everything: it has neither an append-only file nor a replica."
    ),
    "berth_clock_offset_seconds": _gauge(
        "By how much this server's clock differs from that of the API's host, at least.", "server"
    ),
    "berth_disk_free_bytes": _gauge(
        "Free space on the disk of this folder of the API's host.", "folder"
    ),
    "berth_disk_inodes_free_ratio": _gauge(
        "Share of its places for files that are free.", "folder"
    ),
    "berth_limit_used_ratio": _gauge(
        "Share that is in use of open files (`files`, of the API process that answers), or of "
        "connections (`valkey`, `postgresql`).",
        "limit",
    ),
    "berth_calendar_ends_timestamp_seconds": _gauge(
        "Unix time from which on the exchanges' holidays are unknown."
    ),
    "berth_pool_ready": _gauge("Free workers that are ready.", "pool"),
    "berth_pool_waiting": _gauge("Users who wait for a worker, because none is ready.", "pool"),
    "berth_workers_in_use": _gauge("Workers that have connected for their user.", "pool"),
    "berth_users": _gauge(
        "Users by the state of their worker, by Temporal's index; `Parked`: it crashed too often.",
        "state",
    ),
    "berth_orders_unsettled": _gauge(
        "Orders that were begun and are not settled; `needs_attention`: a person has to look.",
        "state",
    ),
    "berth_switches_closed": _gauge("Trading switches that halt or reduce.", "scope", "state"),
    "berth_differences_open": _gauge("Accounts whose books differ from the broker's.", "blocks"),
    "berth_certificates_expiring": _gauge(
        "Certificates of live accounts that expire within so many days; 0: that have expired.",
        "days",
    ),
    "berth_instruments_missed_days": _gauge(
        "Trading days of a broker since the list of a market's instruments that is in force.",
        "broker",
        "market",
    ),
    "berth_instrument_loads_failing": _gauge(
        "1: the last load of a list was refused or has failed. `market`: the account's.",
        "broker",
        "market",
        "state",
    ),
    "berth_instrument_changes_open": _gauge(
        "Changed lots of known instruments that wait for an operator."
    ),
    "berth_person_matches_open": _gauge(
        "Pairs of users who log in as one person, not decided yet."
    ),
    "berth_dead_letters": _gauge(
        "What failed for good: `workflow`, `order` (it waits for a person), `job`, `alert`; of "
        "messages `event` (cannot be read), `recorder` and `relay` (their handler failed), `late` "
        "(news from a worker that ended over a day before), `outcome` (the API's writer).",
        "kind",
    ),
    "berth_event_stream_waiting": _gauge(
        "Events of workers that this group has not handled.", "group"
    ),
    "berth_event_stream_lag_seconds": _gauge("Age of the oldest of them.", "group"),
    "berth_entities": _gauge(
        "Long-lived workflows and schedules that are `paused` or `missing`, and those that were "
        "`rebuilt` or `ended` within the last hour.",
        "state",
        "kind",
    ),
    "berth_maintenance_age_seconds": _gauge("Since the last pass of maintenance began."),
    "berth_maintenance_workers": _gauge("Workers that it scanned."),
    "berth_maintenance_guarded": _gauge("1: it might do nothing, for want of trust."),
    "berth_maintenance_scan_seconds": _gauge("How long its scan took."),
    "berth_maintenance_seconds": _gauge("How long all of it took."),
    "berth_maintenance_found": _gauge("Anomalies that it saw.", "anomaly"),
    "berth_maintenance_outcomes": _gauge("What was done about them.", "outcome"),
    "berth_jobs_waiting": _gauge(
        "Jobs that could run now; without a priority: only counted.", "queue", "priority"
    ),
    "berth_jobs_oldest_seconds": _gauge(
        "How long the oldest of them has waited.", "queue", "priority"
    ),
    "berth_jobs_delayed": _gauge("Jobs that wait for their time, retries with them."),
    "berth_jobs_failed": _gauge("Failed jobs that are kept."),
    "berth_jobs_runners": _gauge("Registered runners."),
    "berth_application_jobs_waiting": _gauge(
        "Jobs of an application that could run now.", "application"
    ),
    "berth_jobs_without_runner": _gauge(
        "Those of them whose type no live runner takes.", "application", "type"
    ),
    **_counted("berth_jobs", ""),
    **_counted("berth_user_jobs", "Users' own jobs: "),
}


class MetricsPage(Collector):
    """The samples of one answer."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(
        self, name: str, value: float, *labels: str, part: str = "", **extra_labels: str
    ) -> None:
        """Adds a sample. `labels` are in the family's order; a histogram adds `part` to the name
        and `extra_labels` to them."""
        family = FAMILIES[name]
        if name not in self._metrics:
            self._metrics[name] = Metric(name.removesuffix("_total"), family.about, family.kind)
        self._metrics[name].add_sample(
            name + part, dict(zip(family.labels, labels, strict=True)) | extra_labels, value
        )

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Returns labels and value of each sample of a gauge."""
        metric = self._metrics.get(name)
        return [(sample.labels, sample.value) for sample in metric.samples] if metric else []

    def add_histogram(self, name: str, numbers: Mapping[str, int], *labels: str) -> None:
        """Adds a histogram: `numbers` by bucket, and the `sum` in ms; shown in seconds."""
        total = 0
        for index, bound in enumerate((*(f"{bound / 1000:g}" for bound in BOUNDS_MS), "+Inf")):
            total += numbers.get(str(index), 0)
            self.add(name, total, *labels, part="_bucket", le=bound)
        self.add(name, numbers.get("sum", 0) / 1000, *labels, part="_sum")
        self.add(name, total, *labels, part="_count")

    def collect(self) -> Iterable[Metric]:
        return self._metrics.values()

    def text(self, counted: CollectorRegistry) -> str:
        """Returns these samples, and what the processes of this API have counted."""
        registry = CollectorRegistry()
        registry.register(self)
        return (generate_latest(registry) + generate_latest(counted)).decode()


async def write_fleet_metrics(
    page: MetricsPage, client: Redis, session: AsyncSession, pool: str
) -> None:
    """Writes the metrics as they are now. Raises `RedisError` when Valkey is down, SQLAlchemy's
    errors when PostgreSQL is."""
    page.add("berth_pool_ready", await client.zcard(keys.pool_ready(pool)), pool)
    page.add("berth_pool_waiting", await client.zcard(keys.pool_wait_queue(pool)), pool)
    for name, labels, count in await fleet_counts.count_fleet(session):
        page.add(name, count, *labels)
    page.add("berth_primary", (await read_holder(session)).pid is not None)
    for kind, count in (await dead_letters.count_letters(session)).items():
        page.add("berth_dead_letters", count, kind)
    await _write_lag(page, client)
    await _write_maintenance(page, session)


async def write_valkey_memory(page: MetricsPage, client: Redis) -> None:
    """Raises `RedisError`."""
    page.add("berth_valkey_memory_used_ratio", (await read_memory(client)).share)


async def _write_lag(page: MetricsPage, client: Redis) -> None:
    """Writes how far the groups that read the events of workers are behind."""
    now_ms = await read_clock(client)
    for stream in (keys.EVENTS, keys.CHANGES):
        try:
            groups = await reply_of(client.xinfo_groups(stream))
        except ResponseError:  # nobody has made it yet
            continue
        for group in groups:
            name, last = text_of(group["name"]), text_of(group["last-delivered-id"])
            pending = await reply_of(client.xpending(stream, group["name"]))
            next_one = await reply_of(client.xrange(stream, f"({last}", count=1))
            oldest = pending["min"] or (next_one[0][0] if next_one else b"")
            waits = now_ms - int(text_of(oldest).partition("-")[0]) if oldest else 0
            page.add("berth_event_stream_waiting", pending["pending"] + (group["lag"] or 0), name)
            page.add("berth_event_stream_lag_seconds", max(0, waits) / 1000, name)


async def _write_maintenance(page: MetricsPage, session: AsyncSession) -> None:
    last = await passes.pass_summary(session)
    if last is None:
        return
    page.add(
        "berth_maintenance_age_seconds",
        await fleet_counts.seconds_since(session, last.began_at),
    )
    page.add("berth_maintenance_workers", last.scanned)
    page.add("berth_maintenance_guarded", 1 if last.guarded else 0)
    page.add("berth_maintenance_scan_seconds", last.scan_seconds)
    if last.total_seconds is not None:
        page.add("berth_maintenance_seconds", last.total_seconds)
    for name, numbers in (("found", last.found), ("outcomes", last.outcomes)):
        for key, number in numbers.items():
            page.add(f"berth_maintenance_{name}", number, key)


def write_host(page: MetricsPage, settings: Settings, calendar: Calendar) -> None:
    """Writes what this host tells without any server."""
    for setting, end in measures.certificate_ends(settings).items():
        page.add("berth_certificate_expires_timestamp_seconds", end, setting)
    for disk in measures.read_disks(settings):
        page.add("berth_disk_free_bytes", disk.free_bytes, str(disk.folder))
        page.add("berth_disk_inodes_free_ratio", disk.inodes_free_ratio, str(disk.folder))
    page.add("berth_limit_used_ratio", measures.open_files_ratio(), "files")
    page.add("berth_calendar_ends_timestamp_seconds", measures.calendar_end(calendar))


async def write_valkey(page: MetricsPage, client: Redis) -> None:
    """Writes how Valkey keeps its data. Raises `RedisError`."""
    state = await measures.read_valkey_state(client)
    page.add("berth_valkey_unlimited", not state.memory.limit)
    page.add("berth_valkey_evicts", state.evicts)
    page.add("berth_valkey_save_failed", bool(state.failed_saves))
    page.add("berth_valkey_not_kept", not state.is_kept)
    page.add("berth_limit_used_ratio", state.connections_ratio, "valkey")


async def write_postgresql(page: MetricsPage, session: AsyncSession) -> None:
    """Writes PostgreSQL's connections. Raises SQLAlchemy's errors."""
    page.add(
        "berth_limit_used_ratio", await measures.database_connections_ratio(session), "postgresql"
    )


async def write_valkey_clock(page: MetricsPage, client: Redis) -> None:
    """Writes by how much Valkey's clock differs from this host's. Raises `RedisError`."""
    page.add("berth_clock_offset_seconds", await measures.valkey_clock_offset(client), "valkey")


async def write_database_clock(page: MetricsPage, session: AsyncSession) -> None:
    """Writes by how much PostgreSQL's clock differs from this host's. Raises SQLAlchemy's
    errors."""
    page.add(
        "berth_clock_offset_seconds", await measures.database_clock_offset(session), "postgresql"
    )
