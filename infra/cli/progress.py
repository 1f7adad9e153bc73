"""How a start is shown: a live list on a terminal, plain lines in a pipe."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from infra.local.steps import Progress, Status

TITLES = {
    "leftovers": "ended what an earlier run left",
    "keys": "keys",
    "valkey": "Valkey",
    "postgres": "PostgreSQL",
    "database": "database schema",
    "temporal": "Temporal",
    "exchange": "paper exchange",
    "node": "node",
    "orchestrator": "orchestrator",
    "api": "API",
    "pool": "pool of warm workers",
}


class ProgressView(Protocol):
    """What `LocalStack` tells goes to `show`, from any thread."""

    def show(self, change: Progress) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def view(console: Console) -> ProgressView:
    return LiveList(console) if console.is_terminal else PlainLines(console)


class PlainLines:
    """One line for each step that is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()

    def show(self, change: Progress) -> None:
        if change.status is Status.STARTED:
            return
        title = TITLES.get(change.step, change.step)
        word = "ready" if change.status is Status.DONE else "FAILED"
        detail = f"  ({change.detail})" if change.detail else ""
        line = f"{word:6} {title:28} {change.seconds:5.1f} s{detail}"
        with self._lock:
            self._console.print(line, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class LiveList:
    """All steps with a spinner each, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._changes: dict[str, Progress] = {}
        self._spinners: dict[str, Spinner] = {}
        self._lock = threading.Lock()
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=12)

    def show(self, change: Progress) -> None:
        with self._lock:
            self._changes[change.step] = change

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        with self._lock:
            for name, change in self._changes.items():
                if change.status is Status.STARTED:
                    sign: Spinner | Text = self._spinners.setdefault(name, Spinner("dots", style="cyan"))
                else:
                    good = change.status is Status.DONE
                    sign = Text("✓" if good else "✗", style="green" if good else "red")
                took = f"{change.seconds:.1f} s" if change.seconds else ""
                table.add_row(
                    sign, TITLES.get(name, name), Text(took, style="dim"), Text(change.detail, style="dim")
                )
        return table

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
