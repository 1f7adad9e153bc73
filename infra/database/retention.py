"""Deletes old rows: for each table that grows, a setting says how long its rows are kept.

Tables that are not here hold what is there (a user, an account, a switch), and a row goes with it.
Docs and a test list all tables: docs/reference/retention.md.
"""

import asyncio
from datetime import UTC, datetime, timedelta
from importlib.resources import files

import structlog
from sqlalchemy import text

from infra.database.engine import Database
from infra.settings import Settings
from worker_runtime.protocol.messages import FINAL_ORDER_STATES

#: Rows of one transaction, and seconds between two rounds.
ROWS_PER_TRANSACTION, PURGE_INTERVAL_S = 1000, 3600.0

_OLD = """
delete from {0}
 where ctid = any(array(select ctid from {0} where {1} limit :rows for update skip locked))
"""
_ENDED = ", ".join(f"'{state.value}'" for state in FINAL_ORDER_STATES)
_ORDERS = (
    (files("infra.database") / "orders" / "old_orders.sql")
    .read_text("utf-8")
    .replace("ENDED", _ENDED)
)

#: Table → field of the settings (days), and the condition, or the whole statement, of what is
#: deleted. Launches and assignments of workers go together (`workers/launches.py`).
PURGED = {
    "orders": ("order_days", _ORDERS),
    "order_tags": ("order_days", "trading_day < :before"),
    # No window of the checks is longer than a day.
    "order_twins": ("dead_letter_days", "at < greatest(:before, now() - interval '1 day')"),
    "reconciliations": (
        "order_days",
        "resolved_at < :before and (resolved_by = 'reconciliation'"
        " or not differences ?| array['positions', 'odd_shares'])",
    ),
    "daily_reports": ("order_days", "until < :before"),
    # A trigger keeps what is younger than a year, whoever asks.
    "audit_trail": ("audit_days", "at < :before"),
    "api_keys": (
        "audit_days",
        "least(revoked_at, expires_at) < :before "
        "and not exists (select from api_keys s where s.session_of = api_keys.id)",
    ),
    "webhooks": ("audit_days", "least(revoked_at, expires_at) < :before"),
    "daily_acts": ("dead_letter_days", "day < least(:before, now() - interval '2 days')"),
    "webhook_calls": ("alert_days", "received_at < :before and completed_at is not null"),
    "webhook_deliveries": ("alert_days", "at < :before and held_until is null"),
    "worker_transitions": ("worker_history_days", "recorded_at < :before"),
    # Orchestrators renew those of their release; no worker of another one is so old.
    "worker_scripts": (
        "worker_history_days",
        "seen_at < least(:before, now() - interval '90 days')",
    ),
    "failed_logins": ("dead_letter_days", "at < :before"),
    "maintenance_passes": ("dead_letter_days", "began_at < :before"),
    "dead_letters": ("dead_letter_days", "last_at < :before"),
    "entity_findings": ("dead_letter_days", "seen_at < :before"),
    "instruments": ("worker_history_days", "not listed and loaded_on < :before"),
    # The last list of each market that went through says how old it is.
    "instrument_loads": (
        "worker_history_days",
        "began_at < :before and id not in"
        " (select max(id) from instrument_loads where state = 'loaded'"
        " group by broker, market, markets)",
    ),
    "instrument_changes": ("audit_days", "resolved_at < :before"),
    "kept_jobs": (
        "dead_letter_days",
        # An application may have hundreds of jobs a second.
        "outcome is not null and (ended_at < :before or (user_id like 'app:%'"
        " and outcome <> 'failed' and ended_at < now() - interval '1 day'))",
    ),
}

log = structlog.get_logger()


async def purge(database: Database, settings: Settings) -> dict[str, int]:
    """Deletes what is too old; table → rows. Safe to repeat, also at once. Raises
    `DatabaseUnavailable`."""
    counts = {}
    for table, (setting, description) in PURGED.items():
        before = datetime.now(UTC) - timedelta(days=getattr(settings, setting))
        statement = description if "delete" in description else _OLD.format(table, description)
        counts[table] = 0
        while True:
            async with database.session() as session:
                done = await session.execute(
                    text(statement), {"before": before, "rows": ROWS_PER_TRANSACTION}
                )
            counts[table] += (gone := int(getattr(done, "rowcount", 0)))
            if gone < ROWS_PER_TRANSACTION:
                break
    return {table: count for table, count in counts.items() if count}


async def purge_each_hour(database: Database, settings: Settings) -> None:
    """Purges old rows each hour, in a background loop."""
    while True:
        try:
            if counts := await purge(database, settings):
                log.info("old_rows_deleted", **counts)
        except Exception as error:  # the boundary of a loop: a server is away
            log.warning("old_rows_not_deleted", error=type(error).__name__, reason=str(error)[:200])
        await asyncio.sleep(PURGE_INTERVAL_S)
