"""All checks of `berth doctor`: servers and keys, and what only some processes use."""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from infra import setting_names
from infra.database.engine import IDLE_IN_TRANSACTION_TIMEOUT_S, Database, is_pooled, open_engine
from infra.database.trading import instrument_loads, instruments, webhooks
from infra.doctor.measures import (
    CALENDAR_WARNING_S,
    CERTIFICATE_WARNING_S,
    MAX_CLOCK_OFFSET_S,
    MAX_LIMIT_USED_RATIO,
    MAX_MEMORY_USED_RATIO,
    MIN_DISK_FREE_BYTES,
    MIN_OPEN_FILES,
    calendar_end,
    certificate_ends,
    database_clock_offset,
    database_connections_ratio,
    day_of,
    open_files_limit,
    open_files_ratio,
    read_disks,
    read_valkey_state,
    valkey_clock_offset,
)
from infra.doctor.servers import (
    API_KEYS,
    BROKER,
    POSTGRESQL,
    TEMPORAL,
    USE_POOLER,
    VALKEY,
    Check,
    CheckResult,
    ServerRefuses,
    SettingRefused,
    run_check,
)
from infra.jobs.fleet import runner_config
from infra.launchers.registry import create_launcher
from infra.local import record
from infra.market.calendar import MarketCalendars, load_calendar
from infra.market.list_age import MAX_MISSED_DAYS, missed_trading_days
from infra.settings import Settings
from infra.valkey.client import connect_valkey
from infra.vault import key_pairs
from infra.vault.master_key import check_unwrapper
from infra.vault.secret_versions import load_versions
from worker_runtime.protocol.errors import BerthError


async def _orchestrator_keys(settings: Settings) -> None:
    key_pairs.OrchestratorKeys(settings.orchestrator_key_dir)
    load_versions(settings.message_key_file)
    await check_unwrapper(settings)
    if settings.master_kms_key:
        return
    ring = key_pairs.load_ring(settings.master_key_file, *settings.master_key_retired)
    public = settings.master_public_file
    if public.exists() and not ring.holds(key_pairs.load_public(public).key_id):
        raise SettingRefused(f"{public} is not the public half of {settings.master_key_file}")


async def _launcher(settings: Settings) -> None:
    launcher = create_launcher(settings)
    try:
        await launcher.list()
    finally:
        await launcher.close()


async def _delivery(settings: Settings) -> None:
    """Lets the runner itself try its mail server, as it will use it."""

    def sends(queue: str) -> bool:  # a fleet of another tier needs no way to
        return not {"*", queue}.isdisjoint(settings.jobs_queues)

    if settings.alert_mails and not settings.mail_host and sends("email"):
        raise SettingRefused("BERTH_ALERT_MAILS wants mails, and BERTH_MAIL_HOST names no server")
    if settings.alert_webhooks and not settings.webhook_key_file and sends("webhook"):
        raise SettingRefused(
            "BERTH_ALERT_WEBHOOKS wants webhooks, and BERTH_WEBHOOK_KEY_FILE names no key"
        )
    config, pipe = runner_config(settings), asyncio.subprocess.PIPE
    command = (sys.executable, "-P", "-m", "worker_runtime.jobs", "--check")
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        said, _ = await process.communicate(config)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        reason = said.decode(errors="replace").strip()
        raise (
            ConnectionError(reason)
            if reason.startswith("MAIL_DEFERRED")
            else SettingRefused(reason)
        )


class UnitUnconfirmed(BerthError, code="UNIT_UNCONFIRMED", retryable=True):
    """Nobody has confirmed whether the quantities of a webhook are shares or lots."""


async def _webhooks(settings: Settings) -> None:
    async with Database(settings.database_url, pool_size=1) as database:
        count = await database.fetch(webhooks.count_unconfirmed)
    if count:
        raise UnitUnconfirmed(
            f"{count} webhooks count lots, and nobody has confirmed that; TradingView "
            "sends shares: `berth webhooks list USER`, then `berth webhooks change USER ID "
            "--quantity-unit shares` or lots"
        )


async def _eviction(settings: Settings) -> None:
    async with connect_valkey(settings.valkey_url) as client:
        state = await read_valkey_state(client)
    if state.evicts:
        raise SettingRefused(
            f"its maxmemory-policy is {state.policy}: when its memory is full it deletes orders "
            "and marks. Set maxmemory-policy to noeviction in its configuration, and now: CONFIG "
            "SET maxmemory-policy noeviction"
        )


