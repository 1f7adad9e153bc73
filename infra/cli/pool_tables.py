"""How a pool is shown: a table of what it has and wants, and sentences that say why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infra.cli.worker_tables import clock, console, empty_table, plain

__all__ = ["console", "explained", "rollout", "status"]

_STYLES = {"running": "green", "paused": "yellow", "draining": "yellow"}
_PHASES = {
    "replacing": "replaces free workers",
    "moving": "users move when they are quiet",
    "done": "done",
    "rolling_back": "goes back: replaces free workers",
    "moving_back": "goes back: users move when they are quiet",
    "rolled_back": "rolled back",
}


def status(out: Console, shown: Mapping[str, Any]) -> None:
    """One pool; its windows in a table of their own."""
    policy = shown["policy"]
    table = Table.grid(padding=(0, 2))
    mode = plain(shown["mode"])
    rows: list[tuple[str, object]] = [
        ("pool", plain(shown["pool"])),
        ("mode", Text(mode, style=_STYLES.get(mode, ""))),
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


def explained(shown: Mapping[str, Any]) -> list[str]:
    """Why so many are wanted, when that changes, and what is in the way."""
    said = [f"pool {plain(shown['pool'])} wants {shown['wanted']} free workers:"]
    said += [f"  {plain(reason)}" for reason in shown["reasons"]]
    if shown["changes_at"]:
        said.append(f"a window changes that at {clock(shown['changes_at'])} UTC")
    said.append(f"{shown['ready']} are ready, {shown['starting']} are starting, {shown['in_use']} in use")
    if shown["mode"] == "paused":
        said.append("it is paused: nothing is launched until it is resumed")
    elif shown["mode"] == "draining":
        said.append("it is being drained: free workers are stopped, nothing is launched until it is resumed")
    trouble = _trouble(shown)
    return [*said, trouble] if trouble else said


def rollout(shown: Mapping[str, Any]) -> Table:
    """One rollout."""
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
    return f"{claims} claims within {minutes:g} min" if minutes else "not looked at"
