"""Routes for what failed for good: one list, for operators.

A letter is redriven or dismissed by the means that its part of the system has for its kind.
"""

from contextlib import suppress
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import BeforeValidator, Field
from temporalio.common import RawValue, WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.converter import WorkflowSerializationContext

from api.container import AuthorizedCall, Call, Services
from api.http import problems
from api.http.errors import Forbidden, LetterRefused, TemporalUnavailable, ValkeyUnavailable
from api.http.fields import EMPTY_IS_NONE, ID_PATTERN, OfUser, View
from api.orders.schemas import NextCursor, PageCursor, PageLimit, cursor_of, position_of
from api.workers.schemas import ReasonBody
from infra.database import dead_letters
from infra.database.dead_letters import (
    MAX_MESSAGE_BYTES,
    MESSAGE_KINDS,
    DeadLetterNotFound,
    DeadLetterRow,
)
from infra.database.engine import DatabaseUnavailable
from infra.database.locks import seconds_from_now
from infra.database.orders.attention import OrderSettled, recheck_order
from infra.temporal.client import RPC_TIMEOUT, temporal_errors
from infra.temporal.codec import is_refused
from infra.valkey import client as valkey
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.worker_reports import EVENT, read_event

router = APIRouter(prefix="/dead-letters", tags=["dead letters"])

Kind = Annotated[
    str | None, Query(pattern=ID_PATTERN, max_length=32, description="Only of this kind.")
]


def _user_of_owner(owner: str) -> str | None:
    """Return the user; None for the fleet, and for an application (`source` names it)."""
    return owner if owner and not job_keys.application_of_tag(owner) else None


class DeadLetterView(View):
    """Something that failed for good."""

    id: UUID
    kind: str = Field(
        description="`workflow`, `order` (it waits for a person), `job`, `alert`; of messages who "
        "gave them up: `event`, `recorder`, `relay`, `late`, `outcome`. `overflow` counts what is "
        "not kept."
    )
    subject: Annotated[str | None, EMPTY_IS_NONE] = Field(
        description="Id of the workflow, order or job, to be opened."
    )
    source: str = Field(description="At most 100 open letters have the same.")
    user_id: Annotated[str | None, BeforeValidator(_user_of_owner)] = Field(
        description="The user whose it is; null for what is the fleet's or an application's."
    )
    reason: str
    text: Annotated[str | None, EMPTY_IS_NONE] = Field(description="The beginning of a message.")
    count: int = Field(description="How often it failed.")
    first_at: datetime
    last_at: datetime
    closed_at: datetime | None = Field(description="When it was redriven or dismissed.")


class DeadLetterPage(View):
    """Letters, the one that came last first."""

    letters: list[DeadLetterView]
    next_cursor: NextCursor


@router.get("", summary="List dead letters")
async def list_dead_letters(
    call: Call,
    kind: Kind = None,
    user_id: OfUser = None,
    cursor: PageCursor = None,
    limit: PageLimit = 100,
) -> DeadLetterPage:
    """Workflow runs, jobs, alerts and messages that failed for good, and orders that wait for a
    person; the one that came last first. They stop nobody, but something was lost. For
    operators."""
    behind = position_of(cursor) if cursor else None
    rows = await call.database.fetch(
        dead_letters.list_letters, kind=kind, user_id=user_id, after=behind, limit=limit + 1
    )
    end = cursor_of((rows[limit - 1].last_at, rows[limit - 1].id)) if len(rows) > limit else None
    return DeadLetterPage.model_validate({"letters": rows[:limit], "next_cursor": end})


@router.get(
    "/{letter_id}",
    summary="Look at a dead letter",
    responses=problems.responses(DeadLetterNotFound),
)
async def get_dead_letter(letter_id: UUID, call: Call) -> DeadLetterView:
    """One of them, open or closed. For operators."""
    return DeadLetterView.model_validate(
        await call.database.fetch(dead_letters.get_letter, letter_id)
    )


@router.post(
    "/{letter_id}/{act}",
    summary="Redrive or dismiss a dead letter",
    responses=problems.responses(
        Forbidden,
        DeadLetterNotFound,
        LetterRefused,
        TemporalUnavailable,
        ValkeyUnavailable,
        DatabaseUnavailable,
    ),
)
async def close_dead_letter(
    letter_id: UUID, act: Literal["redrive", "dismiss"], body: ReasonBody, call: Call
) -> DeadLetterView:
    """`redrive`: does it once more (rechecks an order, requeues a job or an alert, starts a
    workflow with the same input, hands a message to its readers); the letter is back if that fails.
    `dismiss`: nothing more is done about it, and a failed job leaves its queue. For operators."""
    letter = await call.database.fetch(dead_letters.get_letter, letter_id)
    if letter.closed_at is not None:
        raise LetterRefused("somebody has redriven or dismissed it")
    about = {"kind": letter.kind, "of": letter.subject, "reason": body.reason}
    await call.audit(f"dead_letter.{act}_requested", f"dead_letter:{letter_id}", **about)
    await (_redrive if act == "redrive" else _dismiss)(call, letter)
    # It opens again if the same fails again.
    await call.database.write(dead_letters.close_letter, letter)
    return await get_dead_letter(letter_id, call)


