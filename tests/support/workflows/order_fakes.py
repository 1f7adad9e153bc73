"""The activities of an order's workflow, scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from tests.support.workflows.fakes import patient
from workflows import names
from workflows.order.messages import (
    FollowOrder,
    FollowSettings,
    UnresolvedOrder,
    VerificationFinding,
    Verified,
    VerifyOrder,
)
from workflows.order.workflow import OrderWorkflow
from workflows.sandbox import workflow_runner

FILLED = Verified(finding=VerificationFinding.FINAL, state="filled")
LISTED = Verified(finding=VerificationFinding.LISTED, state="submitted")
UNREACHABLE = Verified(
    finding=VerificationFinding.UNASKED, state="unknown", code="BROKER_UNREACHABLE"
)
FAR = 4_000_000_000.0


class FakeBook:
    """PostgreSQL and the broker: `checks` in order, the last one again and again."""

    def __init__(self, *checks: Verified) -> None:
        self.checks = list(checks)
        self.asked: list[int] = []
        self.settled: list[str] = []
        self.demands: list[str] = []
        self.failures = 0

    @activity.defn
    async def verify_order(self, request: VerifyOrder) -> Verified:
        self.asked.append(request.check)
        if self.failures:
            self.failures -= 1
            raise ApplicationError("no database", type="DATABASE_UNAVAILABLE")
        return self.checks.pop(0) if len(self.checks) > 1 else self.checks[0]

    @activity.defn
    async def settle_absent(self, request: UnresolvedOrder) -> bool:
        self.settled.append(request.reason)
        self.checks = [Verified(finding=VerificationFinding.FINAL, state="rejected")]
        return True

    @activity.defn
    async def demand_attention(self, request: UnresolvedOrder) -> bool:
        self.demands.append(request.reason)
        return True

    def activities(self) -> list[Callable[..., Any]]:
        return [self.verify_order, self.settle_absent, self.demand_attention]


@asynccontextmanager
async def following(client: Client, book: FakeBook) -> AsyncIterator[None]:
    worker = Worker(
        client,
        task_queue=names.ORDERS_QUEUE,
        workflows=[OrderWorkflow],
        activities=book.activities(),
        workflow_runner=workflow_runner(passed=()),
    )
    async with patient(worker):
        yield


async def follow(
    client: Client, order: str, *, day_end: float = FAR, first_pause: float = 2.0
) -> WorkflowHandle[OrderWorkflow, str]:
    return await client.start_workflow(
        OrderWorkflow.run,
        FollowOrder(
            order_id=order,
            user_id="u",
            day_end=day_end,
            settings=FollowSettings(first_pause=first_pause),
        ),
        id=names.order_id(order),
        task_queue=names.ORDERS_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
    )
