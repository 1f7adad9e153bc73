"""Without each safeguard of one owner, the model finds the harm that the safeguard prevents.

A model that cannot fail proves nothing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.model.explore import explore
from tests.unit.model.state import (
    BEHIND,
    CONFIRMED,
    HOST_LOST,
    MARK_PROVES,
    OLD_ORDER,
    STOLEN_ORDER,
    TWO_SESSIONS,
    Rules,
    Violation,
)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "faults",
    [replace(CONFIRMED, terminations=1), replace(CONFIRMED, late_claims=1)],
    ids=["terminated", "late"],
)
def test_a_claim_that_does_not_check_unended_assignments_makes_two_sessions(faults: Rules) -> None:
    explored = explore(replace(faults, check_unended=False))
    assert explored.violation == TWO_SESSIONS
    assert any("terminated" in step or "late call" in step for step in explored.story)


@pytest.mark.parametrize(
    ("rules", "harm"),
    [
        pytest.param(
            replace(CONFIRMED, confirm_stop=False), TWO_SESSIONS, id="no confirmation: two sessions"
        ),
        pytest.param(
            replace(CONFIRMED, confirm_stop=False, flushes=0, replacements=0, overlooked=BEHIND),
            OLD_ORDER,
            id="no confirmation: an old order",
        ),
        pytest.param(
            replace(HOST_LOST, check_lease=False, overlooked=BEHIND), OLD_ORDER, id="no lease check"
        ),
        pytest.param(
            replace(CONFIRMED, check_epoch_in_pop=False), STOLEN_ORDER, id="no epoch in pop"
        ),
        pytest.param(
            replace(HOST_LOST, check_epoch_in_mark=False), TWO_SESSIONS, id="no epoch in mark"
        ),
        pytest.param(
            replace(HOST_LOST, lease_from_send=False), TWO_SESSIONS, id="lease from the reply"
        ),
        pytest.param(
            replace(HOST_LOST, fence_before_wait=False), TWO_SESSIONS, id="wait before the fence"
        ),
        pytest.param(
            replace(MARK_PROVES, fence_before_wait=False), TWO_SESSIONS, id="mark before the fence"
        ),
        pytest.param(
            replace(MARK_PROVES, check_kept=False), TWO_SESSIONS, id="mark of a flushed Valkey"
        ),
        pytest.param(
            replace(MARK_PROVES, lease_from_send=False), TWO_SESSIONS, id="mark, lease from reply"
        ),
    ],
)
def test_without_a_safeguard_the_model_finds_the_harm(rules: Rules, harm: Violation) -> None:
    explored = explore(rules)
    assert explored.violation == harm
    assert "worker 2 is claimed" in explored.story


def test_a_frozen_process_on_a_lost_host_is_the_gap_that_no_check_can_close() -> None:
    """Stopped between the lease check and the call, let go after the successor's login."""
    explored = explore(
        replace(HOST_LOST, freezes=True, flushes=0, overlooked=BEHIND),
    )
    assert explored.violation == OLD_ORDER
    story = list(explored.story)
    checked = story.index("1 checks its lease: checked")
    stopped = story.index("session 1 is stopped")
    login = story.index("2 logs in")
    assert checked < stopped < login < story.index("1 calls the broker")
    assert "the end of worker 1 is confirmed" not in story


def test_an_order_on_the_wire_at_the_end_of_its_process_may_arrive_late() -> None:
    """It was called while its worker was the owner. Only the network's own order of things hides
    this."""
    explored = explore(replace(CONFIRMED, wire_keeps_order=False))
    assert explored.violation == OLD_ORDER
    assert explored.story[-1] == "an order that the ended process of 1 had sent arrives"


def test_a_flush_and_a_late_orchestrator_on_top_of_a_lost_host_are_outside_the_argument() -> None:
    explored = explore(replace(HOST_LOST, late_own=True))
    assert explored.violation == TWO_SESSIONS
    assert "Valkey loses everything" in explored.story
    assert "the other orchestrator repeats set_owner.lua of 1" in explored.story
