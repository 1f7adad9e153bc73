"""The command `berth`. Commands import what is large
when they run, so that `berth --help` is quick."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

try:
    import typer
except ModuleNotFoundError:
    sys.exit(
        "The command `berth` needs Berth's extra `server`, which is not installed here. In a "
        "checkout of Berth: pip install '.[server]'"
    )

from infra.cli import broker, fleet, instruments, jobs, pool, trading, users, webhooks, worker
from infra.cli.options import (
    CommandAnswer,
    Data,
    Json,
    KeyName,
    OfData,
    Reason,
    api_command,
    command_group,
    join_help_lines,
    settings_command,
)
from infra.environment import forget_library_variables

if TYPE_CHECKING:
    from infra.settings import Settings

app = typer.Typer(
    name="berth",
    help="Berth: a worker for every user's broker session.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
keys_app = command_group("Make, rotate, retire and restore key files.")
app.add_typer(keys_app, name="keys")
app.add_typer(users.users_app, name="users")
app.add_typer(users.accounts_app, name="accounts")
app.add_typer(broker.app, name="broker")
app.add_typer(worker.app, name="worker")
app.add_typer(trading.app, name="orders")
app.add_typer(pool.app, name="pool")
app.add_typer(jobs.app, name="jobs")
app.add_typer(users.keys_app, name="api-keys")
app.add_typer(fleet.images_app, name="images")
app.add_typer(fleet.letters_app, name="dead-letters")
app.add_typer(webhooks.webhooks_app, name="webhooks")
app.add_typer(webhooks.symbols_app, name="symbols")
app.add_typer(instruments.app, name="instruments")
app.add_typer(fleet.maintenance_app, name="maintenance")
app.add_typer(fleet.hosts_app, name="hosts")
app.add_typer(fleet.report_app, name="report")

#: Options are passed on unread: `berth exchange --help` shows the module's own help.
#: What `berth backup --plain` says.
PLAIN_BACKUP = (
    "warning: this backup is not encrypted. It holds orders, addresses, sealed credentials and the "
    "keys that open them: whoever finds it has everything. Guard it like the master key"
)
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        typer.echo(f"berth {version('berth')}")
        raise typer.Exit


#: Commands that say themselves what the environment has in vain.
_WARN_THEMSELVES = ("api", "orchestrator", "exchange", "doctor")


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    has_ours = any(name.upper().startswith("BERTH_") for name in os.environ)
    if has_ours and context.invoked_subcommand not in _WARN_THEMSELVES:
        from infra.setting_names import print_unread_variables

        print_unread_variables()


@app.command()
def up(
    data: Data = Path(".berth"),
    pool: Annotated[
        int | None,
        typer.Option(
            min=0, envvar="BERTH_POOL_TARGET", help="Warm workers to keep.", show_default="4"
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, envvar="BERTH_API_PORT", help="Port of the API.", show_default="8000"
        ),
    ] = None,
    ui_port: Annotated[
        int | None,
        typer.Option(
            envvar="BERTH_LOCAL_UI_PORT", help="Port of Temporal's UI.", show_default="8233"
        ),
    ] = None,
    main_job: Annotated[
        bool,
        typer.Option(
            "--main-job", help="After the start, register a demo user and send one order."
        ),
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Stop after the main job: exit 0, or 1 with the reason.")
    ] = False,
) -> None:
    """Start the whole system on 127.0.0.1 and keep it up until Ctrl-C.

    Temporal, Valkey, PostgreSQL, the paper exchange, the node, the orchestrator, the API and a pool
    of warm workers. The other ports are settings (BERTH_LOCAL_…); .env.example lists them.
    """
    from infra.cli.stack import run_up

    raise typer.Exit(
        run_up(data, pool=pool, port=port, ui_port=ui_port, main_job=main_job, once=once)
    )


@app.command()
def down(
    data: Data = Path(".berth"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing if nothing runs.")] = False,
) -> None:
    """Stop a running `berth up`, or what a killed one has left behind."""
    from infra.cli.stack import run_down

    raise typer.Exit(run_down(data, quiet=quiet))


def _exec(module: str, *words: str) -> NoReturn:
    """Replaces this process by `python -m module`, so that signals reach it directly.

    With -P: an `api/` in the current folder is not ours, and is not imported.
    """
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *words])  # noqa: S606


@settings_command(app)
def migrate(settings: Settings) -> CommandAnswer:
    """Bring the database to the schema of this release. Run it before a release is started.

    Safe to run at any time, twice, and while the servers run. It waits at most 2 s for a lock,
    so that it holds nobody up, and tries again for a minute. Without --data it uses
    BERTH_DATABASE_OWNER_URL, or BERTH_DATABASE_URL.
    """
    import asyncio

    from infra.database.migrate import migrate_as_owner, newest_revision

    before, after = asyncio.run(migrate_as_owner(settings))
    said = f"the schema is at {after}" + (
        f", it was at {before or 'nothing'}" if before != after else ""
    )
    newer = f"; this release needs {newest_revision()}" if after > newest_revision() else ""
    return CommandAnswer({"before": before, "after": after}, said + newer)


@settings_command(app)
def backup(
    settings: Settings,
    folder: Annotated[Path, typer.Argument(help="Folder of the backups, mode 0700.")],
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Write PostgreSQL's log into the folder until Ctrl-C, to restore any moment.",
        ),
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Do not encrypt. Guard the backup like the master key.")
    ] = False,
) -> CommandAnswer:
    """Back up PostgreSQL and the key files into a folder of their own (docs/how-to/restore.md).

    Everything is encrypted to BERTH_BACKUP_RECIPIENTS; `berth unpack` opens it. The database's role
    needs REPLICATION. Without --data it uses BERTH_DATABASE_URL and the settings of the key files.
    A backup is noted in the audit trail before it is made.
    """
    from infra.cli.keys import note_act
    from infra.recovery.backup import follow_log, make_backup
    from infra.recovery.encryption import read_recipients

    if plain:
        typer.echo(PLAIN_BACKUP, err=True)
    else:
        read_recipients(settings.backup_recipients)
    if follow:
        follow_log(settings, folder, plain=plain)
        return CommandAnswer(str(folder), "stopped following the log")
    note_act(
        settings, "database.backup_requested", "database", folder=str(folder), encrypted=not plain
    )
    made = make_backup(settings, folder, plain=plain)
    return CommandAnswer(str(made), f"made {made}")


@app.command()
def unpack(
    backup: Annotated[Path, typer.Argument(help="A backup that `berth backup` made.")],
    identity: Annotated[
        Path, typer.Option(help="File with the identity that decrypts the backup.")
    ],
    to: Annotated[
        Path, typer.Option(help="An empty folder, into which base, wal and keys are written.")
    ],
) -> None:
    """Decrypt a backup, with PostgreSQL's log since, so that it can be restored
    (docs/how-to/restore.md).

    The folder needs room for the data and the log. Nothing is changed in the backup.
    """
    from infra.recovery.unpack import unpack_backup

    unpacked = unpack_backup(backup, identity, to)
    typer.echo(f"unpacked {unpacked.base} and {unpacked.log_files} files of the log")
    for first, last in unpacked.missing:
        typer.echo(
            f"PostgreSQL's log from {first} to {last} is missing: only moments before it can be "
            "restored from this backup",
            err=True,
        )


@settings_command(app)
def restore(
    settings: Settings,
    reason: Reason,
    rotate_api: Annotated[
        bool,
        typer.Option(
            "--rotate-api",
            help="Revoke all API keys and webhook addresses: revoked ones may be valid again.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Make Berth safe to start after PostgreSQL was restored, or failed over with lost data.

    While API and orchestrators are stopped (docs/how-to/restore.md). Trading is halted; all workers
    are stopped; epochs and order numbers move above all that were used; Valkey gets a new
    generation; workflows are ended. Safe to repeat. It is noted in the audit trail.
    """
    import asyncio
    from dataclasses import asdict

    from infra.cli.keys import account_name
    from infra.recovery import restore as restoring

    report = asyncio.run(restoring.restore(settings, reason, account_name(), rotate_api=rotate_api))
    CommandAnswer(asdict(report), restoring.told(report)).show(json=json)


