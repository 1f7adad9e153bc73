from __future__ import annotations

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import ActivityTaskStartedEventAttributes, HistoryEvent

from infra.lab.bench.fleet.actions import kinds_of


@pytest.mark.parametrize(
    ("event_type", "kinds"),
    [
        (EventType.EVENT_TYPE_TIMER_STARTED, ["timers"]),
        (EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED, ["activities"]),
        (EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED, ["signals"]),
        (EventType.EVENT_TYPE_WORKFLOW_EXECUTION_UPDATE_ACCEPTED, ["updates"]),
        (EventType.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED, ["starts"]),
        (EventType.EVENT_TYPE_MARKER_RECORDED, ["local_activities"]),
        (EventType.EVENT_TYPE_UPSERT_WORKFLOW_SEARCH_ATTRIBUTES, ["search_attributes"]),
        (EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED, []),
        (EventType.EVENT_TYPE_TIMER_FIRED, []),
    ],
)
def test_an_event_of_a_history_counts_as_one_action_or_none(
    event_type: EventType.ValueType, kinds: list[str]
) -> None:
    assert kinds_of(HistoryEvent(event_type=event_type)) == kinds


def test_each_attempt_of_an_activity_after_the_first_is_an_action_more() -> None:
    def started(attempt: int) -> HistoryEvent:
        return HistoryEvent(
            event_type=EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED,
            activity_task_started_event_attributes=ActivityTaskStartedEventAttributes(
                attempt=attempt
            ),
        )

    assert kinds_of(started(1)) == []
    assert kinds_of(started(3)) == ["retries", "retries"]
