"""`berth jobs …`: queues, runners and jobs, seen and steered through Valkey; and a runner of the fleet."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from infra.cli import job_limits
from infra.cli.options import as_json

if TYPE_CHECKING:
    from infra.jobs.view import JobInspector

app = typer.Typer(
    help="Background jobs: queues, runners, failures. Exit codes: 0 done, 1 refused or not found, 2 usage.",
    no_args_is_help=True,
)
app.add_typer(job_limits.app, name="limits")

Valkey = Annotated[
    str | None,
    typer.Option(
        metavar="URL", envvar="BERTH_VALKEY_URL", help="Valkey.", show_default="the one of `berth up`"
    ),
]
User = Annotated[str | None, typer.Option(help="This user's own jobs, instead of the fleet's.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Watch = Annotated[bool, typer.Option("--watch", help="Look again every second, until Ctrl-C.")]
Queue = Annotated[str, typer.Option(help="Of this queue.")]
Type = Annotated[str, typer.Option("--type", help="Of this type of job.")]
Code = Annotated[str, typer.Option(help="Failed with this code, such as JOB_TIMEOUT.")]

#: Seconds between two looks.
_PERIOD = 1.0


def _address(url: str | None) -> str:
    from infra.local.process import HOST
    from infra.settings import LocalSettings

    return url or f"redis://{HOST}:{LocalSettings().valkey_port}/0"


def _with(url: str | None, user: str | None, action: Callable[[JobInspector], int]) -> NoReturn:
    """Runs `action` and ends with its exit code; 1 with one sentence on standard error when it fails."""
    from redis.exceptions import RedisError

    from infra.jobs.view import JobInspector
    from worker_runtime.jobs.protocol import keys as job_keys
    from worker_runtime.protocol.errors import BerthError

    tag = job_keys.FLEET_TAG if user is None else job_keys.user_tag(user)
    try:
        with JobInspector(_address(url), tag) as jobs:
            code = action(jobs)
    except (RedisError, OSError, ValueError) as error:
        typer.echo(
            f"error: Valkey: {type(error).__name__}; is `berth up` running, or --valkey right?", err=True
        )
        code = 1
    except BerthError as error:
        typer.echo(f"error: {error.detail}", err=True)
        code = 1
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


def _plain(seen: Any) -> Any:
    """One view, or a list of them, as JSON has it."""
    from dataclasses import asdict

    return [asdict(one) for one in seen] if isinstance(seen, list) else asdict(seen)


def _show(
    url: str | None,
    user: str | None,
    watch: bool,
    json: bool,
    look: Callable[[JobInspector], Any],
    draw: Callable[[Any, Any], Any],
) -> NoReturn:
    """Shows what `look` sees, once or again and again. `draw` makes a table of it."""

    def action(jobs: JobInspector) -> int:
        from rich.live import Live

        from infra.cli import tables as job_tables

        out = job_tables.console()
        if not watch:
            seen = look(jobs)
            if json:
                as_json(_plain(seen))
            else:
                out.print(draw(out, seen))
            return 0
        if json or not out.is_terminal:  # a line, or a table, each time
            while True:
                seen = look(jobs)
                if json:
                    as_json(
                        [_plain(one) for one in seen] if isinstance(seen, list) else _plain(seen), line=True
                    )
                else:
                    out.print(draw(out, seen))
                sys.stdout.flush()
                time.sleep(_PERIOD)
        with Live(draw(out, look(jobs)), console=out, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(_PERIOD)
                live.update(draw(out, look(jobs)), refresh=True)

    _with(url, user, action)


@app.command()
def info(
    workers: Annotated[bool, typer.Option("--workers", "-W", help="The runners and what runs, too.")] = False,
    watch: Watch = False,
    json: Json = False,
    user: User = None,
    valkey: Valkey = None,
) -> None:
    """Everything at a glance: queues, what waits, runs, is delayed, has failed."""
    from infra.cli import tables as job_tables

    _show(
        *(valkey, user, watch, json),
        look=lambda jobs: jobs.board(),
        draw=lambda out, board: job_tables.job_board(out, board, workers=workers),
    )


@app.command()
def queues(watch: Watch = False, json: Json = False, user: User = None, valkey: Valkey = None) -> None:
    """Queues with work and suspended ones: how many wait, by type."""
    from infra.cli import tables as job_tables

    _show(valkey, user, watch, json, lambda jobs: jobs.board().queues, job_tables.queue_table)


@app.command()
def running(watch: Watch = False, json: Json = False, user: User = None, valkey: Valkey = None) -> None:
    """What runs: since when, where, and how far it is."""
    from infra.cli import tables as job_tables

    _show(valkey, user, watch, json, lambda jobs: jobs.board().running, job_tables.running_table)


@app.command()
def workers(watch: Watch = False, json: Json = False, user: User = None, valkey: Valkey = None) -> None:
    """The runners: state, queues, jobs in hand, and when they last gave a sign of life."""
    from infra.cli import tables as job_tables

    _show(valkey, user, watch, json, lambda jobs: jobs.board().runners, job_tables.runner_table)


@app.command()
def failed(
    queue: Queue = "",
    type_: Type = "",
    code: Code = "",
    limit: Annotated[int, typer.Option(min=1, help="At the most; the newest come first.")] = 100,
    json: Json = False,
    user: User = None,
    valkey: Valkey = None,
) -> None:
    """The failed queue; `berth jobs show JOB` has the traceback."""
    from itertools import islice

    from infra.cli import tables as job_tables
    from infra.jobs.view import matching

    _show(
        *(valkey, user, False, json),
        look=lambda jobs: list(islice(matching(jobs.failed(), queue=queue, name=type_, code=code), limit)),
        draw=job_tables.failed_table,
    )


@app.command()
def show(
    job: Annotated[str, typer.Argument(help="Its id.")],
    json: Json = False,
    user: User = None,
    valkey: Valkey = None,
) -> None:
    """One job: state, progress, how it ended, its traceback and what it wrote."""

    def action(jobs: JobInspector) -> int:
        from infra.cli import tables as job_tables

        found = jobs.job(job)
        if found is None:
            typer.echo(f"error: there is no job {job}, or its result has expired", err=True)
            return 1
        if json:
            as_json(_plain(found))
        else:
            job_tables.job_table(job_tables.console(), found)
        return 0

    _with(valkey, user, action)


@app.command()
def requeue(
    job_ids: Annotated[list[str] | None, typer.Argument(metavar="[JOB]…", help="Failed jobs.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All that have failed.")] = False,
    queue: Queue = "",
    type_: Type = "",
    code: Code = "",
    json: Json = False,
    user: User = None,
    valkey: Valkey = None,
) -> None:
    """Put failed jobs back on their queues as if they were new: some, those that fit, or all."""
    chosen = [bool(job_ids), all_, bool(queue or type_ or code)]
    if sum(chosen) != 1:
        raise typer.BadParameter("name jobs, or say --all, or filter by --queue, --type and --code")

    def action(jobs: JobInspector) -> int:
        from infra.jobs.view import matching

        fitting = matching(jobs.failed(), queue=queue, name=type_, code=code)
        # Taken down first: what goes back may fail again before the end of the list.
        wanted = job_ids or [job.job_id for job in fitting]
        back = jobs.requeue(wanted)
        if json:
            as_json({"requeued": back, "left": sorted(set(wanted) - set(back))})
        else:
            typer.echo(f"{len(back)} of {len(wanted)} requeued")
        return 0 if len(back) == len(wanted) else 1

    _with(valkey, user, action)


@app.command()
def cancel(
    job: Annotated[str, typer.Argument(help="Its id.")],
    json: Json = False,
    user: User = None,
    valkey: Valkey = None,
) -> None:
    """Cancel a job: at once if it waits; if it runs, its process is ended. A failed one is forgotten."""
    from worker_runtime.jobs.protocol import calls as job_calls

    told = {
        "cancelled": "cancelled",
        "asked": "its runner was told to end it",
        "failed": "it had failed; it is forgotten now",
        "unknown": "there is no such job, or it has ended",
    }

    def action(jobs: JobInspector) -> int:
        reply = jobs.run(job_calls.cancel(job, jobs.tag))
        became = reply.decode() if isinstance(reply, bytes) else str(reply)
        if json:
            as_json({"job_id": job, "became": became})
        else:
            typer.echo(told[became], err=became == "unknown")
        return 1 if became == "unknown" else 0

    _with(valkey, user, action)


Runner = Annotated[str, typer.Option(help="Only the runner of this name.")]
OneQueue = Annotated[str, typer.Option(help="Only this queue.")]


def _switch(resumed: bool, queue: str, runner: str, user: str | None, url: str | None) -> NoReturn:
    if queue and runner:
        raise typer.BadParameter("a queue or a runner, not both")

    def action(jobs: JobInspector) -> int:
        from worker_runtime.jobs.protocol import calls as job_calls

        call = job_calls.resume if resumed else job_calls.suspend
        changed = jobs.run(call(queue=queue, runner=runner, tag=jobs.tag))
        what = f"queue {queue}" if queue else f"runner {runner}" if runner else "everything"
        before = "" if changed else " already"
        typer.echo(f"{what} {'is open' if resumed else 'is suspended'}{before}")
        return 0

    _with(url, user, action)


@app.command()
def suspend(queue: OneQueue = "", runner: Runner = "", user: User = None, valkey: Valkey = None) -> None:
    """Let no further job be taken: none at all, none of a queue, or none by a runner.

    It lasts until `resume`, whatever is restarted. Running jobs go on.
    """
    _switch(False, queue, runner, user, valkey)


@app.command()
def resume(queue: OneQueue = "", runner: Runner = "", user: User = None, valkey: Valkey = None) -> None:
    """Take back one `suspend` with the same options."""
    _switch(True, queue, runner, user, valkey)


@app.command()
def worker(
    queues: Annotated[str, typer.Option(help="Queues it serves, comma separated; all: every one.")] = "all",
    name: Annotated[
        str,
        typer.Option(help="Lasts across restarts; `suspend --runner` names it.", show_default="the host's"),
    ] = "",
    slots: Annotated[int, typer.Option(min=1, max=256, help="Jobs at a time.")] = 1,
    recycle: Annotated[
        int, typer.Option(min=1, help="Jobs that one child process runs; 1: each gets a fresh one.")
    ] = 1,
    lease: Annotated[float, typer.Option(min=1, max=300, help="Seconds until it counts as dead.")] = 5.0,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="JSON with more of its configuration, such as webhook and mail; of mode 0600.",
        ),
    ] = None,
    user: User = None,
    valkey: Valkey = None,
) -> None:
    """Run one runner until SIGTERM or Ctrl-C: running jobs end first; a second signal kills them."""
    import json

    from infra.jobs import fleet
    from worker_runtime.jobs.protocol import keys as job_keys

    more = {} if config is None else _private(config)
    served = [] if queues in ("all", "*") else [queue.strip() for queue in queues.split(",")]
    document = {
        "name": name or socket.gethostname(),
        "node": socket.gethostname(),
        "valkey_url": _address(valkey),
        "tag": job_keys.FLEET_TAG if user is None else job_keys.user_tag(user),
        "queues": served or ["*"],
        "slots": slots,
        "recycle": recycle,
        "lease": lease,
        **more,
    }
    try:
        fleet.exec_runner(json.dumps(document).encode())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _private(config: Path) -> dict[str, Any]:
    """The configuration in a file that may hold keys and passwords."""
    import json

    from infra.vault import key_file
    from worker_runtime.protocol.errors import BerthError

    try:
        found = json.loads(key_file.read_key_file(config, private=True))
    except BerthError as error:
        raise typer.BadParameter(error.detail) from None
    except ValueError as error:
        raise typer.BadParameter(f"{config}: {error}") from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{config}: a JSON object is needed")
    return found
