"""The naive design's workflow, one per user:
it sleeps, reads the worker's mark, and begins again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from temporalio import workflow

WORKFLOW_NAME = "NaivePollingWorkflow"
QUEUE = "bench-polling"
READ_MARK = "read_mark"
#: Seconds between two checks: what such designs choose,
#: because a dead worker is to be noticed in a minute.
CHECK_INTERVAL_S = 60.0


@dataclass(frozen=True, kw_only=True)
class PollingInput:
    user_id: str
    #: Seconds until the first check, so that not all check at the same moment.
    first: float


@workflow.defn(name=WORKFLOW_NAME)
class NaivePollingWorkflow:
    @workflow.run
    async def run(self, given: PollingInput) -> None:
        pause = given.first
        while not workflow.info().is_continue_as_new_suggested():
            await workflow.sleep(pause)
            await workflow.execute_activity(
                READ_MARK,
                given.user_id,
                result_type=bool,
                start_to_close_timeout=timedelta(seconds=10),
            )
            pause = CHECK_INTERVAL_S
        workflow.continue_as_new(PollingInput(user_id=given.user_id, first=CHECK_INTERVAL_S))
