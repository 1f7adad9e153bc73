"""`LocalStack`: the whole system as child processes on 127.0.0.1,
for `berth up`, tests and benchmarks."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from redis import Redis

from infra.database import accounts
from infra.database.engine import Database
from infra.database.migrate import migrate
from infra.local import steps
from infra.local.components import (
    ApiComponent,
    ExchangeComponent,
    NodeComponent,
    OrchestratorComponent,
    WorkerContainers,
    fleet_of,
    job_fleets,
)
from infra.local.folder import DataFolder
from infra.local.process import HOST, Server, ServerFailed, StartAborted, free_ports
from infra.local.servers import PostgresServer, TemporalServer, ValkeyServer
from infra.local.steps import OnProgress, StartStep, StepProgress, StepStatus
from infra.settings import LocalSettings, Settings, read_settings
from infra.vault import keyring
from infra.vault.rotation import kept_files
from infra.worker_task import LauncherUnreachable, Task
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError

#: Equal to `workflows.names.SEARCH_ATTRIBUTES`,
#: which this room must not import; a test compares them.
SEARCH_ATTRIBUTES = ("UserId", "State", "WorkerId", "Pool")
DATABASE = "berth"
#: Seconds until the pool must be full; four workers take about 2 s on 2 idle cores.
POOL_TIMEOUT_S = 60.0
#: Seconds between two checks of the pool.
POOL_CHECK_INTERVAL_S = 0.05


class LocalStack:
    """A context manager. Every part can be stopped, killed and started again by itself.

    Without `ports` all ports are free ones. `orchestrators`: how many run at once. `overrides`:
    fields of `Settings`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ports: LocalSettings | None = None,
        durable: bool = True,
        orchestrators: int = 1,
        progress: OnProgress = lambda change: None,
        **overrides: Any,
    ) -> None:
        self.folder = DataFolder(directory)
        self._progress = progress
        self._opened = False
        self._stopping = threading.Lock()
        path = self.folder.path
        if ports is None:
            api_port, *others = free_ports(7)
            names = [name for name in LocalSettings.model_fields if name.endswith("_port")]
            ports = LocalSettings.model_validate(dict(zip(names, others, strict=True)))
            overrides.setdefault("api_port", api_port)
        self._ports = ports
        self.settings = _settings(self.folder, ports, overrides)
        self.valkey = ValkeyServer(
            path / "valkey",
            ports.valkey_port,
            durable=durable,
            password=self.folder.passwords.valkey,
        )
        self.postgres = PostgresServer(
            path / "postgres",
            ports.postgres_port,
            durable=durable,
            password=self.folder.passwords.postgres,
        )
        self.temporal = TemporalServer(
            path / "temporal",
            ports.temporal_port,
            ui_port=ports.ui_port,
            durable=durable,
            search_attributes=SEARCH_ATTRIBUTES,
        )
        self.exchange = ExchangeComponent(
            path / "exchange", self.settings, ports.exchange_port, ports.exchange_admin_port
        )
        self.node = NodeComponent(path / "node", self.settings)
        #: None unless Docker runs the workers; the node then has none.
        self.containers = (
            WorkerContainers(self.settings) if self.settings.launcher == "docker" else None
        )
        self.orchestrators = [
            OrchestratorComponent(path, self._orchestrator_settings(number))
            for number in range(1, orchestrators + 1)
        ]
        self.api = ApiComponent(path, self.settings, self.settings.api_port)
        self.jobs = job_fleets(path, self.settings)
        #: In the order in which they start.
        self.servers: tuple[Server, ...] = (
            self.valkey,
            self.postgres,
            self.temporal,
            self.exchange,
            self.node,
            *self.orchestrators,
            self.api,
            *self.jobs,
        )
        for server in self.servers:
            self._register_server(server)
            server.port_setting = f"BERTH_LOCAL_{server.name.upper()}_PORT"
        self.api.port_setting = "--port or BERTH_API_PORT"
        self.exchange.admin_port_setting = "BERTH_LOCAL_EXCHANGE_ADMIN_PORT"
        self.temporal.ui_port_setting = "BERTH_LOCAL_UI_PORT"
        #: An administrator's API key, kept in `<data>/keys/admin.key`; set by the start.
        self.admin_key = ""

    def _register_server(self, server: Server) -> None:
        server.log_path = self.folder.logs / f"{server.name}.log"
        server.records = self.folder.records

    def _orchestrator_settings(self, number: int, **overrides: Any) -> Settings:
        name = self.settings.orchestrator_name + (f"-{number}" if number > 1 else "")
        return self.settings.model_copy(update={"orchestrator_name": name, **overrides})

    def add_orchestrator(self, **overrides: Any) -> OrchestratorComponent:
        """Adds one that is not started yet. `overrides`: its own fields of `Settings`."""
        made = OrchestratorComponent(
            self.folder.path, self._orchestrator_settings(len(self.orchestrators) + 1, **overrides)
        )
        self._register_server(made)
        self.orchestrators.append(made)
        return made

    @property
    def orchestrator(self) -> OrchestratorComponent:
        return self.orchestrators[0]

    @property
    def api_url(self) -> str:
        return self.api.url

    @property
    def ui_url(self) -> str:
        return f"http://{HOST}:{self.temporal.ui_port}"

    def start(self) -> Self:
        """Starts everything and fills the pool.

        Raises `FolderUnusable`, `PortInUse` or `ServerFailed`, and then leaves nothing behind.
        """
        self.folder.open()
        self._opened = True
        for server in self.servers:
            server.abort.clear()
        try:
            leftovers = self.folder.end_leftovers()
            if leftovers:
                self._progress(
                    StepProgress("leftovers", StepStatus.DONE, detail=", ".join(leftovers))
                )
            for server in self.servers:  # before anything is started or written
                server.check_ports()
            steps.run_steps(self._steps(), self._progress, self._give_up)
            self.folder.record_api_url(self.api_url, self._ports.model_dump_json())
        except BaseException:
            self.stop()
            raise
        return self

    def _steps(self) -> list[StartStep]:
        ours = ("keys", "database", "valkey", "temporal")
        orchestrators = tuple(orchestrator.name for orchestrator in self.orchestrators)
        return [
            StartStep("keys", self._make_keys),
            self._server(self.valkey),
            self._server(self.postgres),
            self._server(self.temporal),
            self._server(self.exchange),
            StartStep("node", self._start_node),
            StartStep("database", self._make_database, ("postgres",)),
            *(
                self._server(orchestrator, (*ours, "node", "exchange"))
                for orchestrator in self.orchestrators
            ),
            self._server(self.api, ours),
            # An orchestrator makes their login to Valkey.
            *(self._server(runner, ("valkey", *orchestrators)) for runner in self.jobs),
            StartStep("pool", self._wait_pool, orchestrators),
        ]

    @staticmethod
    def _server(server: Server, needs: tuple[str, ...] = ()) -> StartStep:
        def action() -> str:
            server.start()
            return f"port {server.port}" if server.ports() else ""

        return StartStep(server.name, action, needs)

    def _give_up(self) -> None:
        for server in self.servers:
            server.abort.set()

    def _make_keys(self) -> str:
        return ", ".join(path.name for path in keyring.create_missing_keys(self.settings))

    def _make_database(self) -> str:
        self.postgres.create_database(DATABASE)
        asyncio.run(migrate(self.settings.session_database_url))
        if not self.settings.live_accounts:
            asyncio.run(_refuse_live_accounts(self.settings))
        path = self.folder.keys / "admin.key"
        self.admin_key = keyring.ensure_admin_key(path, self.settings)
        return DATABASE

    def _start_node(self) -> str:
        """Starts the node, and ends the workers that a killed
        `berth up` left: their users get new ones."""
        self.node.start()
        ended = self.node.stop_all("left by an earlier run")
        if self.containers is not None:
            ended += self.containers.stop_all("left by an earlier run")
        return f"ended {ended} workers of an earlier run" if ended else ""

    def _wait_pool(self) -> str:
        # An operator or a window may ask for fewer than the settings do.
        target = min(
            self.settings.pool_target,
            max(orchestrator.promised for orchestrator in self.orchestrators),
        )
        self.wait_pool(target)
        return f"{target} workers ready"

    def wait_pool(self, count: int, timeout: float = POOL_TIMEOUT_S) -> None:
        """Waits until `count` workers are ready. Raises `ServerFailed` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        shown = -1
        while (ready := len(self.ready_workers())) < count:
            if ready != shown:
                self._progress(
                    StepProgress("pool", StepStatus.STARTED, detail=f"{ready} of {count} ready")
                )
                shown = ready
            if not any(orchestrator.running for orchestrator in self.orchestrators):
                raise ServerFailed(f"orchestrator ended: {self.orchestrator.explain_log()}")
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"pool: {ready} of {count} workers were ready after {timeout:.0f} s; look at "
                    f"{self.folder.logs} and {self.node.directory}\n"
                    f"{self.orchestrator.log_tail()}"
                )
            if self.orchestrator.abort.wait(POOL_CHECK_INTERVAL_S):
                raise StartAborted("pool: given up")

    def ready_workers(self) -> set[str]:
        """Returns the ids of the pool's free workers that really run."""
        pool = self.settings.pool
        with Redis.from_url(
            self.settings.valkey_url, socket_timeout=5.0, decode_responses=True
        ) as client:
            named = client.zrange(keys.pool_ready(pool), 0, -1)
            alive = {name for name in named if client.exists(keys.pool_worker(pool, name))}
        if not alive:
            return set()
        return alive & {task.worker_id for task in self.tasks()}

    def tasks(self) -> list[Task]:
        """Returns the workers that run now. Raises `LauncherUnreachable`."""
        return self.node.tasks() if self.containers is None else self.containers.tasks()

    def stop(self) -> None:
        """Stops everything in an order that loses nothing. May be called twice, and at any time.

        First the API and the orchestrators, then the workers while their servers still run, so that
        each finishes its order and removes its mark, then the servers.
        """
        with self._stopping:
            if not self._opened:
                return
            with contextlib.suppress(OSError):  # a full disk does not prevent the stop
                self.folder.note_stop()
            self._give_up()
            with contextlib.ExitStack() as order:  # last in, first out, even when one fails
                order.callback(self._close)
                order.callback(
                    _together,
                    self.exchange.stop,
                    self.temporal.stop,
                    self.valkey.stop,
                    self.postgres.stop,
                )
                order.callback(self.node.stop)
                order.callback(self._stop_workers)
                order.callback(
                    _together,
                    self.api.stop,
                    *(server.stop for server in (*self.orchestrators, *self.jobs)),
                )

    def _close(self) -> None:
        self.folder.close()
        self._opened = False

    def _stop_workers(self) -> None:
        if self.containers is not None:
            with contextlib.suppress(LauncherUnreachable):
                self.containers.stop_all("berth down")
        if not self.node.was_started:
            return
        if not self.node.running:  # it crashed; its successor adopts the workers and can end them
            self.node.abort.clear()
            with contextlib.suppress(ServerFailed):
                self.node.start()
        with contextlib.suppress(BerthError):
            self.node.stop_all("berth down")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.stop()


