"""Prints workers, pools and jobs for the commands: tables on a terminal, wide plain columns in a
pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from infra.jobs.view import JobSnapshot, QueueOverview, QueueSnapshot, RunnerSnapshot

#: Columns of a line in a pipe: no row is cut or wrapped.
_PIPE_COLUMNS = 500
#: The states of a worker, a pool, a trading switch, a job's runner or queue.
_STATES = {
    "green": ("Active", "running", "open", "busy", "done"),
    "yellow": (
        "Reconnecting",
        "Draining",
        "IdleTimeout",
        "paused",
        "draining",
        "reducing",
        "suspended",
    ),
    "red": ("Parked", "Failed", "halted", "lost", "failed"),
}
_STYLES = {state: style for style, states in _STATES.items() for state in states}


def console() -> Console:
    """Returns a console on standard output; in a pipe its lines are wide enough for any row."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=_PIPE_COLUMNS)


def plain(value: object) -> str:
    """Returns text from a worker or broker without control characters, which a terminal would
    obey."""
    text = "" if value is None else str(value)
    return "".join(sign if sign.isprintable() else " " for sign in text)


def person(actor: str) -> str:
    """Says who did something: the label of the API key, without its id; or the part of Berth."""
    return plain(actor.partition(" (key:")[0])


def clock(value: str | None) -> str:
    """Returns a time of the API in UTC, to the second."""
    if not value:
        return "-"
    try:
        return f"{datetime.fromisoformat(value).astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return plain(value)


def state_text(name: object) -> Text:
    """Returns a state in its colour."""
    return Text(plain(name) or "-", style=_STYLES.get(plain(name), ""))


