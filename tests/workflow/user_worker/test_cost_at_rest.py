"""cheap-at-rest: at most 6 Temporal actions an hour for a worker that nobody starts, ends or
disturbs.

Everything that Temporal bills as an action, or that a server has to write down for a workflow, is
counted from the history: timers, activities (local ones leave markers), signals, updates, search
attributes.
"""

from __future__ import annotations

import pytest
from temporalio.testing import WorkflowEnvironment

from tests.support.workflows.fakes import (
    FakeFleet,
    ensure_active,
    finished,
    handle,
    serving,
    tell,
    until_state,
)
from tests.support.workflows.user_workers import action_times
from workflows.user_worker.messages import UserWorkerSettings, WorkerHealth, WorkerState

HOUR = 3600.0
#: Seconds by which a server's timers and an hour may differ.
JITTER = 1.0
#: Seconds after the start, and before the end, in which a life is not at rest.
BUSY = 30.0


def worst_hour(times: list[float]) -> int:
    """The most actions within any hour, from the end of the start to the beginning of the end."""
    rest = [at for at in times if BUSY < at < times[-1] - BUSY]
    return max((sum(at <= other < at + HOUR - JITTER for other in rest) for at in rest), default=0)


async def lived(env: WorkflowEnvironment, user: str) -> list[float]:
    await finished(env, user)
    return action_times(await handle(env.client, user).fetch_history())


@pytest.mark.parametrize(
    "period", [60, 500, 600, 901, 960, 1200, 1500, 1790], ids=lambda p: f"{p} s"
)
async def test_an_active_user_costs_at_most_six_actions_in_any_hour(
    skipping: WorkflowEnvironment, fleet: FakeFleet, period: int
) -> None:
    """Orders come every `period` seconds for 12 hours; then the worker idles out."""
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1", UserWorkerSettings(idle_timeout=1800))
        began = (await skipping.get_current_time()).timestamp()
        fleet.last_use = lambda now: began + min(now - began, 12 * HOUR) // period * period
        times = await lived(skipping, "u1")
    assert times[-1] > 12 * HOUR
    assert 4 <= worst_hour(times) <= 6
    assert [stop.reason for stop in fleet.stops] == ["idle"]


async def test_a_worker_whose_broker_is_away_costs_no_more_while_its_user_tries(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    """The broker fails right after the start and stays away; the user keeps sending orders."""
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1", UserWorkerSettings(idle_timeout=1800))
        await tell(skipping.client, "u1", "degraded", 2, "refused")
        await until_state(skipping.client, "u1", WorkerState.RECONNECTING)
        began = (await skipping.get_current_time()).timestamp()
        fleet.last_use = lambda now: began + min(now - began, 6 * HOUR) // 60 * 60
        times = await lived(skipping, "u1")
    assert times[-1] > 6 * HOUR
    assert worst_hour(times) <= 6


async def test_an_unused_worker_whose_broker_is_away_ends_when_idle(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1", UserWorkerSettings(idle_timeout=1800))
        await tell(skipping.client, "u1", "degraded", 2, "refused")
        times = await lived(skipping, "u1")
    assert times[-1] < 1800 + 120
    assert worst_hour(times) <= 6
    assert fleet.checks == 3


async def test_a_worker_of_which_nothing_is_known_costs_no_more(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    """Its mark is missing and the launcher cannot say whether it runs, for hours."""
    fleet.health = [WorkerHealth(marked=False, running=None)] * 12
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1", UserWorkerSettings(idle_timeout=1800))
        times = await lived(skipping, "u1")
    assert times[-1] > 3 * HOUR
    assert worst_hour(times) <= 6


async def test_an_orderly_life_is_written_with_few_activities(
    skipping: WorkflowEnvironment, fleet: FakeFleet
) -> None:
    """One for the start, one or two for the end: what the timeline costs, and nothing between."""
    async with serving(skipping.client, fleet.activities()):
        await ensure_active(skipping.client, "u1", UserWorkerSettings(idle_timeout=1800))
        await finished(skipping, "u1")
    assert len(fleet.written[0].transitions) == 3
    assert len(fleet.written) <= 3
