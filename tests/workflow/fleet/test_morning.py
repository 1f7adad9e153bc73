"""Users of recent days are connected ahead of the bell: spread, in groups, once a day."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.bulk_fakes import DAY, FakeMorning
from tests.support.workflows.fakes import until
from workflows import names
from workflows.morning.messages import Connected, MorningInput, MorningPlan, MorningResult
from workflows.morning.workflow import MorningProgress, MorningWorkflow


async def run(
    client: Client, given: MorningInput, id: str = "morning-by-the-clock"
) -> MorningResult:
    return await client.execute_workflow(
        MorningWorkflow.run, given, id=id, task_queue=names.BULK_QUEUE
    )


def pauses(times: list[float]) -> list[float]:
    """Seconds from each of these moments to the next."""
    return [after - at for at, after in pairwise(times)]


async def test_users_are_connected_over_the_window_in_pages(skipping: WorkflowEnvironment) -> None:
    morning = FakeMorning(50, bell_in=3000.0)
    began = (await skipping.get_current_time()).timestamp()
    async with morning.serving(skipping.client):
        result = await run(skipping.client, MorningInput(window=1200.0, page=20))
    assert (result.day, result.users, result.connected, result.failed) == (DAY, 50, 50, 0)
    assert [user for user, _ in morning.tries] == morning.users
    first, last = morning.tries[0][1], morning.tries[-1][1]
    assert first >= began + 1799, "not before the window"
    assert 1100 < last - first < 1200, "spread over the window, and done at the bell"


async def test_each_bell_has_its_window_and_everybody_stays_until_the_last(
    skipping: WorkflowEnvironment,
) -> None:
    morning = FakeMorning(50, bell_in=2000.0, later=(30, 0, 5))
    began = (await skipping.get_current_time()).timestamp()
    async with morning.serving(skipping.client):
        result = await run(skipping.client, MorningInput(window=1200.0, page=20))
    assert (result.users, result.connected) == (85, 85)
    assert [user for user, _ in morning.tries] == morning.users
    tried, at = dict(morning.tries), began + 2000.0
    for users, bell in (
        (morning.users[:50], at),
        (morning.users[50:80], at + 900),
        (morning.users[80:], at + 2700),
    ):
        assert bell - 1201 < tried[users[0]]
        assert all(tried[user] < bell for user in users)
    assert set(morning.stays) == set(morning.users)
    assert all(abs(stay - (at + 2700)) < 5 for stay in morning.stays.values())


async def test_an_evening_is_another_run_than_the_morning(skipping: WorkflowEnvironment) -> None:
    morning = FakeMorning(2)
    async with morning.serving(skipping.client):
        await run(skipping.client, MorningInput())
        evening = await run(skipping.client, MorningInput(evening=True), id="evening-by-the-clock")
        again = await run(skipping.client, MorningInput(evening=True), id="evening-by-hand")
    assert (evening.connected, again.reason) == (2, "this day's evening has begun already")


async def test_a_second_start_on_the_same_day_does_nothing(skipping: WorkflowEnvironment) -> None:
    morning = FakeMorning(3)
    async with morning.serving(skipping.client):
        await run(skipping.client, MorningInput())
        again = await run(skipping.client, MorningInput(), id="morning-by-hand")
        handle = skipping.client.get_workflow_handle(names.morning_id(DAY))
        assert (await handle.describe()).close_time is not None
    assert again.reason == "this day's morning has begun already"
    assert len(morning.tries) == 3


async def test_on_a_holiday_it_ends_at_once_and_says_why(skipping: WorkflowEnvironment) -> None:
    morning = FakeMorning(3, holiday="2026-09-28 is not a trading day")
    async with morning.serving(skipping.client):
        result = await run(skipping.client, MorningInput())
    assert result.reason == "2026-09-28 is not a trading day"
    assert not morning.tries


async def test_who_fails_is_tried_again_until_the_last_bell_and_stops_nobody_else(
    skipping: WorkflowEnvironment,
) -> None:
    """Each page has its last turn long after the first failure: repeats do not wait for it."""
    morning = FakeMorning(6, bell_in=1200.0)
    later = Connected(ok=False, code="WORKER_UNAVAILABLE", retryable=True)
    never = Connected(ok=False, code="LOGIN_REJECTED")
    morning.script = {
        "u0000": [later],
        "u0001": [later] * 3,
        "u0002": [later] * 9,
        "u0003": [never],
    }
    async with morning.serving(skipping.client):
        result = await run(skipping.client, MorningInput(day=DAY, page=2))
    assert (result.users, result.connected, result.failed) == (6, 4, 2)
    assert result.codes == {"WORKER_UNAVAILABLE": 1, "LOGIN_REJECTED": 1}
    tried = {
        user: [at for tried_user, at in morning.tries if tried_user == user]
        for user in morning.users
    }
    # The first try of u0002 is 800 s before the bell: 30 + 60 + 120 + 240 s later comes the last
    # one.
    assert [len(times) for times in tried.values()] == [2, 4, 5, 1, 1, 1]
    assert [round(after - at) for at, after in pairwise(tried["u0001"])] == pytest.approx(
        [30, 60, 120], abs=3
    )
    turns = [times[0] for times in tried.values()]
    assert [round(after - at) for at, after in pairwise(turns)] == pytest.approx([200] * 5, abs=3)


async def test_who_is_tried_again_holds_up_no_later_page(skipping: WorkflowEnvironment) -> None:
    morning = FakeMorning(4, bell_in=1200.0)
    morning.script = {"u0000": [Connected(ok=False, code="WORKER_UNAVAILABLE", retryable=True)]}
    morning.held["u0001"] = asyncio.Event()
    tried = morning.tries
    async with morning.serving(skipping.client):
        given = MorningInput(day=DAY, window=1.0, rate=20.0, page=2, retry=0.5)
        ending = asyncio.create_task(run(skipping.client, given))
        await until(lambda: "u0001" in dict(tried))
        again = morning.held["u0000"] = asyncio.Event()
        await asyncio.sleep(1.5)  # the repeat of the first one is due, and will not end
        morning.held["u0001"].set()
        await until(lambda: "u0003" in dict(tried))
        again.set()
        result = await ending
    assert (result.users, result.connected) == (4, 4)
    assert [user for user, _ in tried].count("u0000") == 2


async def test_after_the_bell_who_fails_is_tried_once_more(skipping: WorkflowEnvironment) -> None:
    morning = FakeMorning(3, bell_in=-60.0)
    later = Connected(ok=False, code="WORKER_UNAVAILABLE", retryable=True)
    morning.script = {"u0000": [later], "u0002": [later] * 9}
    async with morning.serving(skipping.client):
        result = await run(skipping.client, MorningInput(day=DAY, page=2))
    assert (result.users, result.connected, result.codes) == (3, 2, {"WORKER_UNAVAILABLE": 1})
    tried = [user for user, _ in morning.tries]
    assert [tried.count(user) for user in morning.users] == [2, 1, 2]


async def test_when_all_fail_repeats_keep_the_rate_and_end(skipping: WorkflowEnvironment) -> None:
    morning = FakeMorning(30, bell_in=100.0)
    later = Connected(ok=False, code="TEMPORAL_UNAVAILABLE", retryable=True)
    morning.script = {user: [later] * 9 for user in morning.users}
    async with morning.serving(skipping.client):
        result = await run(skipping.client, MorningInput(day=DAY, page=7, rate=1.0))
    assert (result.users, result.connected, result.codes) == (30, 0, {"TEMPORAL_UNAVAILABLE": 30})
    repeats = [
        at
        for n, (user, at) in enumerate(morning.tries)
        if user in [tried_user for tried_user, _ in morning.tries[:n]]
    ]
    assert len(repeats) >= 30
    assert all(after - at >= 0.9 for at, after in pairwise(sorted(repeats)))


@pytest.mark.timeout(120)
async def test_after_the_bell_the_rate_and_the_number_at_once_still_hold(
    skipping: WorkflowEnvironment,
) -> None:
    morning = FakeMorning(30, bell_in=-60.0)
    morning.takes = 0.1
    async with morning.serving(skipping.client):
        began = time.monotonic()
        result = await run(skipping.client, MorningInput(day=DAY, rate=50.0, abreast=4))
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
    plan = MorningPlan(day=DAY, users=users, bell=now + early)
    progress = MorningProgress.planned(plan, MorningInput(window=window, rate=rate), now)
    assert progress.due >= max(now, plan.bell - window) - 1e-6
    assert progress.pause >= 1 / rate - 1e-9
    last = progress.begins_at + users * progress.pause
    allowed = max(plan.bell, progress.begins_at + users / rate)
    assert last <= allowed + 1e-3
