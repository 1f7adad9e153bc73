"""`berth hosts explain`: how many worker hosts the workers of a pool need, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.operating import Data, Json, KeyFile, Pool, Url, as_json, pool_path, with_api

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi

app = typer.Typer(help="Hosts of workers (docs/rollout.md).", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `explain` a command of its own while there is no other."""


@app.command()
def explain(
    pool: Pool = "default",
    workers: Annotated[
        int | None, typer.Option(min=0, help="So many, instead of those that the pool has and wants.")
    ] = None,
    warm: Annotated[int, typer.Option(min=0, help="Hosts to keep ahead at the least.")] = 1,
    rate: Annotated[float, typer.Option(min=0, help="Workers a second that must find room.")] = 0.0,
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """How many hosts are wanted for the pool's workers: what the orchestrator would ask of the platform."""

    def action(api: OperatorApi) -> int:
        wanted = workers if workers is not None else workers_of(api.get(pool_path(pool)))
        shown = explained(wanted, warm=warm, rate=rate)
        if json:
            as_json(shown)
        else:
            typer.echo(f"{shown['wanted']} hosts are wanted: {shown['reason']}")
        return 0

    with_api(data, url, key_file, action)


def workers_of(shown: dict[str, Any]) -> int:
    """Of a pool: those in use, and the free ones that it has or wants."""
    return int(shown["in_use"]) + max(int(shown["wanted"]), int(shown["ready"]) + int(shown["starting"]))


def explained(workers: int, *, warm: int, rate: float) -> dict[str, Any]:
    from infra.hosts.sizing import HostKind, plan, warm_hosts

    kind = HostKind()
    made = plan(kind, workers, warm=warm_hosts(kind, rate, least=warm))
    return {
        "workers": workers,
        "wanted": made.wanted,
        "needed": made.needed,
        "warm": made.warm,
        "target_capacity": made.target_capacity,
        "reason": made.reason,
    }