async def _persistence(settings: Settings) -> str:
    async with connect_valkey(settings.valkey_url) as client:
        state = await read_valkey_state(client)
    if state.failed_saves:
        raise ServerRefuses(
            f"its {state.failed_saves[0]} could not be written last time. Free space on its disk, "
            "or give it the right to write there; its own log names the cause"
        )
    if not state.is_kept:
        raise SettingRefused(
            "a restart loses all that is queued: it has neither an append-only file nor a replica. "
            "Set appendonly to yes in its configuration, and now: CONFIG SET appendonly yes"
        )
    return "it appends to a file" if state.appends else f"{state.replicas} replicas"


async def _memory(settings: Settings) -> str:
    async with connect_valkey(settings.valkey_url) as client:
        memory = (await read_valkey_state(client)).memory
    used = f"{_mebibytes(memory.used)} of {_mebibytes(memory.available)} are used"
    if not memory.limit:
        raise ServerRefuses(
            f"it has no maxmemory, so nothing is refused before its host's memory is full, and "
            f"the kernel ends it then; {used}. Set one below the host's memory: valkey-cli CONFIG "
            "SET maxmemory 1gb, and in its configuration"
        )
    if memory.share > MAX_MEMORY_USED_RATIO:
        raise ServerRefuses(
            f"{used}: new orders and workers are refused. Raise its maxmemory, or find what fills "
            "it: valkey-cli --bigkeys"
        )
    return used


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


async def _clocks(settings: Settings) -> str:
    offsets = {}
    async with connect_valkey(settings.valkey_url) as client:
        offsets["Valkey"] = await valkey_clock_offset(client)
    async with (
        open_engine(settings.database_url, pool_size=1) as engine,
        engine.connect() as connection,
    ):
        offsets["PostgreSQL"] = await database_clock_offset(connection)
    if wrong := [
        f"{name}'s by {offset:.1f} s"
        for name, offset in offsets.items()
        if offset > MAX_CLOCK_OFFSET_S
    ]:
        raise ServerRefuses(
            f"clocks differ from this machine's: {', '.join(wrong)}. Start a time service (chrony, "
            "systemd-timesyncd) on all hosts: deadlines of orders and signals are compared across "
            "them"
        )
    return f"they differ by at most {max(offsets.values()) * 1000:.0f} ms"


async def _disks(settings: Settings) -> str:
    disks = read_disks(settings)
    if low := [disk for disk in disks if disk.is_low]:
        raise ServerRefuses(
            "; ".join(
                f"the disk of {disk.folder} has {_mebibytes(disk.free_bytes)} and "
                f"{disk.inodes_free_ratio:.0%} of its places for files left"
                for disk in low
            )
            + f". Free at least {_mebibytes(MIN_DISK_FREE_BYTES)} and 1 % of the places: a full "
            "disk stops servers"
        )
    return ", ".join(f"{_mebibytes(disk.free_bytes)} free at {disk.folder}" for disk in disks)


async def _limits(settings: Settings) -> str:
    limit = open_files_limit()
    if limit < MIN_OPEN_FILES:
        raise ServerRefuses(
            f"a process started here may open {limit} files, and needs {MIN_OPEN_FILES}: `ulimit "
            "-n 65536`, or LimitNOFILE= of its service, before it is started"
        )
    used = {
        f"files of {entry.name}": open_files_ratio(entry.pid)
        for entry in record.read_records(settings.data_dir / "run")
        if record.start_ticks(entry.pid) is not None
    }
    async with connect_valkey(settings.valkey_url) as client:
        used["connections of Valkey"] = (await read_valkey_state(client)).connections_ratio
    async with (
        open_engine(settings.database_url, pool_size=1) as engine,
        engine.connect() as connection,
    ):
        used["connections of PostgreSQL"] = await database_connections_ratio(connection)
    if tight := {name: ratio for name, ratio in used.items() if ratio > MAX_LIMIT_USED_RATIO}:
        raise ServerRefuses(
            ", ".join(f"{ratio:.0%} of the {name} are in use" for name, ratio in tight.items())
            + ". Raise the limit (`ulimit -n`, Valkey's maxclients, PostgreSQL's max_connections), "
            "or find who holds so many"
        )
    return f"{limit} files for a process; at most {max(used.values()):.0%} of a limit is in use"


