"""The clients and services of one API process: created at its start, closed at its end, given to
routes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import StreamingResponse
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as ValkeyTimeout
from sqlalchemy.ext.asyncio import AsyncSession
from temporalio.client import Client

from api.fleet.alerts import OperatorAlerts
from api.fleet.entities import EntityProbe
from api.fleet.primary import Primary, startup_tasks
from api.fleet.service import FleetList, MaintenanceTrigger, ReadinessProbe
from api.http.auth import Authenticator, Caller, Principal, route_of
from api.http.errors import NotFound
from api.http.fields import UserId
from api.http.limits import RequestLimits
from api.http.notifications import NotificationListener
from api.http.rights import ENDING, Role, is_counted, known_applications, known_scopes
from api.http.streams import EventFeed, EventStreams, KeyRevocations
from api.instruments.service import InstrumentLists
from api.jobs.own import ApplicationJobs
from api.jobs.service import JobService
from api.orders.changes import OrderChangeService
from api.orders.checks import PreTradeChecks
from api.orders.outcomes import OrderReader, OutcomeWriter
from api.orders.placer import OrderPlacer, PendingOrders
from api.page.charts import PoolHistory
from api.pools.service import PoolControl, RolloutControl
from api.positions.closer import Portfolio, PositionCloser
from api.positions.intents import IntentRunner
from api.processes.link import ProcessCounts
from api.switches.service import SwitchControl
from api.webhook_calls.service import FailureNotices, SignalTester
from api.webhooks.meaning import SignalInterpreter
from api.webhooks.queue import SignalQueue
from api.webhooks.service import SignalReceiver
from api.workers.answers import AnswerListener
from api.workers.requests import WorkerRequests
from api.workers.service import WorkerControl, connect_temporal
from infra import metrics, tasks
from infra.alerts.errors import send_errors
from infra.database import api_keys, audit, quotas, users
from infra.database.engine import Database, DatabaseUnavailable, Turns
from infra.database.migrate import SchemaCheck
from infra.database.models import ApiKey
from infra.database.orders import feed as order_changes
from infra.database.workers import timeline
from infra.doctor.servers import API_KEYS, BROKER, POSTGRESQL, VALKEY, log_problems
from infra.jobs import metrics as job_metrics
from infra.jobs.applications import ApplicationDirectory
from infra.jobs.client import JobClient
from infra.jobs.kept import KeptJobs
from infra.jobs.registry import TypeRegistry
from infra.market.calendar import MarketCalendars, load_calendar
from infra.networks import parse_network
from infra.settings import Settings
from infra.temporal.client import TemporalUnavailable
from infra.temporal.connection import watch_connection
from infra.temporal.starter import WorkerStarter
from infra.tracing import Traces
from infra.valkey import client as valkey
from infra.valkey.request_queue import RequestQueue
from infra.valkey.switch_fanout import SwitchSigner
from infra.vault.api_tokens import ApiTokens
from infra.vault.certificates import CertificateFileReader
from infra.vault.key_pairs import KeyWrapper
from infra.vault.master_key import master_wrapper
from infra.vault.message_secret import MessageSecretFile
from infra.worker_calls.client import WorkerClient

#: Seconds a command may take before Valkey counts as down: as in the orchestrator. A Valkey that is
#: gone is found out at once; only one that stands still is waited for, and a busy host does so for
#: 2 to 3 s.
VALKEY_TIMEOUT_S = 5.0
#: Connections to Valkey: as many commands as can be under way at once in one process.
MAX_VALKEY_CONNECTIONS = 256
#: Seconds that the start waits for the first look at the schema.
SCHEMA_TIMEOUT_S = 10.0
#: Errors of a server that goes down while the metrics are written.
_OUTAGES = (DatabaseUnavailable, TemporalUnavailable, ConnectionLost, ValkeyTimeout, OSError)


class Services:
    """Holds what routes use. Making them connects to no server."""

    def __init__(
        self,
        settings: Settings,
        temporal: Client,
        counts: ProcessCounts,
        traces: Traces | None = None,
    ) -> None:
        self.counts = counts
        deadline = settings.order_deadline
        self.settings = settings
        self._wrapper = master_wrapper(settings)  # one that cannot be read is said at the start
        self.message_secrets = MessageSecretFile(settings.message_key_file)
        self.tokens = ApiTokens(settings.api_secret_file)
        self.database = Database(
            settings.database_url,
            pool_size=settings.database_pool,
            pool_wait=settings.database_pool_wait,
        )
        #: Statistics may read for seconds: they take one connection at a time, and others wait for
        #: 2 s.
        self.statistics = Turns(1, 2.0)
        self.valkey = valkey.connect_valkey(
            settings.valkey_url,
            socket_timeout=VALKEY_TIMEOUT_S,
            max_connections=MAX_VALKEY_CONNECTIONS,
        )
        self.schema = SchemaCheck(settings.database_url)
        self.authenticator = Authenticator(self._find_caller, settings.api_key_cache)
        self.limits = RequestLimits(
            self.valkey, settings, self.authenticator, self.tokens.is_genuine
        )
        self.notifications = NotificationListener(
            settings.session_database_url, (timeline.TIMELINE_CHANNEL, order_changes.ORDERS_CHANNEL)
        )
        self.streams = EventStreams(self.notifications, self._is_revoked)
        self.revocations = KeyRevocations(
            self.database, self.notifications, self.authenticator, self.streams
        )
        self.starter = WorkerStarter(temporal, settings)
        self.control = WorkerControl(temporal)
        self.readiness = ReadinessProbe(
            self.database,
            self.valkey,
            self.control,
            self.schema.require,
            settings,
            EntityProbe(self.database, temporal, settings),
        )
        self.fleet = FleetList(temporal)
        self.pools = PoolControl(temporal, self.database)
        self.pool_history = PoolHistory(self.pools, settings.pool)
        self.kept_jobs = KeptJobs(self.database, JobClient(self.valkey, self.message_secrets))
        self.alerts = OperatorAlerts(
            self.valkey, self.kept_jobs, settings, self.write_metrics, self.write_host
        )
        self.rollouts = RolloutControl(temporal)
        self.maintenance = MaintenanceTrigger(temporal)
        self.switches = SwitchControl(
            self.database, self.valkey, SwitchSigner(self.message_secrets)
        )

        self.answers = AnswerListener(self.valkey, self.message_secrets)
        self.outcome_writer = OutcomeWriter(self.database)
        queue = RequestQueue(self.valkey, self.message_secrets, lambda: self.answers.link)
        self.jobs = JobService(
            self.database, queue, self.kept_jobs, self.starter, settings.jobs_waiting
        )
        applications = ApplicationDirectory(self.database, self.message_secrets)
        self.job_types = TypeRegistry(
            self.database, self.valkey, self.message_secrets, applications
        )
        self.own_jobs = ApplicationJobs(
            self.job_types, self.kept_jobs, self.valkey, settings.job_defaults
        )
        workers = WorkerClient(queue, self.answers, self.starter)
        self.pending_orders = PendingOrders(workers, self.outcome_writer, traces)
        self.worker_requests = WorkerRequests(self.database, workers, traces)
        self.reader = OrderReader(self.database, self.answers)
        self.certificates = CertificateFileReader()
        checks = PreTradeChecks(settings, self.database)
        self.placer = OrderPlacer(
            self.database,
            self.answers,
            self.pending_orders,
            self.reader,
            checks,
            lifetime_s=deadline,
            unknown_blocks=settings.unknown_blocks,
            traces=traces,
        )
        self.changes = OrderChangeService(
            self.database,
            self.answers,
            queue,
            self.worker_requests,
            self.reader,
            self.outcome_writer,
            checks,
            settings,
        )
        self.portfolio = Portfolio(self.database, self.answers, self.worker_requests)
        self.closer = PositionCloser(
            self.database, self.placer, self.portfolio, connections=settings.database_pool
        )
        self.intents = IntentRunner(
            self.database, self.closer, self.reader, self.notifications, deadline=deadline
        )
        self.signals = SignalQueue(
            self.database, self.closer, self.reader, self.notifications, traces
        )
        calendars = MarketCalendars(
            Path(settings.calendar_file) if settings.calendar_file else None
        )
        self.home_calendar = calendars.home
        interpreter = SignalInterpreter(self.database, checks, calendars)
        self.webhooks = SignalReceiver(
            self.database,
            self.limits,
            self.signals,
            self.reader,
            interpreter,
            settings,
            require_schema=self.schema.require,
            is_genuine=self.tokens.is_genuine,
        )
        self.instrument_lists = InstrumentLists(temporal, self.database, calendars)
        self.failure_notices = FailureNotices(self.database, self.kept_jobs, self.schema.require)
        self.signal_tester = SignalTester(self.database, self.signals, interpreter)

    @property
    def wrapper(self) -> KeyWrapper:
        """The half of the present master key that encrypts: its file may have been replaced by a
        rotation."""
        return self._wrapper if self.settings.master_kms_key else master_wrapper(self.settings)

    async def _find_caller(self, token: str) -> Principal | None:
        if not self.tokens.is_genuine(token):
            return None  # made up: it costs no query
        # Every genuine request passes here: none meets a table that is not there yet.
        self.schema.require()

        async def find(session: AsyncSession) -> tuple[ApiKey | None, ApiKey | None, bool]:
            key = await api_keys.find_api_key(session, token)
            owner = await api_keys.find_owner(session, key) if key else None
            return key, owner, owner is not None and await users.is_disabled(session, owner.user_id)

        key, owner, disabled = await self.database.read(find)
        if key is None or owner is None:
            return None
        ends = min(
            (api_key.expires_at for api_key in (key, owner) if api_key.expires_at), default=None
        )
        session_id = "" if key is owner else str(key.id)
        return Principal(
            str(owner.id),
            Role(owner.role),
            owner.user_id,
            owner.label,
            ends,
            session_id,
            disabled,
            known_scopes(owner.scopes),
            tuple(parse_network(source) for source in owner.sources),
            known_applications(owner.scopes),
        )

    async def _is_revoked(self, key_id: str) -> bool:
        async with self.database.session(autocommit=True) as session:
            return bool(await api_keys.revoked_among(session, {key_id}))

    async def write_metrics(self, page: metrics.MetricsPage) -> None:
        """Leaves out what a server that is down would tell.

        A part that fails keeps no other one from the page: its error is raised at the end. Raises
        `DatabaseUnavailable`, `RedisError` and `TemporalUnavailable` at once for a server that goes
        down meanwhile.
        """
        readiness = await self.readiness.check()
        for name, server in readiness.dependencies.items():
            page.add("berth_server_up", server.state == "up", name)
        metrics.write_host(page, self.settings, self.home_calendar)
        up = {name for name, server in readiness.dependencies.items() if server.state == "up"}
        # One that refuses to write answers a question, and says why.
        with suppress(RedisError):
            await metrics.write_valkey(page, self.valkey)
            await metrics.write_valkey_clock(page, self.valkey)
        parts: list[tuple[set[str], Callable[[metrics.MetricsPage], Awaitable[None]]]] = [
            ({"postgresql"}, self._write_postgresql),
            ({"postgresql"}, self._write_instruments),
            ({"postgresql", "valkey"}, self._write_fleet),
            ({"valkey"}, self._write_valkey_memory),
            ({"valkey"}, self._write_jobs),
            ({"postgresql", "valkey"}, self._write_application_jobs),
            ({"temporal"}, self._write_users),
        ]
        failure: Exception | None = None
        for servers, write in parts:
            try:
                if servers <= up:
                    await write(page)
            except _OUTAGES:
                raise
            except Exception as error:  # the boundary between the parts
                failure = failure or error
        if failure is not None:
            raise failure

    async def _write_postgresql(self, page: metrics.MetricsPage) -> None:
        async with self.database.session(autocommit=True) as session:
            await metrics.write_postgresql(page, session)
            await metrics.write_database_clock(page, session)

    async def _write_instruments(self, page: metrics.MetricsPage) -> None:
        for (broker, market), days in (await self.instrument_lists.missed_days()).items():
            page.add("berth_instruments_missed_days", days, broker, market)

    async def _write_fleet(self, page: metrics.MetricsPage) -> None:
        async with self.database.session(autocommit=True) as session:
            await metrics.write_fleet_metrics(page, self.valkey, session, self.settings.pool)

    async def _write_valkey_memory(self, page: metrics.MetricsPage) -> None:
        await metrics.write_valkey_memory(page, self.valkey)

    async def _write_jobs(self, page: metrics.MetricsPage) -> None:
        await job_metrics.write_job_metrics(page, self.valkey)

    async def _write_application_jobs(self, page: metrics.MetricsPage) -> None:
        await job_metrics.write_application_metrics(page, self.valkey, self.job_types)

    async def _write_users(self, page: metrics.MetricsPage) -> None:
        for state, count in (await self.fleet.count_by_state()).items():
            page.add("berth_users", count, state)

    async def write_host(self, page: metrics.MetricsPage) -> None:
        """Writes what differs from host to host. Raises `RedisError`, `DatabaseUnavailable` or
        SQLAlchemy's errors for a server whose clock cannot be read."""
        metrics.write_host(page, self.settings, self.home_calendar)
        await metrics.write_valkey_clock(page, self.valkey)
        async with self.database.session(autocommit=True) as session:
            await metrics.write_database_clock(page, session)


