"""Commands and their options; what they do stands in files of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    name="berth",
    help="Berth: a worker of their own for every user's broker session.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
keys_app = typer.Typer(help="Key files.", no_args_is_help=True)
bench_app = typer.Typer(
    help="Measure on this machine. Each benchmark starts what it needs on free ports, and stops it.",
    no_args_is_help=True,
)
app.add_typer(keys_app, name="keys")
app.add_typer(bench_app, name="bench")

#: Passed on unread: `berth exchange --help` shows the module's own help.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

DataFolder = Annotated[
    Path,
    typer.Option("--data", envvar="BERTH_DATA_DIR", help="Folder for everything.", show_default=".berth"),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"berth {version('berth')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def up(
    data: DataFolder = Path(".berth"),
    pool: Annotated[
        int | None,
        typer.Option(min=0, envvar="BERTH_POOL_TARGET", help="Warm workers to keep.", show_default="4"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(envvar="BERTH_API_PORT", help="Port of the API.", show_default="8000"),
    ] = None,
    ui_port: Annotated[
        int | None,
        typer.Option(envvar="BERTH_LOCAL_UI_PORT", help="Port of Temporal's UI.", show_default="8233"),
    ] = None,
    main_job: Annotated[
        bool, typer.Option("--main-job", help="Then register a demo user and send one order.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Stop after the main job: exit 0, or 1 with the reason.")
    ] = False,
) -> None:
    """Start the whole system on 127.0.0.1 and keep it up until Ctrl-C.

    Temporal, Valkey, PostgreSQL, the paper exchange, the node, the orchestrator, the API and a pool of warm
    workers. The other ports are settings (BERTH_LOCAL_…); .env.example lists them.
    """
    from infra.cli.up import run

    raise typer.Exit(run(data, pool=pool, port=port, ui_port=ui_port, main_job=main_job, once=once))


@app.command()
def down(
    data: DataFolder = Path(".berth"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing if nothing runs.")] = False,
) -> None:
    """Stop a running `berth up`, or what a killed one has left behind."""
    from infra.cli.down import run

    raise typer.Exit(run(data, quiet=quiet))


def _exec(module: str, *words: str) -> NoReturn:
    """Becomes `python -m module`: one process less, and signals reach it directly."""
    os.execv(sys.executable, [sys.executable, "-m", module, *words])  # noqa: S606


@app.command()
def api() -> None:
    """Run the REST API until SIGTERM or Ctrl-C.

    Settings: BERTH_API_HOST, BERTH_API_PORT, BERTH_API_PROCESSES, BERTH_DATABASE_URL, BERTH_VALKEY_URL,
    BERTH_TEMPORAL_ADDRESS, BERTH_MASTER_PUBLIC_FILE, BERTH_LOG_LEVEL; .env.example lists all.
    """
    _exec("api")


@app.command()
def orchestrator() -> None:
    """Run the orchestrator (workflows and activities) until SIGTERM or Ctrl-C.

    Settings: BERTH_TASK_QUEUES, BERTH_POOL_TARGET, BERTH_LAUNCHER, BERTH_NODE_SOCKET, BERTH_DATABASE_URL,
    BERTH_VALKEY_URL, BERTH_TEMPORAL_ADDRESS, BERTH_MASTER_KEY_FILE, BERTH_ORCHESTRATOR_KEY_FILE,
    BERTH_LOG_LEVEL; .env.example lists all.
    """
    _exec("activities")


@app.command()
def worker() -> None:
    """Run one user worker; the orchestrator starts it, people seldom do.

    It reads its launch configuration, one JSON document, from standard input and no BERTH_ setting: what the
    orchestrator was given for workers (BERTH_MARK_TTL, BERTH_MARK_PERIOD, BERTH_LOG_LEVEL …) stands in there.
    """
    _exec("worker_runtime")


@app.command(context_settings=_PASS_ON)
def exchange(context: typer.Context) -> None:
    """Run the paper exchange."""
    _exec("infra.exchange", *context.args)


@app.command(context_settings=_PASS_ON)
def node(context: typer.Context) -> None:
    """Run the node: it owns this host's worker processes."""
    _exec("infra.node", *context.args)


@keys_app.command("init")
def keys_init() -> None:
    """Make the key files that are missing; an existing one is never replaced.

    Paths: BERTH_MASTER_KEY_FILE, BERTH_MASTER_PUBLIC_FILE, BERTH_ORCHESTRATOR_KEY_FILE.
    """
    from infra.local import keyring
    from infra.settings import Settings
    from worker_runtime.protocol.errors import BerthError

    try:
        made = keyring.init(Settings())
    except (BerthError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    for path in made:
        typer.echo(f"made {path}")
    if not made:
        typer.echo("all key files are there")


@keys_app.command("rotate")
def keys_rotate(
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of a running `berth up`: rotate its key.")
    ] = None,
) -> None:
    """Make a new master key, rewrap all stored credentials, and say what to do next.

    Safe to interrupt and to run again; while an old key file is kept, it only goes on rewrapping. Without
    --data: BERTH_MASTER_KEY_FILE, BERTH_MASTER_PUBLIC_FILE, BERTH_MASTER_KEY_RETIRED, BERTH_DATABASE_URL.
    """
    from infra.cli.rotate import run

    raise typer.Exit(run(data))


Rate = Annotated[float, typer.Option(min=0.1, help="Claims per second, from a full pool.")]
RefillRate = Annotated[float, typer.Option(min=0.1, help="Claims per second while the pool is refilled.")]


@bench_app.command("claim")
def bench_claim(
    rate: Rate = 5.0,
    n: Annotated[int, typer.Option("-n", min=1, help="Claims from the full pool of as many.")] = 30,
    refill_rate: RefillRate = 2.0,
    refill_n: Annotated[int, typer.Option(min=1, help="Claims while the pool is refilled.")] = 40,
    json: JsonFile = None,
) -> None:
    """From REST to an Active worker with credentials, open loop, for users without a worker."""
    _bench({"claim": {"rate": rate, "n": n, "refill_rate": refill_rate, "refill_n": refill_n}}, json)


@bench_app.command("order")
def bench_order(
    n: Annotated[int, typer.Option("-n", min=1, help="Orders, one after the other.")] = 2000,
    users: Annotated[int, typer.Option(min=1, help="Users that trade at once in the second part.")] = 8,
    seconds: Annotated[float, typer.Option(min=1, help="How long the second part takes.")] = 10.0,
    json: JsonFile = None,
) -> None:
    """From REST to the answer with an active worker; beside it the bare two Valkey hops."""
    _bench({"order": {"n": n, "users": users, "seconds": seconds}}, json)


@bench_app.command("memory")
def bench_memory(
    workers: Annotated[int, typer.Option(min=1, help="Idle workers in the pool.")] = 10,
    json: JsonFile = None,
) -> None:
    """Proportional set size of a worker with all its processes: idle in a pool, alone, and active."""
    _bench({"memory": {"workers": workers}}, json)


@bench_app.command("all")
def bench_all(json: JsonFile = None) -> None:
    """All benchmarks, one after the other."""
    _bench({"claim": {}, "order": {}, "memory": {}}, json)


def _bench(wanted: dict[str, dict[str, float]], json: Path | None) -> NoReturn:
    from infra.bench.run import run

    raise typer.Exit(run(wanted, json))


def main() -> None:
    app()
