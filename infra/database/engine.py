"""The connections to PostgreSQL: two bounded pools, the time spent waiting for them, and
outages."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import asyncpg
from asyncpg.pool import PoolConnectionProxy
from sqlalchemy import URL, ClauseElement, event, make_url
from sqlalchemy.dialects.postgresql.asyncpg import dialect as asyncpg_dialect
from sqlalchemy.exc import DBAPIError, DisconnectionError, InterfaceError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.sql.compiler import SQLCompiler

from infra.database.liveness import MAX_AGE_S, ConnectionWatch, WatchedConnection
from infra.process_metrics import DATABASE_WAIT
from worker_runtime.protocol.errors import BerthError

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds that a transaction may wait for its own process, so that a process that is stopped or cut
#: off loses its locks. A claim holds its user's row while it asks Valkey, whose socket timeout is 5
#: s.
IDLE_IN_TRANSACTION_TIMEOUT_S = 20
#: Seconds after which a failed read is not repeated: a connection that died silently is found
#: within one.
REPEAT_READ_WITHIN_S = 1.9
#: How asyncpg connects. Seconds.
_CONNECT: dict[str, Any] = {
    "timeout": 5.0,  # a connect takes about 10 ms, but a busy host can stand still for 2 to 3 s
    "server_settings": {
        "application_name": "berth",
        "jit": "off",
        "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION_TIMEOUT_S}s",
    },
}
#: Single statements are planned once per connection, not again for the first five executions and
#: every five minutes: planning an acceptance takes 2 ms.
_CONNECT_SINGLE = {
    **_CONNECT,
    "command_timeout": 10.0,
    "max_cached_statement_lifetime": 0,
    "server_settings": {**_CONNECT["server_settings"], "plan_cache_mode": "force_generic_plan"},
}


#: Behind a pooler that gives each transaction another server connection. It refuses start-up
#: parameters that it does not know: the role has `jit` and the timeout then
#: (docs/how-to/pgbouncer.md). A prepared statement would be on another server connection when it is
#: used, so none outlives its transaction.
_CONNECT_POOLED: dict[str, Any] = {
    "timeout": 5.0,
    "server_settings": {"application_name": "berth"},
    "statement_cache_size": 0,
}


class DatabaseUnavailable(BerthError, code="DATABASE_UNAVAILABLE", retryable=True):
    """PostgreSQL does not answer."""


class OutcomeUnconfirmed(DatabaseUnavailable, code="DATABASE_OUTCOME_UNKNOWN", retryable=True):
    """PostgreSQL's answer was lost, so the request may or may not have been carried out. Send it
    again with the same ids: it is not carried out twice, and you get its outcome."""


class DatabaseUrlRefused(BerthError, code="DATABASE_URL_REFUSED"):
    """The URL of PostgreSQL asks for a TLS mode that Berth does not support."""


def is_pooled(database_url: str) -> bool:
    """Return True if the URL says that a pooler in transaction mode answers: `?pooler=transaction`.

    Raises `DatabaseUrlRefused` for another mode.
    """
    mode = make_url(database_url).query.get("pooler", "")
    if mode not in ("", "transaction"):
        raise DatabaseUrlRefused("pooler= knows `transaction` only; in session mode leave it out")
    return bool(mode)


def require_session(database_url: str) -> None:
    """Raises `DatabaseUrlRefused` for a pooler that changes servers: a lock would stay with one of
    them."""
    if is_pooled(database_url):
        raise DatabaseUrlRefused(
            "a session of its own is needed here: give PostgreSQL's own address, without pooler=, "
            "in BERTH_DATABASE_DIRECT_URL (or BERTH_DATABASE_OWNER_URL, if that is set)"
        )


def parse_url(database_url: str) -> tuple[URL, dict[str, Any]]:
    """Returns the URL without libpq's `sslmode` and `sslrootcert`, and asyncpg's argument `ssl` in
    their place.

    Also without our own `pooler`.

    With `sslrootcert`, a file or `system`, the server has to prove the host's name to these
    authorities. Raises `DatabaseUrlRefused`.
    """
    url = make_url(database_url)
    mode, authorities = (str(url.query.get(name, "")) for name in ("sslmode", "sslrootcert"))
    url = url.difference_update_query(["sslmode", "sslrootcert", "pooler"])
    if not authorities:
        return url, {"ssl": mode} if mode else {}
    if mode not in ("", "verify-full"):
        raise DatabaseUrlRefused(f"sslrootcert goes with sslmode=verify-full, not with {mode}")
    try:
        return url, {
            "ssl": ssl.create_default_context(
                cafile=None if authorities == "system" else authorities
            )
        }
    except OSError as error:
        raise DatabaseUrlRefused(f"sslrootcert {authorities}: {type(error).__name__}") from None


def connection_watch(url: str) -> ConnectionWatch:
    """Returns the watch over all connections to one database."""
    if is_pooled(url):
        return ConnectionWatch(None)

    async def connect() -> asyncpg.Connection:
        return await asyncpg.connect(**_asyncpg_arguments(url), **_CONNECT)

    return ConnectionWatch(connect)


def _asyncpg_arguments(url: str) -> dict[str, Any]:
    """Returns asyncpg's arguments for an address in SQLAlchemy's words."""
    place, tls = parse_url(url)
    query: dict[str, Any] = dict(place.query)
    # SQLAlchemy's name of the setting; 0 behind a pooler that changes servers.
    cache_size = int(query.pop("prepared_statement_cache_size", 100))
    query.pop("prepared_statement_name_func", None)
    dsn = place.set(drivername="postgresql", query={}).render_as_string(hide_password=False)
    return {"dsn": dsn, "statement_cache_size": cache_size, **query, **tls}


def create_engine(
    url: str,
    *,
    pool_size: int = 8,
    pool_wait: float = 2.0,
    command_timeout: float | None = 10.0,
    watch: ConnectionWatch | None = None,
) -> AsyncEngine:
    """Creates an engine with at most `pool_size` connections; a caller waits `pool_wait` seconds
    for one.

    `command_timeout`: seconds that a statement may take; None: for ever. `watch`: of another pool
    to the same database.

    A connection that was used a moment ago is not asked before use, which would cost each order a
    round trip: `ConnectionWatch` finds out if it is dead.
    """
    place, tls = parse_url(url)
    watch = watch or connection_watch(url)
    # SQLAlchemy's own cache of prepared statements is off then, too.
    connect = (
        {**_CONNECT_POOLED, "prepared_statement_cache_size": 0} if is_pooled(url) else _CONNECT
    )
    engine = create_async_engine(
        place,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=pool_wait,
        pool_pre_ping=False,
        pool_use_lifo=True,
        pool_recycle=round(1.25 * MAX_AGE_S),
        connect_args={
            **connect,
            "command_timeout": command_timeout,
            "connection_class": WatchedConnection,
            **tls,
        },
    )
    _watch_engine(engine, watch)
    return engine


def _watch_engine(engine: AsyncEngine, watch: ConnectionWatch) -> None:
    """Tells the watch of all that this engine's connections do."""

    def before_use(adapted: Any, _record: Any, _proxy: Any) -> None:
        connection: WatchedConnection = adapted.driver_connection
        outdated = watch.is_outdated(connection)
        if outdated or (watch.needs_check(connection) and not adapted.run_async(watch.answers)):
            connection.terminate()
            raise DisconnectionError  # the pool replaces it

    def after_use(adapted: Any, _record: Any) -> None:
        if adapted is not None:
            watch.ended(adapted.driver_connection)
            adapted.driver_connection.used_at = time.monotonic()

    def before_close(adapted: Any, _record: Any) -> None:
        # Its farewell would wait 10 s for a server that is gone.
        adapted.driver_connection.terminate()

    def before_statement(connection: Any, *_: object) -> None:
        watch.began(connection.connection.driver_connection)

    def after_statement(connection: Any, *_: object) -> None:
        watch.ended(connection.connection.driver_connection)

    def after_error(context: Any) -> None:
        connection = context.connection
        if connection is not None and not connection.closed and not connection.invalidated:
            after_statement(connection)

    events: dict[str, Callable[..., None]] = {
        "checkout": before_use,
        "checkin": after_use,
        "close": before_close,
        "before_cursor_execute": before_statement,
        "after_cursor_execute": after_statement,
        "handle_error": after_error,
    }
    for name, listener in events.items():
        event.listen(engine.sync_engine, name, listener)


