"""Activities with real Valkey and PostgreSQL, and a launcher in memory."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from redis.asyncio import Redis
from temporalio.testing import ActivityEnvironment

from activities.claims.claim import ClaimActivities
from activities.claims.health import HealthActivity
from activities.claims.reload import ReloadActivity
from activities.claims.stop import StopActivity
from activities.pool.launch import LaunchActivities
from activities.pool.sizing import PoolActivities
from infra.database import accounts, users
from infra.database.engine import Database
from infra.launchers.fake import FakeLauncher
from infra.launchers.port import LaunchSpec
from infra.market import calendar
from infra.settings import Settings
from infra.vault import key_pairs, vault
from infra.vault import key_pairs as orchestrator_keys
from infra.vault.key_pairs import MasterKeyRing, OrchestratorKeys
from tests.integration.activities.scripted import POOL, ScriptedPoolWorker, born
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import Credentials
from workflows.user_worker import messages as m

T = TypeVar("T")
SECRET = Credentials(api_key="key-canary", secret_key="secret-canary")


@dataclass
class Yard:
    """Everything around the activities."""

    client: Redis
    database: Database
    keys: OrchestratorKeys
    ring: MasterKeyRing
    launcher: FakeLauncher
    settings: Settings
    #: Workers that the launcher made.
    made: dict[str, ScriptedPoolWorker]
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.claiming = ClaimActivities(self.client, self.database, self.ring, self.keys)
        self.launching = LaunchActivities(self.client, self.database, self.launcher, self.settings, self.keys)
        self.stopping = StopActivity(self.client, self.database, self.launcher, self.keys)
        self.checking = HealthActivity(self.client, self.database, self.launcher)
        self.reloading = ReloadActivity(self.client, self.database, self.ring, self.keys)
        self.pool = PoolActivities(self.client, self.database, self.launcher, calendar.load_calendar())

    async def run(self, activity: Callable[[Any], Awaitable[T]], request: Any) -> T:
        return await ActivityEnvironment().run(activity, request)

    async def user(self, *, with_account: bool = True) -> str:
        user_id = f"u{next(self._numbers)}"
        encrypted = await vault.encrypt_credentials(
            SECRET, self.ring.public, user_id=user_id, account_id="main"
        )
        async with self.database.session() as session:
            await users.create_user(session, user_id)
            if with_account:
                await accounts.put_account(
                    session,
                    user_id=user_id,
                    account_id="main",
                    broker="paper",
                    broker_type="stock",
                    simulation=True,
                    encrypted=encrypted,
                )
        return user_id

    async def worker(self, worker_id: str | None = None) -> ScriptedPoolWorker:
        """A warm worker that the launcher knows."""
        name = worker_id or f"p-{next(self._numbers)}"
        config = WorkerConfig(
            worker_id=name,
            pool=POOL,
            valkey_url="",
            launch_token=self.keys.launch_token(name),
            orchestrator_key=self.keys.public_key,
        )
        await self.launcher.launch(LaunchSpec(config=config), f"token-{name}")
        return self.made[name]

    def claim(self, user_id: str, claim_id: str = "c1", reply_wait: float = 10.0) -> m.ClaimRequest:
        return m.ClaimRequest(
            user_id=user_id, pool=POOL, claim_id=claim_id, connect_timeout=5.0, reply_wait=reply_wait
        )


@pytest.fixture
async def yard(valkey_client: Redis, migrated_database: str, tmp_path: Path) -> AsyncIterator[Yard]:
    database = Database(migrated_database, pool_wait=30.0)
    keys = orchestrator_keys.create_orchestrator_keys(tmp_path / "orchestrator.key")
    key_pairs.create_master_key(tmp_path / "master.key", tmp_path / "master.pub")
    made: dict[str, ScriptedPoolWorker] = {}
    yield Yard(
        client=valkey_client,
        database=database,
        keys=keys,
        ring=key_pairs.load_ring(tmp_path / "master.key"),
        launcher=FakeLauncher(born(valkey_client, keys, made)),
        settings=Settings(data_dir=tmp_path, database_url=migrated_database),
        made=made,
    )
    await database.close()
