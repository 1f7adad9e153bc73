"""Metrics of workers, claims, orders and maintenance, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

from redis.asyncio import Redis
from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.workers import passes
from worker_runtime.jobs.protocol.telemetry import BOUNDS_MS
from worker_runtime.protocol import keys

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


class MetricsPage:
    """The lines of one answer: each family's head, then its samples."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, about: str) -> None:
        self._lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, labels: Labels, value: float) -> None:
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
        self._lines.append(f"{name}{{{shown}}} {value:.15g}" if shown else f"{name} {value:.15g}")

    def histogram(self, name: str, labels: Labels, numbers: Mapping[str, int]) -> None:
        """`numbers` by bucket, and the `sum` in ms; written in seconds."""
        total = 0
        for index, bound in enumerate((*(f"{bound / 1000:g}" for bound in BOUNDS_MS), "+Inf")):
            total += numbers.get(str(index), 0)
            self.sample(f"{name}_bucket", (*labels, ("le", bound)), total)
        self.sample(f"{name}_sum", labels, numbers.get("sum", 0) / 1000)
        self.sample(f"{name}_count", labels, total)

    def text(self) -> str:
        return "\n".join([*self._lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


#: Minutes of claims that the metrics show: a scraper comes more often than that.
RECENT = 5

_IN_USE = text("""
select pool, count(*) from worker_sessions
 where ended_at is null and connected_at is not null group by pool order by pool
""")
_CLAIMS = text(f"""
select case when warm then 'warm' else 'cold' end, count(*),
       percentile_cont(array[0.5, 0.99]) within group (order by extract(epoch from claimed_at - assigned_at))
  from worker_sessions
 where pool = :pool and claimed_at > clock_timestamp() - interval '{RECENT} minutes' and warm is not null
 group by warm order by warm
""").bindparams(bindparam("pool"))  # noqa: S608 - a constant of ours
_UNSETTLED = text("""
select wanted.state, (select count(*) from orders where orders.state = wanted.state)
  from (values ('submitting'), ('unknown'), ('needs_attention')) as wanted (state)
""")
_AGE = text("select extract(epoch from clock_timestamp() - cast(:began_at as timestamptz))::float8")


async def write_fleet_metrics(page: MetricsPage, client: Redis, session: AsyncSession, pool: str) -> None:
    """The metrics now. Raises `RedisError` when Valkey is down, SQLAlchemy's errors when PostgreSQL is."""
    page.family("berth_pool_ready", "gauge", "Free workers that are ready.")
    page.sample("berth_pool_ready", (("pool", pool),), await client.zcard(keys.pool_ready(pool)))
    page.family("berth_workers_in_use", "gauge", "Workers that have connected for their user.")
    for name, count in (await session.execute(_IN_USE)).all():
        page.sample("berth_workers_in_use", (("pool", name),), count)
    await _write_claims(page, session, pool)
    page.family("berth_orders_unsettled", "gauge", "Orders that were begun and are not settled.")
    for state, count in (await session.execute(_UNSETTLED)).all():
        page.sample("berth_orders_unsettled", (("state", state),), count)
    await _write_maintenance(page, session)


async def _write_claims(page: MetricsPage, session: AsyncSession, pool: str) -> None:
    claims = (await session.execute(_CLAIMS, {"pool": pool})).all()
    page.family("berth_claims_recent", "gauge", f"Workers claimed in the last {RECENT} minutes.")
    for kind, count, _ in claims:
        page.sample("berth_claims_recent", (("pool", pool), ("kind", kind)), count)
    name = "berth_claim_recent_seconds"
    page.family(name, "gauge", "How long these claims took, from the epoch to the worker that confirmed.")
    for kind, _, seconds in claims:
        for quantile, value in zip(("0.5", "0.99"), seconds, strict=True):
            page.sample(name, (("pool", pool), ("kind", kind), ("quantile", quantile)), float(value))


async def _write_maintenance(page: MetricsPage, session: AsyncSession) -> None:
    last = await passes.pass_summary(session)
    if last is None:
        return
    age = float(await session.scalar(_AGE, {"began_at": last.began_at}) or 0.0)
    for name, value, about in (
        ("berth_maintenance_age_seconds", age, "Since the last pass of maintenance began."),
        ("berth_maintenance_workers", last.scanned, "Workers that it scanned."),
        ("berth_maintenance_guarded", 1 if last.guarded else 0, "1: it might do nothing, for want of trust."),
        ("berth_maintenance_scan_seconds", last.scan_seconds, "How long its scan took."),
        ("berth_maintenance_seconds", last.total_seconds, "How long all of it took."),
    ):
        if value is not None:
            page.family(name, "gauge", about)
            page.sample(name, (), value)
    for name, label, numbers, about in (
        ("berth_maintenance_found", "anomaly", last.found, "Anomalies that it saw."),
        ("berth_maintenance_outcomes", "outcome", last.outcomes, "What was done about them."),
    ):
        page.family(name, "gauge", about)
        for key, number in sorted(numbers.items()):
            page.sample(name, ((label, key),), number)