@asynccontextmanager
async def open_engine(url: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    """Opens an engine by `create_engine`; closes its connections behind the block."""
    engine = create_engine(url, **options)
    try:
        yield engine
    finally:
        await engine.dispose()


@contextmanager
def outages_named() -> Iterator[None]:
    """Raises `DatabaseUnavailable` in place of errors that mean PostgreSQL cannot be reached."""
    try:
        yield
    except Exception as error:
        if (outage := outage_of(error)) is not None:
            raise outage from error
        raise


def is_outage(error: BaseException | None) -> bool:
    """Returns True if the error means a lost or refused connection, and not an error of the
    statement.

    These are SQLSTATE classes 08 (connection), 53 (out of resources) and 57P (shutting down,
    starting), and asyncpg's own error for a connection that ended.
    """
    if isinstance(error, asyncpg.InterfaceError):
        return not isinstance(error, ValueError)  # asyncpg's error for a value that it cannot send
    state = str(getattr(error, "sqlstate", "") or "")
    return state[:2] in {"08", "53"} or state[:3] == "57P"


def outage_of(error: Exception) -> DatabaseUnavailable | None:
    """Returns the `DatabaseUnavailable` that the error means, or None if it is another error."""
    match error:
        case OSError() | PoolTimeout() | InterfaceError():
            return DatabaseUnavailable(f"PostgreSQL: {type(error).__name__}")
        case asyncpg.InterfaceError() | asyncpg.PostgresError() if is_outage(error):
            return DatabaseUnavailable(f"PostgreSQL: {type(error).__name__}")
        case DBAPIError() if error.connection_invalidated or is_outage(error.orig):
            return DatabaseUnavailable(f"PostgreSQL: {type(error.orig).__name__}")
    return None


async def _keep_settings(_: asyncpg.Connection) -> None:
    """Replaces asyncpg's reset: single statements leave nothing behind on a connection."""


def _driver_connection(connection: AsyncConnection) -> WatchedConnection:
    raw = connection.sync_connection
    assert raw is not None  # noqa: S101 - it is open
    watched: WatchedConnection = raw.connection.driver_connection  # type: ignore[assignment]
    return watched


def _watched(held: PoolConnectionProxy) -> WatchedConnection:
    """Returns the connection behind a pool's stand-in for it."""
    connection = getattr(held, "_con")  # noqa: B009 - asyncpg's types do not have it
    assert isinstance(connection, WatchedConnection)  # noqa: S101 - the pool's `connection_class`
    return connection


class SingleRow(asyncpg.Record):
    """A row of a single statement; its columns are attributes, too.

    An ORM object of the 29 columns of an order took 0.1 ms of an order's 2.8 ms, before it could be
    queued.
    """

    def __getattr__(self, name: str) -> Any:
        return self[name]


class SingleStatement:
    """One statement compiled for asyncpg, for `Database.row`."""

    def __init__(self, statement: ClauseElement) -> None:
        compiled = statement.compile(dialect=asyncpg_dialect())  # type: ignore[no-untyped-call]
        assert isinstance(compiled, SQLCompiler)  # noqa: S101 - the type of that dialect's compiler
        self.text = str(compiled)
        self._names = tuple(compiled.positiontup or ())

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        return [values[name] for name in self._names]


class Turns:
    """Lets callers at a pool's connections in the order in which they came.

    Both pools give a free connection to a newcomer before those who wait. With 64 callers at once
    p99 of the waits was 0.9 s, and some waited for more than 2 s; in turn it is 0.5 s, and nobody
    waits for longer.
    """

    def __init__(self, connections: int, patience: float) -> None:
        self._free = asyncio.Semaphore(connections)
        self._patience = patience

    async def __aenter__(self) -> None:
        """Raises `TimeoutError` after `patience` seconds."""
        if not self._free.locked():
            await self._free.acquire()
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._free.acquire()
        except TimeoutError:
            DATABASE_WAIT.observe(self._patience)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._free.release()


class Database:
    """PostgreSQL for repositories: sessions of one transaction each, and single statements."""

    def __init__(
        self, url: str, *, pool_size: int = 8, pool_wait: float = 2.0, **options: Any
    ) -> None:
        self._watch = connection_watch(url)
        self.engine = create_engine(
            url, pool_size=pool_size, pool_wait=pool_wait, watch=self._watch, **options
        )
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)
        #: A statement is prepared and then run. Outside of a transaction a pooler would do that on
        #: two server connections, so that another client's statement may be run in its place.
        self._pooled = is_pooled(url)
        # Same pool, other isolation level.
        single = (
            self.engine
            if self._pooled
            else self.engine.execution_options(isolation_level="AUTOCOMMIT")
        )
        self._singles = async_sessionmaker(single, expire_on_commit=False)
        self._url = url
        self._size = pool_size
        self._pool_wait_limit = pool_wait
        self._turns, self._single_turns = Turns(pool_size, pool_wait), Turns(pool_size, pool_wait)
        self._single_pool: asyncpg.Pool | None = None

    @asynccontextmanager
    async def session(self, *, autocommit: bool = False) -> AsyncIterator[AsyncSession]:
        """Opens a transaction: committed at the end, rolled back on an error.

        With `autocommit` each statement is a transaction of its own, which saves the round trips of
        BEGIN and COMMIT; behind a pooler it is one transaction all the same.

        Raises `DatabaseUnavailable` if no connection is free in time or the connection breaks: then
        nothing was committed; `OutcomeUnconfirmed` if it breaks while the transaction is committed.
        """
        committing = False
        autocommit = autocommit and not self._pooled
        try:
            with outages_named():
                sessions = self._singles if autocommit else self._sessions
                started = time.perf_counter()
                async with self._turns, sessions() as session, session.begin():
                    connection = await session.connection()
                    DATABASE_WAIT.observe(time.perf_counter() - started)
                    yield session
                    if not autocommit and session.in_transaction():  # the caller may have committed
                        # At commit the session would send what it holds back, and the watch would
                        # take the end of that for the end of the commit.
                        await session.flush()
                        committing = True
                        # The watch lasts until the connection is back in its pool.
                        self._watch.began(_driver_connection(connection))
        except DatabaseUnavailable as error:
            if committing:
                raise OutcomeUnconfirmed(error.detail) from error
            raise

    async def fetch(
        self,
        function: Callable[Concatenate[AsyncSession, P], Awaitable[T]],
        *args: P.args,
        **named: P.kwargs,
    ) -> T:
        """Returns what a repository's function reads; each of its statements is a transaction of
        its own.

        Raises as `session` does.
        """
        async with self.session(autocommit=True) as session:
            return await function(session, *args, **named)

    async def read(
        self,
        function: Callable[Concatenate[AsyncSession, P], Awaitable[T]],
        *args: P.args,
        **named: P.kwargs,
    ) -> T:
        """Fetches with a function that only reads; repeats it once if its connection had died
        silently."""
        began = time.monotonic()
        try:
            return await self.fetch(function, *args, **named)
        except DatabaseUnavailable:
            if time.monotonic() - began > REPEAT_READ_WITHIN_S:
                raise
        return await self.fetch(function, *args, **named)

    async def write(
        self,
        function: Callable[Concatenate[AsyncSession, P], Awaitable[T]],
        *args: P.args,
        **named: P.kwargs,
    ) -> T:
        """Calls a function that changes something, in one transaction."""
        async with self.session() as session:
            return await function(session, *args, **named)

    async def row(self, single: SingleStatement, values: Mapping[str, Any]) -> SingleRow | None:
        """Runs one statement as a transaction of its own and returns its first row.

        It uses asyncpg's pool: SQLAlchemy's took 0.5 ms of the 1.3 ms of an order's acceptance.
        Raises `DatabaseUnavailable` if the statement was not sent, and `OutcomeUnconfirmed` if it
        may have run.
        """
        with outages_named():
            pool = self._single_pool or await self._open_single_pool()
            started = time.perf_counter()
            async with self._single_turns:
                held = await self._take_single(pool)
                try:
                    DATABASE_WAIT.observe(time.perf_counter() - started)
                    return await self._run_single(held, single, values)
                finally:
                    await pool.release(held)

    async def _run_single(
        self, held: PoolConnectionProxy, single: SingleStatement, values: Mapping[str, Any]
    ) -> SingleRow | None:
        connection = _watched(held)
        arguments = single.arguments(values)
        self._watch.began(connection)
        try:
            async with connection.transaction() if self._pooled else nullcontext():
                row = await connection.fetchrow(single.text, *arguments, record_class=SingleRow)
        except Exception as error:
            if (outage := outage_of(error)) is None:
                raise
            connection.terminate()
            raise OutcomeUnconfirmed(outage.detail) from error
        finally:
            self._watch.ended(connection)
        connection.used_at = time.monotonic()
        return row

    async def _take_single(self, pool: asyncpg.Pool) -> PoolConnectionProxy:
        """Takes a connection that is fit for use; replaces others."""
        while True:
            held = await pool.acquire(timeout=self._pool_wait_limit)
            connection = _watched(held)
            try:
                if not self._watch.is_outdated(connection) and (
                    not self._watch.needs_check(connection) or await self._watch.answers(connection)
                ):
                    return held
            except BaseException:
                await pool.release(held)
                raise
            connection.terminate()
            await pool.release(held)

    async def _open_single_pool(self) -> asyncpg.Pool:
        """Opens the pool at the first statement; it never waits, since `min_size=0` opens no
        connection."""
        connect = _CONNECT_SINGLE
        if self._pooled:
            connect = {**_CONNECT_POOLED, "command_timeout": _CONNECT_SINGLE["command_timeout"]}
        self._single_pool = asyncpg.create_pool(
            min_size=0,
            max_size=self._size,
            max_inactive_connection_lifetime=0,
            reset=_keep_settings,
            connection_class=WatchedConnection,
            **{**_asyncpg_arguments(self._url), **connect},
        )
        await self._single_pool
        return self._single_pool

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._watch.close()
        if self._single_pool is not None:
            self._single_pool.terminate()
        await self.engine.dispose()
