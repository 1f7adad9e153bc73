"""`berth down`: stops a running `berth up` and waits for its end, or ends what a killed one left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import typer

from infra.local import stack
from worker_runtime.protocol.errors import BerthError

#: Seconds; a graceful stop of workers (10 s each, all at once) and servers fits well.
PATIENCE = 60.0


def run(data: Path, *, quiet: bool) -> int:
    if not (data / "lock").exists():
        if not quiet:
            typer.echo(f"nothing runs: {data} is no data folder")
        return 0
    try:
        pid = stack.pid_of_holder(data)
        if pid is not None:
            return _stop(pid, data)
        ended = stack.end_leftovers(data)
    except BerthError as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    if ended or not quiet:
        typer.echo(f"ended {', '.join(ended)}" if ended else "nothing runs")
    return 0


def _stop(pid: int, data: Path) -> int:
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE
    while stack.pid_of_holder(data) == pid:
        if time.monotonic() > deadline:
            typer.echo(f"error: `berth up` (pid {pid}) still runs after {PATIENCE:.0f} s", err=True)
            return 1
        time.sleep(0.05)
    typer.echo(f"stopped `berth up` (pid {pid})")
    return 0
