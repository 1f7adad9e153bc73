"""The options that many commands share, and the decorators that give them to a command."""

import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from infra.cli.tables import console, plain, row_table
from worker_runtime.protocol.errors import BerthError

Data = Annotated[
    Path,
    typer.Option(
        "--data", envvar="BERTH_DATA_DIR", help="Folder of `berth up`.", show_default=".berth"
    ),
]
OfData = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of a running `berth up`, instead of the settings."),
]
Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Another API, such as https://berth.example; needs --key-file."
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with an operator's API key, mode 0600; needs --url."),
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Reason = Annotated[str, typer.Option(help="Why; recorded in the audit trail.")]
Limit = Annotated[int, typer.Option(min=1, help="Maximum number of rows.")]
OfUser = Annotated[str, typer.Argument(metavar="USER", help="Id of the user.")]
AccountId = Annotated[str, typer.Argument(metavar="ACCOUNT", help="Id of the account.")]
Pool = Annotated[str, typer.Argument(metavar="[POOL]", help="Name of the pool.")]


#: Of options that begin and end a span of time, as the API's parameters do.
START_HELP = "From this day of the home markets, such as 2026-11-27, or from a time with its zone."
END_HELP = "To the end of this day of the home markets, or to a time with its zone."


def command_group(help: str) -> typer.Typer:
    """Makes a group of commands. One that is alone in it is a subcommand, too."""
    group = typer.Typer(help=help, no_args_is_help=True)
    group.callback()(lambda: None)
    return group


def join_help_lines(app: typer.Typer) -> None:
    """Joins the lines of each paragraph of every command's help, so that the terminal wraps it.

    Typer prints a docstring with the line breaks of the source.
    """
    for command in app.registered_commands:
        text = inspect.cleandoc(command.help or getattr(command.callback, "__doc__", None) or "")
        command.help = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            join_help_lines(group.typer_instance)


class KeyName(StrEnum):
    """A key that a command rotates."""

    MASTER = "master"
    SIGNING = "signing"
    LAUNCH = "launch"
    BUDGET = "budget"
    MESSAGE = "message"
    API = "api"
    TEMPORAL = "temporal"
    WEBHOOKS = "webhooks"


@dataclass(frozen=True)
class CommandAnswer:
    """Holds what a command prints: `value` with --json, else `text`: a sentence, or a function that
    draws."""

    value: Any
    text: str | Callable[[], None] = ""
    #: Goes to standard error, with --json too.
    warning: str = ""
    exit_code: int = 0

    def show(self, *, json: bool) -> None:
        if json:
            as_json(self.value)
        elif callable(self.text):
            self.text()
        elif self.text:
            typer.echo(self.text)
        if self.warning:
            typer.echo(self.warning, err=True)


def list_answer(
    rows: Sequence[Mapping[str, Any]],
    columns: str,
    *,
    none: str,
    has_more: bool = False,
    value: Any = None,
    **cells: Callable[[Mapping[str, Any]], object],
) -> CommandAnswer:
    """Answers with a table of rows (`tables.row_table`), or the sentence `none`. `value` is for
    --json instead of rows."""

    def draw() -> None:
        out = console()
        out.print(row_table(out, rows, columns, **cells) if rows else none)
        if has_more:
            out.print("there are more: raise --limit")

    return CommandAnswer(rows if value is None else value, draw)


#: The function of a command; most return a `CommandAnswer`, or None when they have printed
#: everything.
Command = Callable[..., Any]


