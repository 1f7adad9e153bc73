"""`berth restore`: after PostgreSQL came back as it was at an earlier moment, by a backup or a
failover.

What is newer than that moment is lost to PostgreSQL, not to the broker, nor to Valkey. So nothing
may begin again with numbers that were used since, and what was under way is asked of the broker.
Safe to repeat; it is run while API and orchestrators are stopped.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from uuid import uuid4

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import ARRAY, String, bindparam, func, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database import audit
from infra.database.engine import Database
from infra.database.migrate import SchemaCheck
from infra.database.models import ApiKey
from infra.database.orders.states import OPEN_STATES, RANK
from infra.database.trading import switches
from infra.database.trading.switches import TradingScope
from infra.launchers.registry import create_launcher
from infra.market.calendar import HOME_ZONE_NAME
from infra.settings import Settings
from infra.temporal.connection import check_client, open_client
from infra.temporal.executions import terminate_workflows
from infra.valkey import client as valkey
from infra.valkey.failures import explain_failure
from infra.vault.secret_versions import add_version
from infra.worker_task import LauncherUnreachable, StopFailed
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.requests import SwitchState

#: Stops at the same time, and how often the list of workers is read until it is empty.
MAX_CONCURRENT_STOPS, MAX_ROUNDS = 20, 5
#: Seconds that are waited for a worker whose end nobody confirmed: its mark's life and 10 s more
#: (one-owner).
UNCONFIRMED_WAIT_S = keys.MARK_TTL_S + 10.0
#: Seconds that connections of stopped servers get to be gone.
LEAVE_TIMEOUT_S = 3.0
#: Why workers and workflows are ended.
REASON = "the database was restored"

log = structlog.get_logger()


@dataclass(kw_only=True)
class RestoreReport:
    """Reports what was found and done."""

    #: About when the restored data ends; None: there is none.
    data_until: str | None = None
    generation: str = ""
    stopped: int = 0
    #: Workers whose end was not confirmed: they were fenced by time.
    unconfirmed: list[str] = field(default_factory=list)
    workflows: int = 0
    #: Orders that were open in the restored data: the broker is asked about each.
    orders: int = 0
    #: Users who may have traded since: their accounts are to be compared with the broker's.
    users: list[str] = field(default_factory=list)
    #: Users whom Valkey knows and PostgreSQL does not: they were added since.
    lost_users: list[str] = field(default_factory=list)
    #: API keys that ended, with all webhooks' addresses; None: they were not to.
    api_keys: int | None = None


async def restore(
    settings: Settings, reason: str, actor: str, *, rotate_api: bool = False
) -> RestoreReport:
    """Raises `BerthError`: run it again then. Trading stays halted until an operator opens it.

    `rotate_api`: all API keys and webhooks' addresses end, because the restored data holds some as
    valid that were revoked since.
    """
    if not await SchemaCheck(settings.session_database_url).passes():
        raise BerthError(
            "the schema of the restored database is older than this release: run `berth migrate`"
        )
    report = RestoreReport(generation=uuid4().hex)
    database = Database(settings.session_database_url, pool_size=1, command_timeout=None)
    client = valkey.connect_valkey(settings.valkey_url)
    try:
        await client.ping()
        async with database.session(autocommit=True) as session:
            await _check_alone(session)
        async with database.session() as session:
            await switches.put_switch(
                session, TradingScope(), SwitchState.HALTED, actor=actor, reason=reason
            )
            until: datetime | None = await session.scalar(DATA_UNTIL)
            report.data_until = None if until is None else until.isoformat()
        owners = await _owners(client)
        await _stop_workers(settings, report)
        await _wait_for_marks(client, owners)
        await client.set(keys.GENERATION, report.generation)
        temporal = await open_client(settings)
        await check_client(temporal, settings)
        report.workflows = await terminate_workflows(temporal, REASON)
        # Last, in one transaction: until it commits, a repeat finds the same users.
        async with database.session() as session:
            await _move_ahead(session, report, owners)
            if rotate_api:
                report.api_keys = await end_api_access(session, settings.api_secret_file)
            data = asdict(report)
            audit.append_entry(
                session, actor, "database.restored", "database", reason=reason, **data
            )
    except (RedisError, OSError) as error:
        raise BerthError(f"{explain_failure(error)} Nothing is lost; run it again.") from error
    finally:
        await client.aclose()
        await database.close()
    return report


async def end_api_access(session: AsyncSession, secret_file: Path) -> int:
    """Ends all API keys, and makes a new API secret, under which no token of before counts; returns
    how many keys were valid.

    The secret first: if the transaction fails, the keys are dead all the same, and a repeat ends
    them. Raises what `load_versions` does.
    """
    add_version(secret_file, keep=1)
    ended = (
        update(ApiKey).where(ApiKey.revoked_at.is_(None)).values(revoked_at=func.clock_timestamp())
    )
    return len((await session.scalars(ended.returning(ApiKey.id))).all())


async def _check_alone(session: AsyncSession) -> None:
    """Raises `BerthError` while one of our servers is connected: it would continue by what it
    remembers.

    The session is in no transaction, which would see the same connections again.
    """
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    while count := await session.scalar(_OTHERS):
        if time.monotonic() > deadline:
            raise BerthError(
                f"{count} connections of Berth: stop the API and the orchestrators first"
            )
        await asyncio.sleep(0.2)


_OTHERS = text(
    "select count(*) from pg_stat_activity where datname = current_database() "
    "and application_name = 'berth' and pid <> pg_backend_pid()"
)
#: By indexes: reading all events took longer than a statement may.
DATA_UNTIL = text(
    "select greatest((select at from audit_trail order by id desc limit 1), (select max(last) from "
    "unnest(:states) as of (state), lateral (select max(updated_at) as last from orders where "
    "orders.state = of.state) as orders_of), (select max(began_at) from maintenance_passes), "
    "(select recorded_at from worker_transitions order by id desc limit 1))"
).bindparams(bindparam("states", [*RANK], type_=ARRAY(String)))
#: Epochs and numbers of orders were used that these tables do not know. Both continue above all of
#: them: an epoch at the Unix time in seconds (no user has one a second), an order's number in the
#: upper half of its day's.
_AHEAD: Sequence[str] = (
    "select setval('epoch_floor', greatest(last_value, extract(epoch from "
    "clock_timestamp())::bigint)) "
    "from epoch_floor",
    "update users set epoch = greatest(epoch, (select last_value from epoch_floor))",
    "update worker_sessions set ended_at = clock_timestamp(), end_reason = 'the database was "
    "restored' "
    "where ended_at is null",
    # The zone's name is from a record of ours.
    "insert into order_tags (user_id, account_id, trading_day, last) "  # noqa: S608
    "select user_id, account_id, today.day, today.half from broker_accounts, (select "
    "at.now::date as day, "
    "839808 + 9 * cast(extract(epoch from at.now - at.now::date) as bigint) as half "
    f"from (select clock_timestamp() at time zone '{HOME_ZONE_NAME}' as now) as at) as today "
    "on conflict (user_id, account_id, trading_day) "
    "do update set last = greatest(order_tags.last, excluded.last)",
)
_OPEN_ORDERS = text("update orders set verify_at = clock_timestamp() where state = any(:states)")
_USERS = text(
    "select u.id, u.epoch, exists "
    "(select from worker_sessions s where s.user_id = u.id and s.ended_at is null) from users u"
)


async def _owners(client: Redis) -> dict[str, int]:
    """Returns the users of Valkey's owner keys, with the epochs that Valkey knows."""
    owners: dict[str, int] = {}
    prefix, _, suffix = keys.owner("\0").partition("\0")
    async for name in client.scan_iter(f"{prefix.replace('{', '[{]')}*", count=1000):
        user_id = valkey.text_of(name).removeprefix(prefix).removesuffix(suffix)
        owners[user_id] = valkey.number_of(
            await valkey.reply_of(client.hget(keys.owner(user_id), "epoch"))
        )
    return owners


