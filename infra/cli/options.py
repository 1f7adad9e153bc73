"""What the commands that go through the REST API share: their options, and the way to the API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi

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
Reason = Annotated[str, typer.Option(help="Why; it stands in the audit trail.")]
Pool = Annotated[str, typer.Argument(metavar="[POOL]", help="Name of the pool.")]


def with_api(
    data: Path, url: str | None, key_file: Path | None, action: Callable[[OperatorApi], int]
) -> NoReturn:
    """Runs `action` and ends with its exit code; 1 with one sentence on standard error when it fails."""
    if (url is None) != (key_file is None):
        raise typer.BadParameter("--url and --key-file are given together, or neither")
    from infra.cli.rest import OperatorApi, find_api
    from infra.cli.tables import plain
    from worker_runtime.protocol.errors import BerthError

    try:
        with OperatorApi(find_api(data, url, key_file)) as api:
            code = action(api)
    except BerthError as error:
        typer.echo(f"error: {plain(error.detail)}", err=True)
        code = 1
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


def pool_path(pool: str, rest: str = "") -> str:
    """The API's path of a pool; `rest` comes behind its name."""
    from urllib.parse import quote

    return f"/pools/{quote(pool, safe='')}{rest}"


def as_json(value: Any, *, line: bool = False) -> None:
    import json

    typer.echo(json.dumps(value, indent=None if line else 2, ensure_ascii=False))
