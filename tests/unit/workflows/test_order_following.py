"""An order's workflow decides by its checks, without Temporal."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.entity import carried_state
from workflows.order.messages import FollowSettings, VerificationFinding, Verified
from workflows.order.state import FollowedOrder, OrderStep

SETTINGS = FollowSettings()
DAY_END = 100_000.0
UNASKED = Verified(
    finding=VerificationFinding.UNASKED,
    state="submitted",
    code="BROKER_UNREACHABLE",
    detail="no route",
)


def missing(
    *, state: str = "unknown", certain: bool = True, dead: bool = True, quiet: float = 0.0
) -> Verified:
    return Verified(
        finding=VerificationFinding.MISSING,
        state=state,
        complete=True,
        certain=certain,
        dead=dead,
        quiet_since=quiet,
    )


def after(*checks: tuple[float, Verified]) -> FollowedOrder:
    follow = FollowedOrder()
    for now, seen in checks:
        follow = follow.after_check(seen, now, SETTINGS)
    return follow


def test_a_final_order_ends_it() -> None:
    follow = after((1.0, Verified(finding=VerificationFinding.FINAL, state="filled")))
    assert follow.step(1.0, DAY_END) == OrderStep.END


@pytest.mark.parametrize(("dead", "wait"), [(True, 60.0), (False, 120.0)])
def test_two_complete_listings_after_a_while_prove_absence(dead: bool, wait: float) -> None:
    early = missing(dead=dead)
    follow = after((0.0, early), (10.0, early), (wait - 1, early), (wait, early))
    assert follow.step(wait, DAY_END) == OrderStep.WAIT
    follow = follow.after_check(early, wait + 2, SETTINGS)
    assert follow.step(wait + 2, DAY_END) == OrderStep.SETTLE


def test_a_listing_that_is_behind_proves_only_what_it_shows() -> None:
    late = replace(missing(), behind=90.0)
    follow = after((60.0, late), (100.0, late), (149.0, late))
    assert (follow.missing, follow.step(149.0, DAY_END)) == (0, OrderStep.WAIT)
    follow = follow.after_check(late, 150.0, SETTINGS).after_check(late, 152.0, SETTINGS)
    assert follow.step(152.0, DAY_END) == OrderStep.SETTLE


def test_a_listing_that_proves_nothing_does_not_count_as_an_absence() -> None:
    follow = after((100.0, missing(certain=False)), (102.0, missing()))
    assert follow.step(102.0, DAY_END) == OrderStep.WAIT
    assert follow.after_check(missing(), 104.0, SETTINGS).step(104.0, DAY_END) == OrderStep.SETTLE


def test_an_incomplete_listing_proves_nothing() -> None:
    partial = Verified(
        finding=VerificationFinding.MISSING, state="unknown", certain=False, dead=True
    )
    follow = after(*((100.0 * number, partial) for number in range(10)))
    assert follow.step(1000.0, DAY_END) == OrderStep.WAIT


def test_a_listing_that_shows_it_starts_the_count_anew() -> None:
    listed = Verified(finding=VerificationFinding.LISTED, state="submitted")
    follow = after((100.0, missing()), (102.0, listed), (104.0, missing()))
    assert follow.step(104.0, DAY_END) == OrderStep.WAIT


def test_where_absence_is_never_certain_operators_are_alerted_and_following_continues() -> None:
    unsure = missing(certain=False)
    follow = after((100.0, unsure), (102.0, unsure))
    assert follow.step(102.0, DAY_END) == OrderStep.WAIT
    assert "does not prove" in follow.concern(102.0, DAY_END, SETTINGS)


def test_an_order_that_the_broker_had_and_lists_no_more_is_not_rejected() -> None:
    follow = after((100.0, missing(state="submitted")), (102.0, missing(state="submitted")))
    assert follow.step(102.0, DAY_END) == OrderStep.WAIT
    assert "does not list it any more" in follow.concern(102.0, DAY_END, SETTINGS)


def test_operators_are_alerted_when_the_broker_was_out_of_reach_for_long() -> None:
    follow = after((100.0, UNASKED), (999.0, UNASKED))
    assert follow.concern(999.0, DAY_END, SETTINGS) == ""
    assert "BROKER_UNREACHABLE: no route" in follow.concern(1000.0, DAY_END, SETTINGS)


def test_the_end_of_the_trading_day_ends_it_once_operators_were_alerted() -> None:
    follow = after((DAY_END, Verified(finding=VerificationFinding.LISTED, state="submitted")))
    assert follow.step(DAY_END, DAY_END) == OrderStep.WAIT
    concern = follow.concern(DAY_END, DAY_END, SETTINGS)
    assert replace(follow, attention=concern).step(DAY_END, DAY_END) == OrderStep.END
    assert "check 1: the broker lists it, and the order is submitted" in follow.full_story(concern)


def test_pauses_double_up_to_the_longest() -> None:
    listed = Verified(finding=VerificationFinding.LISTED, state="submitted")
    follow, pauses = FollowedOrder(), []
    for number in range(8):
        follow = follow.after_check(listed, float(number), SETTINGS)
        pauses.append(follow.pause(float(number), DAY_END, SETTINGS))
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]


def test_a_recheck_checks_often_again_and_alerts_operators_anew() -> None:
    listed = Verified(finding=VerificationFinding.LISTED, state="submitted")
    follow = after(*((float(number), listed) for number in range(8)))
    follow = replace(follow, attention="?").rechecked()
    assert (follow.attention, follow.pause(8.0, DAY_END, SETTINGS)) == ("", 2.0)


CHECKS_MAX = st.lists(
    st.tuples(
        st.floats(0, 500),
        st.builds(
            Verified,
            finding=st.sampled_from([*VerificationFinding]),
            state=st.sampled_from(
                ["accepted", "submitting", "unknown", "submitted", "part_filled"]
            ),
            code=st.just("X"),
            complete=st.booleans(),
            certain=st.booleans(),
            dead=st.booleans(),
            quiet_since=st.floats(0, 1000),
            behind=st.floats(0, 1000),
        ),
    ),
    max_size=20,
)


@given(checks=CHECKS_MAX)
def test_any_observation_continues_or_ends_it_and_only_a_quiet_time_settles_it(
    checks: list[tuple[float, Verified]],
) -> None:
    follow, now = FollowedOrder(), 0.0
    for gap, seen in checks:
        now += gap
        follow = follow.after_check(seen, now, SETTINGS)
        assert carried_state(FollowedOrder, asdict(follow)) == follow
        pause = follow.pause(now, DAY_END, SETTINGS)
        assert 0 < pause <= 300
        if follow.step(now, DAY_END) == OrderStep.SETTLE:
            assert follow.certain
            assert follow.state in {"accepted", "submitting", "unknown"}
            assert now >= follow.quiet_since + (60 if follow.dead else 120)
