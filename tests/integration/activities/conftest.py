"""Makes the harness of activities, and their client of Temporal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from temporalio.client import Client

from infra.database.engine import Database
from infra.local.servers import TemporalServer
from infra.settings import Settings
from infra.vault import key_pairs
from infra.vault.key_pairs import OrchestratorKeys
from tests.support.activities.harness import ActivityHarness
from tests.support.launchers.fake import FakeLauncher
from tests.support.message_signing import SECRETS
from tests.support.workers.pool_worker import ScriptedPoolWorker, born


@pytest.fixture
async def harness(
    valkey_client: Redis, services_database: str, tmp_path: Path
) -> AsyncIterator[ActivityHarness]:
    database = Database(services_database, pool_wait=30.0)
    key_pairs.create_orchestrator_keys(tmp_path)
    keys = OrchestratorKeys(tmp_path)
    key_pairs.create_master_key(tmp_path / "master.key", tmp_path / "master.pub")
    made: dict[str, ScriptedPoolWorker] = {}
    yield ActivityHarness(
        client=valkey_client,
        database=database,
        keys=keys,
        secrets=SECRETS,
        ring=key_pairs.load_ring(tmp_path / "master.key"),
        launcher=FakeLauncher(born(valkey_client, keys, made)),
        settings=Settings(data_dir=tmp_path, database_url=services_database),
        made=made,
    )
    await database.close()


@pytest.fixture
async def temporal(temporal_server: TemporalServer) -> Client:
    return await Client.connect(temporal_server.address)
