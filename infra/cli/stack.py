"""`berth up` runs the local system until Ctrl-C;
`berth down` stops it, or ends what a killed one left.

A start is shown as a live list on a terminal, as plain lines in a pipe.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from infra.cli import main_job as job
from infra.cli.main_job import MainJobResult
from infra.local import stack
from infra.local.process import Server
from infra.local.stack import LocalStack
from infra.local.steps import StepProgress, StepStatus, as_berth_error
from infra.settings import LocalSettings, read_settings
from worker_runtime.protocol.errors import BerthError

TITLES = {
    "leftovers": "ended what an earlier run left",
    "valkey": "Valkey",
    "postgres": "PostgreSQL",
    "database": "database schema",
    "temporal": "Temporal",
    "exchange": "paper exchange",
    "jobs": "job runner",
    "api": "API",
    "pool": "pool of warm workers",
}


#: The words and signs for a step that has ended, in a pipe and, with its colour, on a terminal.
_WORDS = {StepStatus.DONE: "ready", StepStatus.FAILED: "FAILED", StepStatus.STOPPED: "stopped"}
_SIGNS = {
    StepStatus.DONE: ("✓", "green"),
    StepStatus.FAILED: ("✗", "red"),
    StepStatus.STOPPED: ("-", "dim"),
}


class StackConsole(Console):
    """A console whose end (a full disk, a closed pipe) stops nothing."""

    def print(self, *objects: Any, **options: Any) -> None:
        with contextlib.suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Overrides rich, which would end the program."""


