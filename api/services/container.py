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
from api.services import checks
from api.services.alert_keeper import AlertKeeper
from api.services.answers import AnswerListener
from api.services.asking import Asking
from api.services.changing import OrderChanging
from api.services.closing import PositionClosing
from api.services.control import WorkerControl
from api.services.fleet import FleetList
from api.services.flights import Flights
from api.services.intents import Intents
from api.services.jobs import Jobs
from api.services.notices import Notices
from api.services.orders import OrderBook
from api.services.placing import OrderPlacing
from api.services.pools import PoolControl
from api.services.portfolio import Portfolio
from api.services.readiness import Readiness
from api.services.rollouts import RolloutControl
from api.services.settling import Settler
from api.services.streams import Streams
from api.services.switchboard import Switchboard
from api.services.upkeep import Upkeep
from api.services.waiting import Waiting
from api.services.webhooks import WebhookDesk
from api.services.workers import connect
from infra import tasks, valkey
from infra.database import api_keys, order_changes, timeline
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.migrate import migrate
from infra.job_desk import JobDesk
from infra.request_queue import RequestQueue
from infra.settings import Settings
from infra.vault.master_key import KeyWrapper, load_public
from workflows.starting import WorkerStarter

#: Seconds a command may take before Valkey counts as down: as in the orchestrator. A Valkey that is gone is
#: found out at once; only one that stands still is waited for, and a busy host does so for 2 to 3 s.
VALKEY_TIMEOUT = 5.0
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
    asking: Asking
    changing: OrderChanging
    portfolio: Portfolio
    closing: PositionClosing
    intents: Intents
    book: OrderBook
    starter: WorkerStarter
    control: WorkerControl
    fleet: FleetList
    pools: PoolControl
    jobs: Jobs
    rollouts: RolloutControl
    upkeep: Upkeep
    notices: Notices
    streams: Streams
    readiness: Readiness
    wrapper: KeyWrapper
    switchboard: Switchboard
    webhooks: WebhookDesk


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
        starter = WorkerStarter(temporal, settings, log.logger())
        stack.push_async_callback(starter.close)
        queue = RequestQueue(client, lambda: answers.link)
        waiting = Waiting(queue, answers, starter)
        flights = Flights(queue, answers, waiting, settler)
        stack.push_async_callback(flights.close)
        asking = Asking(queue, answers, waiting)
        stack.push_async_callback(asking.close)

        notices = Notices(settings.database_url, (timeline.CHANNEL, order_changes.CHANNEL))
        notices.start()
        stack.push_async_callback(notices.close)

        await answers.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(MIGRATE_PATIENCE):
                await schema.tried.wait()
        control = WorkerControl(temporal)
        book = OrderBook(database, answers, settings.order_deadline)
        placing = OrderPlacing(
            database,
            answers,
            flights,
            book,
            checks.create(settings, database),
            deadline=settings.order_deadline,
            unknown_blocks=settings.unknown_blocks,
        )
        portfolio = Portfolio(database, answers, asking)
        closing = PositionClosing(database, placing, portfolio, connections=settings.database_pool)
        intents = Intents(database, closing, book, notices, deadline=settings.order_deadline)
        webhooks = WebhookDesk(
            database, client, placing, closing, intents, book, settings, ready=lambda: schema.ready
        )
        stack.push_async_callback(webhooks.close)
        keeper = AlertKeeper(database, webhooks)
        keeper.start()
        stack.push_async_callback(keeper.close)
        yield Services(
            settings=settings,
            database=database,
            valkey=client,
            authenticator=authenticator(database, schema, settings.api_key_cache),
            answers=answers,
            placing=placing,
            asking=asking,
            portfolio=portfolio,
            closing=closing,
            intents=intents,
            changing=OrderChanging(
                database, answers, queue, asking, book, settler, deadline=settings.order_deadline
            ),
            book=book,
            starter=starter,
            control=control,
            fleet=FleetList(temporal),
            pools=PoolControl(temporal),
            jobs=Jobs(database, client, JobDesk(client), starter, settings.jobs_waiting),
            rollouts=RolloutControl(temporal),
            upkeep=Upkeep(temporal),
            notices=notices,
            streams=Streams(notices),
            readiness=Readiness(database, client, control, lambda: schema.ready),
            wrapper=wrapper,
            switchboard=Switchboard(database, client),
            webhooks=webhooks,
        )
