"""What the commands print of workers, pools and jobs: tables on a terminal, wide plain columns in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from infra.jobs.view import JobSnapshot, QueueOverview, QueueSnapshot, RunnerSnapshot

#: Columns of a line in a pipe: no row is cut or wrapped.
_WIDE = 500
_WORKER_STYLES = {
    "Active": "green",
    "Reconnecting": "yellow",
    "Draining": "yellow",
    "IdleTimeout": "yellow",
    "Parked": "red",
    "Failed": "red",
}


def console() -> Console:
    """A console on standard output; in a pipe its lines are wide enough for any row."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDE)


def plain(value: object) -> str:
    """Text from a worker or broker without control characters, which a terminal would obey."""
    text = "" if value is None else str(value)
    return "".join(sign if sign.isprintable() else " " for sign in text)


def clock(value: str | None) -> str:
    """A time of the API in UTC, to the second."""
    if not value:
        return "-"
    try:
        return f"{datetime.fromisoformat(value).astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return plain(value)


def _state(name: object) -> Text:
    return Text(plain(name) or "-", style=_WORKER_STYLES.get(plain(name), ""))


def empty_table(out: Console, *columns: str) -> Table:
    """An empty table, with lines on a terminal only."""
    return Table(*columns, box=box.SIMPLE_HEAD if out.is_terminal else None, pad_edge=False)


def show_workers(out: Console, rows: Iterable[Mapping[str, Any]], *, more: bool) -> None:
    """Prints one line a user."""
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
        out.print("no such worker runs")
        return
    out.print(table)
    if more:
        out.print("there are more: raise --limit, or narrow with --state and --user")


def show_worker(out: Console, shown: Mapping[str, Any]) -> None:
    """Prints all that is known of one user's worker."""
    metadata = shown.get("metadata") or {}
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
            ("version", plain(metadata.get("version"))),
        ]
        for name, value in rows:
            if value:
                table.add_row(name, Text(value))
    out.print(table)