class ProgressView:
    """Shows the steps of a start: all of them redrawn
    in place on a terminal, one line for each in a pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._changes: dict[str, StepProgress] = {}
        self._spinners: dict[str, Spinner] = {}
        self._lock = threading.Lock()
        #: The view draws while this context is entered.
        self.drawing: AbstractContextManager[object] = (
            Live(console=console, get_renderable=self._table, refresh_per_second=12)
            if console.is_terminal
            else nullcontext()
        )

    def show(self, change: StepProgress) -> None:
        """Shows one change of a step; may be called from any thread."""
        with self._lock:
            self._changes[change.step] = change
            if not self._console.is_terminal and change.status is not StepStatus.STARTED:
                self._console.print(_plain_line(change), soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        with self._lock:
            for name, change in self._changes.items():
                if change.status is StepStatus.STARTED:
                    sign: Spinner | Text = self._spinners.setdefault(
                        name, Spinner("dots", style="cyan")
                    )
                else:
                    sign = Text(*_SIGNS[change.status])
                took = f"{change.seconds:.1f} s" if change.seconds else ""
                table.add_row(
                    sign,
                    TITLES.get(name, name),
                    Text(took, style="dim"),
                    Text(change.detail, style="dim"),
                )
        return table


def _plain_line(change: StepProgress) -> str:
    title = TITLES.get(change.step, change.step)
    word = _WORDS[change.status]
    detail = f"  ({change.detail})" if change.detail else ""
    return f"{word:7} {title:28} {change.seconds:5.1f} s{detail}"


#: Seconds between two checks of the processes.
CHECK_INTERVAL_S = 0.5
#: A part that ends more often than this within a minute is not started again.
MAX_RESTARTS = 5


class StopRequested(BaseException):
    """Ctrl-C, SIGTERM or a closed terminal."""


def run_up(
    data: Path,
    *,
    pool: int | None,
    port: int | None,
    ui_port: int | None,
    main_job: bool,
    once: bool,
) -> int:
    """Returns the exit code: 0, 1 with the reason on standard error,
    or 130 when stopped while starting."""
    console, errors = StackConsole(highlight=False), StackConsole(stderr=True, highlight=False)
    overrides = {"pool_target": pool, "api_port": port}
    given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    ports = read_settings(LocalSettings, **({"ui_port": ui_port} if ui_port else {}))
    view = ProgressView(console)
    stack = LocalStack(data, ports=ports, progress=view.show, **given)
    up = False
    with _signals():
        try:
            with view.drawing:
                stack.start()
            up = True
            result = None
            if main_job:
                try:
                    result = job.run_main_job(
                        stack.api_url, stack.exchange.admin_url, stack.folder.keys
                    )
                    show_job(console, result)
                except Exception as error:  # the boundary of the demo: the system itself is up
                    failure = as_berth_error("main job", error)
                    if once:
                        raise failure from error
                    why = f"[red]the demo order failed:[/] {escape(failure.detail)}"
                    errors.print(why, soft_wrap=True)
            if not once:
                show_addresses(console, stack, result)
                console.print("\nCtrl-C stops everything.")
                _watch_servers(stack, console)
            return 0
        except StopRequested:
            return 0 if up and not once else 130
        except (BerthError, OSError) as error:
            errors.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
            return 1
        finally:
            _ignore_signals()
            with contextlib.suppress(OSError):  # a closed terminal must not prevent the stop
                if up:
                    console.print("stopping")
            stack.stop()


def _stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that stop the system.
    `nohup` has SIGHUP ignored, and then it stays so."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequested

    before = {number: signal.signal(number, stop) for number in _stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """Ignores a second Ctrl-C: cutting the stop short would leave processes behind."""

    def say(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write("still stopping; one moment\n")

    for number in _stop_signals():
        signal.signal(number, say)


def _watch_servers(stack: LocalStack, console: Console) -> None:
    """Restarts a server that ends, until a signal. Raises `BerthError` when one keeps ending."""
    restarts: dict[str, list[float]] = {}
    while True:
        time.sleep(CHECK_INTERVAL_S)
        for server in stack.servers:
            if not server.running:
                _restart(server, restarts.setdefault(server.name, []), console)


def _restart(server: Server, before: list[float], console: Console) -> None:
    now = time.monotonic()
    before[:] = [at for at in before if now - at < 60]
    if len(before) >= MAX_RESTARTS:
        cause = server.explain_log()
        raise BerthError(f"{server.name} ended {MAX_RESTARTS} times within a minute: {cause}")
    time.sleep(len(before))  # seconds: what ends at once gets longer and longer pauses
    before.append(now)
    why = escape(server.describe_end())
    console.print(f"{server.name} has ended; starting it again ({why})", soft_wrap=True)
    server.stop()  # ends its remaining processes
    try:
        server.start()
    except (BerthError, OSError) as error:  # tried again; what runs next to it continues
        failure = as_berth_error(server.name, error).detail.partition("\n")[0]
        console.print(f"{server.name} has not come up: {escape(failure)}", soft_wrap=True)
        server.stop()


def show_job(console: Console, result: MainJobResult) -> None:
    order = result.order
    console.print(
        f"\nOrder {order.client_order_id} of user {order.user_id}: {order.side} {order.quantity} "
        f"{order.symbol} is {order.state} at {order.average_price or '?'} after "
        f"{result.seconds * 1000:.0f} ms over REST",
        soft_wrap=True,
    )
    if not console.is_terminal:
        for step in order.timeline:
            console.print(f"  {step.step:12} {step.elapsed_ms:9.1f} ms")
        return
    table = Table("step", "at", "ms since accepted")
    table.columns[2].justify = "right"
    for step in order.timeline:
        table.add_row(step.step, f"{step.at:%FT%T.%fZ}", f"{step.elapsed_ms:.1f}")
    console.print(table)


def show_addresses(console: Console, stack: LocalStack, result: MainJobResult | None) -> None:
    addresses = [
        ("pages", f"{stack.api_url}  (log in with the admin's API key)"),
        ("API docs", f"{stack.api_url}/v1/docs"),
        ("Temporal UI", stack.ui_url),
        ("payloads in it", f"berth codec --data {stack.folder.path}"),
        ("logs", str(stack.folder.logs)),
        ("admin's API key", str(stack.folder.keys / "admin.key")),
    ]
    if result is not None:
        url = f"{stack.api_url}/v1/orders/{result.order.id}"
        addresses.append(("demo's API key", result.api_key))
        addresses.append(("try", f"curl -H 'X-API-Key: {result.api_key}' {url}"))
    console.print()
    for name, value in addresses:
        console.print(f"{name:16} {value}", soft_wrap=True, markup=False)


#: Seconds; enough for a graceful stop of workers (10 s, all at once) and servers.
STOP_TIMEOUT_S = 60.0


def run_down(data: Path, *, quiet: bool) -> int:
    if not (data / "lock").exists():
        if not quiet:
            typer.echo(f"nothing runs: {data} is no data folder")
        return 0
    try:
        pid = stack.pid_of_holder(data)
        if pid is not None:
            return _stop_holder(pid, data)
        ended = stack.end_leftovers(data)
    except BerthError as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    if ended or not quiet:
        typer.echo(f"ended {', '.join(ended)}" if ended else "nothing runs")
    return 0


def _stop_holder(pid: int, data: Path) -> int:
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while stack.pid_of_holder(data) == pid:
        if time.monotonic() > deadline:
            typer.echo(
                f"error: `berth up` (pid {pid}) still runs after {STOP_TIMEOUT_S:.0f} s", err=True
            )
            return 1
        time.sleep(0.05)
    typer.echo(f"stopped `berth up` (pid {pid})")
    return 0
