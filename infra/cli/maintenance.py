"""`berth maintenance …`: what maintenance saw when it last looked at all workers, and what it did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from infra.cli.operating import Data, Json, KeyFile, Reason, Url, as_json, with_api

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi

app = typer.Typer(help="Look at what cleans up after failures (docs/maintenance.md).", no_args_is_help=True)


#: Seconds to wait for a pass: one over 20,000 workers with 2,000 anomalies took 11.
PATIENCE = 60.0


@app.command("run")
def run(
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Look at all workers now, as the schedule does; what the look before has seen, too, is cleaned up."""

    def action(api: OperatorApi) -> int:
        reply = api.post("/fleet/maintenance", wait=PATIENCE, reason=reason)
        if json:
            as_json(reply.body)
        elif not reply.done:
            typer.echo(f"the pass takes longer than {PATIENCE:.0f} s: berth maintenance status")
        else:
            _told(reply.body)
        return 0

    with_api(data, url, key_file, action)


def _told(done: dict[str, object]) -> None:
    from infra.cli.worker_tables import plain

    typer.echo(
        f"{done['workers']} workers, {done['found']} anomalies, {done['confirmed']} of them seen before; "
        f"done: {_counts(done['outcomes'])}"
    )
    if done["guarded"]:
        typer.echo(f"held still because: {plain(done['guarded'])}")


@app.command("status")
def status(
    json: Json = False, data: Data = Path(".berth"), url: Url = None, key_file: KeyFile = None
) -> None:
    """Show the last pass: when, how many workers, what was odd, what was done, and why not."""

    def action(api: OperatorApi) -> int:
        found = api.get("/fleet")["maintenance"]
        if json:
            as_json(found)
        elif found is None:
            typer.echo("no pass yet")
        else:
            _show(found)
        return 0

    with_api(data, url, key_file, action)


def _show(found: dict[str, object]) -> None:
    from infra.cli.worker_tables import clock, console, empty_table, plain

    out = console()
    rows = empty_table(out, "pass of (UTC)", "workers", "odd", "done", "held still because", "seconds")
    began = found["began_at"]
    rows.add_row(
        clock(str(began)),
        plain(found["workers"]),
        _counts(found["found"]),
        _counts(found["outcomes"]),
        plain(found["guarded"] or "-"),
        plain("under way" if found["total_seconds"] is None else found["total_seconds"]),
    )
    out.print(rows)


def _counts(counts: object) -> str:
    from infra.cli.worker_tables import plain

    shown = counts.items() if isinstance(counts, dict) else ()
    return ", ".join(plain(f"{count} {name}") for name, count in shown) or "-"
