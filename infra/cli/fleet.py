"""`berth maintenance …`, `hosts …`, `dead-letters …`,
`audit`, `call`: what is run, failed, was done."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli.options import (
    START_HELP,
    CommandAnswer,
    Limit,
    Pool,
    Reason,
    api_command,
    as_json,
    command_group,
    list_answer,
)
from infra.cli.tables import console, plain, table
from infra.hosts.scaling import plan_hosts, warm_hosts

if TYPE_CHECKING:
    from infra.cli.rest import OperatorApi


maintenance_app = command_group(
    "The maintenance that cleans up after failures (docs/how-it-works/maintenance.md)."
)


#: Seconds to wait for a pass; over 20,000 workers with 2,000 anomalies it took 11.
PASS_TIMEOUT_S = 60.0


@api_command(maintenance_app)
def run(
    api: OperatorApi,
    reason: Reason = "requested",
    override_guard: Annotated[
        bool,
        typer.Option(
            "--override-guard",
            help="Clean up even if so many workers look odd that the cause may be an outage.",
        ),
    ] = False,
) -> CommandAnswer:
    """Check all workers now, as the schedule does;
    anomalies that the last pass saw too are cleaned up."""
    asked = {"reason": reason, "override_guard": override_guard}
    reply = api.post("fleet", "maintenance", wait=PASS_TIMEOUT_S, **asked)
    if not reply.done:
        return CommandAnswer(
            reply.body,
            f"the pass takes longer than {PASS_TIMEOUT_S:.0f} s: berth maintenance status",
        )
    done = reply.body
    summary = (
        f"{done['workers']} workers, {done['found']} anomalies, {done['confirmed']} of "
        "them seen before"
    )
    held = f"\nheld still because: {plain(done['guarded'])}" if done["guarded"] else ""
    return CommandAnswer(done, f"{summary}; done: {_counts(done['outcomes'])}{held}")


@api_command(maintenance_app)
def status(
    api: OperatorApi,
    odd: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            help="List this many passes that found something or cleaned up nothing.",
        ),
    ] = 0,
) -> CommandAnswer:
    """Show the last pass: when, how many workers, what it found and did, and what it left alone."""
    latest = None if odd else api.get("fleet")["maintenance"]
    passes = api.get("fleet", "maintenance", odd=True, limit=odd)["passes"] if odd else [latest]
    return list_answer(
        [row for row in passes if row],
        "pass of (UTC): began_at, workers, odd, done, held still because: held, seconds",
        none="no such pass" if odd else "no pass yet",
        value=latest,
        odd=lambda row: _counts(row["found"]),
        done=lambda row: _counts(row["outcomes"]),
        held=lambda row: row["guarded"] or "-",
        seconds=lambda row: "under way" if row["total_seconds"] is None else row["total_seconds"],
    )


def _counts(counts: object) -> str:
    shown = counts.items() if isinstance(counts, dict) else ()
    return ", ".join(plain(f"{count} {name}") for name, count in shown) or "-"


def servers(api: OperatorApi) -> CommandAnswer:
    """Show the health of every server: databases,
    Temporal, orchestrators, launcher, paper exchange."""
    servers = [
        {"name": name, **server} for name, server in api.get("fleet", "servers")["servers"].items()
    ]
    answer = list_answer(
        servers, "server: name, state, ms, seen (UTC): seen_at, more: reason", none=""
    )
    return replace(answer, exit_code=int(any(server["state"] == "down" for server in servers)))


report_app = command_group("The daily report (docs/how-to/read-reports.md).")


@api_command(report_app)
def show(
    api: OperatorApi,
    day: Annotated[
        str | None, typer.Argument(help="Such as 2026-11-20.", show_default="the latest")
    ] = None,
) -> CommandAnswer:
    """Show the report of a trading day: users, orders, lots, latencies, claims, failures."""
    from infra.database.reports import report_lines

    report = api.get("reports", "daily", day=day)
    columns, rows, out = (
        (f"report of {report['day']}", ""),
        report_lines(report["figures"]),
        console(),
    )
    return CommandAnswer(report, lambda: out.print(table(out, columns, rows)))


hosts_app = command_group("Hosts of workers (docs/how-to/roll-out.md).")


@api_command(hosts_app)
def explain(
    api: OperatorApi,
    pool: Pool = "default",
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of workers, instead of those that the pool has and wants."
        ),
    ] = None,
    warm: Annotated[
        int, typer.Option(min=0, help="Minimum number of empty hosts to keep ready.")
    ] = 1,
    rate: Annotated[
        float, typer.Option(min=0, help="New workers that need room, per second.")
    ] = 0.0,
) -> CommandAnswer:
    """Explain how many hosts the pool's workers need: what the orchestrator would ask of the
    platform."""
    worker_count = workers if workers is not None else workers_of_pool(api.get("pools", pool))
    shown = explain_hosts(worker_count, warm=warm, rate=rate)
    return CommandAnswer(shown, f"{shown['wanted']} hosts are wanted: {shown['reason']}")


def workers_of_pool(shown: dict[str, Any]) -> int:
    """Returns how many workers a pool has in use, and has or wants free."""
    return int(shown["in_use"]) + max(
        int(shown["wanted"]), int(shown["ready"]) + int(shown["starting"])
    )


def explain_hosts(workers: int, *, warm: int, rate: float) -> dict[str, Any]:
    made = plan_hosts(workers, warm=warm_hosts(rate, least=warm))
    shown = ("workers", "wanted", "needed", "warm", "target_capacity", "reason")
    return {name: getattr(made, name) for name in shown}


images_app = command_group("Images that workers may be launched from (docs/how-to/roll-out.md).")

Image = Annotated[
    str,
    typer.Argument(
        metavar="IMAGE", help="name@sha256:…, or family:revision on ECS.", show_default=False
    ),
]


@api_command(images_app, "list")
def list_images(api: OperatorApi) -> CommandAnswer:
    """List allowed images. What the launcher was configured with needs no entry."""
    shown = api.get("images")
    columns = "image, by: actor, when: added_at, why: reason"
    return list_answer(shown["images"], columns, none="no image", value=shown)


@api_command(images_app)
def allow(api: OperatorApi, image: Image, reason: Reason = "requested") -> CommandAnswer:
    """Allow an image: its workers get tokens with which they may get credentials."""
    allowed = api.put("images", image=image, reason=reason).body
    return CommandAnswer(allowed, f"workers may be launched from {allowed['image']}")


@api_command(images_app)
def forbid(api: OperatorApi, image: Image, reason: Reason = "requested") -> CommandAnswer:
    """Forbid an image: nothing is launched from it any more; workers that run continue."""
    answer = api.delete("images", image=image, reason=reason).body
    return CommandAnswer(answer, f"no worker is launched from {image} any more")


def call(
    api: OperatorApi,
    method: Annotated[str, typer.Argument(metavar="METHOD", help="GET, POST, PUT or DELETE.")],
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="Path of the route with its query; /v1 may be left out."
        ),
    ],
    body: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Body of the request; -: read standard input."),
    ] = None,
) -> CommandAnswer:
    """Call any route of the REST API, and print its answer: for routes without a command.

    Such as `berth call GET /users/alice/accounts/main/positions`.
    """
    if not path.startswith("/"):
        raise typer.BadParameter("a path begins with /, such as /users")
    try:
        document = (
            None if body is None else json_text.loads(sys.stdin.read() if body == "-" else body)
        )
    except ValueError:
        raise typer.BadParameter("the body is not JSON") from None
    below = path[3:] if path.startswith("/v1/") else path
    answer = api.client.request(method.upper(), below, body=document).body
    write = partial(typer.echo, nl=False) if isinstance(answer, str) else as_json
    return CommandAnswer(answer, lambda: write(answer))


letters_app = command_group("Dead letters: what failed for good (docs/how-to/settle-failures.md).")

LetterIds = Annotated[list[str], typer.Argument(metavar="ID…", help="Ids, as `list` shows them.")]


@api_command(letters_app, "list")
def list_letters(
    api: OperatorApi,
    kind: Annotated[
        str | None, typer.Option(help="Only of this kind, such as workflow or job.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Only of this user.")] = None,
    limit: Limit = 100,
) -> CommandAnswer:
    """List dead letters: what failed for good and nobody has settled, the latest first."""
    rows, has_more = api.rows("dead-letters", name="letters", limit=limit, kind=kind, user_id=user)
    columns = "id, kind, subject, user: user_id, count, first (UTC): first_at, last (UTC): last_at"
    return list_answer(
        rows, f"{columns}, why: reason", none="nothing failed for good", has_more=has_more
    )


@api_command(letters_app, "show")
def show_letter(
    api: OperatorApi,
    letter: Annotated[str, typer.Argument(metavar="ID", help="Id, as `list` shows it.")],
) -> CommandAnswer:
    """Show all that is known of a dead letter, open or closed; of a message, its beginning."""
    details = api.get("dead-letters", letter)
    rows = [{"what": name, "is": value} for name, value in details.items() if value is not None]
    return list_answer(rows, "what, is", none="", value=details)


@api_command(letters_app)
def redrive(api: OperatorApi, letters: LetterIds, reason: Reason = "requested") -> CommandAnswer:
    """Do what failed once more: recheck the order, requeue the job,
    start the workflow, send the message again."""
    return _close_letters(api, letters, "redrive", reason)


@api_command(letters_app)
def dismiss(
    api: OperatorApi,
    letters: LetterIds,
    reason: Annotated[str, typer.Option(help="Why; recorded in the audit trail.")],
) -> CommandAnswer:
    """Take dead letters off the list: nothing more is done about them. A failed job is deleted."""
    return _close_letters(api, letters, "dismiss", reason)


def _close_letters(api: OperatorApi, letters: list[str], act: str, reason: str) -> CommandAnswer:
    done = [api.post("dead-letters", letter, act, reason=reason).body for letter in letters]
    lines = [f"{act}: {row['kind']} {row['subject'] or row['id']}" for row in done]
    return CommandAnswer(done, "\n".join(lines))


def read_audit(
    api: OperatorApi,
    actor: Annotated[
        str | None, typer.Option(help="Only entries of actors whose name contains this.")
    ] = None,
    action: Annotated[
        str | None, typer.Option(help="Only actions that begin with this, such as switch.")
    ] = None,
    subject: Annotated[
        str | None, typer.Option(help="Only entries about this subject, such as user:alice.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option(min=0, max=1e6, help="Only entries of the last so many hours.")
    ] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help=START_HELP)] = None,
    limit: Limit = 50,
) -> CommandAnswer:
    """Read the audit trail: who did what to whom, the latest first."""
    if hours is not None:
        if since is not None:
            raise typer.BadParameter("give --hours or --since, not both")
        since = (datetime.now(UTC) - timedelta(hours=hours)).isoformat()
    filters = {"actor": actor, "action": action, "subject": subject, "since": since}
    rows, has_more = api.rows("audit", name="entries", limit=limit, **filters)

    def data(row: Mapping[str, Any]) -> str:
        return ", ".join(
            f"{name} {value}" for name, value in row["data"].items() if value is not None
        )

    columns = "at (UTC): at, who: actor, did: action, to: subject, with: data"
    return list_answer(rows, columns, none="no such entry", has_more=has_more, data=data)