@asynccontextmanager
async def running_services(
    settings: Settings, counts: ProcessCounts, traces: Traces | None = None
) -> AsyncIterator[Services]:
    """Yields all services, with the process ready to serve. No server needs to be up for it."""
    temporal = await connect_temporal(settings, traces.interceptors if traces else ())
    services = Services(settings, temporal, counts, traces)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(services.database.close)
        stack.push_async_callback(services.valkey.aclose)
        await stack.enter_async_context(tasks.running(_wait_then_lead(services)))
        await stack.enter_async_context(tasks.running(watch_connection(temporal, settings)))
        services.outcome_writer.start()
        stack.push_async_callback(services.outcome_writer.close)
        for part in (
            services.answers,
            services.starter,
            services.pending_orders,
            services.worker_requests,
        ):
            stack.push_async_callback(part.close)
        loops: list[Coroutine[Any, Any, None]] = [
            services.message_secrets.compare_with_others(services.valkey),
            services.notifications.run(),
            services.revocations.run(),
            services.limits.run(),
            services.pool_history.run(),
            log_problems(settings, POSTGRESQL, VALKEY, API_KEYS, BROKER),
        ]
        if settings.sends_alerts:
            loops += [send_errors(services.valkey, "api"), services.alerts.run()]
        for loop in loops:
            await stack.enter_async_context(tasks.running(loop))
        await services.answers.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(SCHEMA_TIMEOUT_S):
                await services.schema.tried.wait()
        stack.push_async_callback(services.signals.close)
        await stack.enter_async_context(tasks.running(services.webhooks.run()))
        await stack.enter_async_context(tasks.running(services.failure_notices.run()))
        yield services


