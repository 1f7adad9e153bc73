"""Statements of a day: users in pages at a rate, once a day, on trading days only, by a
schedule."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import Client, ScheduleOverlapPolicy
from temporalio.service import RPCError
from temporalio.testing import WorkflowEnvironment

from infra.settings import Settings
from infra.temporal import schedules
from tests.support.workflows.statement_fakes import DAY, FakeStatements
from workflows import names
from workflows.reports.messages import StatementsInput, StatementsResult
from workflows.reports.workflow import StatementsWorkflow


async def run(
    client: Client, given: StatementsInput, id: str = "statements-by-the-clock"
) -> StatementsResult:
    return await client.execute_workflow(
        StatementsWorkflow.run, given, id=id, task_queue=names.BULK_QUEUE
    )


async def test_users_come_page_by_page_at_the_rate_over_several_runs(
    skipping: WorkflowEnvironment,
) -> None:
    fake = FakeStatements(25)
    async with fake.serving(skipping.client):
        result = await run(skipping.client, StatementsInput(page=5, pages=2, rate=0.5))
    assert (result.day, result.reason) == (DAY, "")
    assert (result.users, result.enqueued, result.known) == (25, 25, 0)
    # A page that is full may be followed by another one.
    assert [after for after, _ in fake.pages] == ["", "u0004", "u0009", "u0014", "u0019", "u0024"]
    apart = [
        later - sooner for (_, sooner), (_, later) in zip(fake.pages, fake.pages[1:], strict=False)
    ]
    assert min(apart) >= 9.9


async def test_a_second_start_for_the_same_day_does_nothing(skipping: WorkflowEnvironment) -> None:
    fake = FakeStatements(3)
    async with fake.serving(skipping.client):
        first = await run(skipping.client, StatementsInput())
        again = await run(skipping.client, StatementsInput(), id="statements-by-hand")
        handle = skipping.client.get_workflow_handle(names.statements_id(DAY))
        assert (await handle.describe()).close_time is not None
    assert (first.users, first.enqueued) == (3, 3)
    assert again.reason == "the statements of this day have begun already"
    assert len(fake.pages) == 1


async def test_a_day_without_trading_is_left_out_and_says_so(skipping: WorkflowEnvironment) -> None:
    fake = FakeStatements(3, reason=f"{DAY} was no trading day")
    async with fake.serving(skipping.client):
        result = await run(skipping.client, StatementsInput())
    assert (result.reason, result.users) == (f"{DAY} was no trading day", 0)
    assert fake.pages == []


async def test_the_schedule_follows_the_settings_and_keeps_a_pause(temporal: Client) -> None:
    try:
        await schedules.ensure_schedules(
            temporal, Settings(statements="on", statements_at="18:05"), names.STATEMENTS_SCHEDULE
        )
        handle = temporal.get_schedule_handle(names.STATEMENTS_SCHEDULE)
        # Nobody serves its queue here: what it would start must not be met by another test.
        await handle.pause(note="by an operator")
        schedule = (await handle.describe()).schedule
        [daily] = schedule.spec.calendars
        assert ([bound.start for bound in daily.hour], [bound.start for bound in daily.minute]) == (
            [18],
            [5],
        )
        assert schedule.spec.time_zone_name == "Asia/Taipei"
        assert schedule.policy.overlap == ScheduleOverlapPolicy.SKIP
        assert schedule.policy.catchup_window == timedelta(hours=12)
        changed = Settings(statements="on", statements_zone="Europe/Berlin", statements_rate=2.0)
        await schedules.ensure_schedules(temporal, changed, names.STATEMENTS_SCHEDULE)
        schedule = (await handle.describe()).schedule
        assert schedule.spec.time_zone_name == "Europe/Berlin"
        assert (schedule.state.paused, schedule.state.note) == (True, "by an operator")
    finally:
        await schedules.ensure_schedules(
            temporal, Settings(statements="off"), names.STATEMENTS_SCHEDULE
        )
    with pytest.raises(RPCError):
        await temporal.get_schedule_handle(names.STATEMENTS_SCHEDULE).describe()
    await schedules.ensure_schedules(
        temporal, Settings(statements="off"), names.STATEMENTS_SCHEDULE
    )


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, False),
        ({"mail_host": "mail.example.com"}, True),
        ({"webhook_key_file": "key"}, True),
        ({"mail_host": "mail.example.com", "statements": "off"}, False),
        ({"statements": "on"}, True),
    ],
)
def test_without_a_way_to_send_them_there_are_none_unless_one_says_so(
    given: dict[str, Any], sent: bool
) -> None:
    assert schedules.sends_statements(Settings(**given)) is sent
