"""The activity calls of the morning; the rules are those of `calls.py`."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from workflows import morning_messages as mo
    from workflows.names import BULK_QUEUE

#: PostgreSQL may be away for a while, and the bell does not wait for long.
_PATIENTLY = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=10))
#: The workflow tries a user again by itself, when the others have had their turn.
_ONCE = RetryPolicy(maximum_attempts=1)


async def plan_morning(request: mo.PlanMorning) -> mo.MorningPlan:
    """One count over the orders' index: seconds for millions of orders."""
    result: mo.MorningPlan = await workflow.execute_activity(
        "plan_morning",
        request,
        task_queue=BULK_QUEUE,
        result_type=mo.MorningPlan,
        start_to_close_timeout=timedelta(seconds=30),
        schedule_to_close_timeout=timedelta(minutes=30),
        retry_policy=_PATIENTLY,
        summary="is it a trading day, and who traded of late?",
    )
    return result


async def recent_users(request: mo.RecentUsers) -> list[str]:
    """One page of an index."""
    result: list[str] = await workflow.execute_activity(
        "recent_users",
        request,
        task_queue=BULK_QUEUE,
        result_type=list[str],
        start_to_close_timeout=timedelta(seconds=30),
        schedule_to_close_timeout=timedelta(minutes=30),
        retry_policy=_PATIENTLY,
        summary=f"users after {request.after!r}",
    )
    return result


async def connect_user(request: mo.ConnectUser) -> mo.Connected:
    """A claim and a login: the caller's own limit is 50 s with the default settings."""
    result: mo.Connected = await workflow.execute_activity(
        "connect_user",
        request,
        task_queue=BULK_QUEUE,
        result_type=mo.Connected,
        start_to_close_timeout=timedelta(seconds=180),
        schedule_to_close_timeout=timedelta(seconds=240),
        # It beats once a second.
        heartbeat_timeout=timedelta(seconds=10),
        retry_policy=_ONCE,
        summary=f"connect user {request.user_id}",
    )
    return result
