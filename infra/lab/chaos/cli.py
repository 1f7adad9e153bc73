"""`berth chaos …`: break a system of its own on purpose, and judge the result."""

from __future__ import annotations

import signal
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from worker_runtime.protocol.errors import BerthError


class ChaosBroker(StrEnum):
    PAPER = "paper"
    SHIOAJI = "shioaji"


app = typer.Typer(
    help="Break a system of its own on purpose, on free ports, and judge the result.",
    no_args_is_help=True,
)


@app.callback()
def _root() -> None:
    """Keeps `orders` and `jobs` commands of their own."""


@app.command()
def orders(
    minutes: Annotated[
        float, typer.Option(min=0.1, help="How long orders flow and things break.")
    ] = 5.0,
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="The same seed: the same orders, and the same faults at the same times."
        ),
    ] = 1,
    users: Annotated[int, typer.Option(min=1, help="Users that trade, each with a worker.")] = 24,
    rate: Annotated[
        float, typer.Option(min=0.1, help="Orders per second, of all users together.")
    ] = 5.0,
    broker: Annotated[
        ChaosBroker,
        typer.Option(help="The broker that everyone trades at; shioaji is a stand-in for it."),
    ] = ChaosBroker.PAPER,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="An empty folder in which data and logs are kept.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
) -> None:
    """Trade while everything is killed, stopped and flushed;
    then compare the books with the exchange's.

    Exit code 1 when an order was lost,
    doubled or filled differently, or another promise did not hold.
    """
    raise typer.Exit(_orders(minutes, seed, users, rate, broker, keep, json))


@app.command()
def jobs(
    kills: Annotated[
        int, typer.Option(min=1, help="Runners that are killed; some freeze first.")
    ] = 2000,
    own_faults: Annotated[
        int,
        typer.Option(min=0, help="Then, with own job types: processes that are killed."),
    ] = 100,
    seed: Annotated[int, typer.Option(min=0, help="The same seed: the same jobs and steps.")] = 1,
    lease: Annotated[float, typer.Option(min=1, help="Seconds, of each runner.")] = 1.0,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="An empty folder in which data and logs are kept.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
) -> None:
    """Kill and freeze job runners at every step,
    flush and kill Valkey; then compare results with a ledger.

    Exit code 1 when a job was lost, or run twice though it must not.
    """
    raise typer.Exit(_jobs(kills, own_faults, seed, lease, keep, json))


def _jobs(
    kills: int, own_faults: int, seed: int, lease: float, keep: Path | None, json: Path | None
) -> int:
    from infra.lab import figures
    from infra.lab.chaos.jobs import experiment

    # What was started must be stopped, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if json is not None:
            json.touch()  # an unwritable file is reported before the minutes of the run
        with Console(stderr=True).status("chaos: jobs") as status:
            result = experiment.run(
                kills, seed, lease, keep, say=status.update, own_faults=own_faults
            )
        experiment.table(result)
        for finding in result["findings"]:
            typer.echo(f"{finding['harm']}: {finding['job']}: {finding['what']}")
        if json is not None:
            figures.write_json(json, result)
    except (BerthError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 1 if result["findings"] else 0


def _orders(
    minutes: float,
    seed: int,
    users: int,
    rate: float,
    broker: ChaosBroker,
    keep: Path | None,
    json: Path | None,
) -> int:
    from infra.lab import figures
    from infra.lab.chaos.orders import experiment as orders
    from infra.lab.chaos.orders import schedule

    # What was started must be stopped, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for fault in schedule.plan_faults(seed, minutes * 60):
        typer.echo(str(fault))
    try:
        if json is not None:
            json.touch()  # an unwritable file is reported before the minutes of the run
        with Console(stderr=True).status("chaos: orders") as status:
            result = orders.run(
                minutes, seed, users, rate, folder=keep, say=status.update, broker=broker.value
            )
        orders.table(result)
        for finding in result["findings"]:
            typer.echo(f"{finding['harm']}: {finding['order'] or '-'}: {finding['what']}")
        if json is not None:
            figures.write_json(json, result)
    except (BerthError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 1 if result["broken"] else 0