@app.command()
def api() -> None:
    """Run the REST API until SIGTERM or Ctrl-C.

    Settings: BERTH_API_HOST, BERTH_API_PORT, BERTH_API_PROCESSES, BERTH_DATABASE_URL,
    BERTH_VALKEY_URL, BERTH_TEMPORAL_ADDRESS, BERTH_MASTER_PUBLIC_FILE, BERTH_MESSAGE_KEY_FILE,
    BERTH_LOG_LEVEL; .env.example lists all.
    """
    _exec("api")


@app.command()
def orchestrator() -> None:
    """Run the orchestrator (workflows and activities) until SIGTERM or Ctrl-C.

    Settings: BERTH_TASK_QUEUES, BERTH_POOL_TARGET, BERTH_LAUNCHER, BERTH_NODE_SOCKET,
    BERTH_DATABASE_URL, BERTH_VALKEY_URL, BERTH_TEMPORAL_ADDRESS, BERTH_MASTER_KEY_FILE,
    BERTH_ORCHESTRATOR_KEY_DIR, BERTH_LOG_LEVEL; .env.example lists all.
    """
    _exec("activities")


@app.command(context_settings=_PASS_ON)
def exchange(context: typer.Context) -> None:
    """Run the paper exchange; `account add NAME` opens an account at one that runs."""
    _exec("infra.exchange", *context.args)


