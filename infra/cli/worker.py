"""`berth worker …`: users' workers, seen and steered through the REST API with an operator's key."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from infra.cli.options import Data, Json, KeyFile, Reason, Url, as_json, with_api

if TYPE_CHECKING:
    from infra.cli.rest import ApiReply, OperatorApi

app = typer.Typer(
    help="Users' workers, through the REST API. Exit codes: 0 done, 1 refused or not done in time, 2 usage.",
    no_args_is_help=True,
)

#: Most rows that one request may ask for.
_PAGE = 1000

User = Annotated[str, typer.Argument(metavar="USER", help="Id of the user.")]


@app.command("list")
def list_workers(
    state: Annotated[str | None, typer.Option(help="Only this state, such as Reconnecting.")] = None,
    user: Annotated[str | None, typer.Option(metavar="PREFIX", help="Only ids that begin so.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most rows.")] = 100,
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Users whose worker runs, or waits to. From an index that is a moment behind."""

    def action(api: OperatorApi) -> int:
        from infra.cli import tables as worker_tables

        rows, more = api.rows("/workers", "workers", limit=limit, page=_PAGE, state=state, user_id=user)
        if json:
            as_json(rows)
        else:
            worker_tables.show_workers(worker_tables.console(), rows, more=more)
        return 0

    with_api(data, url, key_file, action)


@app.command()
def show(
    user: User, json: Json = False, data: Data = Path(".berth"), url: Url = None, key_file: KeyFile = None
) -> None:
    """One user's worker: its own mark, and what its workflow says."""

    def action(api: OperatorApi) -> int:
        from infra.cli import tables as worker_tables
        from infra.cli.rest import user_path

        shown = api.get(user_path(user))
        if json:
            as_json(shown)
        else:
            worker_tables.show_worker(worker_tables.console(), shown)
        return 0

    with_api(data, url, key_file, action)


def _tell_outcome(reply: ApiReply, done: str, told: str, *, wait: float, json: bool) -> int:
    """Says what came of it. Not done within `wait` is no success, when somebody wanted to wait."""
    if json:
        as_json(reply.body)
    if reply.done:
        if not json:
            typer.echo(done)
        return 0
    if not wait:
        if not json:
            typer.echo(told)
        return 0
    typer.echo(f"not done within {wait:g} s; it goes on: look with `berth worker show`", err=True)
    return 1


@app.command()
def start(
    user: User,
    wait: Annotated[float, typer.Option(min=0, max=60, help="Seconds to wait; 0 only asks.")] = 30.0,
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Make the user's worker Active, if it is not."""

    def action(api: OperatorApi) -> int:
        from infra.cli.rest import user_path

        reply = api.post(user_path(user, "/start"), reason=reason, wait=wait)
        body = reply.body
        done = f"{user} is {body.get('state')} with worker {body.get('worker_id')}, epoch {body.get('epoch')}"
        return _tell_outcome(reply, done, f"the worker of {user} is asked to start", wait=wait, json=json)

    with_api(data, url, key_file, action)


def _signal(
    path: str, told: str, reason: str, json: bool, data: Path, url: str | None, key_file: Path | None
) -> NoReturn:
    def action(api: OperatorApi) -> int:
        return _tell_outcome(api.post(path, reason=reason), told, told, wait=0.0, json=json)

    with_api(data, url, key_file, action)


@app.command()
def stop(
    user: User,
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Ask the worker to finish the order in hand, close its sessions and end."""
    from infra.cli.rest import user_path

    told = f"the worker of {user} is asked to stop"
    _signal(user_path(user, "/stop"), told, reason, json, data, url, key_file)


@app.command()
def resume(
    user: User,
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Let a parked user (too many crashes) start again."""
    from infra.cli.rest import user_path

    told = f"{user} may start again, if it was parked"
    _signal(user_path(user, "/resume"), told, reason, json, data, url, key_file)


@app.command("reload-credentials")
def reload_credentials(
    user: User,
    wait: Annotated[float, typer.Option(min=0, max=60, help="Seconds to wait; 0 only asks.")] = 20.0,
    reason: Reason = "requested",
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Have the worker load the stored credentials; if they are refused, it keeps its session."""

    def action(api: OperatorApi) -> int:
        from infra.cli.rest import user_path
        from infra.cli.tables import plain

        reply = api.post(user_path(user, "/reload-credentials"), reason=reason, wait=wait)
        done = f"{user}: {plain(reply.body.get('detail'))}"
        return _tell_outcome(reply, done, f"the worker of {user} is told to reload", wait=wait, json=json)

    with_api(data, url, key_file, action)


@app.command()
def timeline(
    user: User,
    after: Annotated[int | None, typer.Option(min=0, help="Only changes behind this id.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=_PAGE, help="Most changes of the past.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then show what comes, until Ctrl-C.")
    ] = False,
    json: Json = False,
    data: Data = Path(".berth"),
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """The worker's changes of state: the last ones, or those behind an id; oldest first."""

    def action(api: OperatorApi) -> int:
        from infra.cli import tables as worker_tables
        from infra.cli.rest import user_path

        past = api.get(user_path(user, "/timeline"), after=after, limit=limit)
        out = worker_tables.console()
        if not follow:
            if json:
                as_json(past["transitions"])
            else:
                worker_tables.show_timeline(out, past["transitions"])
            return 0

        def tell(row: dict[str, Any]) -> None:
            if json:
                as_json(row, line=True)
            else:
                worker_tables.show_transition(out, row)
            sys.stdout.flush()

        for row in past["transitions"]:
            tell(row)
        for name, row in api.events(user_path(user, "/events"), past["next_after"]):
            if name == "transition":
                tell(row)
        return 0

    with_api(data, url, key_file, action)


@app.command()
def run() -> None:
    """Run one user worker; the node starts it, people seldom do.

    It reads its launch configuration, one JSON document, from standard input and no BERTH_ setting: what the
    orchestrator was given for workers (BERTH_MARK_TTL, BERTH_MARK_PERIOD, BERTH_LOG_LEVEL …) stands in there.
    """
    os.execv(sys.executable, [sys.executable, "-m", "worker_runtime"])  # noqa: S606
