"""The release before and this one side by side under orders: there, and back again, as the runbook
says."""

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.database.migrate import migrate
from infra.local.components import ApiComponent, ChildComponent, JobFleetComponent
from infra.local.process import free_port, inherited_environment
from infra.local.servers import TemporalServer
from infra.local.stack import DATABASE, LocalStack
from infra.valkey.job_login import without_login
from infra.vault.secret_versions import create_versions
from tests.support import needs
from tests.support.systems.local import VERIFY, RunningSystem, Trader, until

ROOT = Path(__file__).resolve().parents[3]
#: The schema of the release before, and the migration in whose commit its code stands; it runs with
#: this release's packages.
SCHEMA_BEFORE = "0008"
BEFORE = f"infra/database/migrations/versions/{SCHEMA_BEFORE}_tags_used.py"
TRADERS = 2


@pytest.fixture(scope="module")
def release_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    needs.require("history")
    commit = (
        git("log", "--diff-filter=A", "--format=%H", "--max-count=1", "--", BEFORE).decode().strip()
    )
    assert commit, f"the history lacks the commit that added {BEFORE}"
    subprocess.run(
        [shutil.which("tar") or "tar", "-x", "-C", str(folder)],
        input=git("archive", commit),
        check=True,
        timeout=60,
    )
    return folder


def git(*words: str) -> bytes:
    command = [shutil.which("git") or "git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout


class RunningRelease:
    """Which code a component runs from its next start on, and how its parts are called."""

    def __init__(self, path: Path | None, number: str) -> None:
        self._path, self.number, self.build_id = path, number, f"{number}-rehearsal"

    @property
    def python_path(self) -> str:
        return "" if self._path is None else str(self._path)

    def give_to(self, component: ChildComponent) -> None:
        def environment() -> Mapping[str, str]:
            plain = {
                name: v
                for name, v in type(component).environment(component).items()
                if name != "PYTHONPATH"
            }
            if not self.python_path:
                return plain
            # Each release has defaults of its own for these, and the stack passes this one's.
            own = [name for name in plain if name.startswith(("BERTH_CHECK_", "BERTH_JOBS_SLOTS"))]
            return {name: v for name, v in plain.items() if name not in own} | {
                "PYTHONPATH": self.python_path
            }

        component.environment = environment  # type: ignore[method-assign]


class StackOfBefore(LocalStack):
    """All of it is the release before, its tables too."""

    def __init__(self, directory: Path, old: RunningRelease, **overrides: Any) -> None:
        super().__init__(
            directory,
            build_id=old.build_id,
            worker_version="0.1.0",
            pool_target=TRADERS,
            **overrides,
        )
        self.old = old
        for component in (self.node, self.api, self.orchestrator):
            old.give_to(component)
        for fleet in self.jobs:
            self.give_to_fleet(old, fleet)

    def give_to_fleet(self, release: RunningRelease, fleet: JobFleetComponent) -> None:
        """Has a fleet of job runners run a release from its next start on.

        The release before uses Valkey's own login; this one derives a login of its own, which only
        orchestrators of this release make.
        """
        url = self.settings.valkey_url
        if release is not self.old:
            url = without_login(url)
        fleet.settings = fleet.settings.model_copy(update={"valkey_url": url})
        release.give_to(fleet)

    def _make_keys(self) -> str:
        codec = Path(self.settings.temporal_codec_key_file)
        if not codec.exists():
            create_versions(codec)  # in the format that the release before reads
        return super()._make_keys()

    def _make_database(self) -> str:
        self.postgres.create_database(DATABASE)
        scripts = Path(self.old.python_path) / "infra" / "database" / "migrations"
        assert asyncio.run(migrate(self.settings.database_url, scripts))[1] == SCHEMA_BEFORE
        self.admin_key = self._make_admin_key(self.folder.keys / "admin.key")
        return DATABASE

    def _make_admin_key(self, path: Path) -> str:
        """Has the release before make the key: its table lacks columns that this release fills."""
        code = (
            "import sys; from pathlib import Path; from infra.settings import Settings;"
            " from infra.vault import keyring; keyring.ensure_admin_key(Path(sys.argv[1]), "
            "Settings())"
        )
        own = {
            "PYTHONPATH": self.old.python_path,
            "BERTH_DATA_DIR": str(self.settings.data_dir),
            "BERTH_DATABASE_URL": self.settings.database_url,
            "BERTH_API_SECRET_FILE": str(self.settings.api_secret_file),
        }
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, str(path)],
            env=inherited_environment() | own,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return path.read_text().strip()

    def temporal_command(self, *words: str) -> Any:
        """What Temporal's own program answers, as in the runbook."""
        done = subprocess.run(
            [
                TemporalServer.binary(),
                *words,
                "--address",
                self.temporal.address,
                "--output",
                "json",
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout or "null")

    def make_current(self, release: RunningRelease) -> None:
        self.temporal_command(
            "worker",
            "deployment",
            "set-current-version",
            "--deployment-name",
            "berth",
            "--build-id",
            release.build_id,
            "--yes",
        )

    def left_on_another(self, release: RunningRelease) -> list[Any]:
        asked = (
            "TemporalWorkerDeployment = 'berth' AND ExecutionStatus = 'Running' "
            f"AND TemporalWorkerDeploymentVersion != 'berth:{release.build_id}'"
        )
        workflows: list[Any] = self.temporal_command("workflow", "list", "--query", asked)
        return workflows


class RollingSystem(RunningSystem):
    """Calls go to all API processes in turn."""

    def __init__(self, stack: LocalStack) -> None:
        super().__init__(stack)
        self.apis = [stack.api]
        self._turns = itertools.count()

    def call(self, method: str, path: str, key: str, **how: Any) -> httpx.Response:
        url = self.apis[next(self._turns) % len(self.apis)].url
        with httpx.Client(base_url=url, timeout=45, trust_env=False, verify=self._tls) as http:
            return http.request(method, path, headers={"X-API-Key": key}, **how)


@pytest.fixture
def old(release_before: Path) -> RunningRelease:
    return RunningRelease(release_before, "0.1.0")


@pytest.fixture
def system(tmp_path: Path, old: RunningRelease) -> Iterator[RollingSystem]:
    with StackOfBefore(tmp_path / "stack", old, **VERIFY) as stack:
        system = RollingSystem(stack)
        yield system
        system.threads.shutdown()


class Clients:
    """Each trader sends orders one after the other, and repeats each under its id until it is
    final."""

    def __init__(self, system: RunningSystem, traders: list[Trader]) -> None:
        self._system = system
        self._ending = threading.Event()
        self.states: dict[tuple[str, str], str] = {}
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._send, args=(trader,)) for trader in traders]
        for thread in self._threads:
            thread.start()

    def _send(self, trader: Trader) -> None:
        number = 0
        while not self._ending.is_set():
            number += 1
            name, deadline = f"c-{number}", time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    answer = self._system.order(trader, name)
                except httpx.HTTPError:  # the API is restarted
                    self._ending.wait(0.1)
                    continue
                order = answer.json().get("order") or answer.json()
                if order.get("final"):
                    self.states[trader.user_id, name] = order["state"]
                    if order["state"] != "filled":
                        self.faults.append(f"{name}: {order}")
                    break
                self._ending.wait(0.1)
            else:
                self.faults.append(f"{name} has no outcome")
                return
            self._ending.wait(0.05)

    def more(self, count: int = 10) -> None:
        """Waits for this many further orders."""
        expected_count = len(self.states) + count
        until(lambda: len(self.states) >= expected_count or bool(self.faults), "more orders")

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(90)


