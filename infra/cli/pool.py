"""`berth pool …`: shows and steers pools of free
workers and their rollouts, through the REST API."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli import tables
from infra.cli.options import CommandAnswer, Json, Pool, Reason, api_command, command_group
from infra.cli.options import watch as watch_until_ended

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi


rollout_app = command_group(
    "Bring a pool to another version of the worker, and back (docs/how-to/roll-out.md)."
)

#: Seconds between two reads of `--watch`.
WATCH_INTERVAL_S = 2.0
_seconds = partial(typer.Option, min=0, metavar="SECONDS")


@api_command(rollout_app)
def start(
    api: OperatorApi,
    version: Annotated[
        str,
        typer.Option(help="What the new workers report; '': what the orchestrator's settings say."),
    ],
    pool: Pool = "default",
    image: Annotated[
        str,
        typer.Option(help="Container image, or task definition on ECS; left out: the settings'."),
    ] = "",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Free workers to replace at a time; usually 5.")
    ] = None,
    deadline: Annotated[
        float | None,
        _seconds(help="Time after which users move even if they are not quiet; usually 8 hours."),
    ] = None,
    quiet: Annotated[
        float | None, _seconds(help="Time without an order that makes a user quiet; usually 300.")
    ] = None,
    proof: Annotated[
        float | None,
        _seconds(help="Time to wait until a new worker has served a user; usually 120."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show progress until the rollout ends.")
    ] = False,
    reason: Reason = "requested",
    json: Json = False,
) -> CommandAnswer:
    """Start a rollout: first free workers, then users when they are quiet. It rolls back by
    itself."""
    times = {"deadline_seconds": deadline, "quiet_seconds": quiet, "proof_seconds": proof}
    rollout: dict[str, Any] = {
        "version": version,
        "image": image,
        "batch": batch,
        **times,
        "reason": reason,
    }
    shown = api.post("pools", pool, "rollout", **rollout).body
    return _watch_rollout(api, pool, json) if watch else _rollout_answer(shown)


@api_command(rollout_app, "status")
def rollout_status(
    api: OperatorApi,
    pool: Pool = "default",
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Show progress until it ends; exit code 1 if it was rolled back."
        ),
    ] = False,
    json: Json = False,
) -> CommandAnswer:
    """Show how far the pool's rollout is, or how the last one ended."""
    return (
        _watch_rollout(api, pool, json)
        if watch
        else _rollout_answer(api.get("pools", pool, "rollout"))
    )


@api_command(rollout_app)
def abort(api: OperatorApi, pool: Pool = "default", reason: Reason = "requested") -> CommandAnswer:
    """Abort the rollout: the pool returns to its earlier version in the same way."""
    reply = api.post("pools", pool, "rollout", "abort", reason=reason)
    return CommandAnswer(reply.body, f"the rollout of pool {pool} is rolled back")


def _rollout_answer(shown: dict[str, Any]) -> CommandAnswer:
    return CommandAnswer(shown, lambda: tables.console().print(tables.rollout_table(shown)))


def _watch_rollout(api: OperatorApi, pool: str, json: bool) -> CommandAnswer:
    """Redraws the rollout in place on a terminal; a pipe gets the end only."""
    last = watch_until_ended(
        lambda: api.get("pools", pool, "rollout"),
        lambda out, shown: tables.rollout_table(shown),
        period=WATCH_INTERVAL_S,
        json=json,
        ended=lambda shown: bool(shown["ended"]),
    )
    return replace(_rollout_answer(last), exit_code=0 if last["phase"] == "done" else 1)


app = command_group(
    "Pools of free workers, through the REST API. Exit codes: 0 done, 1 refused, 2 usage."
)
app.add_typer(rollout_app, name="rollout")


@api_command(app)
def status(api: OperatorApi, pool: Pool = "default") -> CommandAnswer:
    """Show what the pool has and wants, and how its launches go."""
    return _pool_answer(api.get("pools", pool))