@app.command(context_settings=_PASS_ON)
def node(context: typer.Context) -> None:
    """Run the node: it owns this host's worker processes."""
    _exec("infra.node", *context.args)


@settings_command(keys_app, "init", data=False)
def keys_init(settings: Settings) -> CommandAnswer:
    """Make the missing key files; existing ones are never replaced.

    Paths: BERTH_MASTER_KEY_FILE, BERTH_MASTER_PUBLIC_FILE, BERTH_ORCHESTRATOR_KEY_DIR,
    BERTH_MESSAGE_KEY_FILE, BERTH_API_SECRET_FILE; if they are set, BERTH_TEMPORAL_CODEC_KEY_FILE
    and BERTH_WEBHOOK_KEY_FILE.
    """
    from infra.vault import keyring

    made = [f"made {path}" for path in keyring.create_missing_keys(settings)]
    return CommandAnswer(None, "\n".join(made) or "all key files exist")


@settings_command(keys_app, "rotate")
def keys_rotate(
    settings: Settings,
    key: Annotated[KeyName, typer.Argument(help="Name of the key.")] = KeyName.MASTER,
    keep: Annotated[
        int,
        typer.Option(
            help="How many of Temporal's keys stay with the new one; 0: all. Histories under "
            "others are lost."
        ),
    ] = 0,
    data: OfData = None,
) -> CommandAnswer:
    """Make a new key, keep the one before next to it, and say what to do next.

    The master key: rewraps all stored credentials, too. Safe to interrupt and to repeat; while an
    old key file is kept, it makes no new key and only rewraps.

    The others: running processes take the new version over within a second. Refused while the
    version before the present one is kept (`berth keys retire`), but for Temporal's: earlier ones
    stay, because histories under them are still read.

    It is noted in the audit trail, in BERTH_DATABASE_URL. Without --data it uses
    BERTH_MASTER_KEY_FILE, BERTH_MASTER_PUBLIC_FILE and BERTH_MASTER_KEY_RETIRED;
    BERTH_ORCHESTRATOR_KEY_DIR; BERTH_MESSAGE_KEY_FILE; BERTH_API_SECRET_FILE;
    BERTH_TEMPORAL_CODEC_KEY_FILE; BERTH_WEBHOOK_KEY_FILE.
    """
    from infra.cli import keys

    if keep and (key is not KeyName.TEMPORAL or keep < 2):
        raise typer.BadParameter(
            "only of Temporal's keys, and 2 at least: running workflows need both"
        )
    return keys.rotate(settings, key, keep, local=data is not None)