def _together(*actions: Callable[[], None]) -> None:
    """Runs all actions in parallel to their end; then raises the first error."""
    with ThreadPoolExecutor(max_workers=len(actions)) as threads:
        futures = [threads.submit(action) for action in actions]
    for future in futures:
        future.result()


async def _refuse_live_accounts(settings: Settings) -> None:
    """Raises `LiveAccountRefused` if a stored account
    trades for real: Temporal here has no login."""
    async with (
        Database(settings.database_url, pool_size=1) as database,
        database.session() as session,
    ):
        live = await accounts.live_accounts(session)
    if live:
        raise accounts.LiveAccountRefused(
            f"{len(live)} accounts trade for real ({', '.join(live[:5])}), and the Temporal of "
            "`berth up` has no login: anybody with an account on this machine can steer workers. "
            "Set BERTH_LOCAL_LIVE_ACCOUNTS=true to accept that"
        )


def _settings(folder: DataFolder, ports: LocalSettings, overrides: dict[str, Any]) -> Settings:
    """Returns the environment's settings, with all addresses and files of this stack.

    URLs of `overrides` need no password; this adds it.
    """
    fixed: dict[str, Any] = {
        "data_dir": folder.path,
        "valkey_url": f"redis://{HOST}:{ports.valkey_port}/0",
        # Our server has no TLS. Without `sslmode` asyncpg asks for it,
        # and reads files of ~/.postgresql.
        "database_url": (
            f"postgresql+asyncpg://{PostgresServer.user}@{HOST}:{ports.postgres_port}/{DATABASE}"
            "?sslmode=disable"
        ),
        "temporal_address": f"{HOST}:{ports.temporal_port}",
        "temporal_ui_url": f"http://{HOST}:{ports.ui_port}",
        "node_socket": folder.path / "node.sock",
        "valkey_users": True,
        # All our servers listen on 127.0.0.1 only.
        "docker_network": "host",
        "docker_fleet": fleet_of(folder.path),
        "exchange_address": f"{HOST}:{ports.exchange_port}",
        "exchange_admin_url": f"http://{HOST}:{ports.exchange_admin_port}",
        "master_key_file": folder.keys / "master.key",
        "master_public_file": folder.keys / "master.pub",
        "master_key_retired": kept_files(folder.keys / "master.key"),
        "orchestrator_key_dir": folder.keys,
        "message_key_file": folder.keys / "message.key",
        "api_secret_file": folder.keys / "api.key",
        "temporal_codec_key_file": str(folder.keys / "temporal.key"),
        "api_host": HOST,
        "live_accounts": ports.live_accounts,
    }
    settings = read_settings(Settings, **{**fixed, **overrides})
    valkey = ("redis://", f"redis://:{folder.passwords.valkey}@")
    database = (
        f"//{PostgresServer.user}@",
        f"//{PostgresServer.user}:{folder.passwords.postgres}@",
    )
    return settings.model_copy(
        update={
            "valkey_url": settings.valkey_url.replace(*valkey),
            "worker_valkey_url": settings.worker_valkey_url.replace(*valkey),
            "database_url": settings.database_url.replace(*database),
            "database_direct_url": settings.database_direct_url.replace(*database),
        }
    )