async def _calendar(settings: Settings) -> str:
    calendar = load_calendar(Path(settings.calendar_file) if settings.calendar_file else None)
    if calendar_end(calendar) - time.time() < CALENDAR_WARNING_S:
        end = calendar.first_end
        markets = ", ".join(name for name, last in calendar.ends.items() if last == end)
        raise SettingRefused(
            f"the holidays of {markets or 'the home markets'} are known until {end}; after that "
            "every weekday counts as a trading day. Install a newer release of Berth or of the "
            "broker's plug-in, or add the new year's holidays to the file that BERTH_CALENDAR_FILE "
            "names"
        )
    return f"holidays are known until {calendar.first_end}"


async def _instruments(settings: Settings) -> str:
    calendars = MarketCalendars(Path(settings.calendar_file) if settings.calendar_file else None)
    async with (
        Database(settings.database_url, pool_size=1) as database,
        database.session(autocommit=True) as session,
    ):
        sources = await instrument_loads.list_sources(session)
        removed = await instrument_loads.removed_sources(session)
        in_force = await instruments.lists_in_force(session)
        changes = await instrument_loads.open_changes(session)
    designated = {(source.broker, source.market) for source in sources}
    watched = [listed for listed in in_force if listed.sources & designated]
    old = [
        f"the list of {listed.broker}, market {listed.market}, is of {listed.trading_day}"
        for listed in watched
        if missed_trading_days(calendars, listed.broker, listed.trading_day, time.time())
        > MAX_MISSED_DAYS
    ]
    missing = designated.difference(*(listed.sources for listed in watched))
    old += [
        f"no list of {broker}, market {market}, was loaded" for broker, market in sorted(missing)
    ]
    old += [
        f"account {source.account_id} of {source.user_id}, which lists {source.broker}, market"
        f" {source.market}, was removed"
        for source in removed
    ]
    if changes:
        old.append(f"{len(changes)} changed lots wait: `berth instruments changes`")
    if old:
        raise ServerRefuses("; ".join(old) + ". `berth instruments source list` shows why")
    if not sources:
        return "no account lists instruments: brokers' records say what symbols mean"
    return ", ".join(
        f"{listed.broker}, market {listed.market}: of {listed.trading_day}" for listed in watched
    )


async def _certificates(settings: Settings) -> str:
    ends = certificate_ends(settings)
    if unread := [setting for setting, end in ends.items() if not end]:
        raise SettingRefused(
            f"the certificates of {', '.join(unread)} cannot be read, or are not PEM"
        )
    if late := {
        setting: end for setting, end in ends.items() if end - time.time() < CERTIFICATE_WARNING_S
    }:
        raise SettingRefused(
            "; ".join(
                f"the certificate or JWT of {setting} ends on {day_of(end)}"
                for setting, end in late.items()
            )
            + ". Put a new one in its place, and restart what reads it"
        )
    return f"the first ends on {day_of(min(ends.values()))}" if ends else "the settings name none"


async def _variables(_: Settings) -> None:
    """Names what the environment, the secret files and `.env` here have in vain."""
    unread = [*setting_names.unread_variables(), *setting_names.unread_in_file(Path(".env"))]
    if unread:
        raise SettingRefused(" ".join(dict.fromkeys(map(str, unread))))


VARIABLES = Check("settings", "docs/reference/settings.md", _variables, is_notice=True)
ORCHESTRATOR_KEYS = Check(
    "orchestrator-keys", "BERTH_MASTER_K…, BERTH_ORCHESTRATOR_KEY_DIR", _orchestrator_keys
)
LAUNCHER = Check("launcher", "BERTH_LAUNCHER, and its own", _launcher)
DELIVERY: Check = Check("delivery", "BERTH_MAIL_…, BERTH_WEBHOOK_KEY_FILE", _delivery)
WEBHOOKS = Check("webhooks", "their quantity_unit", _webhooks, is_notice=True)
#: Which database answers, and what a role needs behind a pooler.
_DATABASE = text(
    "select cast(pg_postmaster_start_time() as text) || current_database() as server,"
    " current_setting('jit') as jit,"
    " current_setting('idle_in_transaction_session_timeout') as idle,"
    " pg_backend_pid() as pid, current_user as role"
)


