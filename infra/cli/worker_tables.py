"""How workers and their timelines are shown: tables on a terminal, wide plain columns in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Columns of a line in a pipe: no row is cut or wrapped.
_WIDE = 500
_STYLES = {
    "Active": "green",
    "Reconnecting": "yellow",
    "Draining": "yellow",
    "IdleTimeout": "yellow",
    "Parked": "red",
    "Failed": "red",
}


def console() -> Console:
    """Of standard output."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDE)


def plain(value: object) -> str:
    """Text of a worker or broker, without control characters: a terminal would obey them."""
    text = "" if value is None else str(value)
    return "".join(sign if sign.isprintable() else " " for sign in text)


def clock(value: str | None) -> str:
    """The API's time to the second, UTC."""
    if not value:
        return "-"
    try:
        return f"{datetime.fromisoformat(value).astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return plain(value)


def _state(name: object) -> Text:
    return Text(plain(name) or "-", style=_STYLES.get(plain(name), ""))


def empty_table(out: Console, *columns: str) -> Table:
    """An empty one, with lines on a terminal only."""
    return Table(*columns, box=box.SIMPLE_HEAD if out.is_terminal else None, pad_edge=False)


def fleet(out: Console, rows: Iterable[Mapping[str, Any]], *, more: bool) -> None:
    """One line a user."""
    table = empty_table(out, "user", "state", "worker", "pool", "started (UTC)")
    for row in rows:
        table.add_row(
            Text(plain(row["user_id"])),
            _state(row["state"]),
            Text(plain(row["worker_id"]) or "-"),
            Text(plain(row["pool"]) or "-"),
            clock(row["started_at"]),
        )
    if not table.row_count:
        out.print("no worker like that runs")
        return
    out.print(table)
    if more:
        out.print("there are more: raise --limit, or narrow with --state and --user")


def worker(out: Console, shown: Mapping[str, Any]) -> None:
    """All that is known of one user's worker."""
    told = shown.get("metadata") or {}
    life = shown.get("lifecycle")
    table = Table.grid(padding=(0, 2))
    table.add_row("user", Text(plain(shown["user_id"])))
    table.add_row("state", _state(shown["state"] or "no worker yet"))
    table.add_row("live", "yes: its mark is there" if shown["live"] else "no mark")
    if life:
        # Without a worker, its health would be that of the one before.
        health = f"{plain(life['health'])} ({clock(life['health_at'])} UTC)" if life["worker_id"] else ""
        by = f", by {clock(life['deadline'])} UTC" if life["deadline"] else ""
        rows = [
            (
                "lifecycle",
                f"{plain(life['state'])} since {clock(life['since'])} UTC, attempt {life['attempts']}",
            ),
            ("reason", plain(life["reason"])),
            ("next", f"{plain(life['next_step'])}{by}"),
            ("worker", plain(life["worker_id"])),
            ("task", plain(life["task_id"])),
            ("epoch", plain(life["epoch"])),
            ("health", health if life["health"] else ""),
            ("crashes", f"{life['crashes']} of late" if life["crashes"] else ""),
            ("last use", f"{clock(life['last_activity'])} UTC" if life["last_activity"] else ""),
            ("version", plain(told.get("version"))),
        ]
        for name, value in rows:
            if value:
                table.add_row(name, Text(value))
    out.print(table)


def timeline(out: Console, rows: Iterable[Mapping[str, Any]]) -> None:
    """One line a change."""
    table = empty_table(out, "id", "at (UTC)", "before", "after", "worker", "epoch", "reason")
    for row in rows:
        table.add_row(
            str(row["id"]),
            clock(row["at"]),
            plain(row["before"]),
            _state(row["after"]),
            Text(plain(row["worker_id"]) or "-"),
            plain(row["epoch"]) or "-",
            Text(plain(row["reason"])),
        )
    out.print(table if table.row_count else "nothing has happened yet")


def change(out: Console, row: Mapping[str, Any]) -> None:
    """One change as a line, as they come."""
    line = Text(f"{clock(row['at'])}  {plain(row['before']):>12} → ")
    line.append(f"{plain(row['after']):12}", style=_STYLES.get(plain(row["after"]), ""))
    line.append(f"  {plain(row['worker_id'])}  {plain(row['reason'])}")
    line.rstrip()
    out.print(line, soft_wrap=True)
