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

from activities.checking import Checking
from activities.claiming import Claiming
from activities.launching import Launching
from activities.pool import Pool
from activities.pool_situation import PoolSituation
from activities.reloading import Reloading
from activities.stopping import Stopping
from infra.database import accounts, users
from infra.database.engine import Database
from infra.launchers.fake import FakeLauncher
from infra.launchers.port import LaunchSpec
from infra.market import calendar
from infra.settings import Settings
from infra.vault import master_key, orchestrator_keys, vault
from infra.vault.master_key import MasterKeyRing
from infra.vault.orchestrator_keys import OrchestratorKeys
from tests.integration.activities.scripted import POOL, ScriptedWorker, born
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import Credentials
from workflows import messages as m

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
    made: dict[str, ScriptedWorker]
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.claiming = Claiming(self.client, self.database, self.ring, self.keys)
        self.launching = Launching(self.client, self.database, self.launcher, self.settings, self.keys)
        self.stopping = Stopping(self.client, self.database, self.launcher, self.keys)
        self.checking = Checking(self.client, self.database, self.launcher)
        self.reloading = Reloading(self.client, self.database, self.ring, self.keys)
        self.pool = Pool(
            self.client, self.database, self.launcher, PoolSituation(self.database, calendar.load())
        )

    async def run(self, activity: Callable[[Any], Awaitable[T]], request: Any) -> T:
        return await ActivityEnvironment().run(activity, request)

    async def user(self, *, with_account: bool = True) -> str:
        user_id = f"u{next(self._numbers)}"
        encrypted = await vault.encrypt(SECRET, self.ring.public, user_id=user_id, account_id="main")
        async with self.database.session() as session:
            await users.create(session, user_id)
            if with_account:
                await accounts.put(
                    session,
                    user_id=user_id,
                    account_id="main",
                    broker="paper",
                    broker_type="stock",
                    simulation=True,
                    encrypted=encrypted,
                )
        return user_id

    async def worker(self, worker_id: str | None = None) -> ScriptedWorker:
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
    keys = orchestrator_keys.create(tmp_path / "orchestrator.key")
    master_key.create_master_key(tmp_path / "master.key", tmp_path / "master.pub")
    made: dict[str, ScriptedWorker] = {}
    yield Yard(
        client=valkey_client,
        database=database,
        keys=keys,
        ring=master_key.load_ring(tmp_path / "master.key"),
        launcher=FakeLauncher(born(valkey_client, keys, made)),
        settings=Settings(data_dir=tmp_path, database_url=migrated_database),
        made=made,
    )
    await database.close()