@pytest.mark.drill
@pytest.mark.timeout(240)
def test_no_order_is_lost_and_no_claim_fails_on_the_way_to_this_release_and_back(
    system: RollingSystem, old: RunningRelease
) -> None:
    stack, new = system.stack, RunningRelease(None, "0.2.0")
    assert isinstance(stack, StackOfBefore)
    traders = [system.trader() for _ in range(TRADERS)]
    for trader in traders:
        system.start_until_active(trader)
    clients = Clients(system, traders)
    try:
        clients.more()
        migrated = subprocess.run(
            [Path(sys.executable).with_name("berth"), "migrate", "--data", str(stack.folder.path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert migrated.returncode == 0, migrated.stderr
        clients.more()
        for release in (new, old):
            roll_orchestrators(stack, release, clients)
            begin_rollout(system, release)
            roll_api(system, release, clients)
            end_rollout(system, release)
            clients.more()
    finally:
        clients.end()
    assert clients.faults == []
    for trader in traders:
        sent = [name for user, name in clients.states if user == trader.user_id]
        assert len(system.ledger(trader)) == len(sent)
        stopped = system.call("POST", f"/v1/users/{trader.user_id}/worker/stop", trader.api_key)
        assert stopped.is_success, stopped.text
        system.start_until_active(trader)  # no workflow is stuck
    assert stack.left_on_another(old) == []


def roll_orchestrators(stack: StackOfBefore, release: RunningRelease, clients: Clients) -> None:
    rolled = stack.add_orchestrator(build_id=release.build_id)
    release.give_to(rolled)
    rolled.start()  # while the other one runs
    clients.more()
    if release is stack.old:  # an operator orders a step back
        stack.make_current(release)
    until(lambda: not stack.left_on_another(release), f"workflows all on {release.build_id}")
    for orchestrator in stack.orchestrators:
        if orchestrator is not rolled and orchestrator.running:
            orchestrator.stop()
    clients.more()
    for fleet in stack.jobs:
        stack.give_to_fleet(release, fleet)
        fleet.restart()


def roll_api(system: RollingSystem, release: RunningRelease, clients: Clients) -> None:
    stack, (former,) = system.stack, system.apis
    port = free_port()
    rolled = ApiComponent(
        stack.folder.path, stack.settings.model_copy(update={"api_port": port}), port
    )
    rolled.name = f"api-{release.number}"
    rolled.log_path, rolled.records = stack.folder.logs / f"{rolled.name}.log", stack.folder.records
    release.give_to(rolled)
    rolled.start()
    system.apis.append(rolled)
    clients.more()  # half of them by each
    system.apis.remove(former)
    former.stop()
    stack.api = rolled
    clients.more()


def begin_rollout(system: RollingSystem, release: RunningRelease) -> None:
    stack = system.stack
    release.give_to(stack.node)
    stack.node.restart()  # it keeps the workers; those that come are of the other release
    begun = system.call(
        "POST",
        "/v1/pools/default/rollout",
        stack.admin_key,
        json={
            "version": release.number,
            "deadline_seconds": 0,
            "quiet_seconds": 0,
            "reason": "rehearsal",
        },
    )
    assert begun.status_code == 202, begun.text


def end_rollout(system: RollingSystem, release: RunningRelease) -> None:
    def ended() -> bool:
        rollout = system.call("GET", "/v1/pools/default/rollout", system.stack.admin_key).json()
        assert not rollout["reason"], rollout
        return bool(rollout["ended"])

    until(ended, f"workers of {release.number}", 60)
    for task in system.stack.tasks():
        variables = (
            Path(f"/proc/{system.worker_pid(task.worker_id)}/environ").read_bytes().split(b"\0")
        )
        assert task.version == release.number
        named = [variable for variable in variables if variable.startswith(b"PYTHONPATH=")]
        assert named == (
            [f"PYTHONPATH={release.python_path}".encode()] if release.python_path else []
        )
