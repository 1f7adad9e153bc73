"""`berth up`: the local system until Ctrl-C, with the main job if it is wanted."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infra.cli import progress
from infra.local import main_job as job
from infra.local.main_job import JobResult
from infra.local.process import Server
from infra.local.stack import LocalStack
from infra.local.steps import told
from infra.settings import LocalSettings
from worker_runtime.protocol.errors import BerthError

#: Seconds between two looks at the processes.
WATCH_PERIOD = 0.5
#: A part that ends more often than this within a minute is not started again.
MAX_RESTARTS = 5


class Stopped(BaseException):
    """Ctrl-C, SIGTERM or a closed terminal."""


def run(
    data: Path, *, pool: int | None, port: int | None, ui_port: int | None, main_job: bool, once: bool
) -> int:
    """The exit code: 0, 1 with the reason on standard error, or 130 when stopped while starting."""
    console, errors = Console(), Console(stderr=True)
    overrides: dict[str, Any] = {"pool_target": pool, "api_port": port}
    ports = LocalSettings(ui_port=ui_port) if ui_port else LocalSettings()
    view = progress.view(console)
    stack = LocalStack(
        data,
        ports=ports,
        progress=view.show,
        **{name: value for name, value in overrides.items() if value is not None},
    )
    up = False
    with _signals():
        try:
            with view:
                stack.start()
            up = True
            if main_job:
                result = _run_job(stack)
                show_job(console, result)
                if not once:
                    show_addresses(console, stack, result)
            else:
                show_addresses(console, stack, None)
            if not once:
                console.print("\nCtrl-C stops everything.", highlight=False)
                _stay(stack, console)
            return 0
        except Stopped:
            return 0 if up and not once else 130
        except BerthError as error:
            errors.print(f"[red]error:[/] {escape(error.detail)}", highlight=False, soft_wrap=True)
            return 1
        except OSError as error:
            errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            return 1
        finally:
            _deaf()
            with contextlib.suppress(OSError):  # a closed terminal must not keep us from stopping
                if up:
                    console.print("stopping", highlight=False)
            stack.stop()


def _run_job(stack: LocalStack) -> JobResult:
    try:
        return job.run(stack.api_url, stack.exchange.admin_url, stack.folder.keys)
    except Exception as error:
        raise told("main job", error) from error


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _deaf() -> None:
    """A second Ctrl-C must not cut the stopping short: something would be left behind."""

    def say(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write("still stopping; one moment\n")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, say)


def _stay(stack: LocalStack, console: Console) -> None:
    """Until a signal. What ends meanwhile is started again; raises when it keeps ending."""
    restarts: dict[str, list[float]] = {}
    while True:
        time.sleep(WATCH_PERIOD)
        for server in stack.servers:
            if not server.running:
                _restart(server, restarts.setdefault(server.name, []), console)


def _restart(server: Server, before: list[float], console: Console) -> None:
    now = time.monotonic()
    before[:] = [at for at in before if now - at < 60]
    if len(before) >= MAX_RESTARTS:
        raise BerthError(f"{server.name} ended {MAX_RESTARTS} times within a minute:\n{server.log_tail()}")
    before.append(now)
    console.print(f"{server.name} has ended; starting it again", highlight=False)
    server.stop()  # whatever is left of it
    server.start()


def show_job(console: Console, result: JobResult) -> None:
    order = result.order
    price = order["average_price"] or "?"
    console.print(
        f"\nOrder {order['client_order_id']} of user {result.user_id}: {order['side']} {order['quantity']} "
        f"{order['symbol']} is {order['state']} at {price} after {result.seconds * 1000:.0f} ms over REST",
        highlight=False,
        soft_wrap=True,
    )
    if not console.is_terminal:
        for step in order["timeline"]:
            console.print(f"  {step['step']:12} {step['elapsed_ms']:9.1f} ms", highlight=False)
        return
    table = Table("step", "at", "ms since accepted")
    table.columns[2].justify = "right"
    for step in order["timeline"]:
        table.add_row(step["step"], step["at"], f"{step['elapsed_ms']:.1f}")
    console.print(table)


def show_addresses(console: Console, stack: LocalStack, result: JobResult | None) -> None:
    rows = [
        ("API docs", f"{stack.api_url}/v1/docs"),
        ("Temporal UI", stack.ui_url),
        ("logs", str(stack.folder.logs)),
        ("admin's API key", str(stack.folder.keys / "admin.key")),
    ]
    if result is not None:
        rows.append(("demo's API key", result.api_key))
    console.print()
    for name, value in rows:
        console.print(f"{name:16} {value}", highlight=False, soft_wrap=True)
    if result is not None:
        path = f"/v1/orders/{result.order['id']}"
        console.print(
            f"{'try':16} curl -H 'X-API-Key: {result.api_key}' {stack.api_url}{path}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
