"""The command `berth`. Commands import what they need when they run, so that `berth --help` is quick."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from infra.cli import fleet, jobs, pool, trading, worker

app = typer.Typer(
    name="berth",
    help="Berth: a worker for every user's broker session.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
keys_app = typer.Typer(help="Key files.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.add_typer(worker.app, name="worker")
app.add_typer(trading.app, name="orders")
app.add_typer(pool.app, name="pool")
app.add_typer(jobs.app, name="jobs")
app.add_typer(fleet.maintenance_app, name="maintenance")
app.add_typer(fleet.hosts_app, name="hosts")

#: Options are passed on unread: `berth exchange --help` shows the module's own help.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

DataFolder = Annotated[
    Path,
    typer.Option("--data", envvar="BERTH_DATA_DIR", help="Folder for everything.", show_default=".berth"),
]


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
    from infra.cli.stack import run_up

    raise typer.Exit(run_up(data, pool=pool, port=port, ui_port=ui_port, main_job=main_job, once=once))


@app.command()
def down(
    data: DataFolder = Path(".berth"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing if nothing runs.")] = False,
) -> None:
    """Stop a running `berth up`, or what a killed one has left behind."""
    from infra.cli.stack import run_down

    raise typer.Exit(run_down(data, quiet=quiet))


def _exec(module: str, *words: str) -> NoReturn:
    """Replaces this process by `python -m module`, so that signals reach it directly."""
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
    """Make the missing key files; existing ones are never replaced.

    Paths: BERTH_MASTER_KEY_FILE, BERTH_MASTER_PUBLIC_FILE, BERTH_ORCHESTRATOR_KEY_FILE.
    """
    from infra.settings import Settings
    from infra.vault import keyring
    from worker_runtime.protocol.errors import BerthError

    try:
        made = keyring.create_missing_keys(Settings())
    except (BerthError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    for path in made:
        typer.echo(f"made {path}")
    if not made:
        typer.echo("all key files exist")


@keys_app.command("rotate")
def keys_rotate(
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of a running `berth up`: rotate its key.")
    ] = None,
) -> None:
    """Make a new master key, rewrap all stored credentials, and say what to do next.

    Safe to interrupt and to repeat; while an old key file is kept, it makes no new key and only rewraps.
    Without --data it uses BERTH_MASTER_KEY_FILE, BERTH_MASTER_PUBLIC_FILE, BERTH_MASTER_KEY_RETIRED and
    BERTH_DATABASE_URL.
    """
    from infra.cli.keys import run_rotation

    raise typer.Exit(run_rotation(data))


def _install_lab() -> None:
    """Adds `bench` and `chaos`, which register in the entry point group `berth.commands`.

    Production images come without `infra/lab`; there the two commands do not exist.
    """
    for command in entry_points(group="berth.commands"):
        try:
            app.add_typer(command.load(), name=command.name)
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("infra.lab"):
                raise


trading.install(app)
_install_lab()


def main() -> None:
    app()