async def _move_ahead(session: AsyncSession, report: RestoreReport, owners: dict[str, int]) -> None:
    before = {row[0]: (int(row[1]), bool(row[2])) for row in await session.execute(_USERS)}
    report.users = sorted(
        user_id
        for user_id, (epoch, serving) in before.items()
        if serving or owners.get(user_id, 0) > epoch
    )
    report.lost_users = sorted(owners.keys() - before.keys())
    for statement in _AHEAD:
        await session.execute(text(statement))
    result = await session.execute(_OPEN_ORDERS, {"states": list(OPEN_STATES)})
    report.orders = int(getattr(result, "rowcount", 0))


async def _stop_workers(settings: Settings, report: RestoreReport) -> None:
    """Stops all workers that are listed, and waits for those whose end nobody confirms."""
    launcher, turns = create_launcher(settings), asyncio.Semaphore(MAX_CONCURRENT_STOPS)
    ended: set[str] = set()

    async def stop(task_id: str) -> None:
        async with turns:
            try:
                if await launcher.stop(task_id, REASON):
                    ended.add(task_id)
            except (StopFailed, LauncherUnreachable) as error:
                log.warning("worker_not_stopped", task=task_id, code=error.code)

    try:
        asked: set[str] = set()
        for _ in range(MAX_ROUNDS):  # a listing may lag
            listed = {task.task_id for task in await launcher.list()} - ended
            if not listed:
                break
            asked |= listed
            await asyncio.gather(*(stop(task_id) for task_id in listed))
    finally:
        await launcher.close()
    report.stopped, report.unconfirmed = len(ended), sorted(asked - ended)
    if report.unconfirmed:
        log.warning(
            "waits_for_unconfirmed_workers", seconds=UNCONFIRMED_WAIT_S, tasks=report.unconfirmed
        )
        await asyncio.sleep(UNCONFIRMED_WAIT_S)


async def _wait_for_marks(client: Redis, owners: dict[str, int]) -> None:
    """Raises `BerthError` if a worker lives on that the launcher did not list: it renews its
    mark."""
    deadline = time.monotonic() + UNCONFIRMED_WAIT_S
    while alive := [user_id for user_id in owners if await client.exists(keys.mark(user_id))]:
        if time.monotonic() > deadline:
            raise BerthError(
                f"the launcher does not list the workers of {', '.join(alive[:20])}, and they live "
                "on: stop them by hand, and run it again"
            )
        await asyncio.sleep(0.5)


def told(report: RestoreReport) -> str:
    lost = (
        f"\nadded since, to be added again: {', '.join(report.lost_users)}"
        if report.lost_users
        else ""
    )
    ended = (
        ""
        if report.api_keys is None
        else f"ended {report.api_keys} API keys and all webhooks' addresses: `berth up` or "
        "`prepare` makes an administrator's key; copy the API secret to the other hosts\n"
    )
    return (
        f"trading is halted; the data ends at {report.data_until or 'nothing'}\n"
        f"stopped {report.stopped} workers, {len(report.unconfirmed)} more without a confirmation\n"
        f"ended {report.workflows} workflows; {report.orders} open orders are asked of the broker\n"
        f"may have traded since: {', '.join(report.users) or 'nobody'}{lost}\n"
        f"{ended}Next: start orchestrators and API, then the workers of these users (`berth worker "
        "start`), look at what differs, and open trading (docs/how-to/restore.md)"
    )
