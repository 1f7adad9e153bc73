"""`berth pool …`: pools of free workers, seen and steered through the REST API with an operator's key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from infra.cli import rollout
from infra.cli.operating import Data, Json, KeyFile, Pool, Reason, Url, as_json, pool_path, with_api

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi

app = typer.Typer(
    help="Pools of free workers, through the REST API. Exit codes: 0 done, 1 refused, 2 usage.",
    no_args_is_help=True,
)
app.add_typer(rollout.app, name="rollout")


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
        from infra.cli import pool_tables

        shown = api.get(pool_path(pool))
        if json:
            as_json(shown)
        else:
            pool_tables.status(pool_tables.console(), shown)
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
        from infra.cli import pool_tables

        shown = api.get(pool_path(pool))
        sentences = pool_tables.explained(shown)
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
        from infra.cli import pool_tables

        before = api.get(pool_path(pool))
        # With the revision that was read: of two who change it at once, one is told so.
        body = {**before["policy"], **changes, "revision": before["revision"], "reason": reason}
        shown = api.put(pool_path(pool), body).body
        if json:
            as_json(shown)
        else:
            pool_tables.status(pool_tables.console(), shown)
        return 0

    with_api(data, url, key_file, action)


def _read(path: Path) -> Any:
    import json

    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None
