"""Each event changes the state of a user's worker, without Temporal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from worker_runtime.protocol.messages import WorkerEventKind
from workflows.user_worker.events import EventEffect, apply_event
from workflows.user_worker.messages import (
    UserWorkerSettings,
    WorkerEventSignal,
    WorkerRef,
    WorkerState,
)
from workflows.user_worker.state import UserWorkerState
from workflows.user_worker.visibility import details

WORKER = WorkerRef(worker_id="w1", task_id="t1", epoch=3, claim_id="c1", pool="default")
NOW = 1000.0


def connecting() -> UserWorkerState:
    fresh = UserWorkerState(user_id="u1", pool="default", settings=UserWorkerSettings()).opened(
        100.0
    )
    return fresh.claimed("c1", 101.0).assigned(WORKER).connecting(1, 102.0)


def active() -> UserWorkerState:
    return connecting().active(101.5, 103.0, 104.0)


def event(kind: str, sequence: int = 2, **changes: Any) -> WorkerEventSignal:
    plain = WorkerEventSignal(
        worker_id="w1", epoch=3, sequence=sequence, kind=kind, at=990.0, detail="the line is dead"
    )
    return replace(plain, **changes)


@pytest.mark.parametrize("kind", [WorkerEventKind.RECONNECTING, WorkerEventKind.DEGRADED])
def test_a_lost_broker_makes_the_state_reconnecting_and_degraded(kind: WorkerEventKind) -> None:
    state = apply_event(active(), event(kind), NOW).state
    assert (state.state, state.reason) == (WorkerState.RECONNECTING, "the line is dead")
    assert (state.health, state.health_at) == ("degraded: the line is dead", 990.0)
    assert not state.needs_credentials


def test_a_workers_text_is_shown_without_links_pictures_or_markup() -> None:
    said = "[log in](https://x.example) ![](https://x.example/seen) <b>\n\n### now"
    shown = details(apply_event(active(), event(WorkerEventKind.DEGRADED, detail=said), NOW).state)
    assert shown.count("https://x.example") == 4
    for markup in ("](", "![", "<b>"):
        assert markup not in shown.replace("\\]", "").replace("\\[", "").replace("\\<", "")
    assert [line for line in shown.splitlines() if line.startswith("#")] == shown.splitlines()[:1]


def test_a_degraded_worker_that_reconnects_keeps_its_deadline() -> None:
    once = apply_event(active(), event(WorkerEventKind.RECONNECTING), NOW).state
    twice = apply_event(once, event(WorkerEventKind.DEGRADED, 4, detail="refused"), NOW + 5).state
    assert (twice.since, twice.deadline, twice.health) == (
        once.since,
        once.deadline,
        "degraded: refused",
    )


def test_connected_makes_the_worker_healthy_and_does_not_reset_the_idle_timer() -> None:
    lost = apply_event(active(), event(WorkerEventKind.RECONNECTING), NOW).state
    back = apply_event(lost, event(WorkerEventKind.CONNECTED, 4), NOW + 30).state
    assert (back.state, back.health, back.reason) == (WorkerState.ACTIVE, "well", "")
    assert (back.last_activity, back.deadline) == (104.0, 104.0 + 1800.0)


@pytest.mark.parametrize(
    "before", [active(), apply_event(active(), event(WorkerEventKind.DEGRADED, 1), NOW).state]
)
def test_a_replaced_session_waits_for_its_credentials(before: UserWorkerState) -> None:
    state = apply_event(before, event(WorkerEventKind.SESSION_REPLACED), NOW).state
    assert (state.state, state.needs_credentials, state.replacements) == (
        WorkerState.RECONNECTING,
        True,
        1,
    )
    again = apply_event(state.not_answered(), event(WorkerEventKind.SESSION_REPLACED, 4), NOW).state
    assert (again.replacements, again.unanswered) == (2, 0)
    assert not apply_event(again, event(WorkerEventKind.CONNECTED, 6), NOW).state.needs_credentials


def test_failed_gives_the_worker_up_for_the_reason_it_reported() -> None:
    result = apply_event(
        active(), event(WorkerEventKind.FAILED, detail="LOGIN_REJECTED: wrong key"), NOW
    )
    assert result.given_up == "LOGIN_REJECTED: wrong key"
    assert apply_event(active(), event(WorkerEventKind.FAILED, detail=""), NOW).given_up.startswith(
        "BROKER_ERROR: "
    )


@pytest.mark.parametrize("kind", [WorkerEventKind.OWNER_MISSING, WorkerEventKind.FENCED])
def test_a_doubtful_owner_is_checked(kind: WorkerEventKind) -> None:
    result = apply_event(active(), event(kind), NOW)
    assert result.check
    assert result.state == replace(active(), sequence=2)


@pytest.mark.parametrize("kind", [WorkerEventKind.CLOSED, "of a later release"])
def test_other_events_are_only_counted(kind: str) -> None:
    assert apply_event(active(), event(kind), NOW) == EventEffect(
        state=replace(active(), sequence=2)
    )


@pytest.mark.parametrize("kind", [WorkerEventKind.SESSION_REPLACED, WorkerEventKind.FAILED])
def test_a_session_that_dies_while_it_connects_makes_the_claim_useless(
    kind: WorkerEventKind,
) -> None:
    result = apply_event(connecting(), event(kind), NOW)
    assert result.lost
    assert result.state.state == WorkerState.CONNECTING


@pytest.mark.parametrize(
    "changes",
    [{"sequence": 0}, {"epoch": 2}, {"epoch": 4}, {"worker_id": "w2"}],
    ids=["a repeat", "an older epoch", "a later epoch", "another worker"],
)
@pytest.mark.parametrize("kind", list(WorkerEventKind))
def test_what_is_not_news_changes_nothing(kind: WorkerEventKind, changes: dict[str, Any]) -> None:
    assert apply_event(active(), event(kind, **{"sequence": 9, **changes}), NOW) == EventEffect(
        state=active()
    )


def test_an_event_without_a_worker_changes_nothing() -> None:
    gone = active().drains("requested", NOW).stopped()
    assert apply_event(gone, event(WorkerEventKind.FAILED), NOW) == EventEffect(state=gone)


@pytest.mark.parametrize("at", [0.0, -1.0, float("nan"), float("inf"), NOW + 1])
def test_a_clock_that_cannot_be_right_is_not_believed(at: float) -> None:
    assert apply_event(active(), event(WorkerEventKind.DEGRADED, at=at), NOW).state.health_at == NOW


def test_a_workers_own_words_are_kept_short() -> None:
    assert (
        len(
            apply_event(
                active(), event(WorkerEventKind.DEGRADED, detail="x" * 5000), NOW
            ).state.reason
        )
        == 200
    )
