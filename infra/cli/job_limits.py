"""`berth jobs limits …`: how many jobs of a type run at once, and how often, through the REST API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from infra.cli.options import CommandAnswer, Reason, api_command

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi

app = typer.Typer(
    help="Limits of the fleet's job types. They apply from the next claim on; running jobs continue.",
    no_args_is_help=True,
)

Type = Annotated[str, typer.Argument(metavar="TYPE", help="Type of job, such as webhook.")]


@api_command(app, "list")
def list_(api: OperatorApi) -> CommandAnswer:
    """Show every type with its limits, and how many jobs of it run now."""
    found = api.get("/job-limits")["limits"]
    return CommandAnswer(found, lambda: _show_limits(found))


def _check_limits(**given: Any) -> None:
    if all(given[name] is None for name in ("running", "per_node", "per_second", "burst")):
        raise typer.BadParameter("say --running, --per-node or --per-second; `clear` removes all")
    if given["burst"] is not None and given["per_second"] is None:
        raise typer.BadParameter("--burst needs --per-second")


@api_command(app, "set", check=_check_limits)
def set_(
    api: OperatorApi,
    job_type: Type,
    running: Annotated[
        int | None, typer.Option(min=0, help="Jobs that run at once, everywhere; 0: none starts.")
    ] = None,
    per_node: Annotated[int | None, typer.Option(min=0, help="Jobs that run at once on one node.")] = None,
    per_second: Annotated[
        float | None, typer.Option(help="Jobs a second for each rate key: a webhook's host, a mail's domain.")
    ] = None,
    burst: Annotated[
        int | None, typer.Option(min=1, help="How many may start at once after a pause.")
    ] = None,
    reason: Reason = "requested",
) -> CommandAnswer:
    """Set all limits of a type: one that is left out is removed."""
    limits = {"running": running, "per_node": per_node, "per_second": per_second, "burst": burst}
    return _put_limits(api, job_type, limits, reason)


@api_command(app)
def clear(api: OperatorApi, job_type: Type, reason: Reason = "requested") -> CommandAnswer:
    """Remove all limits of a type."""
    return _put_limits(api, job_type, {}, reason)


def _put_limits(api: OperatorApi, job_type: str, limits: dict[str, Any], reason: str) -> CommandAnswer:
    found = api.put(f"/job-limits/{quote(job_type, safe='')}", {**limits, "reason": reason}).body
    return CommandAnswer(found, lambda: _show_limits([found]))


def _show_limits(rows: list[dict[str, Any]]) -> None:
    from infra.cli.tables import console, table

    def cells(row: dict[str, Any]) -> list[str]:
        limits = [row[name] for name in ("running_now", "running", "per_node", "per_second", "burst")]
        return [row["type"], *("-" if limit is None else f"{limit:g}" for limit in limits)]

    out = console()
    columns = ("type", "running", "limit", "per node", "per second", "burst")
    out.print(table(out, columns, map(cells, rows)))
