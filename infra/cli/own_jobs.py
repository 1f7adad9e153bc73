"""`berth jobs types`, `enqueue` and `application …`: jobs of applications, through the REST API.

An application's key is made here, on a server that has
the message secret; the API cannot hand it out.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import (
    CommandAnswer,
    Json,
    api_command,
    command_group,
    json_object,
    list_answer,
    settings_command,
)
from worker_runtime.protocol.errors import BerthError

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi
    from infra.jobs.applications import JobApplication
    from infra.settings import Settings

application_app = command_group(
    "Applications: names under which your own job types run, each with a key of its own."
)

#: Seconds that one request waits for a job's end.
_MAX_WAIT_S = 60.0
_TYPE_COLUMNS = (
    "type, version, package, runners, waiting, announced (UTC): announced_at, state: "
    "waits_for_runner"
)
_APPLICATION_COLUMNS = (
    "application: name, types, key: generation, former key: former_generation, made (UTC): "
    "created_at, by: created_by"
)
Name = Annotated[
    str,
    typer.Argument(
        metavar="APPLICATION", help="Name of the application: a letter, then a-z, 0-9 and '-'."
    ),
]


def add_commands(jobs_app: typer.Typer) -> None:
    """Add the commands of this module to `berth jobs`."""
    api_command(jobs_app)(types)
    api_command(jobs_app, check=_check_enqueue)(enqueue)
    jobs_app.add_typer(application_app, name="application")


def types(
    api: OperatorApi,
    type_: Annotated[
        str, typer.Argument(metavar="[TYPE]", help="Show only this type, with its arguments.")
    ] = "",
) -> CommandAnswer:
    """Show the job types of applications: versions, runners, and jobs that wait for a runner."""
    kinds = [api.get("job-types", *_parts(type_))] if type_ else api.get("job-types")["types"]
    rows = [{**version, "type": kind["type"]} for kind in kinds for version in kind["versions"]]
    answer = list_answer(
        rows,
        _TYPE_COLUMNS,
        none="no runner has announced a job type",
        value=kinds[0] if type_ else kinds,
        waits_for_runner=_state_of_type,
    )
    if not type_:
        return answer
    return CommandAnswer(answer.value, lambda: _show_type(answer, rows))


def _state_of_type(version: Any) -> str:
    if version["refusal"]:
        return "refused"
    return "no runner takes its jobs" if version["waits_for_runner"] else ""


def _show_type(answer: CommandAnswer, rows: list[dict[str, Any]]) -> None:
    answer.show(json=False)
    for version in rows:
        if version["summary"]:
            typer.echo(f"\n{version['summary']}")
        if version["refusal"]:
            typer.echo(f"\nrefused: {version['refusal']}")
        schema = version["arguments_schema"] or {}
        required = set(schema.get("required", ()))
        typer.echo(f"\narguments of version {version['version']}:")
        for name, about in schema.get("properties", {}).items():
            kind = about.get("type", "any") if isinstance(about, dict) else "any"
            typer.echo(f"  {name}: {kind}{'' if name in required else ' (optional)'}")


def _parts(type_: str) -> tuple[str, str]:
    application, slash, name = type_.partition("/")
    if not (application and slash and name):
        raise BerthError(
            f"{type_} is no job type of an application, such as shop/jobs.resize_image"
        )
    return application, name


def _check_enqueue(**given: Any) -> None:
    if given["delay"] and given["at"] is not None:
        raise typer.BadParameter("--delay or --at, not both")
    if given["at"] is not None and given["at"].tzinfo is None:
        raise typer.BadParameter("--at needs a time zone, such as 2026-11-27T09:00:00+08:00")


def _aware_time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def enqueue(
    api: OperatorApi,
    type_: Annotated[
        str, typer.Argument(metavar="TYPE", help="Job type, such as shop/jobs.resize_image.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="NAME=VALUE",
            help="An argument: JSON, or else text. Once for each. NAME:=VALUE takes JSON only.",
        ),
    ] = None,
    arguments_json: Annotated[
        str, typer.Option("--args", metavar="JSON", help="All arguments as one JSON object.")
    ] = "",
    job_id: Annotated[
        str, typer.Option(help="Id of the job. A repeat with the same id enqueues nothing.")
    ] = "",
    queue: Annotated[str, typer.Option(help="Queue, instead of the one of the type.")] = "",
    priority: Annotated[
        int | None,
        typer.Option(min=0, max=9, help="0 to 9; jobs of a higher priority run earlier."),
    ] = None,
    delay: Annotated[float, typer.Option(min=0, help="Seconds until the job may run.")] = 0.0,
    at: Annotated[
        datetime | None,
        typer.Option(parser=_aware_time, metavar="TIME", help="Time from which the job may run."),
    ] = None,
    group: Annotated[str, typer.Option(help="Jobs of one group run one after the other.")] = "",
    unique: Annotated[
        str, typer.Option(help="While a job with this key has not ended, no other one is enqueued.")
    ] = "",
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the job's end.")] = 0.0,
) -> CommandAnswer:
    """Enqueue a job. Exit code 1 if it failed while --wait lasted."""
    options = {
        "job_id": job_id,
        "queue": queue,
        "priority": priority,
        "delay_s": delay,
        "run_at": None if at is None else at.isoformat(),
        "group": group,
        "unique": unique,
    }
    given = {name: value for name, value in options.items() if value not in (None, "", 0.0)}
    if priority is not None:
        given["priority"] = priority
    args = json_object(arguments_json.encode(), "--args") if arguments_json else {}
    args |= dict(_read_argument(text) for text in arguments or ())
    job = api.post("jobs", type=type_, args=args, options=given).body
    remaining = wait
    while remaining > 0 and not job["ended"]:
        span = min(remaining, _MAX_WAIT_S)
        job = api.get("jobs", job["id"], wait=span)
        remaining -= span
    failed = job["state"] in ("failed", "cancelled")
    return CommandAnswer(job, lambda: _tell(job), exit_code=1 if failed else 0)


def _read_argument(text: str) -> tuple[str, Any]:
    """Return name and value of `NAME=VALUE` or `NAME:=JSON`. Raises `typer.BadParameter`."""
    import json

    name, sign, value = text.partition("=")
    as_json = name.endswith(":")
    name = name.removesuffix(":")
    if not sign or not name:
        raise typer.BadParameter(f"--arg {text[:40]}: NAME=VALUE is needed")
    try:
        return name, json.loads(value)
    except ValueError:
        if as_json:
            raise typer.BadParameter(f"--arg {name}: the value is no JSON") from None
        return name, value


def _tell(job: dict[str, Any]) -> None:
    import json

    waits = " until a runner has its type" if job["waits_for_runner"] else ""
    typer.echo(f"job {job['id']}: {job['state']}{waits}")
    if job["state"] == "done":
        typer.echo(json.dumps(job["value"], ensure_ascii=False, indent=2))
    elif job["failure"]:
        typer.echo(f"{job['failure']['code']}: {job['failure']['detail']}", err=True)


@api_command(application_app, "list")
def list_(api: OperatorApi) -> CommandAnswer:
    """Show all applications."""
    applications = api.get("job-applications")["applications"]
    return list_answer(applications, _APPLICATION_COLUMNS, none="there is no application")


@settings_command(application_app)
def add(settings: Settings, name: Name, json: Json = False) -> CommandAnswer:
    """Make an application, and the file with its key for its runners and direct producers.

    Run it on a server that has the message secret.
    """
    from infra.jobs.applications import add_application
    from worker_runtime.jobs.protocol.manifest import is_application_name

    if not is_application_name(name):
        raise BerthError("an application's name is a letter and up to 31 of a-z, 0-9 and '-'")

    async def work(session: Any, actor: str) -> JobApplication:
        return await add_application(session, name, actor)

    application, path = _change(settings, "job_application.added", name, work)
    return CommandAnswer(
        {"name": application.name, "key_file": str(path)},
        f"made the application {name}; its key is in {path}\n"
        f"Give this file, and nothing else of the keys, to its runners and direct producers.",
    )


@settings_command(application_app)
def rotate(
    settings: Settings,
    name: Name,
    retire: Annotated[
        bool,
        typer.Option("--retire", help="End the former key. Everything must run with the new one."),
    ] = False,
    json: Json = False,
) -> CommandAnswer:
    """Give an application another key; the former one counts until `rotate --retire`."""
    from infra.jobs.applications import rotate_application

    async def work(session: Any, _actor: str) -> JobApplication:
        return await rotate_application(session, name, retire=retire)

    act = "job_application.key_retired" if retire else "job_application.rotated"
    application, path = _change(settings, act, name, work)
    answer = {
        "name": name,
        "generation": application.generation,
        "former_generation": application.former_generation,
        "key_file": str(path),
    }
    if retire:
        return CommandAnswer(
            answer, f"only key {application.generation} of {name} counts; it is in {path}"
        )
    return CommandAnswer(
        answer,
        f"made key {application.generation} of {name} in {path}; key "
        f"{application.former_generation} still counts\n"
        "Restart its runners and direct producers with this file, then run `berth jobs application "
        f"rotate {name} --retire`.",
    )


def _change(settings: Settings, action: str, name: str, work: Any) -> tuple[JobApplication, Path]:
    """Change an application and write its keys, in one transaction with the audit trail."""
    from sqlalchemy.exc import SQLAlchemyError

    from infra.cli.keys import account_name
    from infra.database import audit
    from infra.database.engine import Database
    from infra.jobs.applications import write_application_keys

    async def change() -> tuple[JobApplication, Path]:
        actor = account_name()
        async with (
            Database(settings.database_url, pool_size=1) as database,
            database.session() as session,
        ):
            application: JobApplication = await work(session, actor)
            audit.append_entry(
                session, actor, action, f"application:{name}", generation=application.generation
            )
            # Written before the commit, so that an application never lacks its file.
            return application, write_application_keys(settings, application)

    try:
        return asyncio.run(change())
    except SQLAlchemyError as error:
        raise BerthError(f"not done: PostgreSQL refused it ({type(error).__name__})") from None


def read_generations(settings: Settings, name: str) -> tuple[int, ...]:
    """Return the generations of an application's key that count. Raises `BerthError`."""
    from sqlalchemy.exc import SQLAlchemyError

    from infra.database.engine import Database
    from infra.jobs.applications import ApplicationNotFound, list_applications

    async def read() -> tuple[int, ...]:
        async with Database(settings.database_url, pool_size=1) as database:
            for application in await database.fetch(list_applications):
                if application.name == name:
                    return application.generations
        raise ApplicationNotFound(f"There is no application {name}.")

    try:
        return asyncio.run(read())
    except SQLAlchemyError as error:
        raise BerthError(f"PostgreSQL cannot be read ({type(error).__name__})") from None
