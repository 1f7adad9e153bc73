"""`berth maintenance …`: the last check of all workers, and what was cleaned up. `berth hosts explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import CommandAnswer, Pool, Reason, api_command, pool_path

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi


maintenance_app = typer.Typer(
    help="The maintenance that cleans up after failures (docs/how-it-works/maintenance.md).",
    no_args_is_help=True,
)


#: Seconds to wait for a pass; over 20,000 workers with 2,000 anomalies it took 11.
PASS_PATIENCE = 60.0


@api_command(maintenance_app)
def run(api: OperatorApi, reason: Reason = "requested") -> CommandAnswer:
    """Check all workers now, as the schedule does; anomalies that the last pass saw too are cleaned up."""
    reply = api.post("/fleet/maintenance", wait=PASS_PATIENCE, reason=reason)
    if not reply.done:
        return CommandAnswer(
            reply.body, f"the pass takes longer than {PASS_PATIENCE:.0f} s: berth maintenance status"
        )
    return CommandAnswer(reply.body, lambda: _show_outcome(reply.body))


def _show_outcome(done: dict[str, object]) -> None:
    from infra.cli.tables import plain

    typer.echo(
        f"{done['workers']} workers, {done['found']} anomalies, {done['confirmed']} of them seen before; "
        f"done: {_counts(done['outcomes'])}"
    )
    if done["guarded"]:
        typer.echo(f"held still because: {plain(done['guarded'])}")


@api_command(maintenance_app)
def status(api: OperatorApi) -> CommandAnswer:
    """Show the last pass: when, how many workers, what it found and did, and what it left alone."""
    found = api.get("/fleet")["maintenance"]
    return CommandAnswer(found, "no pass yet" if found is None else lambda: _show_pass(found))


def _show_pass(found: dict[str, object]) -> None:
    from infra.cli.tables import clock, console, table

    out = console()
    columns = ("pass of (UTC)", "workers", "odd", "done", "held still because", "seconds")
    row = (
        *(clock(str(found["began_at"])), found["workers"], _counts(found["found"])),
        *(_counts(found["outcomes"]), found["guarded"] or "-"),
        "under way" if found["total_seconds"] is None else found["total_seconds"],
    )
    out.print(table(out, columns, [row]))


def _counts(counts: object) -> str:
    from infra.cli.tables import plain

    shown = counts.items() if isinstance(counts, dict) else ()
    return ", ".join(plain(f"{count} {name}") for name, count in shown) or "-"


hosts_app = typer.Typer(help="Hosts of workers (docs/how-to/roll-out.md).", no_args_is_help=True)


@hosts_app.callback()
def _hosts_group() -> None:
    """Makes `explain` a subcommand although it is the only one."""


@api_command(hosts_app)
def explain(
    api: OperatorApi,
    pool: Pool = "default",
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Number of workers, instead of those that the pool has and wants."),
    ] = None,
    warm: Annotated[int, typer.Option(min=0, help="Empty hosts to keep ready, at least.")] = 1,
    rate: Annotated[float, typer.Option(min=0, help="New workers a second that need room.")] = 0.0,
) -> CommandAnswer:
    """How many hosts the pool's workers need: what the orchestrator would ask of the platform."""
    wanted = workers if workers is not None else workers_of_pool(api.get(pool_path(pool)))
    shown = explain_hosts(wanted, warm=warm, rate=rate)
    return CommandAnswer(shown, f"{shown['wanted']} hosts are wanted: {shown['reason']}")


def workers_of_pool(shown: dict[str, Any]) -> int:
    """How many workers a pool has in use, and has or wants free."""
    return int(shown["in_use"]) + max(int(shown["wanted"]), int(shown["ready"]) + int(shown["starting"]))


def explain_hosts(workers: int, *, warm: int, rate: float) -> dict[str, Any]:
    from infra.hosts.scaling import HostKind, plan_hosts, warm_hosts

    kind = HostKind()
    made = plan_hosts(kind, workers, warm=warm_hosts(kind, rate, least=warm))
    return {
        "workers": workers,
        "wanted": made.wanted,
        "needed": made.needed,
        "warm": made.warm,
        "target_capacity": made.target_capacity,
        "reason": made.reason,
    }
