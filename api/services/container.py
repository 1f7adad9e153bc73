"""The clients and services of one API process: made at its start, closed in turn at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from redis.asyncio import Redis
from sqlalchemy.exc import SQLAlchemyError

from api import log
from api.auth import Authenticator, Principal, Role
from api.services.answers import AnswerListener
from api.services.flights import Flights
from api.services.orders import OrderBook
from api.services.placing import OrderPlacing
from api.services.queue import RequestQueue
from api.services.readiness import Readiness
from api.services.settling import Settler
from api.services.workers import WorkerControl, WorkerStarter, connect
from infra import tasks, valkey
from infra.database import api_keys
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.migrate import migrate
from infra.settings import Settings
from infra.vault.master_key import KeyWrapper, load_public

#: Seconds a command may take before Valkey counts as down.
VALKEY_TIMEOUT = 2.0
#: Connections to Valkey: as many commands as can be under way at once in one process.
VALKEY_CONNECTIONS = 256
#: Seconds between two attempts to migrate while PostgreSQL is away.
MIGRATE_PERIOD = 0.5
#: Seconds that the start waits for the first attempt; other processes may migrate at the same time.
MIGRATE_PATIENCE = 10.0


@dataclass(frozen=True)
class Services:
    """What routes use."""

    settings: Settings
    database: Database
    valkey: Redis
    authenticator: Authenticator
    answers: AnswerListener
    placing: OrderPlacing
    book: OrderBook
    starter: WorkerStarter
    control: WorkerControl
    readiness: Readiness
    wrapper: KeyWrapper


class Schema:
    """Brings the database up to date, as soon as there is one to talk to."""

    def __init__(self, database_url: str) -> None:
        self._url = database_url
        self.ready = False
        #: Set after the first attempt, whatever came of it.
        self.tried = asyncio.Event()

    async def run(self) -> None:
        logger = log.logger()
        while not self.ready:
            try:
                await migrate(self._url)
                self.ready = True
                logger.info("database_migrated")
            except (OSError, SQLAlchemyError) as error:
                logger.warning("database_not_migrated", reason=type(error).__name__)
            finally:
                self.tried.set()
            if not self.ready:
                await asyncio.sleep(MIGRATE_PERIOD)


def authenticator(database: Database, schema: Schema, ttl: float) -> Authenticator:
    async def lookup(token: str) -> Principal | None:
        if not schema.ready:  # every request passes here: none meets a table that is not there yet
            raise DatabaseUnavailable("PostgreSQL: the schema is not up to date yet")
        async with database.session() as session:
            key = await api_keys.find(session, token)
        return Principal(str(key.id), Role(key.role), key.user_id) if key else None

    return Authenticator(lookup, ttl)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Services]:
    """All services, with the process ready to serve. No server needs to be up for it."""
    wrapper = load_public(settings.master_public_file)
    async with AsyncExitStack() as stack:
        database = Database(
            settings.database_url, pool_size=settings.database_pool, pool_wait=settings.database_pool_wait
        )
        stack.push_async_callback(database.close)
        client = valkey.connect(
            settings.valkey_url, socket_timeout=VALKEY_TIMEOUT, max_connections=VALKEY_CONNECTIONS
        )
        stack.push_async_callback(client.aclose)
        temporal = await connect(settings)

        schema = Schema(settings.database_url)
        migrating = asyncio.create_task(schema.run(), name="migrate")
        stack.push_async_callback(tasks.end, migrating)
        settler = Settler(database)
        settler.start()
        stack.push_async_callback(settler.close)
        answers = AnswerListener(client)
        stack.push_async_callback(answers.close)
        starter = WorkerStarter(temporal, settings)
        stack.push_async_callback(starter.close)
        flights = Flights(RequestQueue(client), answers, starter, settler)
        stack.push_async_callback(flights.close)

        await answers.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(MIGRATE_PATIENCE):
                await schema.tried.wait()
        control = WorkerControl(temporal)
        book = OrderBook(database, answers, settings.order_deadline)
        yield Services(
            settings=settings,
            database=database,
            valkey=client,
            authenticator=authenticator(database, schema, settings.api_key_cache),
            answers=answers,
            placing=OrderPlacing(database, answers, flights, book, deadline=settings.order_deadline),
            book=book,
            starter=starter,
            control=control,
            readiness=Readiness(database, client, control, lambda: schema.ready),
            wrapper=wrapper,
        )
