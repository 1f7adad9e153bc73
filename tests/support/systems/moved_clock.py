"""The orchestrator and the API in this process, with a clock that jumps.

Temporal is the time-skipping server: its timers, and so all of a worker's life, run by a clock that
jumps from one due moment to the next. Valkey, PostgreSQL, the node and its simulated workers are
there as always, and live by the real one.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from pathlib import Path

import httpx
from sqlalchemy import select, text
from temporalio.api.testservice.v1 import SleepRequest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from activities.events.cut_off import WorkerCutOff
from activities.events.pump import EventPump
from activities.events.relay import Relay
from activities.events.stream import RELAY_GROUP, EventStream
from activities.orchestrator.queues import (
    OrchestratorResources,
    bulk_activities,
    ends_of,
    hosted_queues,
    open_resources,
)
from api.app import create_app
from infra import tasks
from infra.database import accounts, api_keys
from infra.database.dead_letters import DeadLetters
from infra.database.models import WorkerTransition
from infra.lab.bench.fleet.simulated.calls import SimulatedConnections
from infra.lab.bench.fleet.simulated.supervisor import SimulatedSupervisor
from infra.lab.bench.fleet.simulated.worker import SimulatedBehaviour
from infra.market.calendar import HOME_ZONE
from infra.node.address import listen
from infra.node.server import NodeServer
from infra.settings import Settings
from infra.temporal.starter import WorkerStarter
from infra.vault import key_pairs, vault
from infra.vault.api_tokens import ApiTokens
from infra.vault.key_pairs import MasterKeyRing
from tests.support.message_signing import write_secret
from tests.support.workflows.fakes import patient
from worker_runtime.protocol.messages import Credentials
from workflows import names
from workflows.morning.messages import MorningInput
from workflows.morning.workflow import MorningWorkflow
from workflows.sandbox import workflow_runner
from workflows.user_worker.messages import WorkerState

#: Seconds of one jump, and real time for all that happens within: hundreds of users may be idle at
#: once.
STEP, PATIENCE = 120.0, timedelta(minutes=4)


_TRADED = (
    "insert into users (id) values (:user) on conflict do nothing",
    "insert into broker_accounts (user_id, account_id, broker, broker_type, simulation) "
    "values (:user, :market, 'paper', :market, true) on conflict do nothing",
    "insert into orders (id, user_id, account_id, client_order_id, fingerprint, symbol, side, "
    "quantity, "
    "price_type, time_in_force, tag, trading_day, state, generation, deadline_at, created_at, "
    "verify_at) "
    "select gen_random_uuid(), :user, :market, t, '', '2330', 'buy', 1, 'MKT', 'IOC', left(t, "
    "6), :day, "
    "'filled', '', cast(:at as timestamptz), cast(:at as timestamptz), null "
    "from (select md5(random()::text) as t) as tag",
)


@dataclass
class MovedSystem:
    env: WorkflowEnvironment
    parts: OrchestratorResources
    http: httpx.AsyncClient
    ring: MasterKeyRing
    accounts: dict[str, list[str]] = field(default_factory=dict)

    async def trader(
        self, user_id: str, *markets: str, before: date, clock: time = time(10)
    ) -> None:
        """A user with an account for each market and its credentials, who traded in each on that
        day."""
        await self.traded(user_id, before, **dict.fromkeys(markets, clock))
        async with self.parts.database.session() as session:
            for market in markets:
                sealed = await vault.encrypt_credentials(
                    Credentials(api_key="k", secret_key="s"),
                    self.ring.public,
                    user_id=user_id,
                    account_id=market,
                )
                await accounts.put_account(
                    session,
                    user_id=user_id,
                    account_id=market,
                    broker="paper",
                    broker_type=market,
                    simulation=True,
                    encrypted=sealed,
                )
        self.accounts[user_id] = list(markets)

    async def traded(self, user_id: str, day: date, **clocks: time) -> None:
        """One order of this user in each market on that day."""
        given = [
            {
                "user": user_id,
                "market": market,
                "day": day,
                "at": datetime.combine(day, clock, HOME_ZONE),
            }
            for market, clock in clocks.items()
        ]
        async with self.parts.database.session() as session:
            for statement in _TRADED:
                await session.execute(text(statement), given)

    async def order(self, user_id: str) -> str:
        """One order by REST; what became of it. A simulated worker refuses it, which only a worker
        does."""
        body = {
            "client_order_id": f"{user_id}-{asyncio.get_running_loop().time()}",
            "account_id": self.accounts[user_id][0],
            "symbol": "2330" if self.accounts[user_id][0] == "stock" else "TXFA7",
            "side": "buy",
            "quantity": 1,
            "price_type": "LMT",
            "price": "100",
        }
        answer = await self.http.post(f"/users/{user_id}/orders", json=body, params={"wait": 30})
        order = answer.json()
        return f"{answer.status_code} {order.get('state') or order.get('code')}"

    async def first_orders(self, user_ids: list[str]) -> set[str]:
        """All of them at the bell; what became of them."""
        turn = asyncio.Semaphore(8)

        async def one(user_id: str) -> str:
            async with turn:
                return await self.order(user_id)

        outcomes = set(await asyncio.gather(*(one(user_id) for user_id in user_ids)))
        # PostgreSQL's clock is not moved: it may be night by it.
        at = await self.env.get_current_time()
        async with self.parts.database.session() as session:
            await session.execute(
                text(
                    "update orders set created_at = :at where client_order_id like '%-%' "
                    "and created_at between clock_timestamp() - interval '1 h' and "
                    "clock_timestamp()"
                ),
                {"at": at},
            )
        return outcomes

    async def now(self) -> float:
        return (await self.env.get_current_time()).timestamp()

    async def until(self, at: datetime, step: float = STEP) -> None:
        """Lets the clock jump to this moment, and everything happen that is due before."""
        while (seconds_left := at.timestamp() - await self.now()) > 0:
            jump = SleepRequest()
            jump.duration.FromTimedelta(timedelta(seconds=min(seconds_left, step)))
            # `env.sleep` gives up after 30 s.
            await self.env.client.test_service.unlock_time_skipping_with_sleep(
                jump, timeout=PATIENCE
            )

    async def morning(self, given: MorningInput, id: str) -> None:
        """What the Schedule does."""
        await self.env.client.start_workflow(
            MorningWorkflow.run, given, id=id, task_queue=names.BULK_QUEUE
        )

    async def transitions(self, after: WorkerState) -> dict[str, list[float]]:
        """When each user's worker came to this state (Unix seconds of the moved clock), by the
        timeline."""
        times_by_user: dict[str, list[float]] = {}
        async with self.parts.database.session() as session:
            rows = await session.execute(
                select(WorkerTransition.user_id, WorkerTransition.at)
                .where(WorkerTransition.after == after)
                .order_by(WorkerTransition.at)
            )
            for user_id, at in rows:
                times_by_user.setdefault(user_id, []).append(at.timestamp())
        return times_by_user


def settings_of(
    folder: Path, socket: Path, valkey_url: str, database_url: str, temporal: str
) -> Settings:
    key_pairs.create_orchestrator_keys(folder)
    key_pairs.create_master_key(folder / "master.key", folder / "master.pub")
    return Settings(
        data_dir=folder,
        orchestrator_key_dir=folder,
        master_key_file=folder / "master.key",
        master_public_file=folder / "master.pub",
        message_key_file=write_secret(folder / "message.key"),
        api_secret_file=write_secret(folder / "api.key"),
        node_socket=socket,
        valkey_url=valkey_url,
        database_url=database_url,
        database_pool_wait=30.0,
        temporal_address=temporal,
        launch_rate=1000.0,
        mark_ttl=120.0,
        maintenance_period=0.0,
        report_at="",
    )


@asynccontextmanager
async def moved_system(
    env: WorkflowEnvironment,
    settings: Settings,
    starter: WorkerStarter | None = None,
    *,
    maintenance_confirm: float | None = None,
) -> AsyncIterator[MovedSystem]:
    """`maintenance_confirm`: seconds of the real clock between two passes that confirm each other;
    None: as always."""
    async with AsyncExitStack() as stack:
        link = SimulatedConnections(settings.valkey_url)
        stack.push_async_callback(link.close)
        supervisor = SimulatedSupervisor(link, SimulatedBehaviour(start=0.0, connect=0.0))
        stack.push_async_callback(supervisor.close)
        node = NodeServer(supervisor, supervisor, limits="none")
        await node.start(listen(settings.node_socket))
        stack.push_async_callback(node.close)
        parts = await stack.enter_async_context(open_resources(settings))
        starter = starter or WorkerStarter(env.client, settings)
        for worker in _workers(env.client, starter, parts, maintenance_confirm):
            await stack.enter_async_context(worker)
        stream = EventStream(
            parts.client,
            RELAY_GROUP,
            Relay(env.client),
            parts.message_secrets,
            dead_letters=DeadLetters(parts.database),
        )
        cutting = WorkerCutOff(parts.client, parts.database, parts.launcher, ends_of(parts))
        pump = EventPump(parts.client, parts.database, cutting, parts.keys)
        for loop in (pump.run, pump.attend, stream.run):
            await stack.enter_async_context(tasks.running(loop()))
        app = create_app(settings)
        await stack.enter_async_context(app.router.lifespan_context(app))
        async with parts.database.session() as session:
            token = ApiTokens(settings.api_secret_file).make()
            await api_keys.create_api_key(session, token, "admin")
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://api/v1",
            headers={"X-API-Key": token},
            timeout=40,
        )
        await stack.enter_async_context(http)
        yield MovedSystem(env, parts, http, key_pairs.load_ring(Path(settings.master_key_file)))


def _workers(
    client: Client,
    starter: WorkerStarter,
    parts: OrchestratorResources,
    maintenance_confirm: float | None,
) -> Iterator[Worker]:
    """The orchestrator's queues, without versions of its deployment: the server knows none."""
    bulk = bulk_activities(client, starter, parts, maintenance_confirm=maintenance_confirm)
    for hosted in hosted_queues(client, starter, parts):
        yield patient(
            Worker(
                client,
                task_queue=hosted.name,
                workflows=hosted.workflows,
                activities=bulk if hosted.name == names.BULK_QUEUE else hosted.activities(),
                workflow_runner=workflow_runner(),
            )
        )
