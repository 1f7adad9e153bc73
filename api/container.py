"""The clients and services of one API process: created at its start, closed at its end, given to routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Annotated, Any

import structlog
from fastapi import Depends, Request
from sqlalchemy.exc import SQLAlchemyError
from temporalio.client import Client

from api.fleet.readiness import ReadinessProbe
from api.fleet.service import FleetList, MaintenanceTrigger
from api.http.auth import Authenticator, Principal, Role, require_user
from api.http.notifications import NotificationListener
from api.http.streams import EventStreams
from api.jobs.service import JobService
from api.orders.changes import OrderChangeService
from api.orders.checks import PreTradeChecks
from api.orders.outcomes import OrderReader, OutcomeWriter
from api.orders.placer import OrderPlacer, PendingOrders
from api.pools.service import PoolControl, RolloutControl
from api.positions.closer import PositionCloser
from api.positions.intents import IntentRunner
from api.positions.service import Portfolio
from api.switches.service import SwitchControl
from api.webhooks.service import AlertProcessor
from api.workers.answers import AnswerListener, AnswerWaiter
from api.workers.requests import WorkerRequests
from api.workers.service import WorkerControl, connect_temporal
from infra import tasks
from infra.database import audit, users
from infra.database.engine import Database, DatabaseUnavailable
from infra.database.migrate import migrate
from infra.database.orders import feed as order_changes
from infra.database.workers import timeline
from infra.jobs.client import JobClient
from infra.settings import Settings
from infra.temporal.starter import WorkerStarter
from infra.valkey import client as valkey
from infra.valkey.request_queue import RequestQueue
from infra.vault.key_pairs import load_public

#: Seconds a command may take before Valkey counts as down: as in the orchestrator. A Valkey that is gone is
#: found out at once; only one that stands still is waited for, and a busy host does so for 2 to 3 s.
VALKEY_TIMEOUT = 5.0
#: Connections to Valkey: as many commands as can be under way at once in one process.
VALKEY_CONNECTIONS = 256
#: Seconds between two attempts to migrate while PostgreSQL is away.
MIGRATE_PERIOD = 0.5
#: Seconds that the start waits for the first attempt; other processes may migrate at the same time.
MIGRATE_PATIENCE = 10.0


class SchemaMigration:
    """Brings the database up to date, as soon as there is one to talk to."""

    def __init__(self, database_url: str) -> None:
        self._url = database_url
        self.ready = False
        #: Set after the first attempt, whatever came of it.
        self.tried = asyncio.Event()

    def require(self) -> None:
        """Raises `DatabaseUnavailable` until the tables are there."""
        if not self.ready:
            raise DatabaseUnavailable("PostgreSQL: the schema is not up to date yet")

    async def run(self) -> None:
        logger = structlog.get_logger()
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


class Services:
    """What routes use. Making them connects to no server."""

    def __init__(self, settings: Settings, temporal: Client) -> None:
        deadline = settings.order_deadline
        self.settings = settings
        self.wrapper = load_public(settings.master_public_file)
        self.database = Database(
            settings.database_url, pool_size=settings.database_pool, pool_wait=settings.database_pool_wait
        )
        self.valkey = valkey.connect_valkey(
            settings.valkey_url, socket_timeout=VALKEY_TIMEOUT, max_connections=VALKEY_CONNECTIONS
        )
        self.schema = SchemaMigration(settings.database_url)
        self.authenticator = Authenticator(self._find_caller, settings.api_key_cache)
        self.notifications = NotificationListener(
            settings.database_url, (timeline.TIMELINE_CHANNEL, order_changes.ORDERS_CHANNEL)
        )
        self.streams = EventStreams(self.notifications)
        self.starter = WorkerStarter(temporal, settings)
        self.control = WorkerControl(temporal)
        self.readiness = ReadinessProbe(self.database, self.valkey, self.control, lambda: self.schema.ready)
        self.fleet = FleetList(temporal)
        self.pools = PoolControl(temporal)
        self.rollouts = RolloutControl(temporal)
        self.maintenance = MaintenanceTrigger(temporal)
        self.switches = SwitchControl(self.database, self.valkey)

        self.answers = AnswerListener(self.valkey)
        self.outcome_writer = OutcomeWriter(self.database)
        queue = RequestQueue(self.valkey, lambda: self.answers.link)
        self.jobs = JobService(
            self.database, queue, JobClient(self.valkey), self.starter, settings.jobs_waiting
        )
        waiter = AnswerWaiter(queue, self.answers, self.starter)
        self.pending_orders = PendingOrders(queue, self.answers, waiter, self.outcome_writer)
        self.worker_requests = WorkerRequests(queue, self.answers, waiter)
        self.reader = OrderReader(self.database, self.answers, deadline)
        self.placer = OrderPlacer(
            self.database,
            self.answers,
            self.pending_orders,
            self.reader,
            PreTradeChecks(settings, self.database),
            deadline=deadline,
            unknown_blocks=settings.unknown_blocks,
        )
        self.changes = OrderChangeService(
            self.database,
            self.answers,
            queue,
            self.worker_requests,
            self.reader,
            self.outcome_writer,
            deadline=deadline,
        )
        self.portfolio = Portfolio(self.database, self.answers, self.worker_requests)
        self.closer = PositionCloser(
            self.database, self.placer, self.portfolio, connections=settings.database_pool
        )
        self.intents = IntentRunner(
            self.database, self.closer, self.reader, self.notifications, deadline=deadline
        )
        self.webhooks = AlertProcessor(
            self.database,
            self.valkey,
            self.placer,
            self.closer,
            self.intents,
            self.reader,
            settings,
            require_schema=self.schema.require,
        )

    async def _find_caller(self, token: str) -> Principal | None:
        self.schema.require()  # every request passes here: none meets a table that is not there yet
        async with self.database.session() as session:
            key = await users.find_api_key(session, token)
        return Principal(str(key.id), Role(key.role), key.user_id) if key else None

    async def require_known_user(self, caller: Principal, user_id: str) -> None:
        """Raises `NotFound` or `UserNotFound`. A user's own key proves that the user exists."""
        require_user(caller, user_id)
        if caller.user_id != user_id:
            async with self.database.session() as session:
                await users.get_user(session, user_id)

    async def audit_request(self, caller: Principal, action: str, subject: str, **data: Any) -> None:
        """Writes who asked for what. Call it before it is done, so that nothing is done unseen."""
        async with self.database.session() as session:
            audit.append_entry(session, actor=caller.actor, action=action, subject=subject, **data)


@asynccontextmanager
async def running_services(settings: Settings) -> AsyncIterator[Services]:
    """All services, with the process ready to serve. No server needs to be up for it."""
    services = Services(settings, await connect_temporal(settings))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(services.database.close)
        stack.push_async_callback(services.valkey.aclose)
        await stack.enter_async_context(tasks.running(services.schema.run()))
        services.outcome_writer.start()
        stack.push_async_callback(services.outcome_writer.close)
        for part in (services.answers, services.starter, services.pending_orders, services.worker_requests):
            stack.push_async_callback(part.close)
        await stack.enter_async_context(tasks.running(services.notifications.run()))
        await services.answers.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(MIGRATE_PATIENCE):
                await services.schema.tried.wait()
        stack.push_async_callback(services.webhooks.close)
        await stack.enter_async_context(tasks.running(services.webhooks.run()))
        yield services


async def current_services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


InServices = Annotated[Services, Depends(current_services)]
