"""`Server`: a child process with a port, which is started,
awaited, stopped and killed by its own pid.

The kernel ends it with the process that started it (PDEATHSIG). It leads its own session, so that
Ctrl-C in a terminal reaches only us, and we stop everything in order.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import IO, Any, Self

import psutil

from infra.environment import compose_environment
from infra.local import record
from infra.local.record import ProcessRecord
from infra.processes import end_with_parent
from infra.settings import LocalSettings, read_settings
from worker_runtime.protocol.errors import BerthError

HOST = "127.0.0.1"
#: PostgreSQL's first start (initdb) takes about 3 s, the others under 2 s on 2 idle cores. On cores
#: that 20 other processes kept busy, an API needed more than 60 s.
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
#: Bytes of a log that a start continues with.
MAX_LOG_BYTES = 64 << 20

#: Bytes at the end of a log among which the cause of an end is looked for.
LOG_TAIL_BYTES = 64 << 10

#: Below the ports that Linux assigns itself (from 32768), because ours are bound seconds
#: after they are chosen. Each process takes ports from a part of its own, so that two
#: processes do not choose the same.
_PORTS = range(12_000, 32_000)
_PORT_PARTS = 50
_PORTS_PER_PART = len(_PORTS) // _PORT_PARTS
_turns = itertools.count()

#: PDEATHSIG fires when the *thread* that forked ends,
#: so one thread that never ends forks all children.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="berth-spawner")


#: Finds the lines of servers and of Python that report an error.
_ERROR = re.compile(
    r"\b(FATAL|PANIC|ERROR|[Ee]rror|[A-Z]\w+(Error|Exception)|panic|cannot|refused|denied)\b"
)


class ServerFailed(BerthError, code="SERVER_FAILED"):
    """A local server did not start."""


class PortInUse(ServerFailed, code="PORT_IN_USE"):
    """A needed port belongs to another process."""


class StartAborted(ServerFailed, code="START_ABORTED"):
    """The start was given up because something else failed."""


def free_ports(count: int) -> list[int]:
    """Returns `count` different TCP ports that were free a moment ago. Raises `ServerFailed` if
    there are fewer."""
    first = _PORTS.start + os.getpid() % _PORT_PARTS * _PORTS_PER_PART
    ports: list[int] = []
    for _ in range(_PORTS_PER_PART):
        if len(ports) == count:
            break
        port = first + next(_turns) % _PORTS_PER_PART
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            ports.append(port)
    if len(ports) < count:
        raise ServerFailed(f"no {count} free ports from {first} to {first + _PORTS_PER_PART - 1}")
    return ports


def free_port() -> int:
    return free_ports(1)[0]


def accepts(port: int, host: str = HOST) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0


def listener(port: int) -> str:
    """Says who listens on a port: `pid 123 (redis-server)`, or `another process` if we may not see
    it."""
    try:
        for link in psutil.net_connections("tcp"):
            if (
                link.status == psutil.CONN_LISTEN
                and link.laddr
                and link.laddr.port == port
                and link.pid
            ):
                return f"pid {link.pid} ({psutil.Process(link.pid).name()})"
    except psutil.Error:
        pass
    return "another process"


def telling_line(log: str) -> str:
    """Returns the line of a log that says best why a program ended:
    its last error, else its last line.

    Of our own processes, whose lines are JSON, that is `event: reason`. '' if the log says nothing.
    """
    lines = [
        line.strip()
        for line in log.splitlines()
        if line.strip() and not line.startswith("(whole log:")
    ]
    for line in reversed(lines):
        if (ours := _logged_error(line)) is not None:
            return ours
        if not line.startswith("{") and _ERROR.search(line):
            return line[:500]
    return lines[-1][:500] if lines else ""


def _logged_error(line: str) -> str | None:
    """Returns the error that a line of our own log reports; None if it reports none."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or str(fields.get("level")).lower() not in (
        "error",
        "critical",
    ):
        return None
    why = fields.get("reason") or fields.get("detail") or fields.get("error")
    return f"{fields.get('event')}: {why}" if why else str(fields.get("event"))


def inherited_environment() -> dict[str, str]:
    """Returns what a process of the local system inherits of our environment."""
    return compose_environment(os.environ, read_settings(LocalSettings).pass_environment)