def local_settings(directory: Path) -> Settings:
    """Returns the settings of the `berth up` of this folder: with its ports if it runs, else the
    environment's."""
    folder = DataFolder(directory)
    _, ports = folder.addresses()
    local = LocalSettings.model_validate_json(ports) if ports else read_settings(LocalSettings)
    return _settings(folder, local, {})


def known_settings(name: str) -> Settings:
    """Returns the settings of the environment and secret files if they set `name`, else those of
    `berth up`."""
    settings = read_settings(Settings)
    return settings if name in settings.model_fields_set else local_settings(settings.data_dir)


#: Those of them that say where a system is.
_ADDRESSES = {"valkey_url", "database_url", "temporal_address"}


def running_settings() -> tuple[Settings, str]:
    """Returns the settings of the environment if they say where a system is, else those of the
    running `berth up` of the data folder; and which these are, in words."""
    settings = read_settings(Settings)
    path = DataFolder(settings.data_dir).path
    if settings.model_fields_set & _ADDRESSES:
        return settings, "looking at the servers that the settings (BERTH_…) name"
    if DataFolder(settings.data_dir).addresses()[0]:
        return local_settings(settings.data_dir), f"looking at the `berth up` of {path}"
    return settings, (
        f"no `berth up` is ready in {path}, and no setting (BERTH_…) says where a system is: "
        "looking at the default addresses"
    )


def end_leftovers(directory: Path) -> list[str]:
    """Ends all that a killed `berth up` left, workers too; returns names. Raises `FolderBusy`."""
    stack = LocalStack(directory)
    with contextlib.closing(stack.folder.lock()):
        names = stack.folder.end_leftovers()
        if stack.containers is not None:
            count = stack.containers.stop_all("berth down")
            names += [f"{count} containers"] if count else []
        if (stack.node.directory / "register.db").exists():
            stack.node.start()
            try:
                count = stack.node.stop_all("berth down")
                names += [f"{count} workers"] if count else []
            finally:
                stack.node.stop()
    return names


def pid_of_holder(directory: Path) -> int | None:
    """Returns the pid of the `berth up` that has this folder; None if there is none."""
    pid = DataFolder(directory).holder()
    return None if pid == os.getpid() else pid
