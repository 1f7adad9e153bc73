"""The resources of an orchestrator: clients, keys, calendar."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from activities.orchestrator.pool_policy import policy_of
from infra.database.engine import Database
from infra.hosts.scaling import HostScaler
from infra.launchers.limited import LaunchTurns, LimitedLauncher, SharedRate
from infra.launchers.port import Launcher
from infra.launchers.registry import create_host_scaler, create_launcher
from infra.market import calendar
from infra.market.calendar import Calendar
from infra.settings import EcsSettings, Settings
from infra.valkey import client as valkey
from infra.vault import key_pairs
from infra.vault import key_pairs as orchestrator_keys
from infra.vault.key_pairs import KeyUnwrapper, OrchestratorKeys

#: The pool of Valkey connections: each waiting claim holds one for up to 1.5 s.
VALKEY_CONNECTIONS = 256


@dataclass(frozen=True, kw_only=True)
class OrchestratorResources:
    """Everything the activities get in their constructors."""

    settings: Settings
    client: Redis
    database: Database
    launcher: Launcher
    unwrapper: KeyUnwrapper
    keys: OrchestratorKeys
    calendar: Calendar
    #: None: the number of hosts is not managed here.
    hosts: HostScaler | None = None


@asynccontextmanager
async def open_resources(settings: Settings) -> AsyncIterator[OrchestratorResources]:
    """Opens and closes the resources. Reads keys and calendar first, so that a missing one fails at once."""
    policy_of(settings)
    days = calendar.load_calendar(Path(settings.calendar_file) if settings.calendar_file else None)
    keys = orchestrator_keys.load_orchestrator_keys(settings.orchestrator_key_file)
    unwrapper = key_pairs.MasterKeyFiles(settings.master_key_file, *settings.master_key_retired)
    async with AsyncExitStack() as stack:
        client = valkey.connect_valkey(settings.valkey_url, max_connections=VALKEY_CONNECTIONS)
        stack.push_async_callback(client.aclose)
        database = Database(
            settings.database_url, pool_size=settings.database_pool, pool_wait=settings.database_pool_wait
        )
        stack.push_async_callback(database.close)
        rate = SharedRate(client, settings.launch_rate, settings.launch_burst)
        launcher = LimitedLauncher(create_launcher(settings), LaunchTurns(rate))
        stack.push_async_callback(launcher.close)
        hosts = create_host_scaler(settings, EcsSettings())
        if hosts is not None:
            stack.push_async_callback(hosts.close)
        yield OrchestratorResources(
            settings=settings,
            client=client,
            database=database,
            launcher=launcher,
            unwrapper=unwrapper,
            keys=keys,
            calendar=days,
            hosts=hosts,
        )