async def _pooler(settings: Settings) -> str:
    url = settings.database_url
    async with open_engine(url, pool_size=2) as engine, engine.connect() as connection:
        seen = (await connection.execute(_DATABASE)).one()
        raw: Any = (await connection.get_raw_connection()).driver_connection
        hidden = raw.get_server_pid() != seen.pid
        await connection.rollback()
        if not is_pooled(url):
            if not hidden:
                return "no pooler is between"
            if await _changes_servers(url, connection):
                raise SettingRefused(f"a pooler in transaction mode answers: {USE_POOLER}")
            return "a pooler in session mode is between"
    async with (
        open_engine(settings.session_database_url, pool_size=1) as direct,
        direct.connect() as session,
    ):
        theirs = (await session.execute(_DATABASE)).one()
        raw = (await session.get_raw_connection()).driver_connection
        if raw.get_server_pid() != theirs.pid and await _changes_servers(
            settings.session_database_url, session
        ):
            raise SettingRefused(
                "BERTH_DATABASE_DIRECT_URL leads to a pooler: locks and LISTEN need a session"
            )
    if theirs.server != seen.server:
        raise SettingRefused(
            "BERTH_DATABASE_DIRECT_URL leads to another database than BERTH_DATABASE_URL"
        )
    needed = {
        "jit": ("off", seen.jit),
        "idle_in_transaction_session_timeout": (f"{IDLE_IN_TRANSACTION_TIMEOUT_S}s", seen.idle),
    }
    wrong = [name for name, (value, current) in needed.items() if current != value]
    if wrong:
        alter = "; ".join(
            f"ALTER ROLE {seen.role} SET {name} = '{needed[name][0]}'" for name in wrong
        )
        raise SettingRefused(
            f"a pooler cannot set {' and '.join(wrong)} for us: {alter}; then RECONNECT in it"
        )
    return "a pooler in transaction mode is between"


async def _changes_servers(url: str, connection: AsyncConnection) -> bool:
    """Returns True if the server process of a connection is given to another one between its
    transactions."""
    await connection.rollback()
    before = await connection.scalar(text("select pg_backend_pid()"))
    await connection.rollback()
    async with open_engine(url, pool_size=1) as engine, engine.connect() as other:
        return bool(await other.scalar(text("select pg_backend_pid()")) == before)


VALKEY_EVICTION = Check("valkey-eviction", "Valkey's maxmemory-policy", _eviction)
VALKEY_PERSISTENCE = Check("valkey-persistence", "Valkey's appendonly and dir", _persistence)
VALKEY_MEMORY = Check("valkey-memory", "Valkey's maxmemory", _memory)
POOLER = Check("pooler", "BERTH_DATABASE_URL, BERTH_DATABASE_DIRECT_URL", _pooler)
CLOCKS = Check("clocks", "the hosts' time services", _clocks)
DISKS = Check("disks", "BERTH_DATA_DIR", _disks)
LIMITS = Check("limits", "ulimit -n, maxclients, max_connections", _limits)
CALENDAR = Check("calendar", "BERTH_CALENDAR_FILE", _calendar)
INSTRUMENTS = Check("instruments", "`berth instruments source`", _instruments)
CERTIFICATES = Check("certificates", "the files that they name", _certificates)
CHECKS = (
    POSTGRESQL,
    VALKEY,
    VALKEY_EVICTION,
    VALKEY_PERSISTENCE,
    VALKEY_MEMORY,
    TEMPORAL,
    API_KEYS,
    ORCHESTRATOR_KEYS,
    LAUNCHER,
    BROKER,
    DELIVERY,
    WEBHOOKS,
    POOLER,
    CLOCKS,
    DISKS,
    LIMITS,
    CALENDAR,
    INSTRUMENTS,
    CERTIFICATES,
    VARIABLES,
)


def examine(settings: Settings, names: Sequence[str] = ()) -> list[CheckResult]:
    """Runs all checks, or those of these names, at the same time."""

    async def run() -> list[CheckResult]:
        runs = [
            run_check(check, settings) for check in CHECKS if check.name in (names or (check.name,))
        ]
        return await asyncio.gather(*runs)

    return asyncio.run(run())
