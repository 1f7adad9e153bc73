"""The daily statements and the daily report, both started by a Schedule every day.

Statements: a job for each user with an address, after the day's orders have ended. For a day
without trading the workflow ends at once. The work of a day is one workflow, `statements-{day}`, so
a second start for the same day does nothing. Users come page by page, at the given rate. A job's
key is made of user and day, so a repeated page sends nothing twice.

The report: PostgreSQL has one of a day, and the ids of its mails are made of the day, so a second
run for the same day does nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from workflows import names
    from workflows.entity import carried_state, continue_as_new, copied_fields, delegate_day
    from workflows.reports.messages import (
        DailyReportInput,
        EnqueueStatements,
        MakeReport,
        PlanStatements,
        ReportResult,
        StatementCounts,
        StatementsInput,
        StatementsPage,
        StatementsResult,
    )

from workflows import calls


@dataclass(frozen=True, kw_only=True)
class StatementsProgress(StatementsPage):
    """The progress of one day: the counts of all its pages so far."""

    day: str
    #: Users with an address, when it began.
    of: int

    def with_page(self, page: StatementsPage) -> StatementsProgress:
        counts = {
            field.name: getattr(self, field.name) + getattr(page, field.name)
            for field in fields(StatementCounts)
        }
        return replace(self, after=page.after or self.after, **counts)

    def result(self, now: float) -> StatementsResult:
        return StatementsResult(**copied_fields(self, StatementsResult), ended_at=now)


@workflow.defn(name=names.STATEMENTS)
class StatementsWorkflow:
    @workflow.run
    async def run(self, given: StatementsInput) -> StatementsResult:
        if given.carried is not None:
            return await self._send(given, carried_state(StatementsProgress, given.carried))
        plan = await calls.plan_statements(PlanStatements(day=given.day, at=workflow.time()))
        done = await delegate_day(
            StatementsWorkflow.run,
            given,
            plan,
            StatementsResult,
            id=names.statements_id(plan.day),
            begun="the statements of this day have begun already",
            summary=f"sends the statements of {plan.day}",
        )
        return done or await self._send(given, StatementsProgress(day=plan.day, of=plan.users))

    async def _send(self, given: StatementsInput, progress: StatementsProgress) -> StatementsResult:
        """Enqueues the statements of some pages of users, then continues in a new run."""
        for _ in range(given.pages):
            self._show(progress)
            page = await calls.enqueue_statements(
                EnqueueStatements(
                    day=progress.day, after=progress.after, limit=given.page, rate=given.rate
                )
            )
            progress = progress.with_page(page)
            if page.users < given.page:
                self._show(progress)
                return progress.result(workflow.time())
            await workflow.sleep(page.users / given.rate, summary="until the next page's turn")
        continue_as_new(replace(given, carried=asdict(progress)))

    def _show(self, progress: StatementsProgress) -> None:
        text = f"### {progress.users} of {progress.of} users\n\n{progress.enqueued} jobs enqueued"
        if progress.known:
            text += f", {progress.known} were there already"
        if progress.too_many:
            text += f", {progress.too_many} users had more orders than a statement can hold"
        if progress.refused:
            text += f", {progress.refused} jobs were refused"
        workflow.set_current_details(text)


@workflow.defn(name=names.DAILY_REPORT)
class DailyReportWorkflow:
    @workflow.run
    async def run(self, given: DailyReportInput) -> ReportResult:
        made = await calls.make_report(MakeReport(day=given.day, at=workflow.time()))
        workflow.set_current_details(
            f"### {made.day}\n\n{made.reason or f'{made.mails} mails enqueued'}"
        )
        return made
