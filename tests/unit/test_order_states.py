"""The order's state machine against a model that has seen everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.database.orders.states import OPEN_STATES, RANK, rank
from tests.support.orders.model import OrderModel, further_states
from worker_runtime.protocol.messages import FINAL_ORDER_STATES, OrderState

EVENTS = st.lists(st.tuples(st.sampled_from(list(OrderState)), st.integers(0, 5)), max_size=12)


def after(happened: list[tuple[OrderState, int]], begin: OrderModel | None = None) -> OrderModel:
    progress = begin or OrderModel()
    for state, filled in happened:
        progress = progress.after_event(state, filled)
    return progress


def test_every_state_has_its_place() -> None:
    assert set(RANK) == set(OrderState)


def test_a_final_state_has_no_way_on() -> None:
    assert all(further_states(state) == frozenset() for state in FINAL_ORDER_STATES)


@pytest.mark.parametrize("state", OPEN_STATES)
def test_every_open_state_can_still_end_in_each_final_one(state: str) -> None:
    assert further_states(state) >= FINAL_ORDER_STATES


def test_who_knows_that_the_broker_has_it_knows_more_than_who_lost_the_answer() -> None:
    assert OrderState.SUBMITTED in further_states(OrderState.UNKNOWN)
    assert OrderState.UNKNOWN not in further_states(OrderState.SUBMITTED)


@given(happened=EVENTS)
def test_the_state_is_the_furthest_that_was_reported_first(
    happened: list[tuple[OrderState, int]],
) -> None:
    reported = [OrderState.ACCEPTED, *(state for state, _ in happened)]
    furthest = max(rank(state) for state in reported)
    assert after(happened).state == next(state for state in reported if rank(state) == furthest)


@given(happened=EVENTS, order=st.randoms(use_true_random=False), copies=st.integers(1, 3))
def test_repeated_late_and_reordered_events_bring_an_order_as_far(
    happened: list[tuple[OrderState, int]], order: object, copies: int
) -> None:
    mixed = happened * copies
    order.shuffle(mixed)  # type: ignore[attr-defined]
    in_order, shuffled = after(happened), after(mixed)
    assert rank(shuffled.state) == rank(in_order.state)
    assert shuffled.filled_quantity == in_order.filled_quantity
    assert shuffled.watched == in_order.watched


@given(happened=EVENTS, late_events=EVENTS)
def test_nothing_moves_a_final_order_but_late_fills(
    happened: list[tuple[OrderState, int]], late_events: list[tuple[OrderState, int]]
) -> None:
    ended = after([*happened, (OrderState.CANCELLED, 0)])
    later = after(late_events, ended)
    assert later.state == ended.state
    assert later.filled_quantity >= ended.filled_quantity


@given(happened=EVENTS, late_events=EVENTS)
def test_an_open_order_is_watched_or_needs_attention(
    happened: list[tuple[OrderState, int]], late_events: list[tuple[OrderState, int]]
) -> None:
    for progress in (
        after(happened),
        after(late_events, after(happened).after_dead_end("nobody knows")),
        after(late_events, after(happened).after_dead_end("nobody knows").rechecked()),
    ):
        assert progress.final or progress.watched or progress.attention
        assert not (progress.final and (progress.watched or progress.attention))
