"""Redrives and dismisses dead letters: what failed for good is done once more, or left."""

from contextlib import suppress
from uuid import UUID

from temporalio.common import RawValue, WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.converter import WorkflowSerializationContext

from api.container import AuthorizedCall, Services
from api.http.errors import LetterRefused
from infra.database.dead_letters import (
    MAX_MESSAGE_BYTES,
    MESSAGE_KINDS,
    DeadLetterRow,
)
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

#: Kinds of letters that are jobs of the queue.
_JOB_KINDS = ("job", "alert")


async def redrive_letter(call: AuthorizedCall, letter: DeadLetterRow) -> None:
    """Does what failed once more, by the means that its part of the system has.

    Raises `LetterRefused`, and errors of the servers that are away.
    """
    if letter.kind in MESSAGE_KINDS:
        await _send_again(call.services, letter)
    elif letter.kind in _JOB_KINDS:
        await _requeue(call.services, letter)
    elif letter.kind == "workflow":
        await _start_again(call.services, letter.subject)
    elif letter.kind in ("order", "outcome"):
        with suppress(OrderSettled):
            try:
                await call.database.write(recheck_order, UUID(letter.subject), actor=call.actor)
            except ValueError:
                raise LetterRefused("This entry names no order.") from None
    else:
        raise LetterRefused("This entry cannot be retried. Fix the cause, then dismiss it.")


async def _requeue(services: Services, letter: DeadLetterRow) -> None:
    """Puts a failed job back into its queue, or has it enqueued anew if Valkey has lost it."""
    tag = job_keys.tag_of(letter.user_id)
    state = await services.kept_jobs.queue.get(letter.subject, tag=tag)
    # Without its name, Valkey has only the job's result.
    is_lost = state is None or (state.state == "failed" and state.name is None)
    if is_lost:
        await services.valkey.delete(job_keys.result(tag, letter.subject))
    is_requeued = is_lost or await valkey.run_script(
        services.valkey, *job_calls.requeue([letter.subject], tag)
    )
    # The sweeper of kept jobs enqueues a missing one.
    changes = {"outcome": None, "missing": is_lost, "check_at": seconds_from_now(0.0)}
    if not is_requeued or (
        not await services.kept_jobs.change(letter.subject, letter.user_id, **changes) and is_lost
    ):
        raise LetterRefused("The job is no longer a failed one, or another job has its unique key.")
    if job_keys.application_of_tag(letter.user_id):
        return
    if letter.user_id and not await services.valkey.exists(keys.mark(letter.user_id)):
        services.starter.ensure(letter.user_id, check_worker=True)


async def dismiss_letter(call: AuthorizedCall, letter: DeadLetterRow) -> None:
    """Removes a failed job from its queue; other letters need nothing. Raises `LetterRefused`."""
    services = call.services
    if letter.kind == "order":
        raise LetterRefused("An order cannot be dismissed before it has ended. Resolve it.")
    if letter.kind in _JOB_KINDS:
        tag = job_keys.tag_of(letter.user_id)
        key = job_keys.job(tag, letter.subject)
        state = await valkey.reply_of(services.valkey.hget(key, "state"))
        if state in (None, b"failed"):  # and was not put back
            await services.kept_jobs.end(letter.subject, letter.user_id, "cancelled")
        if state == b"failed":
            signed = job_calls.cancel(letter.subject, services.message_secrets.job_keys(tag), tag)
            await valkey.run_script(services.valkey, *signed)


async def _send_again(services: Services, letter: DeadLetterRow) -> None:
    """Adds a message to its stream again; the stream's readers tolerate repeats."""
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
    """Starts a workflow with the input of its last run, unless a run is under way."""
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
