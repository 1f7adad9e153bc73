"""What the activities of one orchestrator are made of: its clients, keys and calendar."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from activities.pool_start import policy_of
from infra import valkey
from infra.database.engine import Database
from infra.hosts.port import HostScaler
from infra.hosts.registry import create_host_scaler
from infra.launchers.launch_rate import SharedRate
from infra.launchers.limited import LimitedLauncher, Turns
from infra.launchers.port import Launcher
from infra.launchers.registry import create_launcher
from infra.market import calendar
from infra.market.calendar import Calendar
from infra.settings import EcsSettings, Settings
from infra.vault import master_key, orchestrator_keys
from infra.vault.master_key import KeyUnwrapper
from infra.vault.orchestrator_keys import OrchestratorKeys

#: The pool of Valkey connections: each waiting claim holds one for up to 1.5 s.
VALKEY_CONNECTIONS = 256


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything the activities get in their constructors."""

    settings: Settings
    client: Redis
    database: Database
    launcher: Launcher
    unwrapper: KeyUnwrapper
    keys: OrchestratorKeys
    calendar: Calendar
    #: None: the number of hosts is not ours to set.
    hosts: HostScaler | None = None


@asynccontextmanager
async def open_parts(settings: Settings) -> AsyncIterator[Parts]:
    """Keys and calendar are read first: an orchestrator without them is of no use and says so at once."""
    policy_of(settings)
    days = calendar.load(Path(settings.calendar_file) if settings.calendar_file else None)
    keys = orchestrator_keys.load(settings.orchestrator_key_file)
    unwrapper = master_key.MasterKeyFiles(settings.master_key_file, *settings.master_key_retired)
    async with AsyncExitStack() as stack:
        client = valkey.connect(settings.valkey_url, max_connections=VALKEY_CONNECTIONS)
        stack.push_async_callback(client.aclose)
        database = Database(
            settings.database_url,
            pool_size=settings.database_pool,
            pool_wait=settings.database_pool_wait,
        )
        stack.push_async_callback(database.close)
        rate = SharedRate(client, settings.launch_rate, settings.launch_burst)
        launcher = LimitedLauncher(create_launcher(settings), Turns(rate))
        stack.push_async_callback(launcher.close)
        hosts = create_host_scaler(settings, EcsSettings())
        if hosts is not None:
            stack.push_async_callback(hosts.close)
        yield Parts(
            settings=settings,
            client=client,
            database=database,
            launcher=launcher,
            unwrapper=unwrapper,
            keys=keys,
            calendar=days,
            hosts=hosts,
        )