def table(out: Console, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Makes a table, with lines on a terminal only. A cell that is no `Text` is shown by
    `plain`."""
    made = Table(*columns, box=box.SIMPLE_HEAD if out.is_terminal else None, pad_edge=False)
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def row_table(
    out: Console,
    rows: Iterable[Mapping[str, Any]],
    columns: str,
    **cells: Callable[[Mapping[str, Any]], object],
) -> Table:
    """Makes a table of rows. `columns` has `heading: field` of each, or only the field; `cells` has
    the fields that a function makes of a row. Fields named `at` and `…_at` are times of the API,
    `actor` is a person."""
    parts = [column.partition(":") for column in columns.split(",")]
    fields = [(field or name).strip() for name, _, field in parts]

    def cell(row: Mapping[str, Any], field: str) -> object:
        if field in cells:
            return cells[field](row)
        value = row[field]
        if field == "actor":
            return person(value)
        if field == "at" or field.endswith("_at"):
            return clock(value)
        return (
            "-" if value in (None, "") else ", ".join(value) if isinstance(value, list) else value
        )

    headings = [name.strip() for name, _, _ in parts]
    return table(out, headings, ([cell(row, field) for field in fields] for row in rows))


def _cell(value: object) -> Text:
    return value if isinstance(value, Text) else Text(plain(value))


def _details(rows: Iterable[tuple[str, object]]) -> Table:
    """Shows names and values, one pair a line, without those whose value is empty."""
    made = Table.grid(padding=(0, 2))
    for name, value in rows:
        if shown := _cell(value):
            made.add_row(name, shown)
    return made


def show_worker(out: Console, shown: Mapping[str, Any]) -> None:
    """Prints all that is known of one user's worker."""
    rows: list[tuple[str, object]] = [
        ("user", shown["user_id"]),
        ("state", state_text(shown["state"] or "no worker yet")),
        ("live", "yes: its mark is there" if shown["live"] else "no mark"),
    ]
    if life := shown.get("lifecycle"):
        # Without a worker, its health would be that of the one before.
        health = f"{life['health']} ({clock(life['health_at'])} UTC)" if life["worker_id"] else ""
        by = f", by {clock(life['deadline'])} UTC" if life["deadline"] else ""
        rows += [
            (
                "lifecycle",
                f"{life['state']} since {clock(life['since'])} UTC, attempt {life['attempts']}",
            ),
            ("reason", life["reason"]),
            ("next", f"{plain(life['next_step'])}{by}"),
            ("worker", life["worker_id"]),
            ("task", life["task_id"]),
            ("epoch", life["epoch"]),
            ("health", health if life["health"] else ""),
            ("crashes", f"{life['crashes']} in the last minutes" if life["crashes"] else ""),
            ("last use", f"{clock(life['last_activity'])} UTC" if life["last_activity"] else ""),
            ("version", (shown.get("metadata") or {}).get("version")),
        ]
    out.print(_details(rows))


def show_transition(out: Console, row: Mapping[str, Any]) -> None:
    """Prints one change of state as a line."""
    line = Text(f"{clock(row['at'])}  {plain(row['before']):>12} → ")
    line.append(f"{plain(row['after']):12}", style=_STYLES.get(plain(row["after"]), ""))
    line.append(f"  {plain(row['worker_id'])}  {plain(row['reason'])}")
    line.rstrip()
    out.print(line, soft_wrap=True)


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
    rows: list[tuple[str, object]] = [
        ("pool", shown["pool"]),
        ("mode", state_text(shown["mode"])),
        ("free", f"{shown['ready']} of {shown['wanted']} wanted, {shown['starting']} starting"),
        ("in use", shown["in_use"]),
        ("next change", f"{clock(shown['changes_at'])} UTC" if shown["changes_at"] else "none"),
        ("target", policy["target"]),
        (
            "bounds",
            f"{policy['minimum']} to {_bound(policy['maximum'])}, in all {_bound(policy['limit'])}",
        ),
        ("buffer", policy["buffer"]),
        ("demand", _demand(policy["demand_minutes"], shown["claims"])),
        ("shrinks", f"after {policy['shrink_after']:g} s"),
        ("launches", f"{shown['launches']}, {shown['failures']} failed"),
        ("trouble", Text(_trouble(shown), style="red")),
        ("revision", shown["revision"]),
    ]
    out.print(_details(rows))
    if policy["windows"]:
        columns = "window: name, target, from: begins, to: ends, days, calendar, zone"
        out.print(row_table(out, policy["windows"], columns))


def explain_pool(shown: Mapping[str, Any]) -> list[str]:
    """Explains in sentences how many workers are wanted and why, when that changes, and what
    prevents it."""
    lines = [f"pool {plain(shown['pool'])} wants {shown['wanted']} free workers:"]
    lines += [f"  {plain(reason)}" for reason in shown["reasons"]]
    if shown["changes_at"]:
        lines.append(f"a window changes that at {clock(shown['changes_at'])} UTC")
    lines.append(
        f"{shown['ready']} are ready, {shown['starting']} are starting, {shown['in_use']} in use"
    )
    if shown["mode"] == "paused":
        lines.append("it is paused: nothing is launched until it is resumed")
    elif shown["mode"] == "draining":
        lines.append(
            "it is being drained: free workers are stopped, nothing is launched until it is resumed"
        )
    trouble = _trouble(shown)
    return [*lines, trouble] if trouble else lines


def rollout_table(shown: Mapping[str, Any]) -> Table:
    back = "back" in plain(shown["phase"])
    return _details(
        [
            ("pool", shown["pool"]),
            ("phase", _PHASES.get(shown["phase"], shown["phase"])),
            ("to", _release(shown["before"] if back else shown["release"])),
            ("from", _release(shown["release"] if back else shown["before"])),
            (
                "free",
                f"{shown['new']} of {shown['wanted']} wanted, {shown['old']} of other versions "
                "left",
            ),
            ("users", f"{shown['users']} on other versions, {shown['asked']} asked to move"),
            ("ended", f"{shown['retired']} free workers"),
            ("began", f"{clock(shown['began_at'])} UTC"),
            ("deadline", "" if shown["ended"] else f"{clock(shown['deadline'])} UTC"),
            ("went back", shown["reason"]),
            ("waits", "" if shown["ended"] else shown["held"]),
        ]
    )


def _release(release: Mapping[str, Any]) -> str:
    version = plain(release["version"]) or "the settings' version"
    return f"{version} ({plain(release['image'])})" if release["image"] else version


def _trouble(shown: Mapping[str, Any]) -> str:
    failure, at = plain(shown["last_failure"]), clock(shown["next_launch"])
    if shown["circuit_open"]:
        return (
            f"refilling has stopped: no worker becomes ready ({failure}); one is tried at {at} "
            "UTC, or when the pool is resumed or its policy changes"
        )
    if shown["failing"]:
        return (
            f"launches fail, {shown['failing']} in a row ({failure}); the next one is tried "
            f"at {at} UTC"
        )
    return ""


def _bound(number: int | None) -> str:
    return "any" if number is None else str(number)


def _demand(minutes: float, claims: int) -> str:
    return f"{claims} claims within {minutes:g} min" if minutes else "ignored"


def job_overview(out: Console, shown: QueueOverview, *, workers: bool) -> RenderableType:
    """Queues and totals; with `workers`, also the runners and running jobs."""
    total = sum(queue.waiting for queue in shown.queues)
    line = (
        f"{total} waiting, {len(shown.running)} running, {shown.delayed} delayed, {shown.failed} "
        f"failed; {len(shown.runners)} runners"
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
    return row_table(
        out,
        map(asdict, rows),
        "queue, waiting, oldest, runners, weight, state, types",
        oldest=lambda row: f"{row['waited']:.1f} s",
        weight=lambda row: f"{row['weight']:g}",
        state=lambda row: Text("suspended", style="yellow") if row["suspended"] else "open",
        types=lambda row: "  ".join(f"{name} {count}" for name, count in row["types"].items()),
    )


def runner_table(out: Console, rows: Iterable[RunnerSnapshot]) -> Table:
    def state(row: Mapping[str, Any]) -> Text:
        text = row["state"] + ", suspended" * (row["suspended"] and row["state"] != "suspended")
        return Text(text, _STYLES.get(row["state"], ""))

    return row_table(
        out,
        map(asdict, rows),
        "runner, node, pid, queues, state, jobs, born, seen",
        state=state,
        jobs=lambda row: " ".join(row["jobs"]),
        born=lambda row: _ago(row["born_at_ms"]),
        seen=lambda row: _ago(row["seen_at_ms"]),
    )


def running_table(out: Console, rows: Iterable[JobSnapshot]) -> Table:
    columns = "job: job_id, type: name, queue, attempt, runner, for: since, progress"
    return row_table(out, map(asdict, rows), columns, since=lambda row: _ago(row["started_at_ms"]))


def failed_table(out: Console, rows: Iterable[JobSnapshot]) -> Table:
    return row_table(
        out,
        map(asdict, rows),
        "job: job_id, type: name, queue, attempts: attempt, failed (UTC): failed, code, why: "
        "detail",
        failed=lambda row: _clock_of_day(row["failed_at_ms"]),
        code=lambda row: Text(plain(row["code"]), style="red"),
    )


def show_job(out: Console, job: JobSnapshot) -> None:
    """Prints all that is known of one job, with its traceback and output."""
    rows = [
        ("job", job.job_id),
        ("type", job.name),
        ("queue", job.queue),
        ("state", state_text(job.state)),
        ("attempt", job.attempt),
        ("runner", job.runner),
        ("started (UTC)", _clock_of_day(job.started_at_ms) if job.started_at_ms else ""),
        ("failed (UTC)", _clock_of_day(job.failed_at_ms) if job.failed_at_ms else ""),
        ("progress", job.progress),
        ("code", job.code),
        ("why", job.detail),
    ]
    out.print(_details(rows))
    for title, text in (("traceback", job.traceback), ("output", job.output)):
        if text:
            out.print(Text(f"{title}:", style="bold"))
            out.print(Text("\n".join(map(plain, text.splitlines()))), soft_wrap=True)


def _clock_of_day(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _ago(milliseconds: int) -> str:
    """Says how long ago that was, by this machine's clock."""
    if not milliseconds:
        return "-"
    seconds = max(0, round(time.time() - milliseconds / 1000))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
