"""How jobs, queues and runners are shown: tables on a terminal, wide plain columns in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from infra.cli.worker_tables import console, empty_table, plain
from infra.job_view import Board, JobView, QueueView, RunnerView

__all__ = ["board", "console", "failed", "job", "queues", "runners", "running"]

_STYLES = {
    "busy": "green",
    "idle": "",
    "suspended": "yellow",
    "lost": "red",
    "failed": "red",
    "done": "green",
}


def board(out: Console, shown: Board, *, workers: bool) -> RenderableType:
    """Queues and totals; with `workers`, the runners and what runs, too."""
    total = sum(queue.waiting for queue in shown.queues)
    line = (
        f"{total} waiting, {len(shown.running)} running, {shown.delayed} delayed, {shown.failed} failed; "
        f"{len(shown.runners)} runners"
    )
    parts: list[RenderableType] = [Text(line)]
    if shown.suspended:
        parts.append(Text("all queues are suspended", style="yellow"))
    if shown.queues:
        parts.append(queues(out, shown.queues))
    if workers:
        parts += [runners(out, shown.runners), running(out, shown.running)]
    return Group(*parts)


def queues(out: Console, rows: Iterable[QueueView]) -> Table:
    table = empty_table(out, "queue", "waiting", "weight", "state", "types")
    for one in rows:
        state = Text("suspended", style="yellow") if one.suspended else Text("open")
        types = "  ".join(f"{name} {count}" for name, count in one.types.items())
        table.add_row(one.queue, str(one.waiting), f"{one.weight:g}", state, types)
    return table


def runners(out: Console, rows: Iterable[RunnerView]) -> Table:
    table = empty_table(out, "runner", "node", "pid", "queues", "state", "jobs", "born", "seen")
    for one in rows:
        state = Text(one.state + (", suspended" if one.suspended else ""), style=_STYLES.get(one.state, ""))
        table.add_row(
            *(plain(one.runner), plain(one.node), str(one.pid), plain(one.queues)),
            *(state, " ".join(map(plain, one.jobs)), _ago(one.born_at_ms), _ago(one.seen_at_ms)),
        )
    return table


def running(out: Console, rows: Iterable[JobView]) -> Table:
    table = empty_table(out, "job", "type", "queue", "attempt", "runner", "for", "progress")
    for one in rows:
        progress = "" if one.progress is None else plain(one.progress)
        table.add_row(
            *(plain(one.job_id), plain(one.name), plain(one.queue), str(one.attempt)),
            *(plain(one.runner), _ago(one.started_at_ms), progress),
        )
    return table


def failed(out: Console, rows: Iterable[JobView]) -> Table:
    table = empty_table(out, "job", "type", "queue", "attempts", "failed (UTC)", "code", "why")
    for one in rows:
        table.add_row(
            *(plain(one.job_id), plain(one.name), plain(one.queue), str(one.attempt)),
            *(_clock(one.failed_at_ms), Text(plain(one.code), style="red"), plain(one.detail)),
        )
    return table


def job(out: Console, one: JobView) -> None:
    """One job with all that is known of it; its traceback and what it wrote, as they are."""
    table = Table.grid(padding=(0, 2))
    rows = [
        ("job", one.job_id),
        ("type", one.name),
        ("queue", one.queue),
        ("state", one.state),
        ("attempt", str(one.attempt)),
        ("runner", one.runner),
        ("started (UTC)", _clock(one.started_at_ms) if one.started_at_ms else ""),
        ("failed (UTC)", _clock(one.failed_at_ms) if one.failed_at_ms else ""),
        ("progress", "" if one.progress is None else str(one.progress)),
        ("code", one.code),
        ("why", one.detail),
    ]
    for name, value in rows:
        if value:
            table.add_row(name, Text(plain(value), style=_STYLES.get(value, "")))
    out.print(table)
    for title, text in (("traceback", one.traceback), ("output", one.output)):
        if text:
            out.print(Text(f"{title}:", style="bold"))
            out.print(Text("\n".join(map(plain, text.splitlines()))), soft_wrap=True)


def _clock(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _ago(milliseconds: int) -> str:
    """How long that is past, by this machine's clock."""
    if not milliseconds:
        return "-"
    seconds = max(0, round(time.time() - milliseconds / 1000))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
