"""`berth jobs limits …`: how many jobs of a type run at once,
and how often, through the REST API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import CommandAnswer, Reason, api_command, command_group, list_answer

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi

app = command_group(
    "Limits of the fleet's job types. They apply from the next claim on; running jobs continue."
)

_COLUMNS = (
    "type, running: running_now, limit: running, per node: per_node, per second: per_second, burst"
)
Type = Annotated[str, typer.Argument(metavar="TYPE", help="Type of job, such as webhook.")]


@api_command(app, "list")
def list_(api: OperatorApi) -> CommandAnswer:
    """Show every type with its limits, and how many jobs of it run now."""
    limits = api.get("job-limits")["limits"]
    return list_answer(limits, _COLUMNS, none="no type")


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
        int | None,
        typer.Option(min=0, help="Maximum number that run at once, everywhere; 0: no job starts."),
    ] = None,
    per_node: Annotated[
        int | None, typer.Option(min=0, help="Maximum number that run at once on one node.")
    ] = None,
    per_second: Annotated[
        float | None,
        typer.Option(help="Jobs a second for each rate key: a webhook's host, a mail's domain."),
    ] = None,
    burst: Annotated[
        int | None, typer.Option(min=1, help="Maximum number that may start at once after a pause.")
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


def _put_limits(
    api: OperatorApi, job_type: str, limits: dict[str, Any], reason: str
) -> CommandAnswer:
    changed = api.put("job-limits", job_type, **limits, reason=reason).body
    return list_answer([changed], _COLUMNS, none="", value=changed)