async def _wait_then_lead(services: Services) -> None:
    await services.schema.run()
    settings = services.settings
    days = load_calendar(Path(settings.calendar_file) if settings.calendar_file else None)
    await Primary(settings, startup_tasks(settings, days)).run()


async def current_services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


InServices = Annotated[Services, Depends(current_services)]


@dataclass(frozen=True, slots=True)
class AuthorizedCall:
    """A request by a caller whose role has the right to it, and what answers it."""

    caller: Principal
    services: Services

    @property
    def database(self) -> Database:
        return self.services.database

    @property
    def actor(self) -> str:
        return self.caller.actor

    def link(self, path: str) -> str:
        """Return the path of this API as clients reach it, below the root path."""
        return f"{self.services.settings.api_root_path}{path}"

    def require_user(self, user_id: str) -> None:
        """Raises `NotFound` when the caller may not see this user: whether it exists is not
        told."""
        if not self.caller.may_see(user_id):
            raise NotFound

    async def require_known_user(self, user_id: str) -> None:
        """Raises `NotFound` or `UserNotFound`. A user's own key proves that the user exists."""
        self.require_user(user_id)
        if self.caller.user_id != user_id:
            await self.database.fetch(users.get_user, user_id)

    async def audit(self, action: str, subject: str, **data: Any) -> None:
        """Writes who asked for what. Call it before it is done, so that nothing is done unseen."""
        async with self.database.session() as session:
            audit.append_entry(session, self.actor, action, subject, **data)

    async def open_stream(self, feed: EventFeed, after: int | None) -> StreamingResponse:
        """Opens a stream like `EventStreams.open_stream`, for as long as the caller's key lasts."""
        caller = self.caller
        return await self.services.streams.open_stream(
            feed, caller.key_id, after, caller.seconds_left
        )


async def authorized_call(request: Request, caller: Caller, services: InServices) -> AuthorizedCall:
    """Counts a user's change for the daily quota. Raises `DailyQuotaReached`."""
    route = route_of(request)
    if caller.user_id is not None and is_counted(route):
        await services.database.write(quotas.spend_act, caller.user_id, ends=route in ENDING)
    return AuthorizedCall(caller, services)


Call = Annotated[AuthorizedCall, Depends(authorized_call)]


async def visible_user(user_id: UserId, call: Call) -> str:
    call.require_user(user_id)
    return user_id


async def known_user(user_id: UserId, call: Call) -> str:
    await call.require_known_user(user_id)
    return user_id


#: The user in the path, after `require_user` and after `require_known_user`.
VisibleUserId = Annotated[str, Depends(visible_user)]
KnownUserId = Annotated[str, Depends(known_user)]
