"""The options that many commands share, and the decorators that give them to a command."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

Data = Annotated[
    Path,
    typer.Option(
        "--data", envvar="BERTH_DATA_DIR", help="Folder of a running `berth up`.", show_default=".berth"
    ),
]
Url = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Another API, such as https://berth.example; needs --key-file."),
]
KeyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with an operator's API key, mode 0600; needs --url.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Reason = Annotated[str, typer.Option(help="Why; recorded in the audit trail.")]
Pool = Annotated[str, typer.Argument(metavar="[POOL]", help="Name of the pool.")]


@dataclass(frozen=True)
class CommandAnswer:
    """What a command prints: `value` with --json, else `text`: a sentence, or a function that draws."""

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


#: The function of a command; most return a `CommandAnswer`, or None when they have printed everything.
Command = Callable[..., Any]


def api_command(
    app: typer.Typer, name: str | None = None, *, check: Callable[..., Any] | None = None, json: bool = True
) -> Callable[[Command], Command]:
    """Adds a command that calls the REST API: its function takes an `OperatorApi` first.

    It also gets --json, --data, --url and --key-file. `check` gets the other arguments before the API is
    opened, and raises `typer.BadParameter`. A function with a parameter `json` prints in both forms itself.
    """

    def run(command: Command, json: bool, given: dict[str, Any]) -> CommandAnswer | None:
        connection = [given.pop(option) for option in ("data", "url", "key_file")]
        if (connection[1] is None) != (connection[2] is None):
            raise typer.BadParameter("--url and --key-file are given together, or neither")
        if check is not None:
            check(**given)
        from infra.cli.rest import OperatorApi, find_api

        with OperatorApi(find_api(*connection)) as api:
            answer: CommandAnswer | None = command(api, **given)
            if answer is not None:
                answer.show(json=json)
            return answer

    options = [
        option("data", Data, Path(".berth")),
        option("url", Url, None),
        option("key_file", KeyFile, None),
    ]
    return add_command(app, name, run, [option("json", Json, False)] * json + options)


def option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )


def add_command(
    app: typer.Typer,
    name: str | None,
    run: Callable[[Command, bool, dict[str, Any]], CommandAnswer | None],
    options: Sequence[inspect.Parameter],
) -> Callable[[Command], Command]:
    """Decorates a function: `run` calls it, with `options` behind the function's own.

    The process ends with the answer's exit code, or with 1 and one sentence on standard error.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(
            command, eval_str=True, locals={"OperatorApi": Any, "JobInspector": Any}
        )
        own = list(signature.parameters.values())[1:]
        own_names = {parameter.name for parameter in own}

        def wrapper(**given: Any) -> None:
            from infra.cli.tables import plain
            from worker_runtime.protocol.errors import BerthError

            json = given["json"] if "json" in own_names else given.pop("json", False)
            try:
                answer = run(command, json, given)
                code = 0 if answer is None else answer.exit_code
            except BerthError as error:
                typer.echo(f"error: {plain(error.detail)}", err=True)
                code = 1
            except KeyboardInterrupt:
                code = 130
            raise typer.Exit(code)

        added = [parameter for parameter in options if parameter.name not in own_names]
        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *added], return_annotation=None
        )
        app.command(name)(wrapper)
        return command

    return decorate


def user_path(user_id: str, rest: str = "") -> str:
    """The API's path of a user's worker."""
    return f"/users/{quote(user_id, safe='')}/worker{rest}"


def pool_path(pool: str, rest: str = "") -> str:
    """The API's path of a pool; `rest` follows its name."""
    return f"/pools/{quote(pool, safe='')}{rest}"


def as_json(value: Any, *, line: bool = False) -> None:
    import json

    typer.echo(json.dumps(value, indent=None if line else 2, ensure_ascii=False))


def watch(
    read: Callable[[], Any],
    show: Callable[[Any], object],
    *,
    period: float,
    ended: Callable[[Any], bool] = lambda seen: False,
) -> Any:
    """Shows what `read` returns, every `period` seconds until that has `ended`; returns the last."""
    while True:
        seen = read()
        show(seen)
        if ended(seen):
            return seen
        time.sleep(period)
