"""Activities of the daily statements and the daily report under the real names: a day, and users in
pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from workflows import names
from workflows.reports.messages import (
    EnqueueStatements,
    MakeReport,
    PlanStatements,
    ReportResult,
    StatementsPage,
    StatementsPlan,
)
from workflows.reports.workflow import DailyReportWorkflow, StatementsWorkflow
from workflows.sandbox import workflow_runner

DAY = "2026-11-23"


class FakeStatements:
    """Users with an address, all of whom are sent a statement unless they were before."""

    def __init__(self, users: int, *, reason: str = "") -> None:
        self.users = [f"u{number:04}" for number in range(users)]
        self.reason = reason
        self.sent: set[str] = set()
        #: User after whom each page began, and the time (Unix seconds) it was asked for.
        self.pages: list[tuple[str, float]] = []

    @activity.defn
    async def plan_statements(self, request: PlanStatements) -> StatementsPlan:
        return StatementsPlan(day=request.day or DAY, reason=self.reason, users=len(self.users))

    @activity.defn
    async def enqueue_statements(self, request: EnqueueStatements) -> StatementsPage:
        at = activity.info().current_attempt_scheduled_time.timestamp()
        self.pages.append((request.after, at))
        page = [user for user in self.users if user > request.after][: request.limit]
        new = set(page) - self.sent
        self.sent |= new
        return StatementsPage(
            users=len(page),
            after=page[-1] if page else "",
            enqueued=len(new),
            known=len(page) - len(new),
        )

    @activity.defn
    async def make_report(self, request: MakeReport) -> ReportResult:
        return ReportResult(
            day=request.day or DAY, reason=self.reason, mails=0 if self.reason else 2
        )

    @asynccontextmanager
    async def serving(self, client: Client) -> AsyncIterator[None]:
        async with Worker(
            client,
            task_queue=names.BULK_QUEUE,
            workflows=[StatementsWorkflow, DailyReportWorkflow],
            workflow_runner=workflow_runner(passed=()),
            activities=[self.plan_statements, self.enqueue_statements, self.make_report],
        ):
            yield
