"""The parts of the local stack that are our own processes:
exchange, node, orchestrator, API, job runner.

Workers are listed and ended through the launcher that runs them, the node's or Docker's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from redis.exceptions import RedisError

from infra.jobs.view import JobInspector
from infra.launchers.port import stop_all
from infra.launchers.process import ProcessLauncher
from infra.launchers.registry import create_docker_launcher
from infra.local.folder import make_private
from infra.local.process import HOST, Server, accepts, inherited_environment
from infra.settings import Settings
from infra.valkey.job_login import without_login
from infra.vault import key_file
from infra.worker_task import Task
from worker_runtime.jobs.protocol.catalog import JOB_KINDS
from worker_runtime.protocol.errors import BerthError

if TYPE_CHECKING:
    from infra.launchers.docker.launcher import DockerLauncher


#: Requests to local addresses never use a proxy from the environment.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def http_ok(url: str, timeout: float = 2.0) -> bool:
    """Returns True if a GET answers 200."""
    try:
        with _direct.open(url, timeout=timeout) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):  # refused, timed out, another status
        return False


#: Settings whose URLs hold a password, or may.
_SECRET = {
    "valkey_url",
    "worker_valkey_url",
    "database_url",
    "database_direct_url",
    "database_owner_url",
    "alert_webhooks",
}


def environment(settings: Settings) -> dict[str, str]:
    """Returns what a child inherits of our environment,
    with these settings as its only `BERTH_` variables.

    It holds no secret of ours.
    """
    return inherited_environment() | _variables(settings.model_dump(mode="json", exclude=_SECRET))


def _variables(settings: dict[str, Any]) -> dict[str, str]:
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in settings.items()
    }
    return {f"BERTH_{name.upper()}": text for name, text in texts.items()}


class ChildComponent(Server):
    """A child that runs `python -m <module>`. Settings go by environment, passwords by files."""

    module = ""
    #: Settings that it gets in files.
    secrets: Collection[str] = _SECRET

    def __init__(self, directory: Path, settings: Settings, port: int | None = None) -> None:
        super().__init__(directory, port)
        self.settings = settings

    def command(self) -> Sequence[str]:
        # -P: a stray `api.py` in the current folder is not imported.
        return [sys.executable, "-P", "-m", self.module]

    @property
    def _secrets(self) -> Path:
        return self.settings.data_dir / "run" / f"{self.name}.secrets"

    def prepare(self) -> None:
        super().prepare()
        make_private(self._secrets)
        secrets = self.settings.model_dump(mode="json", include=set(self.secrets))
        for name, url in _variables(secrets).items():
            key_file.write_key_file(self._secrets / name.lower(), url.encode(), private=True)

    def environment(self) -> Mapping[str, str]:
        own = {"BERTH_SECRETS_DIR": str(self._secrets.absolute())}
        if self.name != OrchestratorComponent.name:  # the port of metrics is for one process
            own["BERTH_METRICS_ADDRESS"] = ""
        return environment(self.settings) | own


class ExchangeComponent(ChildComponent):
    """The paper exchange: sessions on one port, admin API on another."""

    name = "exchange"
    module = "infra.exchange"

    def __init__(self, directory: Path, settings: Settings, port: int, admin_port: int) -> None:
        super().__init__(directory, settings, port)
        self.admin_port = admin_port
        self.admin_port_setting = ""

    @property
    def admin_url(self) -> str:
        return f"http://{HOST}:{self.admin_port}"

    def ports(self) -> list[tuple[int, str]]:
        return [*super().ports(), (self.admin_port, self.admin_port_setting)]

    def answers(self) -> bool:
        return accepts(self.port) and http_ok(f"{self.admin_url}/healthz")


class NodeComponent(ChildComponent):
    """The node. Its workers outlive it; after a restart it adopts them."""

    name = "node"
    module = "infra.node"
    keeps_children = True
    has_port = False

    def answers(self) -> bool:
        try:
            asyncio.run(ProcessLauncher(self.settings.node_socket, answer_timeout=1.0).ping())
        except BerthError:
            return False
        return True

    def tasks(self) -> list[Task]:
        """Returns the workers that run now. Raises `LauncherUnreachable`."""
        return asyncio.run(ProcessLauncher(self.settings.node_socket).list())

    def stop_all(self, reason: str) -> int:
        """Ends all workers, each within its grace period; returns how many there were.

        Raises `LauncherUnreachable`, and `StopFailed` when an end could not be confirmed.
        """
        return asyncio.run(ProcessLauncher(self.settings.node_socket).stop_all(reason))


class OrchestratorComponent(ChildComponent):
    """An orchestrator. It writes a file when it polls and the pool's workflow runs."""

    name = "orchestrator"
    module = "activities"
    has_port = False

    def __init__(self, directory: Path, settings: Settings) -> None:
        self.name = settings.orchestrator_name
        super().__init__(directory, settings)

    @property
    def ready_file(self) -> Path:
        return self.settings.data_dir / f"{self.settings.orchestrator_name}.ready"

    @property
    def promised(self) -> int:
        """The least number of free workers there will be, as its ready file says; 0: unknown."""
        try:
            return int(self.ready_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0

    def prepare(self) -> None:
        super().prepare()
        self.ready_file.unlink(missing_ok=True)  # a killed one left it behind

    def answers(self) -> bool:
        return self.ready_file.exists()


class JobFleetComponent(ChildComponent):
    """A fleet of the jobs' runners. With `valkey_users` it gets no login to Valkey: it derives its
    own."""

    name = "jobs"
    module = "infra.jobs.fleet"
    has_port = False
    secrets = ("valkey_url", "alert_webhooks")

    def __init__(self, directory: Path, settings: Settings) -> None:
        if settings.jobs_runner in settings.jobs_tiers:
            self.name = f"jobs-{settings.jobs_runner}"
        #: The URL of this process, which looks for the fleet's runners.
        self._own_valkey_url = settings.valkey_url
        if settings.valkey_users:
            settings = settings.model_copy(
                update={"valkey_url": without_login(settings.valkey_url)}
            )
        super().__init__(directory, settings)

    def answers(self) -> bool:
        """Returns True if a runner of its name is registered that was not there before the
        start."""
        return bool(self._registered() - self._before)

    def prepare(self) -> None:
        super().prepare()
        self._before = self._registered()

    def _registered(self) -> set[str]:
        name = self.settings.jobs_runner
        try:
            with JobInspector(self._own_valkey_url) as jobs:
                return {runner.runner for runner in jobs.overview().runners if runner.name == name}
        except RedisError:
            return set()


def job_fleets(directory: Path, settings: Settings) -> list[JobFleetComponent]:
    """Returns one fleet for each tier, and one for what else there is; none if the settings name no
    runner."""
    tiers = settings.jobs_tiers
    fleets = [
        {"jobs_runner": queue, "jobs_queues": (queue,), "jobs_runners": runners}
        for queue, runners in tiers.items()
    ]
    if settings.jobs_runner:
        others = {kind.queue for kind in JOB_KINDS.values()} - set(tiers)
        narrowed = tiers and settings.jobs_queues == ("*",)
        fleets.append({"jobs_queues": tuple(sorted(others)) if narrowed else settings.jobs_queues})
    return [JobFleetComponent(directory, settings.model_copy(update=fleet)) for fleet in fleets]


class ApiComponent(ChildComponent):
    """The API: several uvicorn processes on one port."""

    name = "api"
    module = "api"

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def answers(self) -> bool:
        return accepts(self.port) and http_ok(f"{self.url}/v1/readyz")


R = TypeVar("R")


def fleet_of(folder: Path) -> str:
    """Names the fleet of a folder: one for each, so that stacks on the same daemon leave each
    other's workers alone."""
    return f"berth-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12]}"


class WorkerContainers:
    """The workers of a stack that run in Docker.
    Raises `LauncherUnreachable` while the daemon is away."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def tasks(self) -> list[Task]:
        """Returns the workers that run now."""
        return self._ask(lambda launcher: launcher.list())

    def stop_all(self, reason: str) -> int:
        """Ends all workers, each within its grace period; returns how many there were."""
        return self._ask(lambda launcher: stop_all(launcher, reason))

    def _ask(self, question: Callable[[DockerLauncher], Awaitable[R]]) -> R:
        async def asked() -> R:
            launcher = create_docker_launcher(self._settings)
            try:
                return await question(launcher)
            finally:
                await launcher.close()

        return asyncio.run(asked())