def _pool_answer(shown: dict[str, Any]) -> CommandAnswer:
    return CommandAnswer(shown, lambda: tables.show_pool(tables.console(), shown))


@api_command(app)
def explain(api: OperatorApi, pool: Pool = "default") -> CommandAnswer:
    """Explain how many workers the pool wants and why, when that changes, and what prevents it."""
    shown = api.get("pools", pool)
    sentences = tables.explain_pool(shown)
    value = {"pool": shown["pool"], "wanted": shown["wanted"], "explained": sentences}
    return CommandAnswer(value, "\n".join(sentences))


@api_command(app)
def pause(api: OperatorApi, pool: Pool = "default", reason: Reason = "requested") -> CommandAnswer:
    """Launch nothing for the pool until it is resumed. Its free workers can still be claimed."""
    return CommandAnswer(
        api.post("pools", pool, "pause", reason=reason).body, f"pool {pool} is paused"
    )


@api_command(app)
def drain(api: OperatorApi, pool: Pool = "default", reason: Reason = "requested") -> CommandAnswer:
    """Stop all free workers and launch none until the pool is resumed. Users keep theirs."""
    return CommandAnswer(
        api.post("pools", pool, "drain", reason=reason).body, f"pool {pool} is being drained"
    )


@api_command(app)
def resume(api: OperatorApi, pool: Pool = "default", reason: Reason = "requested") -> CommandAnswer:
    """End a pause or a drain. After failed launches, the next launch is tried at once."""
    return CommandAnswer(
        api.post("pools", pool, "resume", reason=reason).body, f"pool {pool} is resumed"
    )


def _policy_changes(**given: Any) -> dict[str, Any]:
    """Returns the options that were given, as the policy's fields. Raises `typer.BadParameter` when
    there is none."""
    changes = {name: value for name, value in given.items() if value is not None}
    if "windows" in changes:
        changes["windows"] = _read(changes["windows"])
    if not changes:
        raise typer.BadParameter("name what to change, such as --target 8")
    return {
        name: None if name in ("maximum", "limit") and value == 0 else value
        for name, value in changes.items()
    }


@api_command(app, "set", check=lambda pool, reason, **policy: _policy_changes(**policy))
def set_policy(
    api: OperatorApi,
    pool: Pool = "default",
    target: Annotated[
        int | None, typer.Option(min=0, help="Number of free workers to keep.")
    ] = None,
    minimum: Annotated[
        int | None, typer.Option(min=0, help="Minimum number of free workers.")
    ] = None,
    maximum: Annotated[
        int | None, typer.Option(min=0, help="Maximum number of free workers; 0: no limit.")
    ] = None,
    buffer: Annotated[
        str | None,
        typer.Option(help="Free workers to add: 3, or 20% of the workers in use."),
    ] = None,
    demand_minutes: Annotated[
        float | None,
        typer.Option(
            min=0, help="Keep as many as were claimed in the last so many minutes; 0: off."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum number of workers, free and in use; 0: no limit."),
    ] = None,
    shrink_after: Annotated[
        float | None, typer.Option(min=0, help="Seconds before a surplus is stopped.")
    ] = None,
    windows: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSON list of windows, which replaces all existing ones."
        ),
    ] = None,
    reason: Reason = "requested",
) -> CommandAnswer:
    """Change the pool's policy at once; options not given stay. A window in FILE looks like

    {"name": "morning", "begins": "08:00", "ends": "09:30", "days": "mon-fri", "calendar":
    "trading", "target": 40}
    """
    bounds = {"target": target, "minimum": minimum, "maximum": maximum, "limit": limit}
    others = {"demand_minutes": demand_minutes, "shrink_after": shrink_after, "windows": windows}
    changes = _policy_changes(**bounds, buffer=buffer, **others)
    before = api.get("pools", pool)
    # The revision that was read makes the API refuse the later of two changes at the same time.
    body = {**before["policy"], **changes, "revision": before["revision"], "reason": reason}
    return _pool_answer(api.put("pools", pool, **body).body)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None
