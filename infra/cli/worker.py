"""`berth worker …`: shows and steers users' workers through the REST API with an operator's key."""

from __future__ import annotations

import os
import sys
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli import tables
from infra.cli.options import (
    CommandAnswer,
    Json,
    Limit,
    OfUser,
    Reason,
    api_command,
    as_json,
    command_group,
    list_answer,
)
from infra.cli.tables import plain

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi
    from infra.client.calls import ApiReply

app = command_group(
    "Users' workers, through the REST API. Exit codes: 0 done, 1 refused or not done in time, "
    "2 usage."
)

Wait = Annotated[
    float, typer.Option(min=0, max=60, help="Seconds to wait until it is done; 0: do not wait.")
]


@api_command(app, "list")
def list_workers(
    api: OperatorApi,
    state: Annotated[
        str | None, typer.Option(help="Only this state, such as Reconnecting.")
    ] = None,
    user: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="Only users whose ids begin with this.")
    ] = None,
    limit: Limit = 100,
) -> CommandAnswer:
    """List users whose worker runs or waits to start. The list may be a moment behind."""
    rows, has_more = api.rows("workers", name="workers", limit=limit, state=state, user_id=user)
    columns = "user: user_id, state, worker: worker_id, pool, started (UTC): started_at"
    cells = {"state": lambda row: tables.state_text(row["state"])}
    return list_answer(rows, columns, none="no such worker runs", has_more=has_more, **cells)


@api_command(app)
def show(api: OperatorApi, user: OfUser) -> CommandAnswer:
    """Show one user's worker: its own mark, and what its workflow says."""
    shown = api.get("users", user, "worker")
    return CommandAnswer(shown, lambda: tables.show_worker(tables.console(), shown))


def _outcome(reply: ApiReply, done: str, asked: str, *, wait: float) -> CommandAnswer:
    """Returns the outcome of a request; exit code 1 when the caller waited and it was not done in
    time."""
    if reply.done or not wait:
        return CommandAnswer(reply.body, done if reply.done else asked)
    warning = f"not done within {wait:g} s; it continues: see `berth worker show`"
    return CommandAnswer(reply.body, warning=warning, exit_code=1)


@api_command(app)
def start(
    api: OperatorApi, user: OfUser, wait: Wait = 30.0, reason: Reason = "requested"
) -> CommandAnswer:
    """Start the user's worker, and wait until it is Active."""
    reply = api.post("users", user, "worker", "start", reason=reason, wait=wait)
    body = reply.body
    done = (
        f"{user} is {body.get('state')} with worker {body.get('worker_id')}, epoch "
        f"{body.get('epoch')}"
    )
    return _outcome(reply, done, f"the worker of {user} is asked to start", wait=wait)


@api_command(app)
def stop(api: OperatorApi, user: OfUser, reason: Reason = "requested") -> CommandAnswer:
    """Ask the worker to finish its order, close its sessions and end."""
    reply = api.post("users", user, "worker", "stop", reason=reason)
    return CommandAnswer(reply.body, f"the worker of {user} is asked to stop")


@api_command(app)
def resume(api: OperatorApi, user: OfUser, reason: Reason = "requested") -> CommandAnswer:
    """Let a user start again who was parked after too many crashes."""
    reply = api.post("users", user, "worker", "resume", reason=reason)
    return CommandAnswer(reply.body, f"{user} may start again, if it was parked")


@api_command(app, "reload-credentials")
def reload_credentials(
    api: OperatorApi, user: OfUser, wait: Wait = 20.0, reason: Reason = "requested"
) -> CommandAnswer:
    """Have the worker load the stored credentials;
    if the broker refuses them, it keeps its session."""
    reply = api.post("users", user, "worker", "reload-credentials", reason=reason, wait=wait)
    done = f"{user}: {plain(reply.body.get('detail'))}"
    return _outcome(reply, done, f"the worker of {user} is asked to reload", wait=wait)


@api_command(app)
def timeline(
    api: OperatorApi,
    user: OfUser,
    after: Annotated[int | None, typer.Option(min=0, help="Only changes after this id.")] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="Maximum number of past changes.")
    ] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then show new changes, until Ctrl-C.")
    ] = False,
    json: Json = False,
) -> CommandAnswer | None:
    """Show the worker's changes of state: the last ones, or those after an id; oldest first."""
    past = api.get("users", user, "worker", "timeline", after=after, limit=limit)
    rows, out = past["transitions"], tables.console()
    if not follow:
        columns = "id, at (UTC): at, before, after, worker: worker_id, epoch, reason"
        none = "nothing has happened yet"
        return list_answer(
            rows, columns, none=none, after=lambda row: tables.state_text(row["after"])
        )
    events = api.events("users", user, "worker", "events", after=past["next_after"])
    for row in chain(rows, (event.data for event in events if event.name == "transition")):
        if json:
            as_json(row, line=True)
        else:
            tables.show_transition(out, row)
        sys.stdout.flush()
    return None


@app.command()
def run() -> None:
    """Run one user worker. Usually the node starts it.

    It reads its launch configuration, one JSON document, from standard input, and no BERTH_
    setting. The document holds the orchestrator's settings for workers (BERTH_MARK_TTL,
    BERTH_MARK_PERIOD, …).
    """
    os.execv(sys.executable, [sys.executable, "-P", "-m", "worker_runtime"])  # noqa: S606
