"""The clients and services of one API process: created at its start, closed at its end, given to routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from redis.asyncio import Redis
from sqlalchemy.exc import SQLAlchemyError

from api.fleet.maintenance import MaintenanceTrigger
from api.fleet.readiness import ReadinessProbe
from api.fleet.service import FleetList
from api.http import log
from api.http.auth import Authenticator, Principal, Role
from api.http.notifications import NotificationListener
from api.http.streams import EventStreams
from api.jobs.service import JobService
from api.orders import checks
from api.orders.changes import OrderChangeService
from api.orders.outcomes import OrderReader, OutcomeWriter
from api.orders.placer import OrderPlacer, PendingOrders
from api.pools.rollouts import RolloutControl
from api.pools.service import PoolControl
from api.positions.closer import PositionCloser
from api.positions.intents import IntentRunner
from api.positions.service import Portfolio
from api.switches.service import SwitchControl
from api.webhooks.keeper import AlertKeeper
from api.webhooks.service import AlertProcessor
from api.workers.answers import AnswerListener, AnswerWaiter
from api.workers.requests import WorkerRequests
from api.workers.service import WorkerControl, connect_temporal
from infra import tasks
from infra.database import users
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.migrate import migrate
from infra.database.orders import feed as order_changes
from infra.database.workers import timeline
from infra.jobs.client import JobClient
from infra.settings import Settings
from infra.temporal.starter import WorkerStarter
from infra.valkey import client as valkey
from infra.valkey.request_queue import RequestQueue
from infra.vault.key_pairs import KeyWrapper, load_public

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
    placer: OrderPlacer
    worker_requests: WorkerRequests
    changes: OrderChangeService
    portfolio: Portfolio
    closer: PositionCloser
    intents: IntentRunner
    reader: OrderReader
    starter: WorkerStarter
    control: WorkerControl
    fleet: FleetList
    pools: PoolControl
    jobs: JobService
    rollouts: RolloutControl
    maintenance: MaintenanceTrigger
    notifications: NotificationListener
    streams: EventStreams
    readiness: ReadinessProbe
    wrapper: KeyWrapper
    switches: SwitchControl
    webhooks: AlertProcessor


class SchemaMigration:
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


def build_authenticator(database: Database, schema: SchemaMigration, ttl: float) -> Authenticator:
    async def lookup(token: str) -> Principal | None:
        if not schema.ready:  # every request passes here: none meets a table that is not there yet
            raise DatabaseUnavailable("PostgreSQL: the schema is not up to date yet")
        async with database.session() as session:
            key = await users.find_api_key(session, token)
        return Principal(str(key.id), Role(key.role), key.user_id) if key else None

    return Authenticator(lookup, ttl)


@asynccontextmanager
async def running_services(settings: Settings) -> AsyncIterator[Services]:
    """All services, with the process ready to serve. No server needs to be up for it."""
    wrapper = load_public(settings.master_public_file)
    async with AsyncExitStack() as stack:
        database = Database(
            settings.database_url, pool_size=settings.database_pool, pool_wait=settings.database_pool_wait
        )
        stack.push_async_callback(database.close)
        client = valkey.connect_valkey(
            settings.valkey_url, socket_timeout=VALKEY_TIMEOUT, max_connections=VALKEY_CONNECTIONS
        )
        stack.push_async_callback(client.aclose)
        temporal = await connect_temporal(settings)

        schema = SchemaMigration(settings.database_url)
        migrating = asyncio.create_task(schema.run(), name="migrate")
        stack.push_async_callback(tasks.cancel_tasks, migrating)
        outcome_writer = OutcomeWriter(database)
        outcome_writer.start()
        stack.push_async_callback(outcome_writer.close)
        answers = AnswerListener(client)
        stack.push_async_callback(answers.close)
        starter = WorkerStarter(temporal, settings)
        stack.push_async_callback(starter.close)
        queue = RequestQueue(client, lambda: answers.link)
        waiter = AnswerWaiter(queue, answers, starter)
        pending_orders = PendingOrders(queue, answers, waiter, outcome_writer)
        stack.push_async_callback(pending_orders.close)
        worker_requests = WorkerRequests(queue, answers, waiter)
        stack.push_async_callback(worker_requests.close)

        notifications = NotificationListener(
            settings.database_url, (timeline.TIMELINE_CHANNEL, order_changes.ORDERS_CHANNEL)
        )
        notifications.start()
        stack.push_async_callback(notifications.close)

        await answers.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(MIGRATE_PATIENCE):
                await schema.tried.wait()
        control = WorkerControl(temporal)
        reader = OrderReader(database, answers, settings.order_deadline)
        placer = OrderPlacer(
            database,
            answers,
            pending_orders,
            reader,
            checks.create_checks(settings, database),
            deadline=settings.order_deadline,
            unknown_blocks=settings.unknown_blocks,
        )
        portfolio = Portfolio(database, answers, worker_requests)
        closer = PositionCloser(database, placer, portfolio, connections=settings.database_pool)
        intents = IntentRunner(database, closer, reader, notifications, deadline=settings.order_deadline)
        webhooks = AlertProcessor(
            database, client, placer, closer, intents, reader, settings, ready=lambda: schema.ready
        )
        stack.push_async_callback(webhooks.close)
        keeper = AlertKeeper(database, webhooks)
        keeper.start()
        stack.push_async_callback(keeper.close)
        yield Services(
            settings=settings,
            database=database,
            valkey=client,
            authenticator=build_authenticator(database, schema, settings.api_key_cache),
            answers=answers,
            placer=placer,
            worker_requests=worker_requests,
            portfolio=portfolio,
            closer=closer,
            intents=intents,
            changes=OrderChangeService(
                database,
                answers,
                queue,
                worker_requests,
                reader,
                outcome_writer,
                deadline=settings.order_deadline,
            ),
            reader=reader,
            starter=starter,
            control=control,
            fleet=FleetList(temporal),
            pools=PoolControl(temporal),
            jobs=JobService(database, client, JobClient(client), starter, settings.jobs_waiting),
            rollouts=RolloutControl(temporal),
            maintenance=MaintenanceTrigger(temporal),
            notifications=notifications,
            streams=EventStreams(notifications),
            readiness=ReadinessProbe(database, client, control, lambda: schema.ready),
            wrapper=wrapper,
            switches=SwitchControl(database, client),
            webhooks=webhooks,
        )


async def current_services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


InServices = Annotated[Services, Depends(current_services)]
