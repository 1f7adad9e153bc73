"""The activity calls of the daily statements; the rules are those of `calls.py`."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from workflows import statements_messages as sm
    from workflows.names import BULK_QUEUE

#: PostgreSQL or Valkey may be away for a while; a statement may come hours late.
_PATIENTLY = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=60))


async def plan_statements(request: sm.PlanStatements) -> sm.StatementsPlan:
    """One count over a table with a row for each user at the most."""
    result: sm.StatementsPlan = await workflow.execute_activity(
        "plan_statements",
        request,
        task_queue=BULK_QUEUE,
        result_type=sm.StatementsPlan,
        start_to_close_timeout=timedelta(seconds=30),
        schedule_to_close_timeout=timedelta(hours=12),
        retry_policy=_PATIENTLY,
        summary="which day, and was it a trading day?",
    )
    return result


async def enqueue_statements(request: sm.EnqueueStatements) -> sm.StatementsPage:
    """One page of users: a look into the orders and a job for each, some ms a user."""
    result: sm.StatementsPage = await workflow.execute_activity(
        "enqueue_statements",
        request,
        task_queue=BULK_QUEUE,
        result_type=sm.StatementsPage,
        start_to_close_timeout=timedelta(minutes=5),
        schedule_to_close_timeout=timedelta(hours=12),
        # It beats once a second.
        heartbeat_timeout=timedelta(seconds=30),
        retry_policy=_PATIENTLY,
        summary=f"users after {request.after!r}",
    )
    return result