class Server:
    """A server process. `start()` returns when it answers."""

    name = "server"
    #: True if its children live on when it ends (the node's workers do).
    keeps_children = False
    #: True if it listens on a TCP port.
    has_port = True

    def __init__(
        self, directory: Path, port: int | None = None, *, durable: bool = True, password: str = ""
    ) -> None:
        """Describes a server. With `durable`, what it stores survives a crash of the host; without
        that, tests are quicker."""
        self.durable = durable
        self.password = password
        self.directory = directory
        self.port = port or free_port()
        self.log_path = directory / f"{self.name}.log"
        #: The setting that chooses another port, for the message when the port is in use.
        self.port_setting = ""
        #: Folder for the process's record, if it should have one.
        self.records: Path | None = None
        #: Set by the owner to give up waiting for readiness.
        self.abort = Event()
        #: Seconds for which a start waits for an answer.
        self.start_timeout = START_TIMEOUT_S
        self._process: subprocess.Popen[bytes] | None = None
        #: Where in its log the last start began.
        self._log_start = 0

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Returns the child's environment: what it may inherit of ours."""
        return inherited_environment()

    def answers(self) -> bool:
        return accepts(self.port)

    def ports(self) -> list[tuple[int, str]]:
        """Returns the ports it listens on, each with the setting that chooses it."""
        return [(self.port, self.port_setting)] if self.has_port else []

    def prepare(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerFailed(f"{self.name} was not started")
        return self._process.pid

    @property
    def was_started(self) -> bool:
        return self._process is not None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Starts the server; raises `ServerFailed`
        with the end of its log if it does not come up."""
        self.launch()
        self.wait_ready()
        return self

    def check_ports(self) -> None:
        """Raises `PortInUse` with the port, its owner, and the setting that chooses another."""
        for port, setting in self.ports():
            if accepts(port):
                hint = f"; stop it or choose another port with {setting}" if setting else ""
                raise PortInUse(f"{self.name}: port {port} is in use by {listener(port)}{hint}")

    def launch(self) -> None:
        self.check_ports()
        self.prepare()
        self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.log_path.exists() and self.log_path.stat().st_size > MAX_LOG_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        with open(
            self.log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as log:
            self._log_start = log.tell()
            self._process = _spawner.submit(self._spawn, log).result()
        if self.records is not None:
            entry = ProcessRecord.of(self.name, self.pid, keeps_children=self.keeps_children)
            if entry is not None:
                entry.write(self.records)

    def _identity(self) -> dict[str, Any]:
        """Returns keyword arguments of Popen that choose the user it runs as."""
        return {}

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(self.command()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self.environment(),
            start_new_session=True,
            umask=0o077,
            preexec_fn=end_with_parent(os.getpid()),
            **self._identity(),
        )

    def wait_ready(self) -> None:
        timeout = self.start_timeout
        deadline = time.monotonic() + timeout
        while not self.answers():
            if not self.running:
                raise ServerFailed(f"{self.name} ended while starting: {self.explain_log()}")
            if time.monotonic() > deadline:
                self.stop()
                raise ServerFailed(
                    f"{self.name} did not answer within {timeout:.0f} s: {self.explain_log()}"
                )
            if self.abort.wait(0.02):
                raise StartAborted(f"{self.name}: given up")

    def explain_log(self) -> str:
        """Returns the line of the log that tells most, and below it the end of the log."""
        tail = self.log_tail()
        return f"{telling_line(tail) or 'it wrote nothing'}\n{tail}"

    def log_tail(self, lines: int = 15) -> str:
        if not self.log_path.exists():
            return ""
        text = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        return f"{text}\n(whole log: {self.log_path})"

    def describe_end(self) -> str:
        """Return how it ended, and what its log says of it since its start."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return "it runs"
        status = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self._log_start, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            text = ""
        words = telling_line(text)
        return f"{status}; {words}" if words else f"{status}; its log says nothing of it"

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Stops the server and all processes it started, and waits for their end. SIGKILL: a
        crash."""
        process = self._process
        if process is None:
            return
        family = self._family(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)  # a stopped process would not see the next signal
            process.send_signal(how)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
        # After a crash PostgreSQL's children end by themselves within a second; uvicorn's do not.
        grace = 2.0 if how == signal.SIGKILL and self.name == "postgres" else 0.2
        remaining = record.wait_gone(family, grace)
        if remaining:
            record.send_signal(remaining, signal.SIGKILL)
            record.wait_gone(remaining, STOP_TIMEOUT_S)
        if self.records is not None:
            record.forget_record(self.records, self.name)

    def _family(self, pid: int) -> list[int]:
        """Returns the pids of all processes it started, even those whose parent has ended or that
        left its session."""
        if self.keeps_children:
            return []
        family = set(record.session_members(pid))
        # It has ended: only its session's members are known.
        with contextlib.suppress(psutil.NoSuchProcess):
            family |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        return sorted(family - {pid})

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def restart(self, how: signal.Signals = signal.SIGTERM, down: float = 0.0) -> Self:
        """Stops it and starts it again after `down` seconds, on its port and with its data.

        Raises `ServerFailed` if it does not come up; `start()` may then be tried again.
        """
        self.stop(how)
        if self.abort.wait(down):
            raise StartAborted(f"{self.name}: given up")
        return self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.stop()
