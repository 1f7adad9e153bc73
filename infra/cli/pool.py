"""`berth pool rollout …`: a pool is brought to another version of the worker, through the REST API.

`berth pool …`: pools of free workers, seen and steered through the REST API with an operator's key.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from infra.cli.options import Data, Json, KeyFile, Pool, Reason, Url, as_json, pool_path, with_api

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi


rollout_app = typer.Typer(
    help="Bring a pool to another version of the worker, and back (docs/rollout.md).", no_args_is_help=True
)

#: Seconds between two looks of `--watch`.
WATCH_PERIOD = 2.0


def _rollout_path(pool: str, rest: str = "") -> str:
    return pool_path(pool, f"/rollout{rest}")


@rollout_app.command()
def start(
    version: Annotated[
        str, typer.Option(help="What the new workers report; '': what the orchestrator's settings say.")
    ],
    pool: Pool = "default",
    image: Annotated[
        str, typer.Option(help="Container image, or task definition on ECS; left out: the settings'.")
    ] = "",
    batch: Annotated[int | None, typer.Option(min=1, help="Free workers at a time; usually 5.")] = None,
    deadline: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Then users move, quiet or not; usually 8 hours."),
    ] = None,
    quiet: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Without an order, until a user is quiet; usually 300."),
    ] = None,
    proof: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="How long it waits for a first user served; usually 120."
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay until it ends.")] = False,
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Begin one: free workers first, make before break; users when they are quiet. It goes back by itself."""

    def action(api: OperatorApi) -> int:
        shown = api.post(
            _rollout_path(pool),
            version=version,
            image=image,
            batch=batch,
            deadline_seconds=deadline,
            quiet_seconds=quiet,
            proof_seconds=proof,
            reason=reason,
        ).body
        return _watch_rollout(api, pool, json) if watch else _show_rollout(shown, json)

    with_api(data, url, key_file, action)


