"""The runs of the daily statements and the daily report whose histories are kept."""

from __future__ import annotations

from temporalio.client import Client, WorkflowHistory

from tests.support.workflows.statement_fakes import DAY, FakeStatements
from workflows import names
from workflows.reports.messages import DailyReportInput, StatementsInput
from workflows.reports.workflow import DailyReportWorkflow, StatementsWorkflow

#: Names of what `run_statements` gives.
STATEMENTS = {
    "statements_by_the_clock",
    "statements_started_again",
    "statements_on_a_holiday",
    "statements_first_pages",
    "statements_last_pages",
    "daily_report",
    "daily_report_on_a_holiday",
}


async def run_statements(client: Client) -> dict[str, WorkflowHistory]:
    """Five users in pages of two, in two runs; started by the clock, once more, and on a
    holiday."""
    fake = FakeStatements(5)
    given = StatementsInput(page=2, pages=2, rate=100.0)

    async def started(id: str, given: StatementsInput = given) -> WorkflowHistory:
        handle = await client.start_workflow(
            StatementsWorkflow.run, given, id=id, task_queue=names.BULK_QUEUE
        )
        await handle.result()
        first = client.get_workflow_handle(id, run_id=handle.first_execution_run_id)
        return await first.fetch_history()

    async def reported(id: str) -> WorkflowHistory:
        handle = await client.start_workflow(
            DailyReportWorkflow.run, DailyReportInput(), id=id, task_queue=names.BULK_QUEUE
        )
        await handle.result()
        return await handle.fetch_history()

    async with fake.serving(client):
        by_the_clock = await started("replay-statements")
        again = await started("replay-statements-again")
        by_hand = StatementsInput(day=DAY, page=2, pages=2, rate=100.0)
        first_pages = await started("replay-statements-by-hand", by_hand)
        last_pages = await client.get_workflow_handle("replay-statements-by-hand").fetch_history()
        report = await reported("replay-daily-report")
        fake.reason = f"{DAY} was no trading day"
        holiday = await started("replay-statements-holiday")
        no_report = await reported("replay-daily-report-holiday")
    return {
        "statements_by_the_clock": by_the_clock,
        "statements_started_again": again,
        "statements_first_pages": first_pages,
        "statements_last_pages": last_pages,
        "statements_on_a_holiday": holiday,
        "daily_report": report,
        "daily_report_on_a_holiday": no_report,
    }
