"""`berth pool rollout …`: a pool is brought to another version of the worker, through the REST API."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.operating import Data, Json, KeyFile, Pool, Reason, Url, as_json, pool_path, with_api

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi

app = typer.Typer(
    help="Bring a pool to another version of the worker, and back (docs/rollout.md).", no_args_is_help=True
)

#: Seconds between two looks of `--watch`.
LOOK = 2.0


def _path(pool: str, rest: str = "") -> str:
    return pool_path(pool, f"/rollout{rest}")


@app.command()
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
            _path(pool),
            version=version,
            image=image,
            batch=batch,
            deadline_seconds=deadline,
            quiet_seconds=quiet,
            proof_seconds=proof,
            reason=reason,
        ).body
        return _watched(api, pool, json) if watch else _told(shown, json)

    with_api(data, url, key_file, action)


@app.command()
def status(
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
        return _watched(api, pool, json) if watch else _told(api.get(_path(pool)), json)

    with_api(data, url, key_file, action)


@app.command()
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
        reply = api.post(_path(pool, "/abort"), reason=reason)
        if json:
            as_json(reply.body)
        else:
            typer.echo(f"the rollout of pool {pool} is taken back")
        return 0

    with_api(data, url, key_file, action)


def _told(shown: dict[str, Any], json: bool) -> int:
    from infra.cli import pool_tables

    if json:
        as_json(shown)
    else:
        out = pool_tables.console()
        out.print(pool_tables.rollout(shown))
    return 0


def _watched(api: OperatorApi, pool: str, json: bool) -> int:
    """Redrawn in place on a terminal; a pipe gets the end only."""
    from rich.live import Live

    from infra.cli import pool_tables

    out = pool_tables.console()
    shown = api.get(_path(pool))
    if out.is_terminal and not json:
        with Live(pool_tables.rollout(shown), console=out) as live:
            while not shown["ended"]:
                time.sleep(LOOK)
                shown = api.get(_path(pool))
                live.update(pool_tables.rollout(shown))
    else:
        while not shown["ended"]:
            time.sleep(LOOK)
            shown = api.get(_path(pool))
        _told(shown, json)
    return 0 if shown["phase"] == "done" else 1