def show_timeline(out: Console, rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints one line a change of state."""
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


def show_transition(out: Console, row: Mapping[str, Any]) -> None:
    """Prints one change of state as a line."""
    line = Text(f"{clock(row['at'])}  {plain(row['before']):>12} → ")
    line.append(f"{plain(row['after']):12}", style=_WORKER_STYLES.get(plain(row["after"]), ""))
    line.append(f"  {plain(row['worker_id'])}  {plain(row['reason'])}")
    line.rstrip()
    out.print(line, soft_wrap=True)


_POOL_STYLES = {"running": "green", "paused": "yellow", "draining": "yellow"}
_PHASES = {
    "replacing": "replaces free workers",
    "moving": "users move when they are quiet",
    "done": "done",
    "rolling_back": "goes back: replaces free workers",
    "moving_back": "goes back: users move when they are quiet",
    "rolled_back": "rolled back",
}


def show_pool(out: Console, shown: Mapping[str, Any]) -> None:
    """Prints one pool, and its windows in a second table."""
    policy = shown["policy"]
    table = Table.grid(padding=(0, 2))
    mode = plain(shown["mode"])
    rows: list[tuple[str, object]] = [
        ("pool", plain(shown["pool"])),
        ("mode", Text(mode, style=_POOL_STYLES.get(mode, ""))),
        ("free", f"{shown['ready']} of {shown['wanted']} wanted, {shown['starting']} starting"),
        ("in use", str(shown["in_use"])),
        ("next change", f"{clock(shown['changes_at'])} UTC" if shown["changes_at"] else "none"),
        ("target", str(policy["target"])),
        ("bounds", f"{policy['minimum']} to {_bound(policy['maximum'])}, in all {_bound(policy['limit'])}"),
        ("buffer", plain(policy["buffer"])),
        ("demand", _demand(policy["demand_minutes"], shown["claims"])),
        ("shrinks", f"after {policy['shrink_after']:g} s"),
        ("launches", f"{shown['launches']}, {shown['failures']} failed"),
        ("trouble", Text(_trouble(shown), style="red")),
        ("revision", str(shown["revision"])),
    ]
    for name, value in rows:
        if str(value):
            table.add_row(name, value if isinstance(value, Text) else Text(str(value)))
    out.print(table)
    if policy["windows"]:
        windows = empty_table(out, "window", "target", "from", "to", "days", "calendar", "zone")
        for one in policy["windows"]:
            names = ("name", "target", "begins", "ends", "days", "calendar", "zone")
            windows.add_row(*(Text(plain(one[name])) for name in names))
        out.print(windows)


def explain_pool(shown: Mapping[str, Any]) -> list[str]:
    """Sentences: how many workers are wanted and why, when that changes, and what prevents it."""
    lines = [f"pool {plain(shown['pool'])} wants {shown['wanted']} free workers:"]
    lines += [f"  {plain(reason)}" for reason in shown["reasons"]]
    if shown["changes_at"]:
        lines.append(f"a window changes that at {clock(shown['changes_at'])} UTC")
    lines.append(f"{shown['ready']} are ready, {shown['starting']} are starting, {shown['in_use']} in use")
    if shown["mode"] == "paused":
        lines.append("it is paused: nothing is launched until it is resumed")
    elif shown["mode"] == "draining":
        lines.append("it is being drained: free workers are stopped, nothing is launched until it is resumed")
    trouble = _trouble(shown)
    return [*lines, trouble] if trouble else lines


def rollout_table(shown: Mapping[str, Any]) -> Table:
    """A table of one rollout."""
    table = Table.grid(padding=(0, 2))
    back = "back" in plain(shown["phase"])
    rows: list[tuple[str, str]] = [
        ("pool", plain(shown["pool"])),
        ("phase", _PHASES.get(shown["phase"], plain(shown["phase"]))),
        ("to", _release(shown["before"] if back else shown["release"])),
        ("from", _release(shown["release"] if back else shown["before"])),
        ("free", f"{shown['new']} of {shown['wanted']} wanted, {shown['old']} of other versions left"),
        ("users", f"{shown['users']} on other versions, {shown['asked']} asked to move"),
        ("ended", f"{shown['retired']} free workers"),
        ("began", f"{clock(shown['began_at'])} UTC"),
        ("deadline", "" if shown["ended"] else f"{clock(shown['deadline'])} UTC"),
        ("went back", plain(shown["reason"])),
        ("waits", "" if shown["ended"] else plain(shown["held"])),
    ]
    for name, value in rows:
        if value:
            table.add_row(name, Text(value))
    return table


def _release(release: Mapping[str, Any]) -> str:
    version = plain(release["version"]) or "the settings' version"
    return f"{version} ({plain(release['image'])})" if release["image"] else version


def _trouble(shown: Mapping[str, Any]) -> str:
    failure, at = plain(shown["last_failure"]), clock(shown["next_launch"])
    if shown["circuit_open"]:
        return (
            f"refilling has stopped: no worker becomes ready ({failure}); one is tried at {at} UTC, or when"
            " the pool is resumed or its policy changes"
        )
    if shown["failing"]:
        return f"launches fail, {shown['failing']} in a row ({failure}); the next one is tried at {at} UTC"
    return ""


def _bound(number: int | None) -> str:
    return "any" if number is None else str(number)


def _demand(minutes: float, claims: int) -> str:
    return f"{claims} claims within {minutes:g} min" if minutes else "ignored"


_JOB_STYLES = {
    "busy": "green",
    "idle": "",
    "suspended": "yellow",
    "lost": "red",
    "failed": "red",
    "done": "green",
}


def job_board(out: Console, shown: QueueOverview, *, workers: bool) -> RenderableType:
    """Queues and totals; with `workers`, also the runners and running jobs."""
    total = sum(queue.waiting for queue in shown.queues)
    line = (
        f"{total} waiting, {len(shown.running)} running, {shown.delayed} delayed, {shown.failed} failed; "
        f"{len(shown.runners)} runners"
    )
    parts: list[RenderableType] = [Text(line)]
    if shown.suspended:
        parts.append(Text("all queues are suspended", style="yellow"))
    if shown.queues:
        parts.append(queue_table(out, shown.queues))
    if workers:
        parts += [runner_table(out, shown.runners), running_table(out, shown.running)]
    return Group(*parts)


def queue_table(out: Console, rows: Iterable[QueueSnapshot]) -> Table:
    table = empty_table(out, "queue", "waiting", "weight", "state", "types")
    for one in rows:
        state = Text("suspended", style="yellow") if one.suspended else Text("open")
        types = "  ".join(f"{name} {count}" for name, count in one.types.items())
        table.add_row(one.queue, str(one.waiting), f"{one.weight:g}", state, types)
    return table


def runner_table(out: Console, rows: Iterable[RunnerSnapshot]) -> Table:
    table = empty_table(out, "runner", "node", "pid", "queues", "state", "jobs", "born", "seen")
    for one in rows:
        state = Text(
            one.state + (", suspended" if one.suspended else ""), style=_JOB_STYLES.get(one.state, "")
        )
        table.add_row(
            *(plain(one.runner), plain(one.node), str(one.pid), plain(one.queues)),
            *(state, " ".join(map(plain, one.jobs)), _ago(one.born_at_ms), _ago(one.seen_at_ms)),
        )
    return table


def running_table(out: Console, rows: Iterable[JobSnapshot]) -> Table:
    table = empty_table(out, "job", "type", "queue", "attempt", "runner", "for", "progress")
    for one in rows:
        progress = "" if one.progress is None else plain(one.progress)
        table.add_row(
            *(plain(one.job_id), plain(one.name), plain(one.queue), str(one.attempt)),
            *(plain(one.runner), _ago(one.started_at_ms), progress),
        )
    return table


def failed_table(out: Console, rows: Iterable[JobSnapshot]) -> Table:
    table = empty_table(out, "job", "type", "queue", "attempts", "failed (UTC)", "code", "why")
    for one in rows:
        table.add_row(
            *(plain(one.job_id), plain(one.name), plain(one.queue), str(one.attempt)),
            *(_clock_of_day(one.failed_at_ms), Text(plain(one.code), style="red"), plain(one.detail)),
        )
    return table


def job_table(out: Console, one: JobSnapshot) -> None:
    """Prints all that is known of one job, with its traceback and output."""
    table = Table.grid(padding=(0, 2))
    rows = [
        ("job", one.job_id),
        ("type", one.name),
        ("queue", one.queue),
        ("state", one.state),
        ("attempt", str(one.attempt)),
        ("runner", one.runner),
        ("started (UTC)", _clock_of_day(one.started_at_ms) if one.started_at_ms else ""),
        ("failed (UTC)", _clock_of_day(one.failed_at_ms) if one.failed_at_ms else ""),
        ("progress", "" if one.progress is None else str(one.progress)),
        ("code", one.code),
        ("why", one.detail),
    ]
    for name, value in rows:
        if value:
            table.add_row(name, Text(plain(value), style=_JOB_STYLES.get(value, "")))
    out.print(table)
    for title, text in (("traceback", one.traceback), ("output", one.output)):
        if text:
            out.print(Text(f"{title}:", style="bold"))
            out.print(Text("\n".join(map(plain, text.splitlines()))), soft_wrap=True)


def _clock_of_day(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _ago(milliseconds: int) -> str:
    """How long ago that was, by this machine's clock."""
    if not milliseconds:
        return "-"
    seconds = max(0, round(time.time() - milliseconds / 1000))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
