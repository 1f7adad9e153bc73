"""`berth jobs limits …`: how many jobs of a type run at once, and how often, through the REST API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import Data, Json, KeyFile, Reason, Url, as_json, with_api

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi

app = typer.Typer(
    help="Limits of the fleet's job types. They hold from the next claim on; running jobs go on.",
    no_args_is_help=True,
)

Type = Annotated[str, typer.Argument(metavar="TYPE", help="Type of job, such as webhook.")]


@app.command("list")
def list_(json: Json = False, data: Data = Path(".berth"), url: Url = None, key_file: KeyFile = None) -> None:
    """Every type with its limits, and how many of it run now."""

    def action(api: OperatorApi) -> int:
        found = api.get("/job-limits")["limits"]
        if json:
            as_json(found)
        else:
            _show(found)
        return 0

    with_api(data, url, key_file, action)


@app.command("set")
def set_(
    job_type: Type,
    running: Annotated[
        int | None, typer.Option(min=0, help="Jobs that run at once, everywhere; 0: none is begun.")
    ] = None,
    per_node: Annotated[int | None, typer.Option(min=0, help="Jobs that run at once on one node.")] = None,
    per_second: Annotated[
        float | None, typer.Option(help="Jobs a second for each rate key: a webhook's host, a mail's domain.")
    ] = None,
    burst: Annotated[
        int | None, typer.Option(min=1, help="How many of them may come at once after a rest.")
    ] = None,
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Set the limits of a type: all of them, so what is left out has none."""
    given = {"running": running, "per_node": per_node, "per_second": per_second, "burst": burst}
    if all(value is None for value in given.values()):
        raise typer.BadParameter("say --running, --per-node or --per-second; `clear` takes all back")
    if burst is not None and per_second is None:
        raise typer.BadParameter("--burst needs --per-second")
    _put(job_type, given, reason, json, data, url, key_file)


@app.command()
def clear(
    job_type: Type,
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Take all limits of a type back."""
    _put(job_type, {}, reason, json, data, url, key_file)


def _put(
    job_type: str,
    limits: dict[str, Any],
    reason: str,
    json: bool,
    data: Path,
    url: str | None,
    key_file: Path | None,
) -> None:
    def action(api: OperatorApi) -> int:
        from urllib.parse import quote

        path = f"/job-limits/{quote(job_type, safe='')}"
        found = api.put(path, {**limits, "reason": reason}).body
        if json:
            as_json(found)
        else:
            _show([found])
        return 0

    with_api(data, url, key_file, action)


def _show(rows: list[dict[str, Any]]) -> None:
    from infra.cli.tables import console, empty_table, plain

    out = console()
    table = empty_table(out, "type", "running", "limit", "per node", "per second", "burst")
    for row in rows:
        cells = [row["running_now"], *(row[name] for name in ("running", "per_node", "per_second", "burst"))]
        table.add_row(plain(row["type"]), *("-" if cell is None else f"{cell:g}" for cell in cells))
    out.print(table)
