"""Contains activities with real Valkey and PostgreSQL, and a launcher in memory."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redis.asyncio import Redis
from sqlalchemy import text
from temporalio.testing import ActivityEnvironment

from activities.claims.budgets import BudgetPlanner
from activities.claims.claim import ClaimActivities
from activities.claims.handshake import AssignmentSealer
from activities.claims.reload import ReloadActivity
from activities.claims.stop import FENCING_MARGIN_S, HealthActivity, StopActivity, WorkerTerminator
from activities.events.cut_off import WorkerCutOff
from activities.pool.launch import LaunchActivities
from activities.pool.sizing import PoolActivities
from infra.database import accounts, users
from infra.database.engine import Database
from infra.market import calendar
from infra.settings import Settings
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.valkey.worker_users import WorkerUsers
from infra.vault import vault
from infra.vault.key_pairs import MasterKeyRing, OrchestratorKeys
from infra.vault.message_secret import MessageSecrets
from infra.worker_task import LaunchSpec
from tests.support.launchers.fake import FakeLauncher
from tests.support.message_signing import worker_metadata
from tests.support.workers.pool_worker import POOL, ScriptedPoolWorker
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import Credentials, Event
from worker_runtime.protocol.worker_reports import EVENT, sign_event
from workflows.user_worker.messages import ClaimRequest

T = TypeVar("T")

#: Seconds after which a fenced worker counts as ended.
FENCED_FOR = 1.0

SECRET = Credentials(api_key="key-canary", secret_key="secret-canary")


@dataclass
class ActivityHarness:
    """Everything around the activities."""

    client: Redis
    database: Database
    keys: OrchestratorKeys
    secrets: MessageSecrets
    ring: MasterKeyRing
    launcher: FakeLauncher
    settings: Settings
    #: Workers that the launcher made.
    made: dict[str, ScriptedPoolWorker]
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        sealer = AssignmentSealer(
            self.ring, self.keys, self.secrets, BudgetPlanner(self.database, self.keys)
        )
        self.claiming = ClaimActivities(self.client, self.database, sealer)
        self.launching = LaunchActivities(
            self.client, self.database, self.launcher, self.settings, self.keys
        )
        self.ends = WorkerTerminator(
            self.client, self.database, self.launcher, self.secrets, FENCED_FOR - FENCING_MARGIN_S
        )
        self.stopping = StopActivity(self.client, self.database, self.ends, self.keys)
        self.checking = HealthActivity(
            self.client, self.database, self.launcher, self.secrets, FENCED_FOR - FENCING_MARGIN_S
        )
        self.reloading = ReloadActivity(self.client, self.database, sealer)
        self.pool = PoolActivities(
            self.client, self.database, self.launcher, calendar.load_calendar()
        )

    def cutting(self, users: WorkerUsers | None = None) -> WorkerCutOff:
        return WorkerCutOff(self.client, self.database, self.launcher, self.ends, users)

    async def run(self, activity: Callable[[Any], Awaitable[T]], request: Any) -> T:
        return await ActivityEnvironment().run(activity, request)

    async def user(
        self,
        *,
        with_account: bool = True,
        credentials: Credentials = SECRET,
        broker: str = "paper",
    ) -> str:
        user_id = f"u{next(self._numbers)}"
        encrypted = await vault.encrypt_credentials(
            credentials, self.ring.public, user_id=user_id, account_id="main"
        )
        async with self.database.session() as session:
            await users.create_user(session, user_id)
            if with_account:
                await accounts.put_account(
                    session,
                    user_id=user_id,
                    account_id="main",
                    broker=broker,
                    broker_type="stock",
                    simulation=True,
                    encrypted=encrypted,
                )
        return user_id

    async def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Runs one statement in PostgreSQL; returns its rows."""
        async with self.database.session() as session:
            result: Any = await session.execute(text(statement))
            return [tuple(row) for row in result] if result.returns_rows else []

    async def worker(self, worker_id: str | None = None) -> ScriptedPoolWorker:
        """A warm worker that the launcher knows."""
        name = worker_id or f"p-{next(self._numbers)}"
        config = WorkerConfig(
            worker_id=name,
            pool=POOL,
            valkey_url="",
            launch_token=self.keys.launch_token(name),
            orchestrator_keys=self.keys.public_keys,
        )
        await self.launching._record(config)
        task = await self.launcher.launch(LaunchSpec(config=config), f"token-{name}")
        await self.launching._record(config, task.task_id)
        return self.made[name]

    async def renew_mark(
        self, user_id: str, worker_id: str, epoch: int, **fields: str | int
    ) -> str:
        """Renews mark and metadata as the user's worker of this epoch does."""
        shown = worker_metadata(user_id, self.secrets, epoch=epoch, worker=worker_id, **fields)
        outcome = await valkey.run_script(
            self.client,
            scripts.RENEW_MARK,
            [keys.owner(user_id), keys.mark(user_id), keys.metadata(user_id)],
            [epoch, worker_id, 30_000, *shown],
        )
        return bytes(outcome).decode()

    async def send_event(self, event: Event, secrets: MessageSecrets | None = None) -> None:
        """Sends what the worker of the event's assignment says; with other `secrets` it is
        forged."""
        keys_of = (secrets or self.secrets).assignment_keys
        entry = sign_event(event, keys_of(event.user_id, event.epoch))
        for stream in (keys.EVENTS, keys.CHANGES):
            await reply_of(self.client.xadd(stream, {EVENT: entry}))

    def claim(self, user_id: str, claim_id: str = "c1", reply_wait: float = 10.0) -> ClaimRequest:
        return ClaimRequest(
            user_id=user_id,
            pool=POOL,
            claim_id=claim_id,
            connect_timeout=5.0,
            reply_wait=reply_wait,
        )
