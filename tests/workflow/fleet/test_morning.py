"""Users of recent days are connected ahead of the bell: spread, so many at a time, once a day."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from tests.workflow.bulk_fakes import DAY, FakeMorning
from workflows import names
from workflows.morning import messages as mo
from workflows.morning.workflow import MorningProgress, MorningWorkflow


async def run(client: Client, given: mo.MorningInput, id: str = "morning-by-the-clock") -> mo.MorningResult:
    return await client.execute_workflow(MorningWorkflow.run, given, id=id, task_queue=names.BULK_QUEUE)


async def test_users_are_connected_over_the_window_in_pages(skipping: WorkflowEnvironment) -> None:
    morning = FakeMorning(50, bell_in=3000.0)
    began = (await skipping.get_current_time()).timestamp()
    async with morning.serving(skipping.client):
        result = await run(skipping.client, mo.MorningInput(window=1200.0, page=20))
    assert (result.day, result.users, result.connected, result.failed) == (DAY, 50, 50, 0)
    assert [user for user, _ in morning.tries] == morning.users
    first, last = morning.tries[0][1], morning.tries[-1][1]
    assert first >= began + 1799, "not before the window"
    assert 1100 < last - first < 1200, "spread over the window, and done at the bell"


async def test_a_second_start_on_the_same_day_does_nothing(skipping: WorkflowEnvironment) -> None:
    morning = FakeMorning(3)
    async with morning.serving(skipping.client):
        await run(skipping.client, mo.MorningInput())
        again = await run(skipping.client, mo.MorningInput(), id="morning-by-hand")
        handle = skipping.client.get_workflow_handle(names.morning_id(DAY))
        assert (await handle.describe()).close_time is not None
    assert again.reason == "this day's morning has begun already"
    assert len(morning.tries) == 3


async def test_on_a_holiday_it_ends_at_once_and_says_why(skipping: WorkflowEnvironment) -> None:
    morning = FakeMorning(3, holiday="2026-09-28 is no trading day")
    async with morning.serving(skipping.client):
        result = await run(skipping.client, mo.MorningInput())
    assert result.reason == "2026-09-28 is no trading day"
    assert not morning.tries


async def test_who_fails_is_tried_once_more_and_stops_nobody_else(skipping: WorkflowEnvironment) -> None:
    morning = FakeMorning(6)
    later = mo.Connected(ok=False, code="WORKER_UNAVAILABLE", retryable=True)
    never = mo.Connected(ok=False, code="LOGIN_REJECTED")
    morning.script = {"u0001": [later], "u0002": [later, later], "u0003": [never]}
    async with morning.serving(skipping.client):
        result = await run(skipping.client, mo.MorningInput(day=DAY))
    assert (result.users, result.connected, result.failed) == (6, 4, 2)
    assert result.codes == {"WORKER_UNAVAILABLE": 1, "LOGIN_REJECTED": 1}
    tried = [user for user, _ in morning.tries]
    assert [tried.count(user) for user in morning.users] == [1, 2, 2, 1, 1, 1]


@pytest.mark.timeout(120)
async def test_after_the_bell_the_rate_and_the_number_at_once_still_hold(
    skipping: WorkflowEnvironment,
) -> None:
    morning = FakeMorning(30, bell_in=-60.0)
    morning.takes = 0.1
    async with morning.serving(skipping.client):
        began = time.monotonic()
        result = await run(skipping.client, mo.MorningInput(day=DAY, rate=50.0, abreast=4))
    assert result.connected == 30
    assert morning.most_at_once <= 4
    assert time.monotonic() - began >= 30 / 4 * 0.1


@given(
    users=st.integers(0, 5000),
    early=st.floats(-3600, 7200),
    window=st.floats(1, 3600),
    rate=st.floats(0.1, 100),
)
def test_turns_come_in_order_within_the_rate_and_not_before_the_window(
    users: int, early: float, window: float, rate: float
) -> None:
    now = datetime(2026, 11, 23, tzinfo=UTC).timestamp()
    plan = mo.MorningPlan(day=DAY, users=users, bell=now + early)
    progress = MorningProgress.planned(plan, mo.MorningInput(window=window, rate=rate), now)
    assert progress.due >= max(now, plan.bell - window) - 1e-6
    assert progress.pause >= 1 / rate - 1e-9
    last = progress.begins_at + users * progress.pause
    allowed = max(plan.bell, progress.begins_at + users / rate)
    assert last <= allowed + 1e-3
