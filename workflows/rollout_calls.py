"""The activity calls of a rollout; the rules are those of `calls.py`."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from workflows import rollout_messages as rm
    from workflows.names import BULK_QUEUE

#: The rollout looks again by itself.
_TWICE = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_attempts=2)
#: Nobody waits, and what is written must not be lost.
_SLOWLY = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=60))


async def look_at_release(request: rm.LookAtRelease) -> rm.ReleaseLook:
    """An update of the pool's workflow, a listing of the launcher and a page of Valkey."""
    result: rm.ReleaseLook = await workflow.execute_activity(
        "look_at_release",
        request,
        task_queue=BULK_QUEUE,
        result_type=rm.ReleaseLook,
        start_to_close_timeout=timedelta(seconds=20),
        schedule_to_close_timeout=timedelta(seconds=60),
        retry_policy=_TWICE,
        summary=f"how many workers are of version {request.release.version or 'of the settings'}?",
    )
    return result


async def retire_workers(request: rm.RetireWorkers) -> int:
    """Some stops beside each other, each with the grace of a logout. A repeat ends the same workers."""
    result: int = await workflow.execute_activity(
        "retire_workers",
        request,
        task_queue=BULK_QUEUE,
        result_type=int,
        start_to_close_timeout=timedelta(seconds=60),
        schedule_to_close_timeout=timedelta(seconds=130),
        heartbeat_timeout=timedelta(seconds=10),
        retry_policy=_TWICE,
        summary=f"end {request.count} free workers of other versions",
    )
    return result


async def ask_to_move(request: rm.AskToMove) -> int:
    """A signal a user, some at a time."""
    result: int = await workflow.execute_activity(
        "ask_to_move",
        request,
        task_queue=BULK_QUEUE,
        result_type=int,
        start_to_close_timeout=timedelta(seconds=60),
        schedule_to_close_timeout=timedelta(seconds=130),
        heartbeat_timeout=timedelta(seconds=10),
        retry_policy=_TWICE,
        summary="ask the users of other versions to move",
    )
    return result


async def tell_rollout(request: rm.TellRollout) -> None:
    """One row of the audit trail."""
    await workflow.execute_activity(
        "tell_rollout",
        request,
        task_queue=BULK_QUEUE,
        start_to_close_timeout=timedelta(seconds=15),
        schedule_to_close_timeout=timedelta(hours=1),
        retry_policy=_SLOWLY,
        summary=f"the rollout {request.event}",
    )
