"""`berth jobs run`: one runner of an application's own job types."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from infra.cli.options import json_object
from infra.vault import key_file
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol.errors import BerthError

if TYPE_CHECKING:
    from infra.settings import Settings
    from infra.vault.message_secret import Keys


#: Options that every command has that starts a job runner.
RunnerName = Annotated[
    str,
    typer.Option(
        help="Name of the runner across restarts, for `suspend --runner`.",
        show_default="the host's",
    ),
]
Slots = Annotated[
    int, typer.Option(min=1, max=256, help="Maximum number of jobs that run at a time.")
]
Recycle = Annotated[
    int,
    typer.Option(
        min=1,
        help="Jobs that one child process runs before it is replaced; 1: a new process for each.",
    ),
]
Lease = Annotated[
    float,
    typer.Option(
        min=1, max=300, help="Seconds without a renewal after which the runner counts as dead."
    ),
]


def run(
    application: Annotated[str, typer.Option(help="The application whose job types it runs.")],
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Module with jobs, such as shop.jobs; may be given again.",
            show_default="those of all entry points berth.jobs",
        ),
    ] = None,
    path: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder to search for modules; may be given again.",
            show_default="the current one, with --import",
        ),
    ] = None,
    queues: Annotated[
        str, typer.Option(help="Queues it serves besides scheduler, comma separated, or all.")
    ] = "all",
    name: RunnerName = "",
    slots: Slots = 1,
    recycle: Recycle = 1,
    lease: Lease = 5.0,
    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="The application's key file.",
            show_default="BERTH_JOBS_KEY_FILE, or that of the local system",
        ),
    ] = None,
    secrets: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="JSON object of secrets by name, mode 0600; each job gets those that its type "
            "names.",
        ),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="NAME", help="Variable that jobs may see; may be given again."
        ),
    ] = None,
    hidden: Annotated[
        list[Path] | None,
        typer.Option("--hide", help="Folder or file that jobs must not reach; may be given again."),
    ] = None,
    user_id: Annotated[
        int,
        typer.Option(
            min=0, help="User id of the jobs if the runner is root; 0: one for each application."
        ),
    ] = 0,
    valkey: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="URL of Valkey.",
            show_default="BERTH_VALKEY_URL, or that of `berth up`",
        ),
    ] = None,
) -> None:
    """Run one runner of your own job types until SIGTERM or Ctrl-C.

    Running jobs end first; a second signal kills them. Jobs run in processes without keys and
    logins.
    """
    from infra.jobs import fleet
    from infra.valkey.job_login import job_fleet_url

    tag = job_keys.application_tag(application)
    served = [] if queues in ("all", "*") else [queue.strip() for queue in queues.split(",")]
    folders = [folder.resolve() for folder in path or ([Path.cwd()] if modules else [])]
    try:
        settings = _settings(valkey)
        message_keys, files = _message_keys(settings, application, keys)
        url = settings.valkey_url
        own: dict[str, Any] = {
            "application": application,
            "modules": modules or [],
            "path": [str(folder) for folder in folders],
            "uid": user_id,
            "hidden": [str(each.resolve()) for each in hidden or []],
            "key_files": [
                str(each.resolve()) for each in [*files, *([secrets] if secrets else [])]
            ],
            "secrets": json_object(key_file.read_key_file(secrets, private=True), str(secrets))
            if secrets
            else {},
            "defaults": msgspec.to_builtins(settings.job_defaults),
            "environment": {
                each: os.environ[each] for each in variables or [] if each in os.environ
            },
        }
        document = {
            "name": name or socket.gethostname(),
            "node": socket.gethostname(),
            "valkey_url": job_fleet_url(url, tag, message_keys) if settings.valkey_users else url,
            "tag": tag,
            "message_keys": message_keys,
            "queues": served or ["*"],
            "slots": slots,
            "recycle": recycle,
            "lease": lease,
            "runner_ttl": settings.jobs_runner_ttl,
            "timeout_margin": settings.jobs_timeout_margin,
            "own": own,
        }
        fleet.exec_runner(msgspec.json.encode(document))
    except BerthError as error:
        raise typer.BadParameter(error.detail) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _settings(url: str | None) -> Settings:
    """Reads the settings of the environment, or of the local system, with this address of
    Valkey."""
    from infra.local.stack import known_settings
    from infra.settings import Settings, read_settings

    return known_settings("valkey_url") if url is None else read_settings(Settings, valkey_url=url)


def _message_keys(
    settings: Settings, application: str, given: Path | None
) -> tuple[Keys, list[Path]]:
    """Returns the application's keys, and the files that hold them or what they are derived from.

    Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`.
    """
    from infra.jobs.applications import key_file_of
    from infra.local.stack import known_settings
    from infra.vault.message_secret import load_fleet_keys

    path = given or (Path(settings.jobs_key_file) if settings.jobs_key_file else None)
    if path is None:
        path = key_file_of(known_settings("message_key_file"), application)
    return load_fleet_keys(path), [path, settings.message_key_file.parent]
