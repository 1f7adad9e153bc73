"""`berth jobs weights …`: how many turns each queue gets, through the REST API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.options import CommandAnswer, Reason, api_command, command_group, list_answer

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi

app = command_group("Weights of queues: their turns for each turn of a queue with weight 1.")

_COLUMNS = "queue, weight, waiting, state: suspended"
Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.")]
Application = Annotated[
    str | None, typer.Option(help="A queue of this application, instead of the fleet's.")
]


@api_command(app, "list")
def list_(api: OperatorApi, application: Application = None) -> CommandAnswer:
    """Show the queues with their weights and the number of jobs that wait."""
    queues = api.get("job-queues", application=application)["queues"]
    return list_answer(
        queues,
        _COLUMNS,
        none="no queue has work or settings",
        suspended=lambda row: "suspended" if row["suspended"] else "",
    )


@api_command(app, "set")
def set_(
    api: OperatorApi,
    queue: Queue,
    weight: Annotated[
        float,
        typer.Argument(
            min=0, max=1000, metavar="WEIGHT", help="0 to 1000; the default of a queue is 1."
        ),
    ],
    application: Application = None,
    reason: Reason = "requested",
) -> CommandAnswer:
    """Set the weight of a queue."""
    return _put(api, queue, weight, application, reason)


@api_command(app)
def clear(
    api: OperatorApi, queue: Queue, application: Application = None, reason: Reason = "requested"
) -> CommandAnswer:
    """Give a queue the default weight, 1."""
    return _put(api, queue, None, application, reason)


def _put(
    api: OperatorApi, queue: str, weight: float | None, application: str | None, reason: str
) -> CommandAnswer:
    body = {"weight": weight, "application": application, "reason": reason}
    done = api.put("job-queues", queue, **body).body
    return CommandAnswer(done, f"queue {queue} has weight {done['weight']:g}")