def api_command(
    app: typer.Typer,
    name: str | None = None,
    *,
    check: Callable[..., Any] | None = None,
    json: bool = True,
) -> Callable[[Command], Command]:
    """Adds a command that calls the REST API: its function takes an `OperatorApi` first.

    It also gets --json, --data, --url and --key-file. `check` gets the other arguments before the
    API is opened, and raises `typer.BadParameter`. A function with a parameter `json` prints in
    both forms itself.
    """

    def run(command: Command, json: bool, given: dict[str, Any]) -> CommandAnswer | None:
        connection = [given.pop(option) for option in ("data", "url", "key_file")]
        if (connection[1] is None) != (connection[2] is None):
            raise typer.BadParameter("--url and --key-file are given together, or neither")
        if check is not None:
            check(**given)
        from infra.cli.rest import find_api, open_api

        with open_api(find_api(*connection)) as api:
            answer: CommandAnswer | None = command(api, **given)
            return answer

    options: dict[str, tuple[Any, Any]] = {"json": (Json, False)} if json else {}
    options |= {"data": (Data, Path(".berth")), "url": (Url, None), "key_file": (KeyFile, None)}
    return add_command(app, name, run, options)


def settings_command(
    app: typer.Typer, name: str | None = None, *, data: bool = True
) -> Callable[[Command], Command]:
    """Adds a command of an operator on a server: its function takes the `Settings` first.

    They are the environment's, or with --data those of a local system; a function may have that,
    too.
    """

    def run(command: Command, json: bool, given: dict[str, Any]) -> CommandAnswer | None:
        from infra.local.stack import local_settings
        from infra.settings import Settings, read_settings

        folder = given.get("data")
        if "data" not in inspect.signature(command).parameters:
            given.pop("data", None)
        settings = read_settings(Settings) if folder is None else local_settings(folder)
        try:
            answer: CommandAnswer | None = command(settings, **given)
        except OSError as error:
            raise BerthError(str(error)) from None
        return answer

    return add_command(app, name, run, {"data": (OfData, None)} if data else {})


def add_command(
    app: typer.Typer,
    name: str | None,
    run: Callable[[Command, bool, dict[str, Any]], CommandAnswer | None],
    options: Mapping[str, tuple[Any, Any]],
) -> Callable[[Command], Command]:
    """Decorates a function: `run` calls it. Behind its own options come those of `options`, type
    and default.

    The process ends with the answer's exit code, or with 1 and one sentence on standard error.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(
            command,
            eval_str=True,
            locals=dict.fromkeys(("OperatorApi", "JobInspector", "Settings"), Any),
        )
        own = list(signature.parameters.values())[1:]
        own_names = {parameter.name for parameter in own}

        def wrapper(**given: Any) -> None:
            json = given["json"] if "json" in own_names else given.pop("json", False)
            code = 0
            try:
                if (answer := run(command, json, given)) is not None:
                    answer.show(json=json)
                    code = answer.exit_code
            except BerthError as error:
                typer.echo(f"error: {plain(error.detail)}", err=True)
                code = 1
            except KeyboardInterrupt:
                code = 130
            raise typer.Exit(code)

        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )
            for name, (kind, default) in options.items()
            if name not in own_names
        ]
        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *added], return_annotation=None
        )
        app.command(name)(wrapper)
        return command

    return decorate


def json_object(text: bytes, subject: str) -> dict[str, Any]:
    """Raises `typer.BadParameter`, which shows nothing of the text: it may hold secrets."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{subject}: {error}") from None
    if not isinstance(document, dict):
        raise typer.BadParameter(f"{subject}: a JSON object is needed")
    return document


def as_json(value: Any, *, line: bool = False) -> None:
    typer.echo(json.dumps(value, indent=None if line else 2, ensure_ascii=False))


def watch(
    read: Callable[[], Any],
    draw: Callable[[Console, Any], RenderableType],
    *,
    period: float,
    json: bool,
    ended: Callable[[Any], bool] = lambda seen: False,
    each: Callable[[Any], None] | None = None,
) -> Any:
    """Reads every `period` seconds until that has `ended`; returns the last.

    A terminal shows it redrawn in place. In a pipe and with `json`, `each` prints it, if there is
    one.
    """
    from rich.live import Live

    out = console()
    in_place = out.is_terminal and not json
    live = Live(console=out, screen=each is not None, auto_refresh=False, transient=True)
    with live if in_place else nullcontext():
        while True:
            seen = read()
            if in_place:
                live.update(draw(out, seen), refresh=True)
            elif each is not None:
                each(seen)
            if ended(seen):
                return seen
            time.sleep(period)