_JOBS = ("job", "alert")


async def _redrive(call: AuthorizedCall, letter: DeadLetterRow) -> None:
    """Raises `LetterRefused`, and errors of the servers that are away."""
    if letter.kind in MESSAGE_KINDS:
        await _send_again(call.services, letter)
    elif letter.kind in _JOBS:
        await _requeue(call.services, letter)
    elif letter.kind == "workflow":
        await _start_again(call.services, letter.subject)
    elif letter.kind in ("order", "outcome"):
        with suppress(OrderSettled):
            try:
                await call.database.write(recheck_order, UUID(letter.subject), actor=call.actor)
            except ValueError:
                raise LetterRefused("it names no order") from None
    else:
        raise LetterRefused("This entry cannot be retried. Fix the cause, then dismiss it.")


async def _requeue(services: Services, letter: DeadLetterRow) -> None:
    tag = job_keys.tag_of(letter.user_id)
    state = await services.kept_jobs.queue.get(letter.subject, tag=tag)
    # Or only how it ended is left.
    lost = state is None or (state.state == "failed" and state.name is None)
    if lost:
        await services.valkey.delete(job_keys.result(tag, letter.subject))
    back = lost or await valkey.run_script(
        services.valkey, *job_calls.requeue([letter.subject], tag)
    )
    again = {"outcome": None, "missing": lost, "check_at": seconds_from_now(0.0)}
    if not back or (
        not await services.kept_jobs.change(letter.subject, letter.user_id, **again) and lost
    ):
        raise LetterRefused(
            "the job is not among the failed ones, or another one has its unique key"
        )
    if job_keys.application_of_tag(letter.user_id):
        return
    if letter.user_id and not await services.valkey.exists(keys.mark(letter.user_id)):
        services.starter.ensure(letter.user_id, mark_missing=True)


async def _dismiss(call: AuthorizedCall, letter: DeadLetterRow) -> None:
    services = call.services
    if letter.kind == "order":
        raise LetterRefused("an order stays until it has ended: resolve it")
    if letter.kind in _JOBS:
        tag = job_keys.tag_of(letter.user_id)
        key = job_keys.job(tag, letter.subject)
        state = await valkey.reply_of(services.valkey.hget(key, "state"))
        if state in (None, b"failed"):  # and was not put back
            await services.kept_jobs.end(letter.subject, letter.user_id, "cancelled")
        if state == b"failed":
            signed = job_calls.cancel(letter.subject, services.message_secrets.job_keys(tag), tag)
            await valkey.run_script(services.valkey, *signed)


async def _send_again(services: Services, letter: DeadLetterRow) -> None:
    """Back to the stream, whose readers tolerate repeats."""
    if not 0 < len(letter.message) < MAX_MESSAGE_BYTES:
        raise LetterRefused("the message was not kept, or not all of it")
    try:
        read_event(letter.message, services.message_secrets.assignment_keys)
    except BerthError as error:
        raise LetterRefused(f"it still cannot be read: {error.detail}") from None
    streams = {"recorder": [keys.EVENTS], "relay": [keys.CHANGES]}
    for stream in streams.get(letter.kind, [keys.EVENTS, keys.CHANGES]):
        await services.valkey.xadd(stream, {EVENT: letter.message})


async def _start_again(services: Services, workflow_id: str) -> None:
    """With the input of the last run, unless one is under way."""
    temporal = services.control.client
    with temporal_errors(
        missing=LetterRefused("Temporal does not know it any more"), server_only=True
    ):
        history = temporal.get_workflow_handle(workflow_id).fetch_history_events(
            page_size=1, rpc_timeout=RPC_TIMEOUT
        )
        begun = (await anext(history)).workflow_execution_started_event_attributes
        converter = temporal.data_converter.with_context(
            WorkflowSerializationContext(namespace=temporal.namespace, workflow_id=workflow_id)
        )
        given = await converter.decode(begun.input.payloads, [RawValue] * len(begun.input.payloads))
        if any(is_refused(value.payload) for value in given):
            raise LetterRefused(
                "the input of its last run was altered in Temporal, or cannot be decrypted"
            )
        await temporal.start_workflow(
            begun.workflow_type.name,
            args=given,
            id=workflow_id,
            task_queue=begun.task_queue.name,
            execution_timeout=begun.workflow_execution_timeout.ToTimedelta() or None,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            static_summary="started again by an operator",
            rpc_timeout=RPC_TIMEOUT,
        )
