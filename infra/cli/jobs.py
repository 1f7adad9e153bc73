"""`berth jobs …`: shows and steers queues,
runners and jobs through Valkey; runs a runner of the fleet."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from infra.cli import job_limits, job_runner, job_weights, options, own_jobs, tables
from infra.cli.options import Command, CommandAnswer, Json, as_json, command_group, json_object
from infra.vault import key_file
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import catalog
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.calls import halt_field
from worker_runtime.protocol.errors import BerthError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from infra.jobs.view import JobInspector
    from infra.settings import Settings
    from worker_runtime.protocol.authentication import MessageKeys

app = command_group(
    "Background jobs: queues, runners, failures. Exit codes: 0 done, 1 refused or not found, 2 "
    "usage."
)
app.add_typer(job_limits.app, name="limits")
app.add_typer(job_weights.app, name="weights")
app.command("run")(job_runner.run)
own_jobs.add_commands(app)

Valkey = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="URL of Valkey.", show_default="BERTH_VALKEY_URL, or that of `berth up`"
    ),
]


def _named(user: str | None) -> str | None:
    if user == "":  # an empty variable of a script must not mean the fleet
        raise typer.BadParameter("the name is empty")
    return user


User = Annotated[
    str | None, typer.Option(help="Jobs of this user, instead of the fleet's.", callback=_named)
]
Application = Annotated[
    str | None,
    typer.Option(help="Jobs of this application, instead of the fleet's.", callback=_named),
]
Watch = Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")]
Queue = Annotated[str, typer.Option(help="Only jobs of this queue.")]
Type = Annotated[str, typer.Option("--type", help="Only jobs of this type.")]
Code = Annotated[
    str, typer.Option(help="Only jobs that failed with this code, such as JOB_TIMEOUT.")
]

#: Seconds between two reads of `--watch`.
_WATCH_INTERVAL_S = 1.0
#: The values that these acts give to a setting of the queues, which PostgreSQL keeps.
_HALTS = {"suspend": "1", "resume": None}


def _settings(url: str | None) -> Settings:
    """Reads the settings of the environment, or of the local system, with this address of
    Valkey."""
    from infra.local.stack import known_settings
    from infra.settings import Settings, read_settings

    return known_settings("valkey_url") if url is None else read_settings(Settings, valkey_url=url)


def _message_keys(tag: str) -> MessageKeys:
    from infra.local.stack import known_settings
    from infra.vault.message_secret import MessageSecretFile

    settings = known_settings("message_key_file")
    secrets = MessageSecretFile(settings.message_key_file)
    if application := job_keys.application_of_tag(tag):
        secrets.set_generations({application: own_jobs.read_generations(settings, application)})
    return secrets.job_keys(tag)


@dataclass(frozen=True)
class JobView:
    """Holds what a command shows, once or every second: `draw` makes a table of what `read`
    returns."""

    read: Callable[[], Any]
    draw: Callable[[Console, Any], RenderableType]


def _job_command(
    *,
    check: Callable[..., None] | None = None,
    watch: bool = False,
    json: bool = True,
    act: str = "",
) -> Callable[[Command], Command]:
    """Adds a command that talks to Valkey; its function takes a `JobInspector` first.

    It returns a `CommandAnswer`, or a `JobView`, which `--watch` shows until Ctrl-C. `act`: what it
    does, for the audit trail.
    """

    def run(command: Command, json: bool, given: dict[str, Any]) -> CommandAnswer | None:
        from redis.exceptions import RedisError

        from infra.jobs.view import JobInspector
        from infra.valkey.failures import UNREACHABLE, explain_failure

        settings, owner = (
            _settings(given.pop("valkey")),
            _owner(given.pop("user"), given.pop("application")),
        )
        watched = given.pop("watch", False)
        try:
            with JobInspector(settings.valkey_url, job_keys.tag_of(owner)) as jobs:
                if check is not None:
                    check(jobs, **given)
                if act:
                    from infra.cli.keys import note_act
                    from infra.database.kept_jobs import keep_settings

                    fields = {halt_field(**given): _HALTS[act]} if act in _HALTS else {}
                    keep = partial(keep_settings, user_id=owner, fields=fields)
                    said = {name: value for name, value in given.items() if value}
                    note_act(
                        settings,
                        f"jobs.{act}_requested",
                        f"jobs:{owner or 'fleet'}",
                        also=keep,
                        **said,
                    )
                answer = command(jobs, **given)
                if isinstance(answer, JobView) and watched:
                    _watch(answer, json)
                return _answer_of(answer) if isinstance(answer, JobView) else answer
        except (RedisError, OSError, ValueError) as error:
            reason = explain_failure(error)
            if reason == UNREACHABLE:
                reason += " Is `berth up` running, or --valkey right?"
            raise BerthError(reason) from None

    added = {"watch": (Watch, False)} if watch else {}
    added |= {"json": (Json, False)} if json else {}
    owners = {"user": (User, None), "application": (Application, None)}
    return options.add_command(app, None, run, {**added, **owners, "valkey": (Valkey, None)})


def _owner(user: str | None, application: str | None) -> str:
    """Returns whose jobs a command is about, as `job_keys.tag_of` takes it."""
    if user and application:
        raise typer.BadParameter("--user or --application, not both")
    return job_keys.application_tag(application) if application else user or ""


def _plain(seen: Any) -> Any:
    """Returns one snapshot, or a list of them, as JSON has it."""
    return [asdict(snapshot) for snapshot in seen] if isinstance(seen, list) else asdict(seen)


def _answer_of(view: JobView) -> CommandAnswer:
    out, seen = tables.console(), view.read()
    return CommandAnswer(_plain(seen), lambda: out.print(view.draw(out, seen)))


def _watch(view: JobView, json: bool) -> None:
    """Shows the view again and again: in place on a terminal, one after the other in a pipe."""
    out = tables.console()

    def print_one(seen: Any) -> None:
        if json:
            as_json(_plain(seen), line=True)
        else:
            out.print(view.draw(out, seen))
        sys.stdout.flush()

    options.watch(view.read, view.draw, period=_WATCH_INTERVAL_S, json=json, each=print_one)


@_job_command(watch=True)
def info(
    jobs: JobInspector,
    workers: Annotated[
        bool, typer.Option("--workers", "-W", help="Also show runners and running jobs.")
    ] = False,
) -> JobView:
    """Show everything: queues, and how much waits, runs, is delayed and has failed."""
    return JobView(
        jobs.overview, lambda out, overview: tables.job_overview(out, overview, workers=workers)
    )


@_job_command(watch=True)
def queues(jobs: JobInspector) -> JobView:
    """Show queues with work and suspended ones: how many jobs wait, by type."""
    return JobView(lambda: jobs.overview().queues, tables.queue_table)


@_job_command(watch=True)
def running(jobs: JobInspector) -> JobView:
    """Show running jobs: since when, where, and their progress."""
    return JobView(lambda: jobs.overview().running, tables.running_table)


@_job_command(watch=True)
def workers(jobs: JobInspector) -> JobView:
    """Show the runners: state, queues, running jobs, and when they were last seen."""
    return JobView(lambda: jobs.overview().runners, tables.runner_table)


@_job_command()
def failed(
    jobs: JobInspector,
    queue: Queue = "",
    type_: Type = "",
    code: Code = "",
    limit: Annotated[
        int, typer.Option(min=1, help="Maximum number of rows; the newest come first.")
    ] = 100,
) -> JobView:
    """Show the failed jobs; `berth jobs show JOB` has the traceback."""
    from infra.jobs.view import matching

    fitting = matching(jobs.failed(), queue=queue, name=type_, code=code)
    return JobView(lambda: list(islice(fitting, limit)), tables.failed_table)


@_job_command()
def show(
    jobs: JobInspector, job: Annotated[str, typer.Argument(help="Id of the job.")]
) -> CommandAnswer:
    """Show one job: state, progress, how it ended, its traceback and output."""
    snapshot = jobs.job(job)
    if snapshot is None:
        raise BerthError(f"there is no job {job}, or its result has expired")
    return CommandAnswer(_plain(snapshot), lambda: tables.show_job(tables.console(), snapshot))


def _check_requeue(
    _: JobInspector, job_ids: list[str] | None, all_: bool, queue: str, type_: str, code: str
) -> None:
    if sum([bool(job_ids), all_, bool(queue or type_ or code)]) != 1:
        raise typer.BadParameter(
            "name jobs, or give --all, or filter by --queue, --type and --code"
        )


@_job_command(check=_check_requeue, act="requeue")
def requeue(
    jobs: JobInspector,
    job_ids: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB]…", help="Ids of failed jobs.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="All failed jobs.")] = False,
    queue: Queue = "",
    type_: Type = "",
    code: Code = "",
) -> CommandAnswer:
    """Put failed jobs back on their queues as if new: those named, those that match, or all."""
    from infra.jobs.view import matching

    fitting = matching(jobs.failed(), queue=queue, name=type_, code=code)
    # The whole list is read first: a job that goes back may fail again before the end of the list.
    chosen = job_ids or [job.job_id for job in fitting]
    back = jobs.requeue(chosen)
    return CommandAnswer(
        {"requeued": back, "left": sorted(set(chosen) - set(back))},
        f"{len(back)} of {len(chosen)} requeued",
        exit_code=0 if len(back) == len(chosen) else 1,
    )


@_job_command(act="cancel")
def cancel(
    jobs: JobInspector, job: Annotated[str, typer.Argument(help="Id of the job.")]
) -> CommandAnswer:
    """Cancel a job: a waiting one at once, a running one by ending its process. A failed one is
    removed."""
    sentences = {
        "cancelled": "cancelled",
        "asked": "its runner was asked to end it",
        "failed": "it had failed; it is removed now",
        "unknown": "there is no such job, or it has ended",
    }
    reply = jobs.run(job_calls.cancel(job, _message_keys(jobs.tag), jobs.tag))
    became = reply.decode() if isinstance(reply, bytes) else str(reply)
    unknown = became == "unknown"
    return CommandAnswer(
        {"job_id": job, "became": became},
        lambda: typer.echo(sentences[became], err=unknown),
        exit_code=1 if unknown else 0,
    )


Runner = Annotated[str, typer.Option(help="Only the runner of this name.")]
OneQueue = Annotated[str, typer.Option(help="Only this queue.")]


def _check_scope(_: JobInspector, queue: str, runner: str) -> None:
    if queue and runner:
        raise typer.BadParameter("a queue or a runner, not both")


def _require_known(jobs: JobInspector, queue: str, runner: str) -> None:
    """Raises `BerthError` for a runner that is not registered,
    and a queue of no type and without work."""
    _check_scope(jobs, queue, runner)
    seen = jobs.overview()
    known = {row.name for row in seen.runners}
    if queue:
        known = {row.queue for row in seen.queues} | {
            row.queue for row in catalog.JOB_KINDS.values()
        }
    if (queue or runner) and (queue or runner) not in known:
        raise BerthError(
            f"there is no {_scope(queue, runner)}; known: {', '.join(sorted(known)) or 'none'}"
        )


def _scope(queue: str, runner: str) -> str:
    return f"queue {queue}" if queue else f"runner {runner}" if runner else "everything"


@_job_command(check=_require_known, json=False, act="suspend")
def suspend(jobs: JobInspector, queue: OneQueue = "", runner: Runner = "") -> CommandAnswer:
    """Stop taking jobs: everywhere, from one queue, or by one runner.

    It lasts until `resume`, even across restarts. Running jobs continue.
    """
    changed = jobs.run(job_calls.suspend(queue=queue, runner=runner, tag=jobs.tag))
    return CommandAnswer(
        None, f"{_scope(queue, runner)} is suspended{'' if changed else ' already'}"
    )


@_job_command(check=_check_scope, json=False, act="resume")
def resume(jobs: JobInspector, queue: OneQueue = "", runner: Runner = "") -> CommandAnswer:
    """Undo a `suspend` that had the same options."""
    changed = jobs.run(job_calls.resume(queue=queue, runner=runner, tag=jobs.tag))
    if not changed:
        _require_known(jobs, queue, runner)
    return CommandAnswer(None, f"{_scope(queue, runner)} is open{'' if changed else ' already'}")


@app.command()
def worker(
    queues: Annotated[str, typer.Option(help="Queues it serves, comma separated, or all.")] = "all",
    name: job_runner.RunnerName = "",
    slots: job_runner.Slots = 1,
    recycle: job_runner.Recycle = 1,
    lease: job_runner.Lease = 5.0,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="JSON with the rest of its configuration, such as webhook and mail; mode 0600.",
        ),
    ] = None,
    user: User = None,
    valkey: Valkey = None,
) -> None:
    """Run one runner until SIGTERM or Ctrl-C:
    running jobs end first; a second signal kills them."""
    from infra.jobs import fleet

    served = [] if queues in ("all", "*") else [queue.strip() for queue in queues.split(",")]
    try:
        document = {
            "name": name or socket.gethostname(),
            "node": socket.gethostname(),
            "valkey_url": _settings(valkey).valkey_url,
            "tag": job_keys.tag_of(user or ""),
            "message_keys": _message_keys(job_keys.tag_of(user or "")),
            "queues": served or ["*"],
            "slots": slots,
            "recycle": recycle,
            "lease": lease,
        }
        if config is not None:
            document |= json_object(key_file.read_key_file(config, private=True), str(config))
    except BerthError as error:
        raise typer.BadParameter(error.detail) from None
    try:
        fleet.exec_runner(msgspec.json.encode(document))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
