"""Tries the servers of the settings, with their logins, and the keys. Each process does so at its
start."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import structlog
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from sqlalchemy import text
from sqlalchemy.exc import ArgumentError

from infra.database.dead_letters import sqlstate_of
from infra.database.engine import open_engine
from infra.settings import Settings
from infra.temporal.connection import check_client, open_client
from infra.valkey.client import check_writable, connect_valkey
from infra.valkey.failures import explain_failure
from infra.vault.master_key import check_wrapper
from infra.vault.secret_versions import load_versions
from worker_runtime.protocol.errors import BerthError

#: Seconds for one check.
CHECK_TIMEOUT_S = 5.0
#: PostgreSQL's classes of codes for a login or a database that it does not take.
_REFUSED_LOGIN_CLASSES = ("28", "3D", "42")


#: What to do where a pooler answers.
USE_POOLER = (
    "add pooler=transaction to the query of BERTH_DATABASE_URL, and give PostgreSQL's own address "
    "in BERTH_DATABASE_DIRECT_URL (docs/how-to/pgbouncer.md)"
)


class SettingRefused(BerthError, code="SETTING_REFUSED"):
    """A setting is wrong. Correct it and start again."""


class ServerRefuses(BerthError, code="SERVER_REFUSES", retryable=True):
    """A server answers, but refuses what it is asked to do."""


class Check(NamedTuple):
    """`run` raises what is wrong; `settings` are those to look at then."""

    name: str
    settings: str
    #: It may return what is good to know though nothing is wrong.
    run: Callable[[Settings], Awaitable[str | None]]
    #: What it finds has to be known, and is nothing that is wrong.
    is_notice: bool = False


class CheckResult(NamedTuple):
    """`problem`: one sentence; empty: there is none. `wrong`: waiting does not help."""

    check: Check
    problem: str
    wrong: bool
    #: What is good to know though nothing is wrong.
    note: str = ""


async def run_check(
    check: Check, settings: Settings, timeout: float = CHECK_TIMEOUT_S
) -> CheckResult:
    try:
        async with asyncio.timeout(timeout):
            note = await check.run(settings)
    except TimeoutError:
        return CheckResult(check, f"no answer within {timeout:.0f} s", False)
    except BerthError as error:
        return CheckResult(check, error.detail, not error.retryable)
    except (ValueError, ArgumentError, ImportError) as error:  # its text may quote a password
        return CheckResult(
            check, f"the setting cannot be understood ({type(error).__name__})", True
        )
    except RedisError as error:
        return CheckResult(check, explain_failure(error), False)
    except Exception as error:  # of a library, whose server is away
        return CheckResult(check, f"cannot be used: {' '.join(str(error).split())[:300]}", False)
    return CheckResult(check, "", False, note or "")


async def log_problems(settings: Settings, *checks: Check) -> None:
    """Logs each as an error if waiting does not help, else as a warning."""
    log = structlog.get_logger()
    for result in await asyncio.gather(*(run_check(check, settings) for check in checks)):
        if result.problem:
            write = log.error if result.wrong else log.warning
            write(
                "check_failed",
                check=result.check.name,
                reason=result.problem,
                settings=result.check.settings,
            )


async def _postgresql(settings: Settings) -> None:
    try:
        async with (
            open_engine(settings.database_url, pool_size=1) as engine,
            engine.connect() as connection,
        ):
            await connection.execute(text("select 1"))
    except Exception as error:  # asyncpg's and SQLAlchemy's have no common class
        if "unsupported startup parameter" in str(error):
            raise SettingRefused(
                f"a pooler answers, and refuses our start-up parameters: {USE_POOLER}"
            ) from None
        if sqlstate_of(error).startswith(_REFUSED_LOGIN_CLASSES):
            raise SettingRefused(f"it refuses us: {getattr(error, 'orig', error)}") from None
        raise


async def _valkey(settings: Settings) -> None:
    try:
        async with connect_valkey(settings.valkey_url, socket_timeout=CHECK_TIMEOUT_S) as client:
            await check_writable(client)
            if (await client.info("cluster")).get("cluster_enabled"):
                raise SettingRefused(
                    "it is a cluster: our scripts use keys of several slots, so take one shard"
                )
            if settings.valkey_users:
                await client.acl_list()
    except (AuthenticationError, NoPermissionError) as error:
        raise SettingRefused(f"it refuses us: {error}") from None
    except ResponseError as error:
        raise ServerRefuses(explain_failure(error)) from None


async def _temporal(settings: Settings) -> None:
    await check_client(await open_client(settings), settings)


async def _broker(settings: Settings) -> None:
    if not settings.exchange_address:  # there is no paper exchange
        return
    host, _, port = settings.exchange_address.rpartition(":")
    if not host or not port.isdigit():
        raise SettingRefused(f"{settings.exchange_address!r} is no host:port")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()


async def _api_keys(settings: Settings) -> None:
    await check_wrapper(settings)
    for path in (settings.message_key_file, settings.api_secret_file):
        load_versions(path)


POSTGRESQL = Check("postgresql", "BERTH_DATABASE_URL", _postgresql)
VALKEY = Check("valkey", "BERTH_VALKEY_URL, BERTH_VALKEY_USERS", _valkey)
BROKER = Check("broker", "BERTH_EXCHANGE_ADDRESS", _broker)
TEMPORAL = Check("temporal", "BERTH_TEMPORAL_…", _temporal)
API_KEYS = Check(
    "api-keys",
    "BERTH_MASTER_KMS_KEY or …_PUBLIC_FILE, BERTH_MESSAGE_KEY_FILE, BERTH_API_SECRET_FILE",
    _api_keys,
)