@rollout_app.command("status")
def rollout_status(
    pool: Pool = "default",
    watch: Annotated[
        bool, typer.Option("--watch", help="Stay until it ends; exit code 1 if it was rolled back.")
    ] = False,
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """How far the pool's rollout is, or how the last one ended."""

    def action(api: OperatorApi) -> int:
        return _watch_rollout(api, pool, json) if watch else _show_rollout(api.get(_rollout_path(pool)), json)

    with_api(data, url, key_file, action)


@rollout_app.command()
def abort(
    pool: Pool = "default",
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Take it back: what the pool had before is put back in the same way."""

    def action(api: OperatorApi) -> int:
        reply = api.post(_rollout_path(pool, "/abort"), reason=reason)
        if json:
            as_json(reply.body)
        else:
            typer.echo(f"the rollout of pool {pool} is taken back")
        return 0

    with_api(data, url, key_file, action)


def _show_rollout(shown: dict[str, Any], json: bool) -> int:
    from infra.cli import tables as pool_tables

    if json:
        as_json(shown)
    else:
        out = pool_tables.console()
        out.print(pool_tables.rollout_table(shown))
    return 0


def _watch_rollout(api: OperatorApi, pool: str, json: bool) -> int:
    """Redrawn in place on a terminal; a pipe gets the end only."""
    from rich.live import Live

    from infra.cli import tables as pool_tables

    out = pool_tables.console()
    shown = api.get(_rollout_path(pool))
    if out.is_terminal and not json:
        with Live(pool_tables.rollout_table(shown), console=out) as live:
            while not shown["ended"]:
                time.sleep(WATCH_PERIOD)
                shown = api.get(_rollout_path(pool))
                live.update(pool_tables.rollout_table(shown))
    else:
        while not shown["ended"]:
            time.sleep(WATCH_PERIOD)
            shown = api.get(_rollout_path(pool))
        _show_rollout(shown, json)
    return 0 if shown["phase"] == "done" else 1


app = typer.Typer(
    help="Pools of free workers, through the REST API. Exit codes: 0 done, 1 refused, 2 usage.",
    no_args_is_help=True,
)
app.add_typer(rollout_app, name="rollout")


@app.command()
def status(
    pool: Pool = "default",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """What the pool has and wants, and how its launches fare."""

    def action(api: OperatorApi) -> int:
        from infra.cli import tables as pool_tables

        shown = api.get(pool_path(pool))
        if json:
            as_json(shown)
        else:
            pool_tables.show_pool(pool_tables.console(), shown)
        return 0

    with_api(data, url, key_file, action)


@app.command()
def explain(
    pool: Pool = "default",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Why the pool wants so many workers, when that changes, and what keeps it from having them."""

    def action(api: OperatorApi) -> int:
        from infra.cli import tables as pool_tables

        shown = api.get(pool_path(pool))
        sentences = pool_tables.explain_pool(shown)
        if json:
            as_json({"pool": shown["pool"], "wanted": shown["wanted"], "explained": sentences})
        else:
            for sentence in sentences:
                typer.echo(sentence)
        return 0

    with_api(data, url, key_file, action)


def _steer(
    pool: str, asked: str, told: str, reason: str, json: bool, data: Path, url: str | None, key: Path | None
) -> NoReturn:
    def action(api: OperatorApi) -> int:
        reply = api.post(pool_path(pool, f"/{asked}"), reason=reason)
        if json:
            as_json(reply.body)
        else:
            typer.echo(told)
        return 0

    with_api(data, url, key, action)


@app.command()
def pause(
    pool: Pool = "default",
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Launch nothing for the pool until it is resumed. Its free workers can still be claimed."""
    _steer(pool, "pause", f"pool {pool} is paused", reason, json, data, url, key_file)


@app.command()
def drain(
    pool: Pool = "default",
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Stop all free workers and launch none until the pool is resumed. Users keep theirs."""
    _steer(pool, "drain", f"pool {pool} is being drained", reason, json, data, url, key_file)


@app.command()
def resume(
    pool: Pool = "default",
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """End a pause or a drain. After failed launches, the next one is tried at once."""
    _steer(pool, "resume", f"pool {pool} is resumed", reason, json, data, url, key_file)


@app.command("set")
def set_policy(
    pool: Pool = "default",
    target: Annotated[int | None, typer.Option(min=0, help="Free workers to keep.")] = None,
    minimum: Annotated[int | None, typer.Option(min=0, help="Never fewer.")] = None,
    maximum: Annotated[int | None, typer.Option(min=0, help="Never more; 0: without a limit.")] = None,
    buffer: Annotated[str | None, typer.Option(help="On top: 3, or 20% of the workers in use.")] = None,
    demand_minutes: Annotated[
        float | None,
        typer.Option(min=0, help="As many as were claimed within the last so many minutes; 0: off."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Workers in all; 0: without a limit.")] = None,
    shrink_after: Annotated[
        float | None, typer.Option(min=0, help="Seconds that there may be too many.")
    ] = None,
    windows: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON list of windows, in place of all that there are."),
    ] = None,
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Change the pool's policy at once; what is not named stays. A window in FILE looks like

    {"name": "morning", "begins": "08:00", "ends": "09:30", "days": "mon-fri", "calendar": "trading",
    "target": 40}
    """
    changes: dict[str, Any] = {
        "target": target,
        "minimum": minimum,
        "maximum": maximum,
        "buffer": buffer,
        "demand_minutes": demand_minutes,
        "limit": limit,
        "shrink_after": shrink_after,
        "windows": None if windows is None else _read(windows),
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if not changes:
        raise typer.BadParameter("say what to change, such as --target 8")
    for name in ("maximum", "limit"):
        if changes.get(name) == 0:
            changes[name] = None

    def action(api: OperatorApi) -> int:
        from infra.cli import tables as pool_tables

        before = api.get(pool_path(pool))
        # With the revision that was read: of two who change it at once, one is told so.
        body = {**before["policy"], **changes, "revision": before["revision"], "reason": reason}
        shown = api.put(pool_path(pool), body).body
        if json:
            as_json(shown)
        else:
            pool_tables.show_pool(pool_tables.console(), shown)
        return 0

    with_api(data, url, key_file, action)


def _read(path: Path) -> Any:
    import json

    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None