@settings_command(keys_app, "retire")
def keys_retire(
    settings: Settings,
    key: Annotated[
        KeyName, typer.Argument(help="signing, launch, budget, message, api or webhooks.")
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also if workers or tokens still need it. They no longer work then."
        ),
    ] = False,
) -> CommandAnswer:
    """Remove the version of a key that a rotation kept, once nothing needs it.

    Without --data it uses BERTH_ORCHESTRATOR_KEY_DIR, BERTH_MESSAGE_KEY_FILE,
    BERTH_API_SECRET_FILE, BERTH_DATABASE_URL and BERTH_VALKEY_URL.
    """
    from infra.cli import keys

    if key is KeyName.MASTER:
        raise typer.BadParameter(
            "`berth keys rotate` says which file of the master key may be removed"
        )
    if key is KeyName.TEMPORAL:
        raise typer.BadParameter(
            "`berth keys rotate temporal --keep 2` removes Temporal's earlier keys"
        )
    return keys.retire(settings, key, force=force)


@keys_app.command("backup-identity")
def keys_backup_identity(
    file: Annotated[
        Path, typer.Argument(help="A new file, mode 0600. Keep it away from the backups.")
    ],
) -> None:
    """Make the identity that opens backups, and print its recipient.

    Set BERTH_BACKUP_RECIPIENTS to the recipient. `age-keygen` makes such a file, too.
    """
    from infra.recovery.encryption import make_identity

    typer.echo(make_identity(file))


@keys_app.command("unpack")
def keys_unpack(
    backup: Annotated[Path, typer.Argument(help="A backup that `berth backup` made.")],
    identity: Annotated[
        Path, typer.Option(help="File with the identity that decrypts the backup.")
    ],
    to: Annotated[Path, typer.Option(help="An empty folder for the key files.")],
) -> None:
    """Decrypt the key files of a backup."""
    from infra.recovery.unpack import unpack_keys

    typer.echo(f"unpacked {', '.join(unpack_keys(backup, identity, to))}")


@settings_command(app)
def doctor(
    settings: Settings,
    checks: Annotated[
        list[str] | None, typer.Argument(metavar="[CHECK]…", help="Run only these checks.")
    ] = None,
    data: OfData = None,
) -> CommandAnswer:
    """Check what the settings name: servers and logins, keys, launcher, broker, mail server.

    And what they rest on: Valkey's memory and persistence, clocks, disks, limits, the exchanges'
    holidays, certificates.

    One line for each. Exit code 1 if something is wrong; webhooks whose unit is unconfirmed
    are named only. Without --data it looks at the servers that the environment's settings name; if
    they name none, at the running `berth up` of BERTH_DATA_DIR.
    """
    from infra.doctor.checks import CHECKS, examine
    from infra.local.stack import running_settings

    if unknown := set(checks or ()) - {check.name for check in CHECKS}:
        raise typer.BadParameter(
            f"{', '.join(unknown)}: known are {', '.join(check.name for check in CHECKS)}"
        )
    if data is None:
        settings, where = running_settings()
        typer.echo(where, err=True)
    results = examine(settings, checks or ())
    said = [
        f"{result.problem} (look at {result.check.settings})"
        if result.problem
        else f"ok  {result.note}".rstrip()
        for result in results
    ]
    lines = [f"{result.check.name:18} {text}" for result, text in zip(results, said, strict=True)]
    return CommandAnswer(
        None,
        "\n".join(lines),
        exit_code=int(any(result.problem and not result.check.is_notice for result in results)),
    )


@settings_command(app)
def codec(
    settings: Settings,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8234,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="Origin of Temporal's UI.", show_default="http://127.0.0.1:8233"
        ),
    ] = None,
) -> None:
    """Show payloads in Temporal's UI: serve as its codec endpoint until Ctrl-C.

    Prints the endpoint's address, which contains a token: enter it in the UI, or give it to
    `temporal … --codec-endpoint`. Without --data it uses BERTH_TEMPORAL_CODEC_KEY_FILE.
    """
    from infra.cli.keys import serve_codec
    from infra.settings import LocalSettings

    ui = LocalSettings().ui_port
    serve_codec(
        settings, host, port, origin or [f"http://127.0.0.1:{ui}", f"http://localhost:{ui}"]
    )


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
api_command(app, "audit")(fleet.read_audit)
api_command(app)(fleet.servers)
api_command(app)(fleet.call)
_install_lab()
join_help_lines(app)


def main() -> None:
    forget_library_variables()
    app()
